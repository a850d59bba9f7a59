// A grid on one thread of the host: every CUDA thread is a fiber, a seed decides which is next.
//
// Kernels are compiled with -fsanitize=thread,alignment but linked with the functions below in place of the
// sanitizers' own, so this file sees every access to memory before it is made. An access must lie in a tensor
// handed over (byte by byte), be aligned, and not read what nobody wrote. It must be ordered after the accesses
// of other threads to the same four bytes, if one of the two is a write:
// - __syncthreads orders the threads of a block, __syncwarp those of a warp; who waits at a barrier in shared
//   memory comes after who arrived there. Nothing else orders them, shuffles do not.
// - Nobody may look where a copy is on its way. It arrives when its thread waits for it or, if it has a barrier,
//   late and out of order.
// - A fence before an atomic operation in one block and a fence after a later one in another order the two: the
//   other sees what the first did before its last __syncthreads. Atomic operations alone order nothing. There is
//   one word for them in a grid.
// The order is judged, not awaited: a race is found whether or not this schedule shows it. Barriers that some
// threads do not reach, and spinning without end, are errors as well.
#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <ucontext.h>

#include "cuda_shim.h"

using Bytes = unsigned char*;

namespace {

// A kernel's frame with its vectors is a few KiB; calls that are not inlined a few more.
constexpr std::size_t STACK = 1 << 16;
// Looks at memory in a row without a change anywhere; after more, nobody will change it.
constexpr long PATIENCE = 200000;

enum { READ = 1, WRITE = 2 };
// A tensor, filled by the driver, or shared memory. `writes` counts the stores to each byte.
struct Region {
    Bytes begin;
    std::uint64_t bytes, rights;
    Bytes writes;
    std::uint64_t loaded, stored;

    bool holds(Bytes at, std::size_t size) const { return at >= begin && at + size <= begin + bytes; }
};

// The last touch of four bytes: block, thread, its own time then, and barriers of the block before.
struct Touch {
    int block = -1, thread = -1;
    unsigned time = 0, epoch = 0;
};
struct Shadow {
    Touch write;
    std::vector<Touch> reads;
    bool flying = false;
};

// The time of each thread of a block up to which another one has seen what it did.
using Past = std::vector<unsigned>;

struct Block;
struct Meeting;
struct Copy {
    Bytes to, from;
    int bytes, room, group;
    Meeting* meeting;
};

struct Fiber {
    Block* block;
    unsigned thread;
    Bytes stack;
    jmp_buf context;
    bool begun = false, done = false;
    // The kind and the line of the wait; partners of a shuffle are so many lanes away.
    const char* wait = "";
    int line = 0, lanes = 0;
    double value = 0;
    std::shared_ptr<const Past> past;
    unsigned time = 1;
    // Copies without a barrier; how many groups of them it has closed.
    std::vector<Copy> copies;
    int groups = 0;
    // Numbers of atomic operations: of its latest, and of that whose past it sees since a fence. And
    // whether a fence has made the next one a release.
    unsigned latest = 0, acquired = 0;
    bool releases = false;
};

// A barrier in shared memory. Phases are counted; `seen` is what those who arrived have done and seen.
struct Meeting {
    int count = 0, missing = 0;
    long bytes = 0;
    unsigned phase = 0;
    Past arriving, seen;
    std::vector<Fiber*> waiting;
};

struct {
    void (*call)(const unsigned char*);
    const unsigned char* parameters;
    unsigned grid, threads;
    std::size_t shared_bytes;
    Region* regions;
    std::size_t region_count;
} launch;

struct Block {
    unsigned index, alive = launch.threads, epoch = 1, acquired = 0;
    std::vector<Fiber> fibers{launch.threads};
    // How many threads wait: of all, and of each warp.
    std::vector<unsigned> waiting = std::vector<unsigned>(1 + launch.threads / 32);
    std::unique_ptr<unsigned char[]> stacks{new unsigned char[launch.threads * STACK]};
    // All ones is a NaN in every format, and no index. 64 bytes more: an index that is one too far.
    std::vector<unsigned char> memory = std::vector<unsigned char>(launch.shared_bytes + 64, 0xff);
    Region shared{memory.data(), launch.shared_bytes, READ | WRITE, nullptr, 0, 0};
    std::vector<Shadow> shadow{(launch.shared_bytes + 3) / 4};
    std::map<const void*, Meeting> meetings;
    // Copies with a barrier.
    std::vector<Copy> copies;

