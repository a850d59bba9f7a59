// A grid on one thread of the host: every CUDA thread is a fiber, the next one is drawn by a seed.
//
// Kernels are compiled with -fsanitize=thread,alignment but linked with the functions below in
// place of the sanitizers' own, so every access to memory is seen here before it is made. It must
// lie in a tensor handed over (byte by byte), be aligned, and not read what nobody wrote; and it must
// be ordered after the accesses of other threads to the same bytes, if one of the two is a write:
// - threads of a block are ordered by __syncthreads and by nothing else: not by shuffles;
// - blocks are ordered by a fence before an atomic operation in the one, and a fence after an atomic
//   operation on the same word in the other. What passes then is what the block did before its
//   last __syncthreads. Atomic operations alone order nothing.
// The order is judged, not awaited: a race is found whether or not this schedule shows it.
// Barriers that some threads do not reach, and spinning without end, are errors as well.
#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#include "cuda_shim.h"

using Address = std::uintptr_t;

namespace {

// A kernel's frame with its vectors is a few KiB; calls that are not inlined a few more.
constexpr std::size_t STACK = 1 << 18;
// Beyond these many looks at memory in a row without a change anywhere, nobody will change it.
constexpr long PATIENCE = 200000;

enum { READ = 1, WRITE = 2 };
// Filled by the driver. `writes` counts the stores to each byte.
struct Region {
    Address begin;
    std::uint64_t bytes, rights;
    std::uint8_t* writes;
    std::uint64_t loaded, stored;
};

// Who touched a byte last: block, thread (-1: nobody, MANY: several), barriers of the block before.
constexpr int MANY = -2;
struct Touch {
    int block = -1, thread = -1;
    unsigned epoch = 0;
};
struct Shadow { Touch write, read; };

// For each block the barriers of it before which all is visible.
using Known = std::vector<unsigned>;

struct Block;
struct Fiber {
    jmp_buf context;
    ucontext_t start;
    unsigned char* stack = nullptr;
    ShimPlace* place = nullptr; // at the top of the stack, which the thread may read
    bool begun = false, done = false;
    Block* block = nullptr;
    int thread = 0;
    // What it waits for: "" for nothing, a barrier, a shuffle with partners so many lanes away.
    const char* wait = "";
    int line = 0, lanes = 0;
    double value = 0;
    // What it acquired since the last barrier; the word of its last atomic operation, which a fence
    // makes an acquire; whether a fence has made the next one a release.
    Known known;
    const unsigned* last_atomic = nullptr;
    bool releases = false;
};

struct Block {
    std::vector<Fiber*> fibers;
    std::size_t alive = 0, waiting = 0;
    unsigned index = 0, epoch = 1;
    Known known;
    std::vector<unsigned char> shared;
    std::vector<Shadow> shadow;
};

struct Launch {
    void (*call)(const unsigned char*);
    unsigned grid, threads;
    std::size_t shared_bytes;
    std::uint64_t seed, random;
    long idle;
    bool failed;
    char message[1024];
} launch;

unsigned char parameters[4096]; // what a device allows at most
Region* regions;
std::size_t region_count;
std::vector<std::vector<Shadow>> shadows; // of the regions that are read and written
std::map<const unsigned*, Known> published;
Address modules[2][2]; // the libraries of the kernel and of this file: constants, and the above
jmp_buf scheduler;
Fiber* current;
std::deque<Fiber*> runnable;
std::vector<std::unique_ptr<Fiber>> pool;
std::vector<Fiber*> free_fibers;

[[noreturn]] void fail(const char* format, ...) {
    const std::size_t room = sizeof launch.message;
    const int used = std::snprintf(launch.message, room, "block %u, thread %d: ",
                                   current->block->index, current->thread);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(launch.message + used, room - std::size_t(used), format, arguments);
    va_end(arguments);
    launch.failed = true;
    _longjmp(scheduler, 1);
}

// ---- order ----

unsigned known_of(const Known& known, int block) { return known.empty() ? 0 : known[block]; }

void join(Known& into, const Known& from) {
    if (from.empty()) return;
    into.resize(launch.grid);
    for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

bool is_ordered(const Touch& other) {
    const Block* block = current->block;
    if (other.thread == -1) return true;
    if (other.block == int(block->index))
        return other.thread == current->thread || other.epoch < block->epoch;
    if (other.block == MANY) return false;
    return other.epoch < std::max(known_of(block->known, other.block),
                                  known_of(current->known, other.block));
}

void order(Shadow& shadow, bool write, const char* where, std::size_t byte) {
    if (!write && shadow.write.thread == -1)
        fail("reads byte %zu of %s, which nobody wrote", byte, where);
    const bool wrote = !is_ordered(shadow.write);
    if (wrote || (write && !is_ordered(shadow.read))) {
        const Touch& other = wrote ? shadow.write : shadow.read;
        fail("%s byte %zu of %s, which block %d %s: a race", write ? "writes" : "reads", byte,
             where, other.block, wrote ? "wrote" : "read");
    }
    Touch now{int(current->block->index), current->thread, current->block->epoch};
    if (write) {
        shadow = {now, Touch()};
        return;
    }
    // Reads that are not ordered among themselves are remembered together.
    if (!is_ordered(shadow.read)) {
        now.thread = MANY;
        if (shadow.read.block != now.block) now.block = MANY;
    }
    shadow.read = now;
}

// ---- every access ----

void access(Address at, std::size_t size, bool write) {
    if (!current || at - Address(current->stack) < STACK) return;
    Block* block = current->block;
    const std::size_t offset = at - Address(block->shared.data());
    // 64 bytes more than were asked for: an index that is one too far.
    if (offset < block->shared.size()) {
        if (offset + size > launch.shared_bytes)
            fail("touches shared memory at byte %zu, beyond what was asked for", offset);
        for (std::size_t i = offset; i < offset + size; ++i)
            order(block->shadow[i], write, "shared memory", i);
        return;
    }
    for (const auto& module : modules)
        if (at - module[0] < module[1] - module[0]) return;
    if (!regions) return; // the driver vouches for what the parameters point to
    static Region* region;
    const auto holds = [&](const Region& r) {
        return at >= r.begin && at + size <= r.begin + r.bytes;
    };
    if (region < regions || region >= regions + region_count || !holds(*region))
        region = std::find_if(regions, regions + region_count, holds);
    if (region == regions + region_count)
        fail("%s %zu bytes outside of every tensor", write ? "writes" : "reads", size);
    const std::size_t index = std::size_t(region - regions), byte = at - region->begin;
    char name[32];
    std::snprintf(name, sizeof name, "tensor %zu", index);
    if (!(region->rights & (write ? WRITE : READ)))
        fail("%s %s, byte %zu", write ? "writes into" : "reads from", name, byte);
    (write ? region->stored : region->loaded) += size;
    for (std::size_t i = byte; i < byte + size; ++i) {
        if (write) region->writes[i] += region->writes[i] < 255;
        if (region->rights == (READ | WRITE)) order(shadows[index][i], write, name, i);
    }
}

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
    if (_setjmp(scheduler)) return;
    if (fiber->begun) _longjmp(fiber->context, 1);
    fiber->begun = true;
    setcontext(&fiber->start);
}

void prepare(Fiber* fiber) {
    if (!fiber->stack) {
        void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) std::abort();
        fiber->stack = static_cast<unsigned char*>(memory);
        mprotect(fiber->stack, 4096, PROT_NONE);
        fiber->place = reinterpret_cast<ShimPlace*>(fiber->stack + STACK - 128);
    }
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->stack;
    fiber->start.uc_stack.ss_size = STACK - 128;
    fiber->start.uc_link = nullptr;
    makecontext(&fiber->start, fiber_main, 0);
    fiber->begun = false;
    free_fibers.push_back(fiber);
}

