// What the parts share: the arrays of a call, how its rows are dealt out, and its scratch memory.
#pragma once
#include <cstddef>
#include <cstdint>

using Index = std::ptrdiff_t;

// What is beyond these is extreme: no product of three numbers between them, nor its last 106 bits, leaves the range of
// float64.
constexpr double LARGEST = 0x1p200, SMALLEST = 0x1p-200;

enum Type { F32, BF16, F16, F64, PARTIAL };
constexpr Index BYTES[] = {4, 2, 2, 8, 32};
constexpr double LAST_BITS[] = {0x1p24, 0x1p8, 0x1p11, 0x1p53, 0x1p53};  // a number is less than so many of its last

// An array seen as rows: over `lead` axes, each row over `axes` more; `whole` if the elements of a row lie one
// behind the other. With `numbers`, the i-th row is that of the i-th number.
struct Array {
    char* data = nullptr;
    Type type = F32;
    bool whole = false;
    int lead = 0, axes = 0;
    const Index* numbers = nullptr;
    Index count = -1;  // of rows
    // Of NumPy's 64 axes, those that are left once neighbours are merged; the lead's come first.
    Index lengths[64], strides[64];
};

inline char* row_by_number(const Array& a, Index i) {
    if (a.lead == 1) return a.data + i * a.strides[0];
    char* at = a.data;
    for (int k = a.lead - 1; k >= 0; k--) at += i % a.lengths[k] * a.strides[k], i /= a.lengths[k];
    return at;
}
inline char* row_of(const Array& a, Index i) { return row_by_number(a, a.numbers ? a.numbers[i] : i); }

// Float64 from one vector to the next: whole lines, and no multiple of 4096 bytes, where a load waits for an
// unrelated store.
inline Index padded(Index n) {
    Index lines = (n + 15) / 16 * 16 + 16;
    return lines + (lines % 512 == 0 ? 16 : 0);
}

// Gives out pieces of memory; of none, it counts how many float64 are needed.
struct Arena {
    double* memory = nullptr;
    Index used = 0;
    double* take(Index count) {
        Index start = used;
        // Whole lines of 64 bytes.
        used += (count + 7) / 8 * 8;
        return memory ? memory + start : nullptr;
    }
};

struct Call {
    // dx is y, dsum is plus; `source` and `plus` of a forward are what x is the sum of.
    Array x, y, dy, source, plus;
    // Rows, and of numbered ones how many the result has of all, if the others are to be cleared.
    Index rows = 0, all_rows = 0, n = 0;
    const char *gamma = nullptr, *beta = nullptr;
    Type gamma_type = F64, beta_type = F64;
    double eps = 0, gamma_offset = 0;
    // In double-double; every result is the exact one, rounded.
    bool rms = false, backward = false, wide = false, nearest = false;

    // One float64 for each row. Of pairs: low parts, tails, and a mark of rows that are left alone; of nearest:
    // rms(xhat) or more, and a mark of rows in which something is left open.
    double *mean = nullptr, *rest = nullptr, *rstd = nullptr;
    double *rstd_low = nullptr, *tail = nullptr, *spread = nullptr;
    uint8_t* marks = nullptr;

    // The sums over rows, [0] dgamma and [1] dbeta; what each is added to; per column, whether it is undecided.
    // Where rows were marked, those of the others go to `partial` instead.
    char* sums_out[2] = {nullptr, nullptr};
    Type sums_type[2] = {F64, F64};
    const double* old[2] = {nullptr, nullptr};
    uint8_t* undecided[2] = {nullptr, nullptr};
    const uint8_t* wanted = nullptr;  // if given, of both, whether a column is; pairs alone
    double* partial[2] = {nullptr, nullptr};

    // How it is done. Shape and dtypes alone decide the tiles: so no bit depends on the number of threads.
    Index tile_rows = 1, tiles = 1, step = 1;
    bool past = false, ahead = false;  // results go past the caches; rows to come are asked for
    bool results_whole = false;  // results are finished element by element: rounded, added to, scattered

    // Scratch memory of all threads: vectors of float64, and of each tile its sums and the range of its dy.
    double *wide_gamma = nullptr, *gamma_low = nullptr, *wide_beta = nullptr, *sizes = nullptr;
    double *sums = nullptr, *ranges = nullptr;
    double* own = nullptr;
    Index own_size = 0;

    bool summing() const { return sums_out[0] || sums_out[1]; }
    Index apart() const { return padded(n); }
    // Some rows may be done in pairs.
    bool pairs() const { return wide || nearest; }
    // Dgamma, its low part, dbeta and its low part; for nearest, the sizes of both or, not in pairs, the squares of dy
    // and xhat.
    Index sums_per_tile() const { return (nearest ? 6 : 4) * apart(); }

    void lay_out(Arena& arena) {
        Index p = apart();
        wide_gamma = arena.take(p), gamma_low = arena.take(pairs() ? p : 0), wide_beta = arena.take(p);
        sizes = nearest && !backward ? arena.take(p) : nullptr;
        if (summing()) sums = arena.take(sums_per_tile() * tiles), ranges = arena.take(2 * tiles);
    }
};

// The float64 that each thread has for itself.
struct Own {
    double *x[2], *dy[2];              // rows that are gathered or lifted, of this group and the next
    double *raw, *addend;              // a row as it is; one that is added
    double *part;                      // the sums of some rows
    double *xhat;                      // pairs, of each row of a group
    double *kept;                      // what the sums of 16 bits leave for dx, of this group and the next
    double *high, *low, *size;         // a row of results

    Own(const Call& c, Arena& arena) {
        Index p = c.apart(), rows = c.step > 4 ? c.step : 4;  // the narrow backward takes up to four
        for (int i = 0; i < 2; i++) x[i] = arena.take(p * rows), dy[i] = arena.take(c.backward ? p * rows : 0);
        raw = arena.take(p), addend = arena.take(c.plus.data ? p : 0), part = arena.take(c.backward ? 4 * p : 0);
        xhat = arena.take(c.pairs() && c.backward ? 2 * p * rows : 0);
        kept = arena.take(c.backward && !c.wide && BYTES[c.x.type] == 2 ? 16 * p : 0);
        high = arena.take(p), low = arena.take(p), size = arena.take(p);
    }
};

// What one instruction set has for a call.
struct Kernels {
    const char* name;
    Index alignment;  // bytes, of rows that are written past the caches
    // Gamma and beta in float64; false, and the call is not for pairs, if they are of extreme size.
    bool (*prepare)(const Call&);
    void (*do_tile)(const Call&, Index tile, int thread);
    // Adds up the tiles' sums of some columns, [0] dgamma or [1] dbeta, and rounds them.
    void (*finish)(const Call&, int which, Index start, Index stop, bool marked);
};

extern const Kernels kernels_narrow, kernels_x86_64_v3, kernels_x86_64_v4, kernels_arm64;
