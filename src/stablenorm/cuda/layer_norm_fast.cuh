// Rows for the fast kernels of layer_norm.cu: how they arrive, and sums of two numbers along them.
// A block has LN_N elements of a row: all of it, or one of LN_PARTS equal parts, whose blocks are
// neighbors.
//
// Arithmetic is float64, x and dy have 16 or 32 bits. The elements of a thread depend on N alone,
// not on how rows arrive.

constexpr int N = LN_N;
constexpr int PARTS = LN_PARTS;
// Whether all vectors of a row are full; how many there are.
constexpr bool WHOLE = N % VECTOR == 0;
constexpr int ROW_VECTORS = (N + VECTOR - 1) / VECTOR;
constexpr int VECTORS = LN_VECTORS;
constexpr int ELEMENTS = VECTORS * VECTOR;
constexpr int STAGES = LN_STAGES;
// Whether all rows begin at multiples of 16 bytes.
constexpr bool ALIGNED = LN_ALIGNED;
constexpr double INVERSE = 1.0 / N;

// The first column of this block, its group of blocks that share rows, and how many groups there
// are.
INLINE int first_column() { return blockIdx.x % PARTS * N; }
INLINE unsigned group() { return blockIdx.x / PARTS; }
INLINE unsigned groups() { return gridDim.x / PARTS; }

struct __align__(16) Two {
    double a, b;
};
INLINE Two operator+(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }

// Vector v of this thread, among those of a row.
INLINE int vector_of(int v) { return v * ROW_THREADS + row_thread(); }

// Elements of vector v of this thread. No question where the row is long enough for all threads.
INLINE int elements(int v) {
    if ((v + 1) * ROW_THREADS * VECTOR <= N) return VECTOR;
    return WHOLE ? (column(v) < N ? VECTOR : 0) : count_of(v, N);
}

// Sum / N, rounded to nearest for almost all sums; exact where the quotient is a float64.
INLINE double over(double sum) {
    const double quotient = sum * INVERSE;
    return fma(fma(-quotient, (double)N, sum), INVERSE, quotient);
}

// v**-0.5, without what differs between devices: a guess from the bits, off by 3.4 % at most, and
// three steps of third order, which leave 1e-4, 3e-12, 0.
INLINE double inverse_root(double v) {
    if (!(v > 0x1p-900 && v < 0x1p900)) return 1.0 / root(v);
    double r = __longlong_as_double(0x5fe6eb50c7b537a9ll - (__double_as_longlong(v) >> 1));
    unrolled<3>([&](int) {
        const double e = fma(-v * r, r, 1.0);
        r = fma(r * e, fma(e, 0.375, 0.5), r);
    });
    return r;
}

// ---- how rows arrive ----

// Ask for a word of four bytes, element e and what follows, of `count` at `from`; zeros behind
// them.
constexpr int PER_WORD = 4 / sizeof(X);
INLINE void fetch_word(X* to, const X* from, int e, int count) {
    if (e + PER_WORD <= count) return copy_async4(to + e, from + e);
    unrolled<PER_WORD>([&](int i) { to[e + i] = e + i < count ? from[e + i] : X{}; });
}

// Ask for elements [0, count) at `from`, and zeros behind them.
INLINE void fetch(Vector<X>* to, const X* from, int count) {
    if constexpr (ALIGNED) return copy_async(to, from, count * (int)sizeof(X));
    // No copy is shorter than a word.
    if (sizeof(X) < 4 && !is_multiple(from, 4)) return void(*to = load(from, count));
    unrolled<4>([&](int k) { fetch_word(to->e, from, k * PER_WORD, count); });
}

// Rows on their way to a thread, which reads what it asked for itself: that takes no barrier.
struct Stages {
    static constexpr int TENSORS = LN_FORWARD ? 1 : 2;
    const Parameters& p;
    Vector<X>* memory;  // (STAGES, TENSORS, VECTORS, BLOCK): this thread's first

    // Vector v of x, tensor 0, or of dy, tensor 1.
    INLINE Vector<X>* at(int s, int tensor, int v) const {
        return memory + ((s * TENSORS + tensor) * VECTORS + v) * BLOCK;
    }

    // Ask for a row, past the last one for zeros.
    INLINE void ask(int s, long long row) const {
        unrolled<VECTORS>([&](int v) {
            const int count = row < p.rows ? elements(v) : 0;
            fetch(at(s, 0, v), p.x + (count ? row * p.x_stride + column(v) : 0), count);
            if constexpr (TENSORS == 2)
                fetch(at(s, 1, v), p.dy + (count ? row * p.dy_stride + column(v) : 0), count);
        });
        commit_copies();
    }
};

// ---- gamma and beta as float64 in shared memory ----

// The elements of a row of WIDTH vectors, laid out so that no two lanes meet in a bank.
struct Table {
    static constexpr int WIDTH = LN_ROW_WARPS ? ROW_VECTORS : ROW_THREADS * VECTORS;
    static constexpr int SIZE = WIDTH * VECTOR;
    double* memory;

    // Element i of vector q.
    INLINE double& at(int q, int i) const { return memory[(i / 2 * WIDTH + q) * 2 + i % 2]; }

    // Fill it with gamma or beta; past the end of a row with 0.
    template <class T> INLINE void widen(const Columns<T>& from) const {
        for (int col = threadIdx.x; col < SIZE; col += LN_THREADS)
            at(col / VECTOR, col % VECTOR) = col >= N   ? 0.0
                                             : from.row ? lift(from.row[first_column() + col])
                                                        : from.neutral;
    }
};

// ---- the backward of a row ----

// The next step of a block after a row.
enum Next { SAME_CHUNK, NEXT_CHUNK, NO_ROW };

// The statistics of a row and, once they are known, its row sums: the mean of g, and rstd**2 times
// that of (g - mean of g) * (x - mean). A record of zeros adds 0. 32 bits number it: the statistics
// of more would fill a device.
struct __align__(16) Record {
    double mean, mean_lo, rstd, mean_g, slope;
    unsigned row;
    Next next;

    INLINE double centered(double x) const { return (x - mean) - mean_lo; }

    // Return dx of an element, given c = x - mean; add to the sums over rows. A reference to gamma
    // reads it last, which saves registers.
    INLINE double pull_back(
        double c, double dy, const double& gamma, double& dgamma, double& dbeta) const {
        dgamma = fma(c * rstd, dy, dgamma);
        dbeta += dy;
        return fma(-c, slope, fma(dy, gamma, -mean_g)) * rstd;
    }
};

INLINE Record record_of(const Parameters& p, long long row) {
    return {p.mean[row], p.mean_lo[row], p.rstd[row], 0.0, 0.0, (unsigned)row, SAME_CHUNK};
}

// ---- sums of two numbers ----

// Over the lanes of a row; all of them get both. The first step hands one half of the lanes a, the
// other b.
INLINE Two over_lanes(Two mine) {
    constexpr int LANES = ROW_THREADS < WARP && LN_ROW_WARPS == 0 ? ROW_THREADS : WARP;
    if (LANES == 1) return mine;
    const bool second = threadIdx.x & (LANES / 2);
    double v = (second ? mine.b : mine.a) + exchanged(second ? mine.a : mine.b, LANES / 2);
#pragma unroll
    for (int lanes = LANES / 4; lanes > 0; lanes /= 2) v = v + exchanged(v, lanes);
    const double other = exchanged(v, LANES / 2);
    return second ? Two{other, v} : Two{v, other};
}
