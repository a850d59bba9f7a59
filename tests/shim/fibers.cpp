// A grid on one thread of the host: every CUDA thread is a fiber, a seed decides which is next.
//
// Kernels are compiled with -fsanitize=thread,alignment but linked with the functions below in
// place of the sanitizers' own, so this file sees every access to memory before it is made. An
// access must lie in a tensor handed over (byte by byte), be aligned, and not read what nobody
// wrote. It must be ordered after the accesses of other threads to the same four bytes, if one of
// the two is a write:
// - __syncthreads orders the threads of a block, __syncwarp those of a warp; who waits at a barrier
//   in shared memory comes after who arrived there. Nothing else orders them, shuffles do not.
// - Nobody may look where a copy is on its way. It arrives when its thread waits for it or, if it
//   has a barrier, late and out of order.
// - A fence before an atomic operation in one thread and a fence after one that sees its word in
//   another order the two: the other sees what the first had seen and done. Atomic operations alone
//   order nothing. `post` and `peek` are atomic too; but who posts to a word must be ordered after
//   who posted there before, or have read that; and after all who have read it.
// The order is judged, not awaited: a race is found whether or not this schedule shows it. Barriers
// that some threads do not reach, and spinning without end, are errors as well.
#include <algorithm>
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
struct {
    void (*call)(const unsigned char*);
    const unsigned char* parameters;
    unsigned grid, threads, shared_bytes;
} launch;

// A tensor, filled by the driver, or shared memory; `loads` and `stores` count those of each byte
// of a tensor.
struct Region {
    Bytes begin;
    std::uint64_t bytes, rights;
    unsigned *loads, *stores;
};

// The last touch of four bytes: by a thread of the grid, at its own time then.
struct Touch {
    int thread = -1;
    unsigned time = 0;
    int block() const { return thread / int(launch.threads); }
};
struct Shadow {
    Touch write;
    std::vector<Touch> reads;
    bool flying = false;
};
// A region, with shadows if it is read and written.
struct Memory : Region {
    std::vector<Shadow> shadow;

    explicit Memory(Region region)
        : Region(region), shadow(rights == (READ | WRITE) ? (bytes + 3) / 4 : 0) {}
    bool holds(Bytes at, std::size_t size) const {
        return at >= begin && at + size <= begin + bytes;
    }
};

// By block, the times of its threads up to which somebody has seen what they did; a copy is made
// for a change.
using Times = std::shared_ptr<std::vector<unsigned>>;
using Past = std::map<int, Times>;

struct Fiber;
// A place where threads wait for one another: those of a block, a warp, or a barrier in shared
// memory. Phases are counted; `seen` is what those who arrived have done and seen.
struct Meeting {
    int count = 0;
    int missing = 0;
    long bytes = 0;
    unsigned phase = 0;
    int line = 0;
    int lanes = 0;
    Past arriving, seen;
    std::vector<Fiber*> waiting;

    explicit Meeting(int count = 0) : count(count), missing(count) {}
};

struct Copy {
    Bytes to, from;
    int bytes, room, group;
    Meeting* meeting;
};

struct Block;
struct Fiber {
    Block* block;
    unsigned thread;
    Bytes stack;
    ucontext_t context;
    bool done = false;
    // The kind and the line of the wait.
    const char* wait = "";
    int line = 0;
    // Handed to other lanes, by the parity of the phase: none of them is two phases away.
    double values[2] = {};
    Past past;
    unsigned time = 1;
    // Copies without a barrier; how many groups of them it has closed.
    std::vector<Copy> copies;
    int groups = 0;
    // The sights of its atomic operations, for its next fence; and all sights and deeds at its last
    // one.
    Past glimpsed, fenced;
};

struct Block {
    int index;
    unsigned alive = launch.threads;
    std::vector<Fiber> fibers{launch.threads};
    std::unique_ptr<unsigned char[]> stacks{new unsigned char[launch.threads * STACK]};
    // All ones is a NaN in every format, and no index. 64 bytes more: an index that is one too far.
    std::vector<unsigned char> bytes = std::vector<unsigned char>(launch.shared_bytes + 64, 0xff);
    Memory shared{{bytes.data(), launch.shared_bytes, READ | WRITE, nullptr, nullptr}};
    // Meetings of all threads, and of each warp.
    Meeting all{int(launch.threads)};
    std::vector<Meeting> warps = std::vector<Meeting>(launch.threads / 32, Meeting(32));
    std::map<const void*, Meeting> barriers;
    // Copies with a barrier.
    std::vector<Copy> copies;

    explicit Block(unsigned index);
};

