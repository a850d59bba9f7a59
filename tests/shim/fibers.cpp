// A grid on one thread of the host: every CUDA thread is a fiber, the next one is drawn by a seed.
//
// Kernels are compiled with -fsanitize=thread,alignment but linked with the functions below in
// place of the sanitizers' own, so every access to memory is seen here before it is made: it must
// lie in a tensor handed over (byte by byte), be aligned, not read what nobody wrote, and, in
// shared memory, not meet another thread's access without a barrier between, nor, in that of another
// block of a cluster, come before that has begun or after it has returned. Barriers that some
// threads do not reach, and spinning without end, are errors. Order between blocks
// cannot be judged here, since fibers see memory in program order: that is threads.cpp's job.
#include <sys/mman.h>

#include "accesses.h"
#include "fibers.h"

namespace {

// ---- switching ----

void to_scheduler() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

void fiber_main() {
    for (;;) {
        launch.call(parameters);
        current->done = true;
        to_scheduler();
    }
}

void run(Fiber* fiber) {
    current = fiber;
    fiber->block->begun = true;
    if (!_setjmp(scheduler)) {
        if (fiber->begun) _longjmp(fiber->context, 1);
        fiber->begun = true;
        setcontext(&fiber->start);
    }
    current = launch.failed ? current : nullptr;
}

bool prepare(Fiber* fiber) {
    if (!fiber->stack) {
        void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return false;
        fiber->stack = static_cast<unsigned char*>(memory);
        mprotect(fiber->stack, 4096, PROT_NONE);
        fiber->place = reinterpret_cast<Place*>(fiber->stack + STACK - 128);
    }
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack;
    fiber->start.uc_stack.ss_size = STACK - 128;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, fiber_main, 0);
    fiber->begun = false;
    return true;
}

// Seeds 0 and 1 are the extremes: first come, first served; and the last to become ready first, the
// blocks of a cluster one after the other.
enum { FIRST, LAST };

Fiber* pick() {
    if (launch.seed == FIRST) {
        Fiber* fiber = runnable.front();
        runnable.pop_front();
        return fiber;
    }
    if (launch.seed != LAST) std::swap(runnable[draw() % runnable.size()], runnable.back());
    Fiber* fiber = runnable.back();
    runnable.pop_back();
    return fiber;
}

// Lets others run first.
void yield() {
    if (launch.seed == LAST) runnable.push_front(current);
    else runnable.push_back(current);
    to_scheduler();
}

void wake(Fiber* fiber) {
    fiber->wait = NOTHING;
    runnable.push_back(fiber);
    launch.idle = 0;
}

std::unique_ptr<Block> start_block(std::uint64_t index, Cluster* cluster, int rank) {
    auto made = std::make_unique<Block>();
    Block* block = made.get();
    const dim3 grid = launch.grid, size = launch.size;
    const std::size_t count = std::size_t(size.x) * size.y * size.z;
    block->dynamic = launch.shared_bytes;
    block->cluster = cluster;
    block->rank = rank;
    block->shared = cluster->shared.data() + std::size_t(rank) * cluster->each;
    block->shadow = cluster->shadow.data() + std::size_t(rank) * cluster->each;
    block->alive = count;
    for (std::size_t thread = 0; thread < count; ++thread) {
        if (free_fibers.empty()) {
            pool.push_back(std::make_unique<Fiber>());
            if (!prepare(pool.back().get())) std::abort();
            free_fibers.push_back(pool.back().get());
        }
        Fiber* fiber = free_fibers.back();
        free_fibers.pop_back();
        fiber->done = false;
        fiber->block = block;
        fiber->thread = int(thread);
        fiber->lane = int(thread % 32);
        fiber->warp = int(thread / 32);
        fiber->wait = NOTHING;
        fiber->cluster_epoch = fiber->block_epoch = fiber->warp_epoch = 0;
        fiber->place->thread = {unsigned(thread % size.x), unsigned(thread / size.x % size.y),
                               unsigned(thread / size.x / size.y)};
        fiber->place->block = {unsigned(index % grid.x), unsigned(index / grid.x % grid.y),
                              unsigned(index / grid.x / grid.y)};
        fiber->place->block_size = size;
        fiber->place->grid_size = grid;
        block->fibers.push_back(fiber);
    }
    return made;
}

