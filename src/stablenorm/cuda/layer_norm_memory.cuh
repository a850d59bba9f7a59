// Memory of layer_norm.cu: vectors of elements, gamma and beta, sums over the threads of a row.

// ---- memory ----

// Elements as they come from memory, in whole registers: 16-bit ones would get one each.
template <class T> struct __align__(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Vector {
    unsigned words[sizeof(T) * VECTOR / 4];
};

LN_INLINE Word lift(const Vector<Bfloat16>& v, int i) {
    // Widening is a shift, or for the upper one of two no more than a mask.
    return __uint_as_float(i % 2 == 0 ? v.words[i / 2] << 16 : v.words[i / 2] & 0xffff0000u);
}
LN_INLINE Word lift(const Vector<Float16>& v, int i) {
    return float_of(Float16{(unsigned short)(v.words[i / 2] >> 16 * (i % 2))});
}
LN_INLINE Word lift(const Vector<float>& v, int i) { return __uint_as_float(v.words[i]); }
#if LN_ARITHMETIC != 2
LN_INLINE Word lift(const Vector<double>& v, int i) {
    return __longlong_as_double((unsigned long long)v.words[2 * i + 1] << 32 | v.words[2 * i]);
}
#endif

// Set element i of a vector whose words were zero.
LN_INLINE void set(Vector<Bfloat16>& v, int i, Bfloat16 e) {
    v.words[i / 2] |= (unsigned)e.bits << 16 * (i % 2);
}
LN_INLINE void set(Vector<Float16>& v, int i, Float16 e) {
    v.words[i / 2] |= (unsigned)e.bits << 16 * (i % 2);
}
LN_INLINE void set(Vector<float>& v, int i, float e) { v.words[i] = __float_as_uint(e); }
LN_INLINE void set(Vector<double>& v, int i, double e) {
    const unsigned long long bits = __double_as_longlong(e);
    v.words[2 * i] = (unsigned)bits;
    v.words[2 * i + 1] = (unsigned)(bits >> 32);
}

// Elements [0, count) at p, and zeros; whole vectors in 16-byte pieces where p is aligned to
// them. Which way is taken changes no bit: the elements of a thread are the same.
template <class T> LN_INLINE Vector<T> load(const T* p, int count, bool aligned) {
    if (aligned && count == VECTOR) return *reinterpret_cast<const Vector<T>*>(p);
    Vector<T> result = {};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (i < count) set(result, i, p[i]);
    return result;
}

template <class T> LN_INLINE void store_element(T* p, const Vector<T>& v, int i) {
    // The bits, whatever the type.
    if (sizeof(T) == 2)
        *reinterpret_cast<unsigned short*>(p) = (unsigned short)(v.words[i / 2] >> 16 * (i % 2));
    else if (sizeof(T) == 4)
        *reinterpret_cast<unsigned*>(p) = v.words[i];
    else
        *reinterpret_cast<unsigned long long*>(p) =
            (unsigned long long)v.words[2 * i + 1] << 32 | v.words[2 * i];
}

template <class T> LN_INLINE void store(T* p, const Vector<T>& v, int count, bool aligned) {
    if (aligned && count == VECTOR) {
        *reinterpret_cast<Vector<T>*>(p) = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (i < count) store_element(p + i, v, i);
}

template <class T> LN_INLINE bool is_aligned(const T* p) {
    return reinterpret_cast<unsigned long long>(p) % alignof(Vector<T>) == 0;
}

// An element of gamma or beta, whose dtype is known at run time only.
LN_INLINE Held parameter(const void* p, int type, long long col) {
    if (type == 2) return static_cast<const float*>(p)[col];
#if LN_ARITHMETIC == 1
    if (type == 3) return static_cast<const double*>(p)[col];
#endif
    if (type == 1) return float_of(static_cast<const Bfloat16*>(p)[col]);
    return float_of(static_cast<const Float16*>(p)[col]);
}

// gamma or beta: `neutral` where there is none and past the end.
struct Parameter {
    const void* p;
    int type;
    long long n;
    Held neutral;
    const Held* staged; // (COLUMNS) of this block in shared memory, if LN_STAGED

    LN_INLINE Held read(long long col) const {
        return p != nullptr && col < n ? parameter(p, type, col) : neutral;
    }

    // The caller's next __syncthreads orders this before the first use.
    LN_INLINE void stage(Held* shared) {
        for (int col = threadIdx.x; col < COLUMNS; col += BLOCK)
            shared[col] = read(first_column() + col);
        staged = shared;
    }

    LN_INLINE Word at(long long col) const {
        return LN_STAGED ? staged[col - first_column()] : read(col);
    }
};

#if LN_ARITHMETIC == 0
LN_INLINE Number load_number(const Number* p) { return __ldcg(p); }
LN_INLINE void store_number(Number* p, Number v) { __stcg(p, v); }
#endif
#if LN_ARITHMETIC == 2
LN_INLINE Pair load_number(const Pair* p) {
    float2 v = __ldcg(reinterpret_cast<const float2*>(p));
    return {v.x, v.y};
}
LN_INLINE void store_number(Pair* p, Pair v) {
    __stcg(reinterpret_cast<float2*>(p), make_float2(v.hi, v.lo));
}
#else
LN_INLINE Pair load_number(const Pair* p) {
    double2 v = __ldcg(reinterpret_cast<const double2*>(p));
    return {v.x, v.y};
}
LN_INLINE void store_number(Pair* p, Pair v) {
    __stcg(reinterpret_cast<double2*>(p), make_double2(v.hi, v.lo));
}
#endif

// ---- sums over the elements of a row ----

// Shared memory: a flag; two turns of two numbers for each warp, and for each block of a cluster;
// then what the kernels say.
constexpr int FLAG_BYTES = 16;
constexpr int REDUCTION_BYTES = 2 * 2 * (WARPS + (CLUSTER > 1 ? CLUSTER : 0)) * sizeof(Number);

struct Reduction {
    Number* sums; // (2, 2, WARPS), then (2, 2, CLUSTER)
    int turn;

    // Where the blocks of the cluster leave their sums in this turn.
    LN_INLINE Number* of_blocks() { return sums + 2 * 2 * WARPS + turn * 2 * CLUSTER; }

    // Replace each of `count` numbers by its sum over the threads of a row, in all of them. A
    // fixed tree: lanes by halves, then warps in order, then blocks. Every thread of the block, and
    // of its cluster, must call it.
    template <int count> LN_INLINE void sum(Number (&v)[count]) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            v[i] = settled(v[i]);
#pragma unroll
            for (int lanes = (ROW_THREADS < WARP ? ROW_THREADS : WARP) / 2; lanes > 0; lanes /= 2)
                v[i] = add(v[i], exchanged(v[i], lanes));
        }
        if (ROW_THREADS <= WARP && CLUSTER == 1) return;
        const int warp = threadIdx.x / WARP;
        Number* mine = sums + turn * 2 * WARPS;
        if (threadIdx.x % WARP == 0)
            for (int i = 0; i < count; ++i) mine[i * WARPS + warp] = v[i];
        // Orders the sums of the warps before they are read. They are written again two turns
        // from now, which no thread begins before all have passed the barrier of the next.
        __syncthreads();
        const int first = warp / ROW_WARPS * ROW_WARPS;
        for (int i = 0; i < count; ++i) {
            v[i] = mine[i * WARPS + first];
            for (int w = 1; w < ROW_WARPS; ++w) v[i] = add(v[i], mine[i * WARPS + first + w]);
        }
#if LN_CLUSTER > 1
        const Number* all = of_blocks();
        gather(of_blocks(), v);
        for (int i = 0; i < count; ++i) {
            v[i] = all[i * CLUSTER];
            for (int b = 1; b < CLUSTER; ++b) v[i] = add(v[i], all[i * CLUSTER + b]);
        }
#endif
        turn ^= 1;
    }

    LN_INLINE Number sum(Number v) {
        Number all[1] = {v};
        sum(all);
        return all[0];
    }

#if LN_PAIRS
    LN_INLINE Word largest(Word v) {
#pragma unroll
        for (int lanes = (ROW_THREADS < WARP ? ROW_THREADS : WARP) / 2; lanes > 0; lanes /= 2) {
            Word other = __shfl_xor_sync(ALL_LANES, v, lanes);
            v = other > v ? other : v;
        }
        if (ROW_THREADS <= WARP && CLUSTER == 1) return v;
        const int warp = threadIdx.x / WARP;
        Number* mine = sums + turn * 2 * WARPS;
        if (threadIdx.x % WARP == 0) mine[warp].hi = v;
        // As in `sum`.
        __syncthreads();
        const int first = warp / ROW_WARPS * ROW_WARPS;
        for (int w = 0; w < ROW_WARPS; ++w) {
            Word other = mine[first + w].hi;
            v = other > v ? other : v;
        }
#if LN_CLUSTER > 1
        const Number* all = of_blocks();
        const Number one[1] = {number(v)};
        gather(of_blocks(), one);
        for (int b = 0; b < CLUSTER; ++b) v = all[b].hi > v ? all[b].hi : v;
#endif
        turn ^= 1;
        return v;
    }
#endif
};