    explicit Block(unsigned index);
};

// The shadows of regions that are read and written.
std::vector<std::vector<Shadow>> shadows;
// By block and epoch, the number of the atomic operation that released what was done there.
std::vector<std::vector<unsigned>> released;
unsigned atomics;
std::mt19937_64 draw;
long idle;
jmp_buf scheduler;
Fiber* current;
std::vector<Fiber*> runnable;
bool failed;
char message[1024];

Block::Block(unsigned number) : index(number) {
    for (Fiber& fiber : fibers) {
        fiber.block = this;
        fiber.thread = unsigned(&fiber - fibers.data());
        fiber.stack = stacks.get() + fiber.thread * STACK;
        runnable.push_back(&fiber);
    }
}

template <class... Values> [[noreturn]] void fail(const char* format, Values... values) {
    const int used = std::snprintf(message, sizeof message, "block %u, thread %u: ",
                                   current->block->index, current->thread);
    std::snprintf(message + used, sizeof message - used, format, values...);
    failed = true;
    _longjmp(scheduler, 1);
}

// ---- order ----

bool is_ordered(const Touch& other) {
    const Block* block = current->block;
    if (other.thread < 0) return true;
    if (other.block == int(block->index))
        return other.thread == int(current->thread) ||
               (current->past && other.time <= (*current->past)[other.thread]);
    const auto& past = released[other.block];
    return other.epoch < past.size() && past[other.epoch] <= std::max(block->acquired, current->acquired);
}

void order(Shadow& shadow, bool write, const char* where, std::size_t byte) {
    const char* does = write ? "writes" : "reads";
    if (shadow.flying) fail("%s byte %zu of %s, where a copy is on its way", does, byte, where);
    if (!write && shadow.write.thread < 0) fail("reads byte %zu of %s, which nobody wrote", byte, where);
    if (!is_ordered(shadow.write))
        fail("%s byte %zu of %s, which block %d wrote: a race", does, byte, where, shadow.write.block);
    const Touch now{int(current->block->index), int(current->thread), current->time, current->block->epoch};
    auto& reads = shadow.reads;
    // Earlier reads that are ordered before this access need no memory.
    reads.erase(std::remove_if(reads.begin(), reads.end(), is_ordered), reads.end());
    if (!write) return reads.push_back(now);
    if (!reads.empty()) fail("%s byte %zu of %s, which block %d read: a race", does, byte, where, reads[0].block);
    shadow.write = now;
}

// Add to `past` what a thread has seen and done.
void merge(Past& past, const Past* other, const Fiber& fiber) {
    past.resize(launch.threads);
    for (std::size_t i = 0; other && i < past.size(); ++i) past[i] = std::max(past[i], (*other)[i]);
    past[fiber.thread] = std::max(past[fiber.thread], fiber.time);
}

// Let threads that met see what all of them have seen and done.
void share(Fiber* begin, Fiber* end) {
    auto all = std::make_shared<Past>();
    const Past* last = nullptr;
    for (Fiber* each = begin; each < end; last = (each++)->past.get())
        merge(*all, each->past.get() == last ? nullptr : each->past.get(), *each);
    for (Fiber* each = begin; each < end; ++each) each->past = all, ++each->time;
}

// ---- every access ----

void access(const void* place, std::size_t size, bool write) {
    const Bytes at = Bytes(place);
    if (!current || std::size_t(at - current->stack) < STACK) return;
    Block* block = current->block;
    Region* end = launch.regions + launch.region_count;
    const bool is_shared = block->shared.holds(at, size);
    Region* region = &block->shared;
    if (!is_shared) region = std::find_if(launch.regions, end, [&](Region& r) { return r.holds(at, size); });
    if (!is_shared && !launch.regions) return; // the driver vouches for what the parameters point to
    if (region == end) fail("%s %zu bytes outside of every tensor", write ? "writes" : "reads", size);
    const std::size_t index = region - launch.regions, byte = at - region->begin;
    char name[32] = "shared memory";
    if (!is_shared) std::snprintf(name, sizeof name, "tensor %zu", index);
    if (!(region->rights & (write ? WRITE : READ)))
        fail("%s %s, byte %zu", write ? "writes into" : "reads from", name, byte);
    (write ? region->stored : region->loaded) += size;
    for (std::size_t i = byte; write && region->writes && i < byte + size; ++i)
        region->writes[i] += region->writes[i] < 255;
    auto& shadow = is_shared ? block->shadow : shadows[index];
    for (std::size_t i = byte / 4; !shadow.empty() && 4 * i < byte + size; ++i)
        order(shadow[i], write, name, 4 * i);
}

// ---- switching ----

// setjmp where it can: swapcontext asks the kernel for the signal mask at every switch.
void to_scheduler() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}

