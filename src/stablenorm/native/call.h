// The record of a call: its arrays, how its rows are dealt out, and its scratch memory.
#pragma once
#include <cstddef>
#include <cstdint>

using Index = std::ptrdiff_t;

// Products of three numbers within [SMALLEST, LARGEST], and their last 106 bits, stay in the range
// of float64. Rows with other numbers are out of range.
constexpr double LARGEST = 0x1p200;
constexpr double SMALLEST = 0x1p-200;

// Short rows that are done together, since their divisions and roots overlap; and columns whose
// tiles' sums are added up at a time, since they stay in the first-level cache.
constexpr Index GROUP = 8;
constexpr Index COLUMNS = 512;

// Longest rows for which pass 1 of the next group runs before pass 2 of this one, so that its roots
// and divisions overlap with stores. Longer rows would evict one another: n = 16384 once ran at
// 0.63 of its speed; on a newer Intel Xeon at 0.97 to 1.05. KEPT rows (back_rows.h) need more room.
// Rows in pairs longer than EARLY are done one by one.
constexpr Index EARLY = 4096;
constexpr Index EARLY_KEPT = 256;

// Longer rows are done one by one with rounding to nearest: what four of 16 bits keep (`kept`)
// takes 64 MiB at this length.
constexpr Index LONG = 1 << 20;

// Rows of a partial sum of dgamma and dbeta. Shorter chains of additions give a smaller error
// bound.
template <bool NEAREST> constexpr Index PART_OF = NEAREST ? 32 : 64;

enum Type { F32, BF16, F16, F64 };
constexpr Index BYTES[] = {4, 2, 2, 8};
constexpr double LAST_BITS[] = {0x1p24, 0x1p8, 0x1p11, 0x1p53};  // above any number / its last bit

// Plain rows: elements of unit stride, rows `stride` bytes apart. Rows that are not plain come in
// runs of `run` rows, which begin `outer` bytes apart, and their elements are `apart` bytes apart.
struct Rows {
    char* data = nullptr;
    Type type = F32;
    Index stride = 0;
    Index run = 0;  // 0: plain
    Index outer = 0;
    Index apart = 0;
};
inline char* row_of(const Rows& a, Index i) { return a.data + i * a.stride; }

// Rows that are not plain are done so many at a time, as plain rows of scratch memory (strips.h).
constexpr Index STRIP = 32;

// Length of a scratch vector, in float64: whole cache lines, and not just beyond a multiple of 4096
// bytes, at which loads would wait for stores to the vector before. (2, 64, 4096) backward: 128
// bytes beyond one, 1.08 of the time.
inline Index padded(Index n) {
    Index lines = (n + 15) / 16 * 16 + 16;
    return lines + (lines % 512 < 64 ? 64 : 0);
}

// Hands out pieces of memory; without memory, counts the float64 that are needed.
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

// Marks of a row. UNCERTIFIED: the next rung computes it, pairs or integers. UNSUMMED: the sums
// over rows lack its terms.
constexpr uint8_t UNCERTIFIED = 1;
constexpr uint8_t UNSUMMED = 2;

struct Call {
    // y: y or dx, of any type; dy and plus have that of x. plus: residual or dsum. source: the x to
    // which the residual is added; x takes the sum.
    Rows x, y, dy, source, plus;
    Index rows = 0;
    Index n = 0;
    int ndim = 0;       // of x
    uint64_t axes = 0;  // of x, a bit for each that is normalized
    const char* gamma = nullptr;
    const char* beta = nullptr;
    Type gamma_type = F32;
    Type beta_type = F32;
    double eps = 0;
    // in_pairs: in double-double. nearest: every result is the exact one, rounded. unrounded: the
    // sums over rows go to `partial`.
    bool rms = false;
    bool backward = false;
    bool in_pairs = false;
    bool nearest = false;
    bool unrounded = false;
    // over: results take the place of x or dy, which cannot be read again. A backward marks rows
    // that overflow, and leaves their dy as it is.
    bool over = false;

    // The statistics, one float64 a row. in_pairs adds low parts and tails, nearest a spread >=
    // rms(xhat); either needs marks.
    double* mean = nullptr;
    double* mean_lo = nullptr;
    double* rstd = nullptr;
    double* rstd_lo = nullptr;
    double* mean_tail = nullptr;
    double* spread = nullptr;
    uint8_t* marks = nullptr;

    // The sums over rows, [0] dgamma and [1] dbeta, and which columns are uncertified. If rows are
    // UNSUMMED, the sums over the others go to `partial`, as partial sums of reference/sums.py.
    char* sums_out[2] = {nullptr, nullptr};
    Type sums_type[2] = {F64, F64};
    uint8_t* uncertified[2] = {nullptr, nullptr};
    double* partial[2] = {nullptr, nullptr};

    // The plan. Shape and dtypes alone decide the tiles: no bit depends on the number of threads.
    Index tile_rows = 1;
    Index tiles = 1;
    Index step = 1;
    bool past = false;
    bool ahead = false;    // non-temporal stores; prefetches
    bool staged = false;   // results go through a scratch row, where they are added to and rounded
    bool strided = false;  // an array has rows that are not plain

