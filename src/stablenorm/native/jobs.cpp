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

// Past the caches, forward of rows of so many columns goes two by two: n = 256, 4.0 for 2.9 10^9 elements a second.
constexpr Index LEAST_OF_TWO = 128;

// An element in double-double takes as long as so many others.
constexpr Index COST = 4;
// Fewer elements than these, 2 us of work, are shared with nobody; and fewer than these wake nobody but in a loop of
// calls, of which the first pays: (2, 128, 64), 10.3 us alone, 7.2 shared.
constexpr Index SHARED = 1 << 13, WORTH_WAKING = 1 << 16;

// Results of so many bytes go past the caches. (4, 512, 1024) with two threads: 570 to 660 us, through them up
// to 1070. Inputs beyond the cache of one core are asked for ahead of time.
constexpr Index PAST_CACHES = 4 << 20, OWN_CACHE = 1 << 20;

constexpr Index LEAST_SAMPLE = 1 << 15;

// Columns of dgamma or dbeta that one thread adds up at a time.
constexpr Index COLUMNS = 512;

Index least(Index a, Index b) { return a < b ? a : b; }
Index most(Index a, Index b) { return a > b ? a : b; }

Index forward_rows(Index rows, Index n) {
    Index elements = least(most(rows * n / FEW, LEAST_FORWARD_TILE), FORWARD_TILE);
    return most(elements / n / ROWS_TOGETHER, 1) * ROWS_TOGETHER;
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

bool any_unsummed(const Call& c) { return c.marks && memchr(c.marks, UNCERTIFIED | UNSUMMED, (size_t)c.rows); }

// Samples from `first` on, whose tiles and sums are done together.
struct Batch {
    const Call& call;
    Index first;
};

template <class T> void further(T*& p, Index bytes) {
    if (p) p = (T*)((char*)p + bytes);
}

// The call of sample `i` of a batch: its parameters, and its sums if it is of one tile, in the memory of a thread.
Call sample_of(const Batch& batch, Index i, int thread) {
    Call c = batch.call;
    Index sample = batch.first + i, row = sample * c.rows;
    for (Rows* each : {&c.x, &c.y, &c.dy, &c.source, &c.plus}) further(each->data, row * each->stride);
    for (double** each : {&c.mean, &c.rest, &c.rstd, &c.rstd_low, &c.tail, &c.spread}) further(*each, row * 8);
    further(c.marks, row), further(c.gamma, sample * c.gamma_stride), further(c.beta, sample * c.beta_stride);
    for (int k = 0; k < 2; k++) {
        further(c.sums_out[k], sample * c.n * BYTES[c.sums_type[k]]), further(c.uncertified[k], sample * 2 * c.n);
        further(c.partial[k], sample * 6 * c.n * 8);
    }
    Arena room{c.own + c.own_size * thread + c.own_parameters, 0};
    c.lay_out_parameters(room);
    if (c.tiles == 1) c.lay_out_sums(room, 1);
    else further(c.sums, i * c.tiles * c.sums_per_tile() * 8), further(c.ranges, i * c.tiles * 16);
    return c;
}

Index finish_parts(const Call& c) { return c.summing() ? (c.n + COLUMNS - 1) / COLUMNS * 2 : 0; }

void finish_part(const Call& c, Index part) {
    Index which = part % 2, start = part / 2 * COLUMNS;
    if (c.sums_out[which]) kernels->finish(c, (int)which, start, least(start + COLUMNS, c.n), any_unsummed(c));
}

void tile_work(void* data, Index number, int thread) {
    DefaultControl control;
    const Batch& batch = *(const Batch*)data;
    if (batch.call.samples == 1) return kernels->do_tile(batch.call, number, thread);
    Call c = sample_of(batch, number / batch.call.tiles, thread);
    kernels->prepare(c), kernels->do_tile(c, number % batch.call.tiles, thread);
    for (Index part = 0, parts = c.tiles == 1 ? finish_parts(c) : 0; part < parts; part++) finish_part(c, part);
}

void finish_work(void* data, Index part, int thread) {
    DefaultControl control;
    const Batch& batch = *(const Batch*)data;
    if (batch.call.samples == 1) return finish_part(batch.call, part);
    Index parts = finish_parts(batch.call);
    finish_part(sample_of(batch, part / parts, thread), part % parts);
}

// Tiles of samples whose sums are held at a time: 4 MiB of them, if n is 256. A sample of one tile has its sums in the
// memory of a thread.
constexpr Index TILES_TOGETHER = 512;
Index batch_of(const Call& c) { return c.tiles == 1 ? c.samples : least(c.samples, most(TILES_TOGETHER / c.tiles, 1)); }

// Scratch memory of so many threads, all in one piece.
bool take_scratch(Call& c, int threads, double*& memory) {
    Arena shared, own;
    bool is_shared = c.samples == 1 || c.tiles > 1;
    Index together = c.tiles * batch_of(c);
    c.lay_out_parameters(shared);
    if (is_shared) c.lay_out_sums(shared, together);
    (void)Own(c, own);
    c.own_parameters = own.used;
    if (c.samples > 1) c.lay_out_parameters(own);
    if (!is_shared) c.lay_out_sums(own, 1);
    memory = (double*)memory::take((size_t)(shared.used + own.used * threads) * sizeof(double));
    if (!memory) return false;
    Arena real{memory, 0};
    c.lay_out_parameters(real);
    if (is_shared) c.lay_out_sums(real, together);
    c.own = memory + real.used, c.own_size = own.used;
    return true;
}

// Some samples, from `first` on.
void run_parts(const Call& c, Index first, Index samples, int threads) {
    Batch batch{c, first};
    Index cost = samples * c.rows * c.n * (c.wide ? COST : 1), tiles = samples * c.tiles;
    pool::run(tiles, threads, cost >= WORTH_WAKING || pool::is_in_use(), tile_work, &batch);
    if (c.samples > 1 && c.tiles == 1) return;
    pool::run(samples * finish_parts(c), tiles * c.n < SHARED ? 1 : threads, false, finish_work, &batch);
}

// Whether kernels can do all samples: gamma and beta of pairs, or of float64, may be out of range.
bool can_prepare(const Call& c) {
    if (c.samples > 1 && !c.pairs() && c.gamma_type != F64 && c.beta_type != F64) return true;
    if (c.samples == 1) return kernels->prepare(c);
    for (Index i = 0; i < c.samples; i++)
        if (!kernels->prepare(sample_of({c, 0}, i, 0))) return false;
    return true;
}

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

Index backward_rows(Index rows, Index n, bool nearest) {
    Index limit = most(least(SUMS / n, MOST_TILES), FEWEST_TILES);
    Index few = least(least(rows * n / LEAST_BACKWARD_TILE, rows / (nearest ? 2 * LEAST_ROWS : LEAST_ROWS)), FEW);
    Index tiles = least(most(most(rows * n / BACKWARD_TILE, few), 1), limit);
    Index each = most((rows + tiles - 1) / tiles, 1);
    return (each + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;
}

bool has_huge_dy(const Call& c) {
    bool huge = false;
    for (Index i = 0; c.dy.type == F64 && i < c.samples * c.rows; i++) huge |= !kernels->is_within((const double*)row_of(c.dy, i), c.n, 0);
    return huge;
}

void plan(Call& c) {
    Index rows = c.plan_rows ? c.plan_rows : c.rows;
    c.tile_rows = c.backward ? backward_rows(rows, c.n, c.nearest) : forward_rows(rows, c.n);
    c.tiles = (c.rows + c.tile_rows - 1) / c.tile_rows;
    bool any_float64 = (c.gamma && c.gamma_type == F64) || (c.beta && c.beta_type == F64);
    for (int i = 0; i < 2; i++) any_float64 |= c.sums_out[i] && c.sums_type[i] == F64;
    bool rare = c.gamma_offset != 0 || c.sums_type[0] == PARTIAL || c.sums_type[1] == PARTIAL || (c.rms && c.sums_out[1]) ||
                (c.backward && !c.spread) || any_float64;
    bool unlike = c.backward && (c.plus.data || c.dy.type != c.x.type);
    // Correct rounding of what is rare is left to pairs.
    c.wide = c.wide || (c.nearest && (rare || unlike));
    c.staged = unlike || (c.wide && (c.nearest || c.gamma_offset != 0 || c.x.type != F64));
    Index row_bytes = c.n * BYTES[c.x.type], bytes = c.samples * c.rows * row_bytes;
    bool aligned = c.y.stride == row_bytes && row_bytes % kernels->alignment == 0 && (uintptr_t)c.y.data % (uintptr_t)kernels->alignment == 0;
    // A tile ends with a fence, which takes as long as a small sample.
    c.past = aligned && bytes >= PAST_CACHES && c.rows * row_bytes >= LEAST_SAMPLE, c.ahead = bytes >= OWN_CACHE;
    c.step = c.past && !c.backward && c.n >= LEAST_OF_TWO ? 2 : rows_together(c.n);
}

State run(Call& c, int threads) {
    double* scratch;
    threads = c.samples * c.rows * c.n * (c.wide ? COST : 1) < SHARED ? 1 : (int)least(threads, pool::MOST);
    if (!take_scratch(c, threads, scratch)) return NO_MEMORY;
    DefaultControl control;
    State state = can_prepare(c) ? DONE : DECLINED;
    for (Index first = 0, some, most = batch_of(c); first < c.samples && state == DONE; first += some) {
        some = least(most, c.samples - first);
        run_parts(c, first, some, threads);
    }
    memory::give(scratch);
    return state;
}

// ---- which kernels ----

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
