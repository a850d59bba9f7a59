// Deals the tiles of a call out to threads; its plan and scratch memory come before.
#include "jobs.h"

#include <cstring>
#include <initializer_list>

#include "memory.h"
#include "plan.h"
#include "scratch.h"

namespace jobs {

const Kernels* kernels;

namespace {

// Time of an element in double-double over that of another.
constexpr Index COST = 4;
// Calls of fewer elements, 2 us of work, run on one thread; of fewer than WORTH_WAKING, they wake
// no helper: in a loop of calls the helpers are awake. (2, 128, 64): 10.3 us alone, 7.2 shared.
constexpr Index SHARED = 1 << 13;
constexpr Index WORTH_WAKING = 1 << 16;

Index finish_parts(const Call& c) { return c.is_summing() ? (c.n + COLUMNS - 1) / COLUMNS * 2 : 0; }

void note_overflow(const Call& c) {
    if (pool::has_overflowed()) __atomic_store_n(c.scratch.overflowed, true, __ATOMIC_RELAXED);
}

void tile_work(void* data, Index number, int thread) {
    const Call& c = *(const Call*)data;
    kernels->do_tile(c, number, thread);
    note_overflow(c);
}

bool is_unsummed(const Call& c) {
    return c.is_summing() && c.marks && memchr(c.marks, UNCERTIFIED | UNSUMMED, (size_t)c.rows);
}

void finish_work(void* data, Index part, int) {
    const Call& c = *(const Call*)data;
    Index sum = part % 2;
    Index start = part / 2 * COLUMNS;
    if (c.sums_out[sum])
        kernels->finish(c, (int)sum, start, std::min(start + COLUMNS, c.n), is_unsummed(c));
    note_overflow(c);
}

// Takes the scratch memory of all threads in one piece; null if there is none.
double* take_scratch(Call& c, int threads) {
    Arena shared, own;
    lay_out(c, shared, c.scratch);
    (void)Own(c, own);
    // No more threads than parts have work.
    Index parts = std::min<Index>(threads, c.plan.tiles);
    c.scratch.bytes = (shared.used + own.used * parts) * (Index)sizeof(double);
    Arena real{(double*)memory::take((size_t)c.scratch.bytes), 0};
    if (!real.memory) return nullptr;
    lay_out(c, real, c.scratch);
    c.scratch.own = real.memory + real.used;
    c.scratch.own_size = own.used;
    return real.memory;
}

void close_work(void* data, Index number, int thread) {
    kernels->close_tile(*(const Call*)data, number, thread);
}

// Lists the open columns, in memory for as many; false if there are none.
bool list_open(Call& c, Index* columns) {
    for (int i = 0; i < 2; i++) {
        c.open.columns[i] = columns;
        for (Index j = 0; c.sums_out[i] && j < c.n; j++)
            if (c.uncertified[i][j] == OPEN) *columns++ = j;
        c.open.count[i] = columns - c.open.columns[i];
    }
    return c.open.count[0] + c.open.count[1];
}

// Closes the open columns, if there are any; integers do those that are left.
State close_columns(Call& c, int threads) {
    if (!c.uncertified[0] || !memchr(c.uncertified[0], OPEN, (size_t)(2 * c.n))) return DONE;
    c.scratch.bytes = 2 * c.n * (Index)sizeof(Index);
    Index* columns = (Index*)memory::take((size_t)c.scratch.bytes);
    if (!columns) return NO_MEMORY;
    // Only x and dy are read: strips shall not scatter dx again.
    c.y = c.plus = Rows{};
    for (bool in_pairs : {false, true}) {
        if (!list_open(c, columns)) break;
        c.open.in_pairs = in_pairs;
        pool::run(c.plan.tiles, threads, true, close_work, &c);
        kernels->close_columns(c);
    }
    memory::give(columns);
    return DONE;
}

// Does all tiles, then the sums.
State run_tiles(Call& c, int threads) {
    bool wake = c.rows * c.n * (c.plan.in_pairs ? COST : 1) >= WORTH_WAKING || pool::is_in_use();
    if (!kernels->prepare(c)) return DECLINED;
    pool::run(c.plan.tiles, threads, wake, tile_work, &c);
    if (is_unsummed(c) && !c.unrounded) {
        // Two sums of n columns, three words each.
        c.scratch.bytes = 6 * c.n * (Index)sizeof(double);
        c.partial[0] = (double*)memory::take((size_t)c.scratch.bytes);
        if (!c.partial[0]) return NO_MEMORY;
        c.partial[1] = c.partial[0] + 3 * c.n;
    }
    pool::run(finish_parts(c), c.plan.tiles * c.n < SHARED ? 1 : threads, false, finish_work, &c);
    return close_columns(c, threads);
}

#if defined(__x86_64__) || defined(_M_X64)
bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd");
}
#endif

}  // namespace

State run(Call& c, int threads) {
    c.plan = plan_of(c, kernels->alignment);
    bool shared = c.rows * c.n * (c.plan.in_pairs ? COST : 1) >= SHARED;
    threads = shared ? (int)std::min<Index>(threads, pool::MOST) : 1;
    double* scratch = take_scratch(c, threads);
    if (!scratch) return NO_MEMORY;
    pool::DefaultControl control;
    bool overflowed = false;
    c.scratch.overflowed = &overflowed;
    State state = run_tiles(c, threads);
    memory::give(scratch);
    return state == DONE && overflowed && !c.has_pairs() ? OVERFLOWED : state;
}

// ---- which kernels ----

const Kernels* const* available() {
    static const Kernels* usable[4];
    int count = 0;
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
#if !defined(ALONE)
    if (has_v4()) usable[count++] = &kernels_x86_64_v4;
#endif
    if (has_v3()) usable[count++] = &kernels_x86_64_v3;
#if defined(WITH_NARROW)
    if (has_v3()) usable[count++] = &kernels_narrow;
#endif
#elif defined(__aarch64__)
    usable[count++] = &kernels_arm64;
#endif
    usable[count] = nullptr;
    return usable;
}

}  // namespace jobs
