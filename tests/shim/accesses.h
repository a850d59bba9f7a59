// Every access of a kernel to memory, judged before it is made. Part of fibers.cpp.
#pragma once

#include "fibers.h"

namespace {

void look();

// Byte `at` of the shared memory of `block`, which may be another one of the cluster.
void touch_shared(Block* block, std::size_t at, std::size_t size, bool write) {
    const char* const whose = block == current->block ? "" : ", of another block of the cluster";
    if (block != current->block && (!block->begun || !block->alive))
        fail("touches shared memory of block %u, which has %s", block->fibers[0]->place->block.x,
             block->begun ? "returned" : "not begun");
    bool inside = at + size <= block->dynamic;
    if (at >= block->dynamic)
        for (const auto& variable : block->variables)
            inside |= at >= variable.second.first && at + size <= variable.second.second;
    if (!inside) fail("touches shared memory at byte %zu, beyond what was asked for%s", at, whose);
    for (std::size_t byte = at; byte < at + size; ++byte) {
        Shadow& shadow = block->shadow[byte];
        if (!write && shadow.write.thread == -1)
            fail("reads byte %zu of shared memory%s, which nobody wrote", byte, whose);
        auto races = [&](const Touch& other) {
            if (other.thread == -1 || other.cluster_epoch != current->cluster_epoch) return false;
            if (other.rank != current->block->rank) return true;
            if (other.thread == current->thread) return false;
            if (other.block_epoch != current->block_epoch) return false;
            return other.warp != current->warp || other.warp_epoch == current->warp_epoch;
        };
        if (races(shadow.write) || (write && races(shadow.read))) {
            const bool wrote = races(shadow.write);
            const Touch& other = wrote ? shadow.write : shadow.read;
            fail("%s byte %zu of shared memory%s, which thread %d%s %s: no barrier is between",
                 write ? "writes" : "reads", byte, whose, other.thread,
                 other.rank == current->block->rank ? "" : " of another block",
                 wrote ? "wrote" : "read");
        }
        Touch now;
        now.thread = std::int16_t(current->thread);
        now.warp = std::int16_t(current->warp);
        now.rank = std::int16_t(current->block->rank);
        now.cluster_epoch = current->cluster_epoch;
        now.block_epoch = current->block_epoch;
        now.warp_epoch = current->warp_epoch;
        if (write) {
            shadow.write = now;
            shadow.read = Touch();
            continue;
        }
        Touch& read = shadow.read;
        const bool same_turn = read.thread != -1 && read.cluster_epoch == now.cluster_epoch;
        if (same_turn && read.rank != now.rank) now.rank = MANY;
        if (same_turn && read.thread != now.thread && read.block_epoch == now.block_epoch) {
            now.thread = MANY;
            if (read.warp != now.warp) now.warp = MANY;
            if (read.warp_epoch > now.warp_epoch) now.warp_epoch = read.warp_epoch;
        }
        read = now;
    }
}

Region* find(Address at) {
    if (last_hit && at - last_hit->begin < last_hit->bytes) return last_hit;
    for (std::size_t i = 0; i < region_count; ++i)
        if (at - regions[i].begin < regions[i].bytes) return last_hit = &regions[i];
    return nullptr;
}

[[noreturn]] void outside(Address at, std::size_t size, bool write) {
    std::size_t nearest = 0;
    long long distance = 1LL << 62;
    for (std::size_t i = 0; i < region_count; ++i) {
        const long long from_begin = (long long)(at - regions[i].begin);
        const long long from_end = from_begin - (long long)regions[i].bytes;
        const long long here = from_begin < 0 ? from_begin : from_end;
        if (llabs(here) < llabs(distance)) distance = here, nearest = i;
    }
    fail("%s %zu bytes outside of every tensor, %lld bytes %s tensor %zu",
         write ? "writes" : "reads", size, llabs(distance),
         distance < 0 ? "before the begin of" : "after the end of", nearest);
}

void access(Address at, std::size_t size, bool write) {
    if (!current || at - Address(current->stack) < STACK) return;
    const Cluster* cluster = current->block->cluster;
    const std::size_t shared = at - Address(cluster->shared.data());
    if (shared < cluster->shared.size())
        return touch_shared(cluster->blocks[shared / cluster->each].get(), shared % cluster->each,
                            size, write);
    for (const Module& module : modules)
        if (at - module.begin < module.end - module.begin) return;
    if (!region_count) return;
    Region* region = find(at);
    if (!region || at + size > region->begin + region->bytes) outside(at, size, write);
    if (!(region->rights & (write ? WRITE : READ)))
        fail("%s tensor %d, byte %llu", write ? "writes into" : "reads from",
             int(region - regions), (unsigned long long)(at - region->begin));
    (write ? region->stored : region->loaded) += size;
    if (!region->writes) return;
    std::uint8_t* writes = region->writes + (at - region->begin);
    for (std::size_t i = 0; i < size; ++i) {
        if (write) writes[i] += writes[i] < 255;
        else if (!writes[i] && (region->rights & UNWRITTEN))
            fail("reads byte %llu of tensor %d, which this launch has not written",
                 (unsigned long long)(at - region->begin + i), int(region - regions));
    }
}

}  // namespace

// ---- what instrumented code calls ----

#define SHIM_ACCESS(bytes)                                                                     \
    void __tsan_read##bytes(void* at) { access(Address(at), bytes, false); }                   \
    void __tsan_write##bytes(void* at) { access(Address(at), bytes, true); }                   \
    void __tsan_unaligned_read##bytes(void* at) { access(Address(at), bytes, false); }         \
    void __tsan_unaligned_write##bytes(void* at) { access(Address(at), bytes, true); }         \
    void __tsan_volatile_read##bytes(void* at) { look(); access(Address(at), bytes, false); }  \
    void __tsan_volatile_write##bytes(void* at) { access(Address(at), bytes, true); }
extern "C" {
SHIM_ACCESS(1)
SHIM_ACCESS(2)
SHIM_ACCESS(4)
SHIM_ACCESS(8)
SHIM_ACCESS(16)
void __tsan_read_range(void* at, std::size_t bytes) { access(Address(at), bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { access(Address(at), bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
    access(Address(from), bytes, false);
    access(Address(to), bytes, true);
    return std::memmove(to, from, bytes);
}
// The first words of what -fsanitize=alignment hands over.
struct Mismatch {
    const char* file;
    unsigned line, column;
};
void __ubsan_handle_type_mismatch_v1(Mismatch* where, Address at) {
    fail("line %u: an access at %llu past a multiple of 16 is misaligned", where->line,
         (unsigned long long)(at % 16));
}
}  // extern "C"