std::vector<Memory> tensors;
// A word of atomic operations: what they let others see; who posted last, and who has read it
// since, if it is not +0.
struct Word {
    Past released;
    Touch posted;
    std::vector<Touch> reads;
};
std::map<const void*, Word> words;
std::mt19937_64 draw;
long idle;
ucontext_t scheduler;
Fiber* current;
std::vector<Fiber*> runnable;
bool failed;
char message[1024];

template <class... Values> [[noreturn]] void fail(const char* format, Values... values) {
    const int used = std::snprintf(
        message, sizeof message, "block %d, thread %u: ", current->block->index, current->thread);
    std::snprintf(message + used, sizeof message - used, format, values...);
    failed = true;
    setcontext(&scheduler);
    std::abort();
}

// ---- order ----

int own_number() { return current->block->index * launch.threads + current->thread; }

bool is_ordered(const Touch& other) {
    if (other.thread < 0 || other.thread == own_number()) return true;
    const auto seen = current->past.find(other.block());
    return seen != current->past.end() &&
           other.time <= (*seen->second)[other.thread % launch.threads];
}

void order(Shadow& shadow, bool write, const char* where, std::size_t byte) {
    const char* does = write ? "writes" : "reads";
    if (shadow.flying) fail("%s byte %zu of %s, where a copy is on its way", does, byte, where);
    if (!write && shadow.write.thread < 0)
        fail("reads byte %zu of %s, which nobody wrote", byte, where);
    if (!is_ordered(shadow.write))
        fail("%s byte %zu of %s, which block %d wrote: a race", does, byte, where,
            shadow.write.block());
    const Touch now{own_number(), current->time};
    auto& reads = shadow.reads;
    // Earlier reads that are ordered before this access need no memory.
    reads.erase(std::remove_if(reads.begin(), reads.end(), is_ordered), reads.end());
    if (!write) return reads.push_back(now);
    if (!reads.empty())
        fail("%s byte %zu of %s, which block %d read: a race", does, byte, where, reads[0].block());
    shadow.write = now;
}

std::vector<unsigned>& to_change(Times& times) {
    if (!times || times.use_count() > 1)
        times = std::make_shared<std::vector<unsigned>>(
            times ? *times : std::vector<unsigned>(launch.threads));
    return *times;
}

void see(Past& past, const Past& other) {
    for (const auto& [block, times] : other) {
        Times& mine = past[block];
        if (!mine) mine = times;
        if (mine == times) continue;
        auto& all = to_change(mine);
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::max(all[i], (*times)[i]);
    }
}
// Let others see what this thread has done; what it does from now on is later.
void show(Past& past) { to_change(past[current->block->index])[current->thread] = current->time++; }
void show_all(Past& past) {
    see(past, current->past);
    show(past);
}

// ---- every access ----

void access(const void* place, std::size_t size, bool write) {
    const Bytes at = Bytes(place);
    if (!current || std::size_t(at - current->stack) < STACK) return;
    const char* does = write ? "writes" : "reads";
    char name[32] = "shared memory";
    Memory* memory = &current->block->shared;
    if (!memory->holds(at, size)) {
        if (tensors.empty()) return;  // the driver vouches for what the parameters point to
        const auto tensor = std::find_if(
            tensors.begin(), tensors.end(), [&](Memory& m) { return m.holds(at, size); });
        if (tensor == tensors.end()) fail("%s %zu bytes outside of every tensor", does, size);
        memory = &*tensor;
        std::snprintf(name, sizeof name, "tensor %td", tensor - tensors.begin());
    }
    const std::size_t byte = at - memory->begin;
    if (!(memory->rights & (write ? WRITE : READ)))
        fail("%s %s, byte %zu", write ? "writes into" : "reads from", name, byte);
    unsigned* counts = write ? memory->stores : memory->loads;
    for (std::size_t i = byte; counts && i < byte + size; ++i) ++counts[i];
    for (std::size_t i = byte / 4; !memory->shadow.empty() && 4 * i < byte + size; ++i)
        order(memory->shadow[i], write, name, 4 * i);
}

// ---- switching ----

void to_scheduler() { swapcontext(&current->context, &scheduler); }

void fiber_main() {
    launch.call(launch.parameters);
    current->done = true;
    setcontext(&scheduler);
}

Block::Block(unsigned number) : index(int(number)) {
    for (Fiber& fiber : fibers) {
        fiber.block = this;
        fiber.thread = unsigned(&fiber - fibers.data());
        fiber.stack = stacks.get() + fiber.thread * STACK;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, fiber_main, 0);
        runnable.push_back(&fiber);
    }
}

// Let the others run before memory is looked at again.
void let_others_run() {
    if (++idle > PATIENCE)
        fail(
            "no thread makes progress: it waits for a block that does not run, or for a lost "
            "store");
    runnable.insert(runnable.begin(), current);
    to_scheduler();
}

// ---- meetings ----