std::uint64_t draw() {
    // xorshift64: any sequence will do, as long as the seed decides it.
    launch.random ^= launch.random << 13;
    launch.random ^= launch.random >> 7;
    launch.random ^= launch.random << 17;
    return launch.random;
}

// Seeds 0 and 1 are the extremes: first come, first served; and the last to become ready first.
Fiber* pick() {
    if (launch.seed > 1) std::swap(runnable[draw() % runnable.size()], runnable.back());
    Fiber* fiber = launch.seed == 0 ? runnable.front() : runnable.back();
    if (launch.seed == 0) runnable.pop_front();
    else runnable.pop_back();
    return fiber;
}

// Let the others run before memory is looked at again.
void look() {
    if (++launch.idle > PATIENCE)
        fail("no thread makes progress: it waits for a block that does not run, or for a lost store");
    if (launch.seed == 1) runnable.push_front(current);
    else runnable.push_back(current);
    to_scheduler();
}

void wait_at(const char* what, int line, int lanes, double value) {
    current->wait = what, current->line = line, current->lanes = lanes, current->value = value;
}

void wake(Fiber* fiber) {
    fiber->wait = "";
    runnable.push_back(fiber);
    launch.idle = 0;
}

std::unique_ptr<Block> start_block(unsigned index) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->alive = launch.threads;
    // All ones is a NaN in every format, and no index.
    block->shared.assign(launch.shared_bytes + 64, 0xff);
    block->shadow.resize(launch.shared_bytes);
    for (unsigned thread = 0; thread < launch.threads; ++thread) {
        if (free_fibers.empty()) {
            pool.push_back(std::make_unique<Fiber>());
            prepare(pool.back().get());
        }
        Fiber* fiber = free_fibers.back();
        free_fibers.pop_back();
        fiber->done = fiber->releases = false;
        fiber->block = block.get();
        fiber->thread = int(thread);
        fiber->wait = "";
        fiber->known.clear();
        fiber->last_atomic = nullptr;
        *fiber->place = {{thread}, {index}, {launch.grid}};
        block->fibers.push_back(fiber);
        runnable.push_back(fiber);
    }
    return block;
}

}  // namespace