void begin(Block* block) {
    runnable.insert(runnable.end(), block->fibers.begin(), block->fibers.end());
}

std::unique_ptr<Cluster> start_cluster(std::uint64_t index) {
    auto cluster = std::make_unique<Cluster>();
    // A multiple of 16, as the memory of a block begins at one.
    cluster->each = (launch.shared_bytes + VARIABLES + 15) / 16 * 16;
    // All ones is a NaN in every format, and no index.
    cluster->shared.assign(cluster->each * launch.cluster, 0xff);
    cluster->shadow.resize(cluster->shared.size());
    cluster->alive = launch.cluster;
    for (unsigned rank = 0; rank < launch.cluster; ++rank) {
        cluster->blocks.push_back(
            start_block(index * launch.cluster + rank, cluster.get(), int(rank)));
        if (launch.seed == LAST && rank + 1 < launch.cluster)
            late.push_back(cluster->blocks.back().get());
        else begin(cluster->blocks.back().get());
    }
    return cluster;
}

// ---- barriers ----

void release_block_barrier(Block* block) {
    int line = 0;
    for (Fiber* fiber : block->fibers) {
        if (line && fiber->line != line)
            fail("threads of one block wait at different __syncthreads, lines %d and %d", line,
                 fiber->line);
        line = fiber->line;
    }
    block->waiting = 0;
    for (Fiber* fiber : block->fibers) {
        ++fiber->block_epoch;
        wake(fiber);
    }
}

void release_cluster_barrier(Cluster* cluster) {
    const int line = current->line;
    cluster->waiting = 0;
    for (auto& block : cluster->blocks)
        for (Fiber* fiber : block->fibers) {
            if (fiber->line != line)
                fail("threads of one cluster wait at different barriers of it, lines %d and %d",
                     line, fiber->line);
            ++fiber->cluster_epoch;
            ++fiber->block_epoch;
            wake(fiber);
        }
}

// Wait until all lanes of `mask` have come to the same operation, then complete it.
void meet(Wait wait, unsigned mask, int line) {
    Block* block = current->block;
    const std::size_t first = std::size_t(current->warp) * 32;
    if (!(mask >> current->lane & 1))
        fail("%s at line %d with a mask, %08x, that lacks the own lane", WAITS[wait], line, mask);
    current->wait = wait;
    current->mask = mask;
    current->line = line;
    bool complete = true;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        if (first + std::size_t(lane) >= block->fibers.size())
            fail("%s at line %d waits for lane %d, which the block does not have", WAITS[wait],
                 line, lane);
        const Fiber* other = block->fibers[first + std::size_t(lane)];
        if (other->done)
            fail("%s at line %d waits for lane %d, which has returned", WAITS[wait], line, lane);
        if (other->wait <= BLOCK) complete = false;
        else if (other->wait != wait || other->mask != mask)
            fail("%s at line %d, mask %08x, but lane %d waits at %s, line %d, mask %08x",
                 WAITS[wait], line, mask, lane, WAITS[other->wait], other->line, other->mask);
    }
    if (!complete) return to_scheduler();
    std::uint64_t given[32];
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) {
            given[lane] = block->fibers[first + std::size_t(lane)]->bits;
            votes |= unsigned(given[lane] & 1) << lane;
        }
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Fiber* fiber = block->fibers[first + std::size_t(lane)];
        if (wait == EXCHANGE) {
            if (fiber->source < 0 || fiber->source > 31 || !(mask >> fiber->source & 1))
                fail("a shuffle at line %d reads lane %d, which is not in the mask %08x", line,
                     fiber->source, mask);
            fiber->bits = given[fiber->source];
        }
        if (wait == BALLOT) fiber->bits = votes;
        if (wait == WARP) ++fiber->warp_epoch;
        if (fiber == current) fiber->wait = NOTHING;
        else wake(fiber);
    }
    launch.idle = 0;
    // Who comes last must not be favored.
    yield();
}