// Count arrivals, and bytes to come; a phase is over when nothing is missing.
void arrive(Meeting& meeting, int arrivals, long bytes) {
    meeting.missing -= arrivals;
    meeting.bytes += bytes;
    if (meeting.missing < 0) fail("more arrivals at a barrier than it was made for");
    if (meeting.missing || meeting.bytes) return;
    meeting.missing = meeting.count;
    meeting.seen = meeting.arriving;
    ++meeting.phase;
    runnable.insert(runnable.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
    idle = 0;
}

// The parity alone decides: a thread that is two phases away is told wrong, as on the device.
void wait(Meeting& meeting, int parity, const char* what, int line) {
    current->wait = what;
    current->line = line;
    while (int(meeting.phase & 1) == parity) {
        meeting.waiting.push_back(current);
        to_scheduler();
    }
}

// Wait for all threads of the block or the warp, who leave a value each; return where those of this
// phase are.
int meet(
    Meeting& meeting, const char* what, int line, bool orders, double value = 0, int lanes = 0) {
    const int parity = meeting.phase & 1;
    if (meeting.missing == meeting.count) {
        meeting.line = line;
        meeting.lanes = lanes;
    }
    if (meeting.line != line || meeting.lanes != lanes)
        fail("threads wait at different %s, lines %d and %d", what, line, meeting.line);
    if (orders)
        show_all(meeting.arriving);
    else
        current->values[parity] = value;
    arrive(meeting, 1, 0);
    wait(meeting, parity, what, line);
    if (orders) see(current->past, meeting.seen);
    return parity;
}

Meeting& own_warp() { return current->block->warps[current->thread / 32]; }
Fiber& lane(int number) { return current->block->fibers[current->thread / 32 * 32 + number]; }

// ---- copies ----

void set_flying(Block* block, Bytes to, int room, bool flying) {
    for (int at = 0; at < room; at += 4)
        block->shared.shadow[(to - block->shared.begin + at) / 4].flying = flying;
}

void land(Block* block, const Copy& copy) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    std::memset(copy.to + copy.bytes, 0, copy.room - copy.bytes);
    set_flying(block, copy.to, copy.room, false);
    if (copy.meeting) arrive(*copy.meeting, 0, -copy.bytes);
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
ShimPlace shim_place() {
    return {{current->thread}, {unsigned(current->block->index)}, {launch.grid}};
}
unsigned char* shim_shared() { return current->block->bytes.data(); }
void __nanosleep(unsigned) { let_others_run(); }

void shim_syncthreads(int line) { meet(current->block->all, "__syncthreads", line, true); }
void shim_syncwarp(int line) { meet(own_warp(), "__syncwarp", line, true); }

double shim_exchange(double value, unsigned mask, int lanes, int line) {
    if (mask != 0xffffffffu)
        fail("a shuffle at line %d of less than a warp, mask %08x", line, mask);
    const int parity = meet(own_warp(), "shuffles", line, false, value, lanes);
    return lane(int(current->thread % 32) ^ lanes).values[parity];
}

bool shim_any(bool value, int line) {
    const int parity = meet(own_warp(), "votes", line, false, value);
    return std::any_of(
        &lane(0), &lane(0) + 32, [&](const Fiber& fiber) { return fiber.values[parity] != 0; });
}

void shim_copy(void* to, const void* from, int bytes, int room, Barrier* barrier) {
    const std::size_t both = std::size_t(to) | (bytes ? std::size_t(from) : 0);
    if (both % std::min(room, 16)) fail("a copy between misaligned addresses");
    if (bytes) access(from, bytes, false);
    access(to, room, true);
    Block* block = current->block;
    Meeting* meeting = barrier ? &block->barriers.at(barrier) : nullptr;
    auto& copies = meeting ? block->copies : current->copies;
    copies.push_back({Bytes(to), Bytes(from), bytes, room, current->groups, meeting});
    std::memset(to, 0xff, room);
    set_flying(block, Bytes(to), room, true);
    // A thread that sees the phase over sees the copy.
    if (meeting) show(meeting->arriving);
}

void commit_copies() { ++current->groups; }

void shim_wait_copies(int left) {
    auto& copies = current->copies;
    const int due = current->groups - left;
    // Copies are in the order of their groups.
    const auto end =
        std::find_if(copies.begin(), copies.end(), [&](const Copy& c) { return c.group >= due; });
    std::for_each(copies.begin(), end, [](const Copy& copy) { land(current->block, copy); });
    copies.erase(copies.begin(), end);
}

void barrier_init(Barrier* barrier, int count) {
    access(barrier, 8, true);
    current->block->barriers[barrier] = Meeting(count);
}

void barrier_expect(Barrier* barrier, int bytes) {
    access(barrier, 8, false);
    Meeting& meeting = current->block->barriers.at(barrier);
    show_all(meeting.arriving);
    arrive(meeting, 1, bytes);
}

void shim_barrier_wait(Barrier* barrier, int parity, int line) {
    access(barrier, 8, false);
    Meeting& meeting = current->block->barriers.at(barrier);
    wait(meeting, parity, "a barrier in shared memory", line);
    see(current->past, meeting.seen);
}

void __threadfence() {
    see(current->past, current->glimpsed);
    current->fenced = current->past;
    show(current->fenced);
}

unsigned atomicAdd(unsigned* word, unsigned value) {
    let_others_run();
    const unsigned old = *word;
    *word = old + value;
    if (value) idle = 0;
    see(current->glimpsed, words[word].released);
    see(words[word].released, current->fenced);
    return old;
}

void post(double* word, double value) {
    let_others_run();
    access(word, 8, true);
    Word& here = words[word];
    const auto own = [](const Touch& read) { return read.thread == own_number(); };
    const bool has_read = std::any_of(here.reads.begin(), here.reads.end(), own);
    if (!(has_read || is_ordered(here.posted)) ||
        !std::all_of(here.reads.begin(), here.reads.end(), is_ordered))
        fail("posts a word that block %d posted: a race", here.posted.block());
    here = {current->fenced, {own_number(), current->time}, {}};
    *word = value;
    idle = 0;
}

double peek(const double* word) {
    let_others_run();
    access(word, 8, false);
    see(current->glimpsed, words[word].released);
    if (__double_as_longlong(*word)) words[word].reads.push_back({own_number(), current->time});
    return *word;
}

// ---- what instrumented code calls ----

#define SHIM_ACCESS(bytes)                                                    \
    void __tsan_read##bytes(void* at) { access(at, bytes, false); }           \
    void __tsan_write##bytes(void* at) { access(at, bytes, true); }           \
    void __tsan_unaligned_read##bytes(void* at) { access(at, bytes, false); } \
    void __tsan_unaligned_write##bytes(void* at) { access(at, bytes, true); }
SHIM_ACCESS(1)
SHIM_ACCESS(2)
SHIM_ACCESS(4) SHIM_ACCESS(8) SHIM_ACCESS(16) void __tsan_read_range(void* at, std::size_t bytes) {
    access(at, bytes, false);
}
void __tsan_write_range(void* at, std::size_t bytes) { access(at, bytes, true); }
void __tsan_init() {}
// -fsanitize=alignment hands over a place: the name of its file, and the line.
struct Place {
    const char* file;
    unsigned line;
};
void __ubsan_handle_type_mismatch_v1(Place* where, std::size_t at) {
    fail("line %u: an access at %zu past a multiple of 16 is misaligned", where->line, at % 16);
}

// ---- what the driver calls ----

const char* shim_launch(void (*call)(const unsigned char*), const unsigned char* parameters,
    unsigned grid, unsigned threads, unsigned shared_bytes, unsigned seed, int cooperative,
    const Region* regions, unsigned region_count) {
    launch = {call, parameters, grid, threads, shared_bytes};
    tensors = std::vector<Memory>(regions, regions + region_count);
    draw.seed(seed);
    idle = 0;
    failed = false;
    words.clear();
    // A device runs the blocks of an ordinary launch a few at a time, in any order.
    const std::size_t limit = cooperative ? grid : 1 + seed % 3;
    std::vector<unsigned> to_come(grid);
    std::iota(to_come.begin(), to_come.end(), 0u);
    // Odd seeds let the last to become ready go first: one block gets as far as it can, block 0
    // first.
    const bool eager = seed % 2;
    if (!eager) std::shuffle(to_come.begin(), to_come.end(), draw);
    std::list<Block> alive;
    while (!failed) {
        for (; !to_come.empty() && alive.size() < limit; to_come.pop_back())
            alive.emplace_back(to_come.back());
        for (Block& block : alive) land_some(block);
        if (runnable.empty()) {
            const auto flies = [](const Block& block) { return !block.copies.empty(); };
            if (std::any_of(alive.begin(), alive.end(), flies)) continue;
            break;
        }
        if (!eager) std::swap(runnable[draw() % runnable.size()], runnable.back());
        current = runnable.back();
        runnable.pop_back();
        swapcontext(&scheduler, &current->context);
        if (failed || !current->done) continue;
        idle = 0;
        --current->block->alive;
        alive.remove_if([](const Block& block) { return block.alive == 0; });
    }
    if (!failed && !alive.empty()) {
        current = alive.front().fibers.data();
        while (current->done) ++current;
        getcontext(&scheduler);
        if (!failed) fail("waits at %s, line %d, and nobody comes", current->wait, current->line);
    }
    current = nullptr;
    runnable.clear();
    return failed ? message : nullptr;
}
}