    // Scratch memory that threads share: the parameters in float64; the sums of each tile, and the
    // range of its dy or, in float64, the worst errors of its rows.
    double* wide_gamma = nullptr;
    double* wide_beta = nullptr;
    double* sizes = nullptr;
    double* sums = nullptr;
    double* ranges = nullptr;
    double* own = nullptr;
    Index own_size = 0;  // float64 of one thread
    Index scratch_bytes = 0;
    // Set where arithmetic overflows: an infinite result of finite input may be the rounding errors
    // of huge terms.
    bool* overflowed = nullptr;

    bool summing() const { return sums_out[0] || sums_out[1]; }
    Index padded_n() const { return padded(n); }
    // Whether some rows may be done in pairs, and how many together.
    bool pairs() const { return in_pairs || nearest; }
    Index step_in_pairs() const { return n <= EARLY ? step : 1; }
    // Words of a sum: a tile of one part has no low one.
    Index words() const { return pairs() || tile_rows > PART_OF<false> ? 2 : 1; }
    // Vectors: dgamma, its low part, dbeta, its low part. Nearest adds two that bound their errors:
    // sizes in pairs, the squares of dy and xhat in float64.
    Index sums_per_tile() const { return (nearest ? 6 : 2 * words()) * padded_n(); }

    void lay_out_parameters(Arena& arena) {
        Index p = padded_n();
        wide_gamma = arena.take(p);
        wide_beta = arena.take(backward ? 0 : p);
        sizes = nearest && !backward ? arena.take(p) : nullptr;
    }
    void lay_out_sums(Arena& arena) {
        if (summing()) {
            sums = arena.take(sums_per_tile() * tiles);
            ranges = arena.take(2 * tiles);
        }
    }
};

// The arrays of a call.
inline constexpr Rows Call::* ARRAYS[] = {
    &Call::x, &Call::dy, &Call::source, &Call::plus, &Call::y};
constexpr int ARRAY_COUNT = sizeof ARRAYS / sizeof *ARRAYS;

// The plain rows of a strip in scratch memory.
inline Index strip_stride(const Call& c, Type type) {
    return padded((c.n * BYTES[type] + 7) / 8) * 8;
}

// Scratch memory of one thread.
struct Own {
    double* strips[ARRAY_COUNT];  // a strip of each array that is not plain
    double* addend;               // a row that is added
    double* part;                 // the sums of some rows
    // A row of results, as pairs with sizes of their errors; its first one also float64, its second
    // one dx that goes over dy.
    double* high;
    double* low;
    double* size;
    // The registers of two rows that failed the test of the first rung.
    Index* failed[2];
    // The float64 arithmetic. x - mean and g - m of types of 16 bits, for this group and the next;
    // a row of zeros, in the place of a hard row.
    double *kept, *zeros;
    // Pairs, mostly afterwards, in the same memory: rows that are lifted, for this group and the
    // next; xhat for each row of a group.
    double* x[2] = {};
    double* dy[2] = {};
    double* xhat;

    Own(const Call& c, Arena& arena) {
        Index p = c.padded_n();
        bool narrow = c.backward && !c.in_pairs;
        Index strip = c.rows < STRIP ? c.rows : STRIP;
        for (int k = 0; k < ARRAY_COUNT; k++) {
            const Rows& of = c.*ARRAYS[k];
            strips[k] = arena.take(of.run ? strip * strip_stride(c, of.type) / 8 : 0);
        }
        addend = arena.take(c.plus.data ? p : 0);
        part = arena.take(!narrow                       ? 0
                          : !c.summing()                ? 4 * p
                          : c.tile_rows > PART_OF<true> ? 2 * p
                                                        : 0);
        bool staged = c.staged || c.nearest;
        high = arena.take(staged || c.in_pairs ? p : 0);
        low = arena.take(staged || c.over ? p : 0);
        size = arena.take(staged ? p : 0);
        for (Index*& of_row : failed)
            of_row = (Index*)arena.take(c.nearest && !c.in_pairs ? c.n / 8 + 1 : 0);
        Index start = arena.used;
        Index sets = c.n <= EARLY_KEPT ? 2 : 1;
        Index rows = !c.nearest ? 2 : c.n <= LONG ? 4 : 1;
        kept = arena.take(narrow && BYTES[c.x.type] == 2 ? sets * rows * 2 * p : 0);
        zeros = arena.take(narrow && c.nearest ? p : 0);
        Index stop = arena.used;
        arena.used = start;
        sets = c.n <= EARLY ? 2 : 1;
        rows = c.step_in_pairs();
        Index of_x = c.pairs() && c.x.type != F64 ? p * rows : 0;
        Index of_dy = c.pairs() && c.backward && c.dy.type != F64 ? p * rows : 0;
        for (int i = 0; i < sets; i++) {
            x[i] = arena.take(of_x);
            dy[i] = arena.take(of_dy);
        }
        xhat = arena.take(c.pairs() && c.backward ? 2 * p * rows : 0);
        arena.used = arena.used > stop ? arena.used : stop;
    }
};

// The kernels of one instruction set.
struct Kernels {
    const char* name;
    Index alignment;  // bytes, of rows for non-temporal stores
    // Gamma and beta in float64; false if they are out of range.
    bool (*prepare)(const Call&);
    void (*do_tile)(const Call&, Index tile, int thread);
    // Adds up the tiles' sums of some columns, [0] dgamma or [1] dbeta, and rounds them.
    void (*finish)(const Call&, int which, Index start, Index stop, bool marked);
};

extern const Kernels kernels_narrow, kernels_x86_64_v3, kernels_x86_64_v4, kernels_arm64;
