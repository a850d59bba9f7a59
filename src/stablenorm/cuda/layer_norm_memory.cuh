// Memory of layer_norm.cu: vectors of elements, gamma and beta, sums over the threads of a row.

constexpr int WARP = 32;
constexpr int ROW_THREADS = LN_ROW_THREADS;
constexpr int SLOTS = LN_SLOTS;
constexpr int BLOCK = ROW_THREADS * SLOTS;
constexpr int WARPS = BLOCK / WARP;
constexpr int ROW_WARPS = ROW_THREADS < WARP ? 1 : ROW_THREADS / WARP;
constexpr int VECTOR = 16 / sizeof(X);
// Whether a row is held in registers, or its columns are read in a loop for each pass.
constexpr bool RESIDENT = LN_VECTORS > 0;
constexpr int VECTORS = RESIDENT ? LN_VECTORS : 1;
constexpr int COLUMNS = ROW_THREADS * VECTORS * VECTOR;
// Columns of rows that fit registers are counted in 32 bits, offsets always in 64.
#if LN_VECTORS
using Index = int;
#else
using Index = long long;
#endif

// ---- vectors ----

// Elements as they come from memory, in whole registers: 16-bit ones would get one each.
template <class T> struct __align__(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Vector {
    unsigned words[sizeof(T) * VECTOR / 4];
};

template <class T> using Bits = decltype(bits_of(T{}));

template <class T> LN_INLINE Bits<T> bits_at(const Vector<T>& v, int i) {
    if (sizeof(T) == 2) return (Bits<T>)(v.words[i / 2] >> 16 * (i % 2));
    if (sizeof(T) == 4) return (Bits<T>)v.words[i];
    return (Bits<T>)((unsigned long long)v.words[2 * i + 1] << 32 | v.words[2 * i]);
}

template <class T> LN_INLINE double lift(const Vector<T>& v, int i) {
    return widened<T>(bits_at(v, i));
}

// Set element i of a vector whose words were zero.
template <class T> LN_INLINE void set(Vector<T>& v, int i, T e) {
    const unsigned long long bits = bits_of(e);
    if (sizeof(T) == 2) v.words[i / 2] |= (unsigned)bits << 16 * (i % 2);
    else if (sizeof(T) == 4) v.words[i] = (unsigned)bits;
    else v.words[2 * i] = (unsigned)bits, v.words[2 * i + 1] = (unsigned)(bits >> 32);
}

template <class T> LN_INLINE bool is_aligned(const T* p) {
    return reinterpret_cast<unsigned long long>(p) % alignof(Vector<T>) == 0;
}

// Elements [0, count) at p, and zeros; whole vectors at once where p is aligned to them. Which way
// is taken changes no bit: the elements of a thread are the same.
template <class T> LN_INLINE Vector<T> load(const T* p, int count) {
    if (count == VECTOR && is_aligned(p)) return *reinterpret_cast<const Vector<T>*>(p);
    Vector<T> result = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (i < count) set(result, i, p[i]);
    return result;
}

template <class T> LN_INLINE void store(T* p, const Vector<T>& v, int count) {
    if (count == VECTOR && is_aligned(p)) {
        *reinterpret_cast<Vector<T>*>(p) = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (i < count) reinterpret_cast<Bits<T>*>(p)[i] = bits_at(v, i);
}

// ---- the part of a row that a thread has: vectors ROW_THREADS apart ----

LN_INLINE int slot() { return threadIdx.x / ROW_THREADS; }
LN_INLINE int row_thread() { return threadIdx.x % ROW_THREADS; }
LN_INLINE Index column(Index vector) { return (vector * ROW_THREADS + row_thread()) * VECTOR; }

// Elements of a vector that begins at column `col`, of a row of n.
LN_INLINE int count_from(Index col, Index n) {
    const Index rest = n - col;
    return rest <= 0 ? 0 : rest < VECTOR ? (int)rest : VECTOR;
}

LN_INLINE Index vectors_of(long long n) {
    return RESIDENT ? VECTORS : (Index)((n + ROW_THREADS * VECTOR - 1) / (ROW_THREADS * VECTOR));
}

template <class T> struct Columns {
    const T* row;
    Index present; // n, or 0 for a row past the end
    Vector<T> held[VECTORS];

    LN_INLINE void open(const T* from, bool is_present, long long n) {
        row = from;
        present = is_present ? (Index)n : 0;
#if LN_VECTORS
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            held[v] = load(row + column(v), count_from(column(v), present));
#endif
    }

    LN_INLINE Vector<T> at(Index v) const {
        return RESIDENT ? held[v] : load(row + column(v), count_from(column(v), present));
    }
};

// Call f(element, whether it is one of the row) for each element of x that this thread has.
template <class F> LN_INLINE void for_each(const Columns<X>& x, long long n, F f) {
#pragma unroll
    for (Index v = 0; v < vectors_of(n); ++v) {
        const int count = count_from(column(v), x.present);
        const Vector<X> xs = x.at(v);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) f(lift(xs, i), i < count);
    }
}

// Call f(column, element of x, element of dy, whether they are of the row).
template <class F>
LN_INLINE void for_each(const Columns<X>& x, const Columns<DY>& dy, long long n, F f) {
#pragma unroll
    for (Index v = 0; v < vectors_of(n); ++v) {
        const int count = count_from(column(v), x.present);
        const Vector<X> xs = x.at(v);
        const Vector<DY> dys = dy.at(v);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) f(column(v) + i, lift(xs, i), lift(dys, i), i < count);
    }
}