// ---- what kernels call ----

extern "C" {
const ShimPlace& shim_place() { return *current->place; }
unsigned char* shim_shared() { return current->block->shared.data(); }
void shim_sleep() { look(); }

bool shim_syncthreads(bool value, int line) {
    Block* block = current->block;
    wait_at("__syncthreads", line, 0, value);
    if (++block->waiting == block->fibers.size()) {
        bool any = false;
        for (Fiber* fiber : block->fibers) {
            if (fiber->line != line)
                fail("threads of one block wait at different __syncthreads, lines %d and %d", line,
                     fiber->line);
            join(block->known, fiber->known);
            fiber->known.clear();
            any |= fiber->value != 0;
        }
        for (Fiber* fiber : block->fibers) fiber->value = any, wake(fiber);
        block->waiting = 0;
        ++block->epoch;
    }
    to_scheduler();
    return current->value != 0;
}

double shim_exchange(double value, unsigned mask, int lanes, int line) {
    if (mask != 0xffffffffu) fail("a shuffle at line %d of less than a warp, mask %08x", line, mask);
    Fiber** warp = current->block->fibers.data() + current->thread / 32 * 32;
    wait_at("a shuffle", line, lanes, value);
    double given[32];
    bool all = true;
    for (int lane = 0; lane < 32 && all; ++lane) {
        all = warp[lane]->wait == current->wait;
        if (all && (warp[lane]->line != line || warp[lane]->lanes != lanes))
            fail("a shuffle at line %d, but lane %d is at line %d", line, lane, warp[lane]->line);
        given[lane] = warp[lane]->value;
    }
    for (int lane = 0; lane < 32 && all; ++lane) {
        warp[lane]->value = given[lane ^ lanes];
        wake(warp[lane]);
    }
    to_scheduler();
    return current->value;
}

void shim_fence() {
    if (current->last_atomic) join(current->known, published[current->last_atomic]);
    current->last_atomic = nullptr;
    current->releases = true;
}

unsigned shim_add(unsigned* word, unsigned value) {
    look();
    const unsigned old = *word;
    *word = old + value;
    if (value) launch.idle = 0;
    if (current->releases) {
        Known& known = published[word];
        join(known, current->block->known);
        join(known, current->known);
        known.resize(launch.grid);
        known[current->block->index] = current->block->epoch;
    }
    current->releases = false;
    current->last_atomic = word;
    return old;
}

// ---- what instrumented code calls ----

#define SHIM_ACCESS(bytes)                                                                     \
    void __tsan_read##bytes(void* at) { access(Address(at), bytes, false); }                   \
    void __tsan_write##bytes(void* at) { access(Address(at), bytes, true); }                   \
    void __tsan_unaligned_read##bytes(void* at) { access(Address(at), bytes, false); }         \
    void __tsan_unaligned_write##bytes(void* at) { access(Address(at), bytes, true); }
SHIM_ACCESS(1)
SHIM_ACCESS(2)
SHIM_ACCESS(4)
SHIM_ACCESS(8)
SHIM_ACCESS(16)
void __tsan_read_range(void* at, std::size_t bytes) { access(Address(at), bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { access(Address(at), bytes, true); }
void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
    access(Address(from), bytes, false);
    access(Address(to), bytes, true);
    return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, std::size_t bytes) {
    access(Address(to), bytes, true);
    return std::memset(to, value, bytes);
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

// ---- what the driver calls ----

int shim_launch(void (*call)(const unsigned char*), void (*library)(Address*),
                const unsigned char* bytes, std::size_t byte_count, unsigned grid, unsigned threads,
                std::size_t shared_bytes, std::uint64_t seed, int cooperative, Region* tensors,
                std::size_t tensor_count, char* message, std::size_t length) {
    extern char __ehdr_start __attribute__((visibility("hidden")));
    extern char _end __attribute__((visibility("hidden")));
    std::memcpy(parameters, bytes, byte_count);
    library(modules[0]);
    modules[1][0] = Address(&__ehdr_start), modules[1][1] = Address(&_end);
    launch = {call, grid, threads, shared_bytes, seed, seed * 0x9e3779b97f4a7c15u | 1, 0, false, ""};
    regions = tensors, region_count = tensor_count;
    published.clear();
    shadows.assign(region_count, {});
    for (std::size_t i = 0; i < region_count; ++i)
        if (regions[i].rights == (READ | WRITE)) shadows[i].resize(regions[i].bytes);
    // A device runs the blocks of an ordinary launch a few at a time, in any order.
    const std::size_t limit = cooperative ? grid : 1 + seed % 3;
    std::vector<unsigned> waiting(grid);
    for (unsigned i = 0; i < grid; ++i) waiting[i] = seed == 1 ? i : grid - 1 - i;
    if (seed > 1)
        for (unsigned i = grid; i > 1; --i) std::swap(waiting[i - 1], waiting[draw() % i]);
    std::vector<std::unique_ptr<Block>> alive;
    while (!launch.failed) {
        while (!waiting.empty() && alive.size() < limit) {
            alive.push_back(start_block(waiting.back()));
            waiting.pop_back();
        }
        if (runnable.empty()) break;
        Fiber* fiber = pick();
        run(fiber);
        if (launch.failed || !fiber->done) continue;
        launch.idle = 0;
        free_fibers.push_back(fiber);
        if (--fiber->block->alive) continue;
        alive.erase(std::find_if(alive.begin(), alive.end(),
                                 [&](const auto& held) { return held.get() == fiber->block; }));
    }
    if (!launch.failed && !alive.empty()) {
        launch.failed = true;
        const auto& fibers = alive[0]->fibers;
        const Fiber* left = *std::find_if(fibers.begin(), fibers.end(), [](Fiber* f) { return !f->done; });
        std::snprintf(launch.message, sizeof launch.message,
                      "block %u, thread %d waits at %s, line %d, and others have returned",
                      alive[0]->index, left->thread, left->wait, left->line);
    }
    current = nullptr;
    runnable.clear();
    if (launch.failed) {
        // Threads stand in the middle of the kernel: all begin anew next time.
        free_fibers.clear();
        for (auto& fiber : pool) prepare(fiber.get());
    }
    std::snprintf(message, length, "%s", launch.message);
    return launch.failed;
}
}