void look() {
    if (++launch.idle > PATIENCE)
        fail("no thread makes progress: it waits for a block that does not run, or for a lost store");
    yield();
}

}  // namespace

// ---- what kernels call ----

namespace shim {
extern "C" {
std::uint64_t shim_flops[6];

const Place& shim_place() { return *current->place; }

void shim_syncthreads(int line) {
    Block* block = current->block;
    current->wait = BLOCK;
    current->line = line;
    if (++block->waiting == block->fibers.size()) release_block_barrier(block);
    to_scheduler();
}

void shim_cluster_barrier(int line) {
    Cluster* cluster = current->block->cluster;
    current->wait = CLUSTER;
    current->line = line;
    if (++cluster->waiting == cluster->blocks.size() * cluster->blocks[0]->fibers.size())
        release_cluster_barrier(cluster);
    to_scheduler();
}

void* shim_in_block(void* own, unsigned rank) {
    const Block* block = current->block;
    if (rank >= block->cluster->blocks.size())
        fail("asks for block %u of a cluster of %zu", rank, block->cluster->blocks.size());
    return static_cast<unsigned char*>(own) - block->shared + block->cluster->blocks[rank]->shared;
}

void shim_syncwarp(unsigned mask, int line) { meet(WARP, mask, line); }

std::uint64_t shim_exchange(unsigned mask, std::uint64_t bits, int source_lane, int line) {
    current->bits = bits;
    current->source = source_lane;
    meet(EXCHANGE, mask, line);
    return current->bits;
}

unsigned shim_ballot(unsigned mask, bool bit, int line) {
    current->bits = bit;
    meet(BALLOT, mask, line);
    return unsigned(current->bits);
}

unsigned char* shim_dynamic_shared() { return current->block->shared; }

void* shim_static_shared(int site, std::size_t bytes) {
    Block* block = current->block;
    // One line of a template declares variables of several sizes.
    const std::size_t key = std::size_t(site) << 32 | bytes;
    auto found = block->variables.find(key);
    if (found == block->variables.end()) {
        // 32 bytes between: an index one too far must not hit the next variable.
        std::size_t begin = (block->dynamic + 32 + 15) / 16 * 16;
        for (const auto& variable : block->variables)
            begin = std::max(begin, (variable.second.second + 32 + 15) / 16 * 16);
        if (begin + bytes > block->cluster->each) fail("too many shared variables");
        found = block->variables.emplace(key, std::make_pair(begin, begin + bytes)).first;
    }
    return block->shared + found->second.first;
}

void shim_fence() {}
void shim_sleep() { look(); }

std::uint32_t shim_load32(const std::uint32_t* word, bool) {
    look();
    access(Address(word), 4, false);
    return *word;
}

void shim_store32(std::uint32_t* word, std::uint32_t value, bool) {
    yield();
    access(Address(word), 4, true);
    launch.idle = 0;
    *word = value;
}

std::uint32_t shim_cas32(std::uint32_t* word, std::uint32_t compare, std::uint32_t value) {
    look();
    access(Address(word), 4, true);
    const std::uint32_t old = *word;
    if (old == compare) *word = value, launch.idle = 0;
    return old;
}
}

template <class T>
T change(T* word, Change kind, T value) {
    look();
    access(Address(word), sizeof *word, true);
    const T old = *word;
    switch (kind) {
        case ADD: *word = old + value; break;
        case INC: *word = old >= value ? 0 : old + 1; break;
        case EXCH: *word = value; break;
        case OR: *word = old | value; break;
        case MAX: *word = old > value ? old : value; break;
    }
    if (*word != old) launch.idle = 0;
    return old;
}

extern "C" std::uint32_t shim_atomic32(std::uint32_t* word, Change kind, std::uint32_t value) {
    return change(word, kind, value);
}
extern "C" std::uint64_t shim_atomic64(std::uint64_t* word, Change kind, std::uint64_t value) {
    return change(word, kind, value);
}
}  // namespace shim