// ---- gamma and beta ----

// What they are held in, exactly.
#if LN_PAIRS
using Held = double;
#else
using Held = float;
#endif

// gamma or beta, whose dtype is known at run time only: `neutral` where there is none and past the
// end.
struct Parameter {
    const void* p;
    int type;
    long long n;
    Held neutral;
    const Held* staged; // (COLUMNS) in shared memory, where rows are held in registers

    LN_INLINE Held read(long long col) const {
        if (p == nullptr || col >= n) return neutral;
        if (type == 2) return static_cast<const float*>(p)[col];
#if LN_PAIRS
        if (type == 3) return static_cast<const double*>(p)[col];
#endif
        const unsigned short bits = static_cast<const unsigned short*>(p)[col];
        return (Held)(type == 1 ? widened<Bfloat16>(bits) : widened<Float16>(bits));
    }

    // The caller's next __syncthreads orders this before the first use.
    LN_INLINE void stage(Held* shared) {
        for (int col = threadIdx.x; col < COLUMNS; col += BLOCK) shared[col] = read(col);
        staged = shared;
    }

    LN_INLINE double at(long long col) const { return RESIDENT ? staged[col] : read(col); }
};

// ---- sums over the elements of a row ----

struct Reduction {
    Number* sums; // (2 turns, 2 numbers, WARPS) in shared memory
    int turn;

    // Replace each of `count` numbers by its sum over the threads of a row, in all of them. A
    // fixed tree: lanes by halves, then warps in order. Every thread of the block must call it.
    template <int count> LN_INLINE void sum(Number (&v)[count]) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            v[i] = settled(v[i]);
#pragma unroll
            for (int lanes = (ROW_THREADS < WARP ? ROW_THREADS : WARP) / 2; lanes > 0; lanes /= 2)
                v[i] = add(v[i], exchanged(v[i], lanes));
        }
        if (ROW_THREADS <= WARP) return;
        const Number* first = meet(v);
        for (int i = 0; i < count; ++i) {
            v[i] = first[i * WARPS];
            for (int w = 1; w < ROW_WARPS; ++w) v[i] = add(v[i], first[i * WARPS + w]);
        }
    }

    LN_INLINE Number sum(Number v) {
        Number all[1] = {v};
        sum(all);
        return all[0];
    }

    // The largest of numbers that are not negative.
    LN_INLINE double largest(double v) {
#pragma unroll
        for (int lanes = (ROW_THREADS < WARP ? ROW_THREADS : WARP) / 2; lanes > 0; lanes /= 2) {
            const double other = exchanged(v, lanes);
            v = other > v ? other : v;
        }
        if (ROW_THREADS <= WARP) return v;
        const Number mine[1] = {number(v)};
        const Number* first = meet(mine);
        // The first word of a number is all of it, or its high word.
        for (int w = 0; w < ROW_WARPS; ++w) {
            const double other = *reinterpret_cast<const double*>(first + w);
            v = other > v ? other : v;
        }
        return v;
    }

    // Leave the numbers of each warp where all can read them; return where those of the own row's
    // first warp are.
    template <int count> LN_INLINE const Number* meet(const Number (&v)[count]) {
        const int warp = threadIdx.x / WARP;
        Number* here = sums + turn * 2 * WARPS;
        if (threadIdx.x % WARP == 0)
            for (int i = 0; i < count; ++i) here[i * WARPS + warp] = v[i];
        // Orders the sums of the warps before they are read. They are written again two turns
        // from now, which no thread begins before all have passed the barrier of the next.
        __syncthreads();
        turn ^= 1;
        return here + warp / ROW_WARPS * ROW_WARPS;
    }
};