// ---- rows ----

// The elements of a row that a thread has: vectors ROW_THREADS apart, in the columns of its block.
template <class T> struct Columns {
    const T* row;
    Index present; // of the row: n, or 0 for a row past the end
    bool aligned;
    Vector<T> held[VECTORS];
};

LN_INLINE int row_thread() { return threadIdx.x % ROW_THREADS; }

LN_INLINE Index column(Index vector) {
    return first_column() + (vector * ROW_THREADS + row_thread()) * VECTOR;
}

LN_INLINE int count_from(Index col, Index n) {
    Index rest = n - col;
    return rest <= 0 ? 0 : rest < VECTOR ? (int)rest : VECTOR;
}

LN_INLINE Index vectors_of(long long n) {
    return RESIDENT ? VECTORS : (Index)((n + ROW_THREADS * VECTOR - 1) / (ROW_THREADS * VECTOR));
}

template <class T> LN_INLINE void open(Columns<T>& c, const T* row, bool present, long long n) {
    c.row = row;
    c.present = present ? (Index)n : 0;
    c.aligned = is_aligned(row);
#if LN_VECTORS
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        c.held[v] = load(row + column(v), count_from(column(v), c.present), c.aligned);
#endif
}

template <class T> LN_INLINE Vector<T> vector_at(const Columns<T>& c, Index v, int count) {
    return RESIDENT ? c.held[v] : load(c.row + column(v), count, c.aligned);
}

// Let the compiler forget what it computed from these elements: to widen them again takes fewer
// registers than to keep them wide from one pass to the next.
template <class T> LN_INLINE void forget(Columns<T>& c) {
#if defined(__CUDA_ARCH__) && LN_VECTORS
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(Vector<T>) / 4; ++i)
            asm volatile("" : "+r"(c.held[v].words[i]));
    }
#endif
}
