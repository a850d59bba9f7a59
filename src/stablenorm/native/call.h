// The record of a call: its arrays, its plan (plan.h makes it) and its scratch memory (scratch.h).
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

// Marks of a row. UNCERTIFIED: the next rung computes it, pairs or integers. UNSUMMED: the sums
// over rows lack its terms.
constexpr uint8_t UNCERTIFIED = 1;
constexpr uint8_t UNSUMMED = 2;
// A mark of a column: it is uncertified, and to be summed closely (close.h).
constexpr uint8_t OPEN = 2;

// How a call is done. Shape and dtypes alone decide it: no bit depends on the number of threads.
struct Plan {
    Index tile_rows = 1;
    Index tiles = 1;
    Index together = 1;     // rows that are done at once
    bool in_pairs = false;  // in double-double
    bool past = false;      // stores past the caches
    bool ahead = false;     // prefetches
    bool staged = false;    // results go through a scratch row, where they are added to and rounded
    bool strided = false;   // an array has rows that are not plain
};

// Scratch memory that threads share: the parameters in float64, padded; |gamma| + |beta|; the sums
// of each tile, and the range of its dy or, in float64, the worst errors of its rows. Then `own`,
// own_size float64 for each thread.
struct Scratch {
    double* gamma = nullptr;
    double* beta = nullptr;
    double* sizes = nullptr;
    double* sums = nullptr;
    double* ranges = nullptr;
    double* own = nullptr;
    Index own_size = 0;
    Index bytes = 0;
    // Set where arithmetic overflows: an infinite result of finite input may be the rounding errors
    // of huge terms.
    bool* overflowed = nullptr;
};

// The sums over rows.
enum { DGAMMA, DBETA };

// The open columns of dgamma and dbeta; whether pairs close them, or float64.
struct OpenColumns {
    Index* columns[2] = {nullptr, nullptr};
    Index count[2] = {0, 0};
    bool in_pairs = false;
};

// A call: its arrays, its plan and its scratch memory.
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
    // nearest: every result is the exact one, rounded. unrounded: the sums over rows go to
    // `partial`.
    bool rms = false;
    bool backward = false;
    bool nearest = false;
    bool unrounded = false;
    // over: results take the place of x or dy, which cannot be read again. A backward marks rows
    // that overflow, and leaves their dy as it is.
    bool over = false;

    // Statistics: one float64 for each row, null if this call has none. Calls in pairs also have
    // rstd_lo and mean_tail; nearest also has spread, an upper bound of rms(xhat). Both have marks.
    double* mean = nullptr;
    double* mean_lo = nullptr;
    double* rstd = nullptr;
    double* rstd_lo = nullptr;
    double* mean_tail = nullptr;
    double* spread = nullptr;
    uint8_t* marks = nullptr;

    // The sums over rows, dgamma and dbeta, and which columns are uncertified. If rows are
    // UNSUMMED, the sums over the others go to `partial`, as partial sums of reference/sums.py.
    char* sums_out[2] = {nullptr, nullptr};
    Type sums_type[2] = {F64, F64};
    uint8_t* uncertified[2] = {nullptr, nullptr};
    double* partial[2] = {nullptr, nullptr};

    Plan plan;
    Scratch scratch;
    OpenColumns open;

    bool is_summing() const { return sums_out[0] || sums_out[1]; }
    // Whether some rows may be done in pairs, and how many together.
    bool has_pairs() const { return nearest || x.type == F64 || y.type == F64; }
    Index together_in_pairs() const { return n <= EARLY ? plan.together : 1; }
    // Words of a sum: a tile of one part has no low one.
    Index words() const { return has_pairs() || plan.tile_rows > PART_OF<false> ? 2 : 1; }
    // Vectors: dgamma, its low part, dbeta, its low part. Nearest adds two that bound their errors:
    // sizes in pairs, the squares of dy and xhat in float64.
    Index sums_per_tile() const { return (nearest ? 6 : 2 * words()) * padded(n); }
};

// The arrays of a call.
inline constexpr Rows Call::* ARRAYS[] = {
    &Call::x, &Call::dy, &Call::source, &Call::plus, &Call::y};
constexpr int ARRAY_COUNT = sizeof ARRAYS / sizeof *ARRAYS;

// The kernels of one instruction set.
struct Kernels {
    const char* name;
    Index alignment;  // bytes, of rows for non-temporal stores
    // Gamma and beta in float64; false if they are out of range.
    bool (*prepare)(const Call&);
    void (*do_tile)(const Call&, Index tile, int thread);
    // Adds up the tiles' sums of some columns, [0] dgamma or [1] dbeta, and rounds them.
    void (*finish)(const Call&, int sum, Index start, Index stop, bool marked);
    // Sums the open columns of a tile; then writes those that this certifies.
    void (*close_tile)(const Call&, Index tile, int thread);
    void (*close_columns)(const Call&);
};

extern const Kernels kernels_narrow, kernels_x86_64_v3, kernels_x86_64_v4, kernels_arm64;