extern "C" {
// ---- what the driver calls ----

int shim_launch(void (*call)(const unsigned char*), void (*library)(Address*),
                const unsigned char* bytes,
                std::size_t byte_count, const unsigned* grid, const unsigned* size, std::size_t shared_bytes,
                unsigned cluster, std::uint64_t seed, int cooperative, Region* tensors, std::size_t tensor_count,
                char* message, std::size_t length) {
    std::memcpy(parameters, bytes, byte_count);
    Address range[2];
    library(range);
    modules[0] = {range[0], range[1]};
    modules[1] = {Address(&__ehdr_start), Address(&_end)};
    launch = {call, {grid[0], grid[1], grid[2]}, {size[0], size[1], size[2]},
              shared_bytes, cluster, seed, seed * 0x9e3779b97f4a7c15u | 1, 0, false, ""};
    regions = tensors;
    region_count = tensor_count;
    last_hit = nullptr;
    current = nullptr;
    const std::uint64_t clusters = std::uint64_t(grid[0]) * grid[1] * grid[2] / cluster;
    // A device runs the blocks of an ordinary launch a few at a time, in any order, but those of a
    // cluster together.
    const std::uint64_t limit = cooperative ? clusters : 1 + seed % 3;
    std::vector<std::uint64_t> order(clusters);
    for (std::uint64_t i = 0; i < clusters; ++i) order[i] = seed == LAST ? clusters - 1 - i : i;
    if (seed > LAST)
        for (std::uint64_t i = clusters; i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
    std::uint64_t started = 0, resident = 0;
    volatile std::uint64_t finished = 0;
    std::vector<std::unique_ptr<Cluster>> alive;
    while (!launch.failed) {
        while (started < clusters && resident < limit) {
            alive.emplace_back(start_cluster(order[started++]));
            ++resident;
        }
        if (runnable.empty() && !late.empty()) {
            begin(late.back());
            late.pop_back();
        }
        if (runnable.empty()) break;
        Fiber* fiber = pick();
        run(fiber);
        if (launch.failed || !fiber->done) continue;
        launch.idle = 0;
        free_fibers.push_back(fiber);
        Block* block = fiber->block;
        Cluster* its = block->cluster;
        --block->alive;
        if ((block->alive && block->waiting) || its->waiting) {
            std::snprintf(launch.message, sizeof launch.message,
                          "block %u: thread %d has returned, others wait at %s",
                          fiber->place->block.x, fiber->thread,
                          WAITS[its->waiting ? CLUSTER : BLOCK]);
            launch.failed = true;
        }
        if (block->alive || --its->alive) continue;
        --resident;
        finished = finished + 1;
        for (auto& held : alive)
            if (held.get() == its) {
                std::swap(held, alive.back());
                alive.pop_back();
                break;
            }
    }
    if (!launch.failed && finished != clusters) {
        launch.failed = true;
        std::snprintf(launch.message, sizeof launch.message, "no thread can run:");
        for (auto& held : alive)
            for (auto& block : held->blocks)
                for (Fiber* fiber : block->fibers)
                    if (!fiber->done && std::strlen(launch.message) < 300)
                        std::snprintf(launch.message + std::strlen(launch.message), 120,
                                      " block %u, thread %d waits at %s, line %d, mask %08x;",
                                      fiber->place->block.x, fiber->thread, WAITS[fiber->wait],
                                      fiber->line, fiber->mask);
    }
    current = nullptr;
    runnable.clear();
    late.clear();
    if (launch.failed) {
        // Threads stand in the middle of the kernel: all begin anew next time.
        free_fibers.clear();
        for (auto& fiber : pool) {
            prepare(fiber.get());
            free_fibers.push_back(fiber.get());
        }
    }
    std::snprintf(message, length, "%s", launch.message);
    return launch.failed;
}
}
