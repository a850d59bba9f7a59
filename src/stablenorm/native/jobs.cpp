// Deals a call out to threads. The shape and dtypes alone decide the tiles: no bit depends on
// threads.
#include "jobs.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "memory.h"

namespace jobs {

const Kernels* kernels;

namespace {

// Elements of a tile of the forward: 4 us of work, so that the last tile keeps nobody waiting and
// claiming one (20 ns) costs nothing. Small calls have four tiles, down to 1 us each.
constexpr Index FORWARD_TILE = 1 << 14;
constexpr Index LEAST_FORWARD_TILE = 1 << 12;
constexpr Index FEW_TILES = 4;

// Tiles of the backward have four vectors of sums each: at most 64 tiles, as few as 8 where rows
// are long, keep these within a few MB. Small calls have up to four, if the sums are a small part
// of the work of each.
constexpr Index BACKWARD_TILE = 1 << 16;
constexpr Index LEAST_BACKWARD_TILE = 1 << 13;
constexpr Index LEAST_ROWS = 16;
constexpr Index MOST_TILES = 64;
constexpr Index FEWEST_TILES = 8;
constexpr Index SUMS = 1 << 17;

Index rows_together(Index n) { return n > 512 ? 2 : n > 256 ? 4 : GROUP; }

// A forward with non-temporal stores takes rows of this length or more two by two: n = 256, 4.0
// 10^9 elements a second, else 2.9.
constexpr Index LEAST_OF_TWO = 128;

// Time of an element in double-double over that of another.
constexpr Index COST = 4;
// Calls of fewer elements, 2 us of work, run on one thread; of fewer than WORTH_WAKING, they wake
// no helper: in a loop of calls the helpers are awake. (2, 128, 64): 10.3 us alone, 7.2 shared.
constexpr Index SHARED = 1 << 13;
constexpr Index WORTH_WAKING = 1 << 16;

// Results of this size and more use non-temporal stores: (4, 512, 1024) with two threads, 570 to
// 660 us, without up to 1070. Inputs beyond the cache of one core are prefetched.
constexpr Index PAST_CACHES = 4 << 20;
constexpr Index OWN_CACHE = 1 << 20;

Index forward_rows(Index rows, Index n, Index together) {
    Index elements = std::min(std::max(rows * n / FEW_TILES, LEAST_FORWARD_TILE), FORWARD_TILE);
    return std::max<Index>(elements / n / together, 1) * together;
}

Index finish_parts(const Call& c) { return c.summing() ? (c.n + COLUMNS - 1) / COLUMNS * 2 : 0; }

void note_overflow(const Call& c) {
    if (pool::has_overflowed()) __atomic_store_n(c.overflowed, true, __ATOMIC_RELAXED);
}

void tile_work(void* data, Index number, int thread) {
    const Call& c = *(const Call*)data;
    kernels->do_tile(c, number, thread);
    note_overflow(c);
}

bool is_unsummed(const Call& c) {
    return c.summing() && c.marks && memchr(c.marks, UNCERTIFIED | UNSUMMED, (size_t)c.rows);
}

void finish_work(void* data, Index part, int) {
    const Call& c = *(const Call*)data;
    Index which = part % 2;
    Index start = part / 2 * COLUMNS;
    if (c.sums_out[which])
        kernels->finish(c, (int)which, start, std::min(start + COLUMNS, c.n), is_unsummed(c));
    note_overflow(c);
}

Index backward_rows(Index rows, Index n, bool nearest) {
    Index limit = std::max(std::min(SUMS / n, MOST_TILES), FEWEST_TILES);
    Index few = std::min(
        std::min(rows * n / LEAST_BACKWARD_TILE, rows / (nearest ? 2 * LEAST_ROWS : LEAST_ROWS)),
        FEW_TILES);
    Index tiles = std::min(std::max<Index>(std::max(rows * n / BACKWARD_TILE, few), 1), limit);
    Index size = std::max<Index>((rows + tiles - 1) / tiles, 1);
    return (size + GROUP - 1) / GROUP * GROUP;
}

// Takes the scratch memory of all threads in one piece.
bool take_scratch(Call& c, int threads, double*& memory) {
    Arena shared, own;
    c.lay_out_parameters(shared);
    c.lay_out_sums(shared);
    (void)Own(c, own);
    // No more threads than parts have work.
    Index parts = std::min<Index>(threads, c.tiles);
    c.scratch_bytes = (shared.used + own.used * parts) * (Index)sizeof(double);
    memory = (double*)memory::take((size_t)c.scratch_bytes);
    if (!memory) return false;
    Arena real{memory, 0};
    c.lay_out_parameters(real);
    c.lay_out_sums(real);
    c.own = memory + real.used;
    c.own_size = own.used;
    return true;
}

// Does all tiles, then the sums.
State run_tiles(Call& c, int threads) {
    bool wake = c.rows * c.n * (c.in_pairs ? COST : 1) >= WORTH_WAKING || pool::is_in_use();
    if (!kernels->prepare(c)) return DECLINED;
    pool::run(c.tiles, threads, wake, tile_work, &c);
    if (is_unsummed(c) && !c.unrounded) {
        // Two sums of n columns, three words each.
        c.scratch_bytes = 6 * c.n * (Index)sizeof(double);
        c.partial[0] = (double*)memory::take((size_t)c.scratch_bytes);
        if (!c.partial[0]) return NO_MEMORY;
        c.partial[1] = c.partial[0] + 3 * c.n;
    }
    pool::run(finish_parts(c), c.tiles * c.n < SHARED ? 1 : threads, false, finish_work, &c);
    return DONE;
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

void plan(Call& c) {
    for (auto array : ARRAYS) c.strided |= (c.*array).run != 0;
    c.tile_rows = c.backward ? backward_rows(c.rows, c.n, c.nearest)
                             : forward_rows(c.rows, c.n, c.strided ? STRIP : GROUP);
    c.tiles = (c.rows + c.tile_rows - 1) / c.tile_rows;
    bool any_float64 = (c.gamma && c.gamma_type == F64) || (c.beta && c.beta_type == F64);
    for (int i = 0; i < 2; i++) any_float64 |= c.sums_out[i] && c.sums_type[i] == F64;
    bool needs_pairs = c.unrounded || (c.rms && c.sums_out[1]) || any_float64;
    bool needs_staging = c.y.type != c.x.type || (c.backward && c.plus.data);
    // Pairs round rare calls correctly, and hold the digits of a float64 result.
    c.in_pairs = c.in_pairs || (c.nearest && (needs_pairs || needs_staging));
    c.staged = needs_staging || (c.in_pairs && (c.nearest || c.x.type != F64));
    Index row_bytes = c.n * BYTES[c.x.type];
    Index bytes = c.rows * row_bytes;
    bool aligned = c.y.type == c.x.type && !c.y.run && c.y.stride == row_bytes &&
                   row_bytes % kernels->alignment == 0 &&
                   (uintptr_t)c.y.data % (uintptr_t)kernels->alignment == 0;
    c.past = aligned && bytes >= PAST_CACHES;
    c.ahead = bytes >= OWN_CACHE;
    c.step = c.past && !c.backward && c.n >= LEAST_OF_TWO ? 2 : rows_together(c.n);
    if (c.in_pairs) c.step = c.step_in_pairs();
}

State run(Call& c, int threads) {
    double* scratch;
    threads = c.rows * c.n * (c.in_pairs ? COST : 1) < SHARED
                  ? 1
                  : (int)std::min<Index>(threads, pool::MOST);
    if (!take_scratch(c, threads, scratch)) return NO_MEMORY;
    pool::DefaultControl control;
    bool overflowed = false;
    c.overflowed = &overflowed;
    State state = run_tiles(c, threads);
    memory::give(scratch);
    return state == DONE && overflowed && !c.pairs() ? OVERFLOWED : state;
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
