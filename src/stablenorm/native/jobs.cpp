// How a call is dealt out to threads. The shape and dtypes alone decide the tiles: no bit depends on threads.
#include "jobs.h"

#include <cstring>
#include <initializer_list>

#include "memory.h"
#include "pool.h"
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace jobs {

const Kernels* kernels;

namespace {

// Elements of a tile of the forward: 4 us of work, so that the last one leaves nobody waiting, and to take one
// (20 ns) is nothing; of few elements four tiles, down to 1 us each.
constexpr Index FORWARD_TILE = 1 << 14, LEAST_FORWARD_TILE = 1 << 12, FEW = 4;

// Tiles of the backward, each with four vectors of sums of its own: at most 64, and as few as 8 where rows are
// long, keep these within a few MB. Of few elements up to four, if each has enough for its sums to be a small
// part of the work.
constexpr Index BACKWARD_TILE = 1 << 16, LEAST_BACKWARD_TILE = 1 << 13, LEAST_ROWS = 16;
constexpr Index MOST_TILES = 64, FEWEST_TILES = 8, SUMS = 1 << 17;
constexpr Index ROWS_TOGETHER = 8;

// Up to so many short rows are done together: what waits for divisions and roots waits for all at once.
Index rows_together(Index n) { return n > 512 ? 2 : n > 256 ? 4 : ROWS_TOGETHER; }

// An element in double-double takes as long as so many others.
constexpr Index COST = 4;
// Fewer elements than these, 2 us of work, are shared with nobody; and fewer than these wake nobody but in a loop of
// calls, of which the first pays: (2, 128, 64), 10.3 us alone, 7.2 shared.
constexpr Index SHARED = 1 << 13, WORTH_WAKING = 1 << 16;

// Results of so many bytes go past the caches. (4, 512, 1024) with two threads: 570 to 660 us, through them up
// to 1070. Inputs beyond the cache of one core are asked for ahead of time.
constexpr Index PAST_CACHES = 4 << 20, OWN_CACHE = 1 << 20;

// Columns of dgamma or dbeta that one thread adds up at a time.
constexpr Index COLUMNS = 512;

Index least(Index a, Index b) { return a < b ? a : b; }
Index most(Index a, Index b) { return a > b ? a : b; }

Index forward_rows(Index rows, Index n) {
    Index elements = least(most(rows * n / FEW, LEAST_FORWARD_TILE), FORWARD_TILE);
    return most(elements / n / ROWS_TOGETHER, 1) * ROWS_TOGETHER;
}

Index backward_rows(Index rows, Index n, bool nearest) {
    Index limit = most(least(SUMS / n, MOST_TILES), FEWEST_TILES);
    Index few = least(least(rows * n / LEAST_BACKWARD_TILE, rows / (nearest ? 2 * LEAST_ROWS : LEAST_ROWS)), FEW);
    Index tiles = least(most(most(rows * n / BACKWARD_TILE, few), 1), limit);
    Index each = most((rows + tiles - 1) / tiles, 1);
    return (each + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;
}

// Rounding to nearest, subnormals as they are, whatever the calling thread is set to.
struct DefaultControl {
#if defined(__x86_64__) || defined(_M_X64)
    unsigned word = _mm_getcsr();
    DefaultControl() { _mm_setcsr(0x1f80); }
    ~DefaultControl() { _mm_setcsr(word); }
#elif defined(__aarch64__)
    uint64_t word;
    DefaultControl() { asm volatile("mrs %0, fpcr\n msr fpcr, xzr" : "=r"(word)); }
    ~DefaultControl() { asm volatile("msr fpcr, %0" : : "r"(word)); }
#endif
};

bool any_extreme(const Call& c) {
    bool found = false;
    for (Index i = 0; c.marks && i < c.rows; i++) found |= c.marks[i] == 1;
    return found;
}

void finish_columns(const Call& c, int which, Index start, bool marked) {
    Index stop = least(start + COLUMNS, c.n);
    if (c.sums_out[which] && (!marked || c.partial[which])) kernels->finish(c, which, start, stop, marked);
}

void tile_work(void* data, Index tile, int thread) {
    DefaultControl control;
    kernels->do_tile(*(const Call*)data, tile, thread);
}

struct Finish {
    const Call& call;
    bool marked;
};
void finish_work(void* data, Index part, int) {
    DefaultControl control;
    const Finish& f = *(const Finish*)data;
    finish_columns(f.call, (int)(part % 2), part / 2 * COLUMNS, f.marked);
}

// Scratch memory of so many threads, all in one piece.
bool take_scratch(Call& c, int threads, double*& memory) {
    Arena shared, own;
    c.lay_out(shared);
    (void)Own(c, own);
    memory = (double*)memory::take((size_t)(shared.used + own.used * threads) * sizeof(double));
    if (!memory) return false;
    Arena real{memory, 0};
    c.lay_out(real);
    c.own = memory + real.used, c.own_size = own.used;
    return true;
}

void run_parts(Call& c, int threads) {
    Index cost = c.rows * c.n * (c.wide ? COST : 1);
    pool::run(c.tiles, threads, cost >= WORTH_WAKING || pool::is_in_use(), tile_work, &c);
    Finish finish{c, c.summing() && any_extreme(c)};
    Index parts = c.summing() ? (c.n + COLUMNS - 1) / COLUMNS * 2 : 0;
    pool::run(parts, c.tiles * c.n < SHARED ? 1 : threads, false, finish_work, &finish);
}

// Dgamma and dbeta of the columns that are undecided, in pairs; these need the statistics of all rows again.
bool sum_again(Call c, int threads) {
    size_t n = (size_t)c.n, rows = (size_t)c.rows;
    char* memory = (char*)memory::take(2 * n * sizeof(double) + 4 * n + rows);
    if (!memory) return false;
    char* found = memory;
    uint8_t *wanted = (uint8_t*)found + 2 * n * sizeof(double), *open = wanted + 2 * n;
    Call again = c;
    again.wide = again.results_whole = true, again.y.data = nullptr, again.wanted = wanted, again.marks = open + 2 * n;
    memset(open, 0, 2 * n + rows);
    for (int i = 0; i < 2; i++) {
        memcpy(wanted + i * n, c.undecided[i], n);
        if (c.sums_out[i]) again.sums_out[i] = found + i * n * sizeof(double);
        again.undecided[i] = open + i * n, again.partial[i] = nullptr;
    }
    run_parts(again, threads);
    // With an extreme row they stay undecided.
    for (int i = 0; i < 2 && !any_extreme(again); i++)
        for (size_t j = 0, bytes = (size_t)BYTES[c.sums_type[i]]; j < n && c.sums_out[i]; j++)
            if (wanted[i * n + j]) memcpy(c.sums_out[i] + j * bytes, again.sums_out[i] + j * bytes, bytes), c.undecided[i][j] = again.undecided[i][j];
    memory::give(memory);
    return true;
}

bool is_any_open(const Call& c) {
    uint8_t found = 0;
    const uint8_t *of_dgamma = c.undecided[0], *of_dbeta = c.undecided[1];
    for (Index j = 0, n = c.summing() && c.nearest ? c.n : 0; j < n; j++) found |= of_dgamma[j] | of_dbeta[j];
    return found;
}

State run_one(Call& c, int threads) {
    double* scratch;
    if (!take_scratch(c, threads, scratch)) return NO_MEMORY;
    DefaultControl control;
    State state = kernels->prepare(c) ? DONE : DECLINED;
    if (state == DONE) run_parts(c, threads);
    if (state == DONE && !c.wide && is_any_open(c) && !sum_again(c, threads)) state = NO_MEMORY;
    memory::give(scratch);
    return state;
}

struct Sampled {
    const Call& call;
    const Samples& samples;
    volatile State state;
};

template <class T> void further(T*& p, Index bytes) {
    if (p) p = (T*)((char*)p + bytes);
}

void sample_work(void* data, Index number, int) {
    Sampled& job = *(Sampled*)data;
    const Samples& s = job.samples;
    Call c = job.call;
    further(c.x.data, number * s.x), further(c.y.data, number * s.y), further(c.dy.data, number * s.dy);
    further(c.source.data, number * s.source), further(c.plus.data, number * s.plus);
    further(c.gamma, number * s.gamma), further(c.beta, number * s.beta);
    for (double** each : {&c.mean, &c.rest, &c.rstd, &c.rstd_low, &c.tail, &c.spread}) further(*each, number * s.statistics);
    further(c.marks, number * s.marks);
    for (int i = 0; i < 2; i++) {
        further(c.sums_out[i], number * s.sums[i]), further(c.old[i], number * s.old[i]);
        further(c.undecided[i], number * s.undecided[i]);
    }
    State state = run_one(c, 1);
    if (state != DONE) job.state = state;
}

}  // namespace

void plan(Call& c) {
    c.tile_rows = c.backward ? backward_rows(c.rows, c.n, c.nearest) : forward_rows(c.rows, c.n);
    c.tiles = (c.rows + c.tile_rows - 1) / c.tile_rows;
    c.step = rows_together(c.n);
    bool rare = c.gamma_offset != 0 || c.sums_type[0] == PARTIAL || c.sums_type[1] == PARTIAL || (c.rms && c.sums_out[1]) ||
                (c.backward && !c.spread);
    bool unlike = (c.backward && c.plus.data) || !c.y.whole || c.y.type != (c.wide ? F64 : c.x.type) ||
                  (c.backward && !c.wide && c.dy.type != c.x.type);
    // Correct rounding of what is rare is left to pairs.
    c.wide = c.wide || (c.nearest && (rare || unlike));
    c.results_whole = unlike || (c.wide && (c.nearest || c.gamma_offset != 0));
    Index row_bytes = c.n * BYTES[c.y.type], bytes = c.rows * row_bytes;
    bool aligned = c.y.lead == 1 && c.y.strides[0] == row_bytes && row_bytes % kernels->alignment == 0 &&
                   (uintptr_t)c.y.data % (uintptr_t)kernels->alignment == 0;
    c.past = aligned && bytes >= PAST_CACHES, c.ahead = bytes >= OWN_CACHE;
}

State run(Call& c, const Samples& samples, int threads) {
    if (!samples.count) return run_one(c, c.rows * c.n * (c.wide ? COST : 1) < SHARED ? 1 : threads);
    // Of samples, the plan has seen the first alone.
    c.past = c.past && samples.y % kernels->alignment == 0;
    Sampled job{c, samples, DONE};
    Index elements = samples.count * c.rows * c.n;
    pool::run(samples.count, elements < SHARED ? 1 : threads, elements >= WORTH_WAKING, sample_work, &job);
    return job.state;
}

// ---- which kernels ----

namespace {
#if defined(__x86_64__) || defined(_M_X64)
bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
#endif
}  // namespace

const Kernels* const* available() {
    static const Kernels* found[4];
    int count = 0;
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_cpu_init();
#if !defined(ALONE)
    if (has_v4()) found[count++] = &kernels_x86_64_v4;
#endif
    if (has_v3()) found[count++] = &kernels_x86_64_v3;
#if defined(WITH_NARROW)
    if (has_v3()) found[count++] = &kernels_narrow;
#endif
#elif defined(__aarch64__)
    found[count++] = &kernels_arm64;
#endif
    found[count] = nullptr;
    return found;
}

}  // namespace jobs