void fiber_main() {
    launch.call(launch.parameters);
    current->done = true;
    to_scheduler();
}

void resume() {
    if (_setjmp(scheduler)) return;
    if (current->begun) _longjmp(current->context, 1);
    current->begun = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = current->stack;
    start.uc_stack.ss_size = STACK;
    makecontext(&start, fiber_main, 0);
    setcontext(&start);
}

// Let the others run before memory is looked at again.
void look() {
    if (++idle > PATIENCE)
        fail("no thread makes progress: it waits for a block that does not run, or for a lost store");
    runnable.insert(runnable.begin(), current);
    to_scheduler();
}

// Wait for all threads of the block, or of a warp, 1 the first; the last to come does `together` for
// all, given the first of them. Return what it left in `value`.
template <class F>
double meet(unsigned warp, const char* what, int line, int lanes, double value, F together) {
    current->wait = what, current->line = line, current->lanes = lanes, current->value = value;
    Block* block = current->block;
    Fiber* fibers = &block->fibers[warp ? 32 * (warp - 1) : 0];
    const unsigned count = warp ? 32 : launch.threads;
    if (++block->waiting[warp] == count) {
        for (Fiber* each = fibers; each < fibers + count; ++each) {
            if (each->line != line || each->lanes != lanes)
                fail("threads wait at different %s, lines %d and %d", what, line, each->line);
            runnable.push_back(each);
        }
        together(fibers);
        block->waiting[warp] = 0;
        idle = 0;
    }
    to_scheduler();
    return current->value;
}

// ---- copies and barriers in shared memory ----

void set_flying(Block* block, Bytes to, int room, bool flying) {
    for (int at = 0; at < room; at += 4) block->shadow[(to - block->shared.begin + at) / 4].flying = flying;
}

void check_phase(Meeting& meeting) {
    if (meeting.missing || meeting.bytes) return;
    meeting.missing = meeting.count;
    meeting.seen = meeting.arriving;
    ++meeting.phase;
    runnable.insert(runnable.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
    idle = 0;
}

void land(Block* block, const Copy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    std::memset(copy.to + copy.bytes, 0, copy.room - copy.bytes);
    set_flying(block, copy.to, copy.room, false);
    if (!copy.meeting) return;
    copy.meeting->bytes -= copy.bytes;
    check_phase(*copy.meeting);
}

// Land one of the copies that have a barrier, now and then.
void land_some(Block& block) {
    auto& copies = block.copies;
    if (copies.empty() || (!runnable.empty() && draw() % 64)) return;
    std::swap(copies[draw() % copies.size()], copies.back());
    land(&block, copies.back());
    copies.pop_back();
}

}  // namespace

