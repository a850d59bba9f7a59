// Memory of layer_norm.cu: vectors of elements, the part of a row that a thread has, sums over a
// row.

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int ROW_THREADS = LN_ROW_THREADS;
constexpr int SLOTS = LN_SLOTS;
constexpr int BLOCK = ROW_THREADS * SLOTS;
constexpr int WARPS = BLOCK / WARP;
constexpr int WARPS_OF_ROW = ROW_THREADS < WARP ? 1 : ROW_THREADS / WARP;
constexpr int VECTOR = 16 / sizeof(X);
using Index = long long;

// Call f(0) to f(count - 1), without a loop.
template <int count, class F> INLINE void unrolled(F f) {
#pragma unroll
    for (int i = 0; i < count; ++i) f(i);
}

// ---- vectors ----

template <class T> struct __align__(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Vector {
    T e[VECTOR];
};

INLINE bool is_multiple(const void* p, int bytes) {
    return reinterpret_cast<unsigned long long>(p) % bytes == 0;
}
template <class T> INLINE bool is_aligned(const T* p) { return is_multiple(p, alignof(Vector<T>)); }

// Two elements.
template <class T> struct __align__(2 * sizeof(T)) Couple {
    T e[2];
};

// Call one(i) for the elements [0, count) at p; but two(i) for i and i + 1 where a full vector has
// both in one word.
template <class T, class One, class Two>
INLINE void by_words(const T* p, int count, One one, Two two) {
    if (sizeof(T) != 2 || count != VECTOR)
        return unrolled<VECTOR>([&](int i) {
            if (i < count) one(i);
        });
    if (is_multiple(p, 4)) return unrolled<VECTOR / 2>([&](int i) { two(2 * i); });
    one(0);
    one(VECTOR - 1);
    unrolled<VECTOR / 2 - 1>([&](int i) { two(2 * i + 1); });
}

// Elements [0, count) at p, and zeros; whole vectors at once where p is aligned to them. Which way
// is taken changes no bit: the elements of a thread are the same.
template <class T> INLINE Vector<T> load(const T* p, int count) {
    if (count == VECTOR && is_aligned(p)) return *reinterpret_cast<const Vector<T>*>(p);
    Vector<T> result = {};
    by_words(
        p, count, [&](int i) { result.e[i] = p[i]; },
        [&](int i) {
            const Couple<T> couple = *reinterpret_cast<const Couple<T>*>(p + i);
            result.e[i] = couple.e[0];
            result.e[i + 1] = couple.e[1];
        });
    return result;
}

// Store past the caches: nobody reads it soon. The fast kernels know whether all rows are aligned.
INLINE void store(X* p, const Vector<X>& v, int count) {
    if (count == VECTOR && (LN_N ? LN_ALIGNED : is_aligned(p)))
        return __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&v));
    by_words(
        p, count, [&](int i) { p[i] = v.e[i]; },
        [&](int i) { *reinterpret_cast<Couple<X>*>(p + i) = {v.e[i], v.e[i + 1]}; });
}

// ---- the part of a row that a thread has: vectors ROW_THREADS apart ----

INLINE int slot() { return threadIdx.x / ROW_THREADS; }
INLINE int row_thread() { return SLOTS == 1 ? threadIdx.x : threadIdx.x % ROW_THREADS; }
INLINE Index column(Index vector) { return (vector * ROW_THREADS + row_thread()) * VECTOR; }

// Elements of vector v of a row of n.
INLINE int count_of(Index v, Index n) {
    const Index rest = n - column(v);
    return rest <= 0 ? 0 : rest < VECTOR ? (int)rest : VECTOR;
}

INLINE Index vectors_of(long long n) {
    return (n + ROW_THREADS * VECTOR - 1) / (ROW_THREADS * VECTOR);
}

// A row of x or dy, of no elements if it is past the end; gamma or beta, all `neutral` if there is
// none.
template <class T> struct Columns {
    const T* row;
    Index n;
    double neutral = 0.0;

    INLINE Vector<T> at(Index v) const {
        if (row != nullptr) return load(row + column(v), count_of(v, n));
        Vector<T> result;
        unrolled<VECTOR>([&](int i) { round_into(result.e[i], neutral); });
        return result;
    }
};

INLINE Columns<Gamma> gamma_of(const Parameters& p) { return {p.gamma, p.n, 1.0}; }
// -0 changes nothing, not even -0.
INLINE Columns<Beta> beta_of(const Parameters& p) { return {p.beta, p.n, -0.0}; }

// Call f(i, element i of each of `vectors`) for i up to `count`; full vectors need no question for
// each element.
template <class F, class... Vectors>
INLINE void for_each_of(int count, F f, const Vectors&... vectors) {
    if (count == VECTOR)
        unrolled<VECTOR>([&](int i) { f(i, lift(vectors.e[i])...); });
    else
        unrolled<VECTOR>([&](int i) {
            if (i < count) f(i, lift(vectors.e[i])...);
        });
}

// The same for all vectors that this thread has of a row of n: of `sources`, which are Columns.
// Elements past the end of a row are never looked at: they would be 0 * NaN.
template <class F, class... Sources> INLINE void for_each(Index n, F f, const Sources&... sources) {
    for (Index v = 0; v < vectors_of(n); ++v) for_each_of(count_of(v, n), f, sources.at(v)...);
}

// ---- over the threads of a row ----

// Warps of a row, each of which leaves a number for the others.
template <class T> struct Exchange {
    T* parts;           // (2 turns, SLOTS, WARPS_OF_ROW) in shared memory
    Barrier* barriers;  // (SLOTS), of fast kernels: a barrier for each row of the block
    int turn;

    // Return what `mine`, the same in all lanes, combines to, warps in order. Every thread of the
    // row must call it; without barriers, of the block.
    template <class F> INLINE T over_warps(T mine, F combine) {
        if (WARPS_OF_ROW == 1) return mine;
        T* row = parts + ((turn & 1) * SLOTS + slot()) * WARPS_OF_ROW;
        const bool first = threadIdx.x % WARP == 0;
        if (first) row[row_thread() / WARP] = mine;
        // Each barrier orders what the warps leave before it is read; it is written again two turns
        // from now, which no thread begins before all have passed the barrier of the next.
        if (LN_N == 0) {
            __syncthreads();
        } else {
            // Orders this warp's reads of the turn before, which is written again next, before it
            // arrives.
            __syncwarp();
            if (first) barrier_arrive(&barriers[slot()]);
            barrier_wait(&barriers[slot()], turn & 1);
        }
        ++turn;
        mine = row[0];
        unrolled<WARPS_OF_ROW - 1>([&](int w) { mine = combine(mine, row[w + 1]); });
        return mine;
    }
};

INLINE double exchanged(double a, int lanes) { return __shfl_xor_sync(ALL_LANES, a, lanes); }
INLINE Wide exchanged(Wide a, int lanes) {
    return {exchanged(a.high, lanes), exchanged(a.low, lanes)};
}