// ---- what kernels call ----

extern "C" {
ShimPlace shim_place() { return {{current->thread}, {current->block->index}, {launch.grid}}; }
unsigned char* shim_shared() { return current->block->memory.data(); }
void __nanosleep(unsigned) { look(); }

void shim_syncthreads(int line) {
    Block* block = current->block;
    meet(0, "__syncthreads", line, 0, 0, [&](Fiber* fibers) {
        for (const Fiber& each : block->fibers) block->acquired = std::max(block->acquired, each.acquired);
        share(fibers, fibers + launch.threads);
        ++block->epoch;
    });
}

double shim_exchange(double value, unsigned mask, int lanes, int line) {
    if (mask != 0xffffffffu) fail("a shuffle at line %d of less than a warp, mask %08x", line, mask);
    return meet(1 + current->thread / 32, "shuffles", line, lanes, value, [&](Fiber* warp) {
        for (int lane = 0; lane < 32; ++lane)
            if (lane < (lane ^ lanes)) std::swap(warp[lane].value, warp[lane ^ lanes].value);
    });
}

void shim_syncwarp(int line) {
    meet(1 + current->thread / 32, "__syncwarp", line, 0, 0, [](Fiber* warp) { share(warp, warp + 32); });
}

bool shim_any(bool value, int line) {
    return meet(1 + current->thread / 32, "votes", line, 0, value, [](Fiber* warp) {
        const bool any = std::any_of(warp, warp + 32, [](const Fiber& each) { return each.value != 0; });
        for (Fiber* each = warp; each < warp + 32; ++each) each->value = any;
    });
}

void shim_copy(void* to, const void* from, int bytes, int room, Barrier* barrier) {
    const std::size_t both = std::size_t(to) | (bytes ? std::size_t(from) : 0);
    if (both % std::min(room, 16)) fail("a copy between misaligned addresses");
    if (bytes) access(from, bytes, false);
    access(to, room, true);
    Block* block = current->block;
    Meeting* meeting = barrier ? &block->meetings.at(barrier) : nullptr;
    auto& copies = meeting ? block->copies : current->copies;
    copies.push_back({Bytes(to), Bytes(from), bytes, room, current->groups, meeting});
    std::memset(to, 0xff, room);
    set_flying(block, Bytes(to), room, true);
    // A thread that sees the phase over sees the copy.
    if (meeting) merge(meeting->arriving, nullptr, *current), ++current->time;
}

void commit_copies() { ++current->groups; }

void shim_wait_copies(int left) {
    auto& copies = current->copies;
    const int due = current->groups - left;
    // Copies are in the order of their groups.
    const auto end = std::find_if(copies.begin(), copies.end(), [&](const Copy& c) { return c.group >= due; });
    std::for_each(copies.begin(), end, [](const Copy& copy) { land(current->block, copy); });
    copies.erase(copies.begin(), end);
}

void barrier_init(Barrier* barrier, int count) {
    access(barrier, 8, true);
    Meeting& meeting = current->block->meetings[barrier] = Meeting();
    meeting.count = meeting.missing = count;
}

void barrier_expect(Barrier* barrier, int bytes) {
    access(barrier, 8, false);
    Meeting& meeting = current->block->meetings.at(barrier);
    merge(meeting.arriving, current->past.get(), *current);
    ++current->time;
    meeting.bytes += bytes;
    if (--meeting.missing < 0) fail("more arrivals at a barrier than it was made for");
    check_phase(meeting);
}

void shim_barrier_wait(Barrier* barrier, int parity, int line) {
    access(barrier, 8, false);
    Meeting& meeting = current->block->meetings.at(barrier);
    // The parity alone decides: a thread that is two phases away is told wrong, as on the device.
    while (int(meeting.phase & 1) == parity) {
        current->wait = "a barrier in shared memory", current->line = line;
        meeting.waiting.push_back(current);
        to_scheduler();
    }
    Past seen = meeting.seen;
    merge(seen, current->past.get(), *current);
    current->past = std::make_shared<Past>(std::move(seen));
}

void __threadfence() {
    current->acquired = current->latest;
    current->releases = true;
}

unsigned atomicAdd(unsigned* word, unsigned value) {
    look();
    const unsigned old = *word;
    *word = old + value;
    if (value) idle = 0;
    current->latest = ++atomics;
    auto& past = released[current->block->index];
    if (current->releases && past.size() < current->block->epoch) past.resize(current->block->epoch, atomics);
    current->releases = false;
    return old;
}

// ---- what instrumented code calls ----

#define SHIM_ACCESS(bytes)                                                     \
    void __tsan_read##bytes(void* at) { access(at, bytes, false); }            \
    void __tsan_write##bytes(void* at) { access(at, bytes, true); }            \
    void __tsan_unaligned_read##bytes(void* at) { access(at, bytes, false); }  \
    void __tsan_unaligned_write##bytes(void* at) { access(at, bytes, true); }
SHIM_ACCESS(1) SHIM_ACCESS(2) SHIM_ACCESS(4) SHIM_ACCESS(8) SHIM_ACCESS(16)
void __tsan_read_range(void* at, std::size_t bytes) { access(at, bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { access(at, bytes, true); }
void __tsan_init() {}
// -fsanitize=alignment hands over a place: the name of its file, and the line.
struct Place { const char* file; unsigned line; };
void __ubsan_handle_type_mismatch_v1(Place* where, std::size_t at) {
    fail("line %u: an access at %zu past a multiple of 16 is misaligned", where->line, at % 16);
}

// ---- what the driver calls ----

const char* shim_launch(void (*call)(const unsigned char*), const unsigned char* parameters,
                        unsigned grid, unsigned threads, std::size_t shared_bytes, std::uint64_t seed,
                        int cooperative, Region* regions, std::size_t region_count) {
    launch = {call, parameters, grid, threads, shared_bytes, regions, region_count};
    draw.seed(seed);
    idle = 0, failed = false, atomics = 0;
    released.assign(grid, {});
    shadows.assign(region_count, {});
    for (std::size_t i = 0; i < region_count; ++i)
        if (regions[i].rights == (READ | WRITE)) shadows[i].resize((regions[i].bytes + 3) / 4);
    // A device runs the blocks of an ordinary launch a few at a time, in any order.
    const std::size_t limit = cooperative ? grid : 1 + seed % 3;
    std::vector<unsigned> to_come(grid);
    std::iota(to_come.begin(), to_come.end(), 0u);
    // Odd seeds let the last to become ready go first: one block gets as far as it can, block 0 first.
    const bool eager = seed % 2;
    if (!eager) std::shuffle(to_come.begin(), to_come.end(), draw);
    std::list<Block> alive;
    while (!failed) {
        for (; !to_come.empty() && alive.size() < limit; to_come.pop_back()) alive.emplace_back(to_come.back());
        for (Block& block : alive) land_some(block);
        if (runnable.empty()) {
            const auto flies = [](const Block& block) { return !block.copies.empty(); };
            if (std::any_of(alive.begin(), alive.end(), flies)) continue;
            break;
        }
        if (!eager) std::swap(runnable[draw() % runnable.size()], runnable.back());
        current = runnable.back();
        runnable.pop_back();
        resume();
        if (failed || !current->done) continue;
        idle = 0;
        --current->block->alive;
        alive.remove_if([](const Block& block) { return block.alive == 0; });
    }
    if (!failed && !alive.empty()) {
        current = alive.front().fibers.data();
        while (current->done) ++current;
        if (!_setjmp(scheduler)) fail("waits at %s, line %d, and nobody comes", current->wait, current->line);
    }
    current = nullptr;
    runnable.clear();
    return failed ? message : nullptr;
}
}
