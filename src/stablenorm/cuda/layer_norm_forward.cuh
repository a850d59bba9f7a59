// The fast forward of layer_norm.cu: one pass over a row, which is read once; several rows a block.
//
// The first element k of a row is a guess of its mean. Moments about k give mean = k + d and
// var = mean((x - k)^2) - d^2. The subtraction cancels if k is far from the mean: with d^2 > 8 var the
// moments are taken once more, about k + d.

// Rows up to here have tables of gamma and beta; longer ones read them again, from the caches.
constexpr bool TABLES = N <= 4096;
constexpr int TABLE = TABLES ? COLUMNS : 0;

// Sums over the warps of a row, for which they meet at a barrier of the row's own.
struct Exchange {
    Two* parts;         // (2 turns, SLOTS, ROW_WARPS) in shared memory
    Barrier* barriers;  // (SLOTS)
    int turn;
    Two mine;

    INLINE void begin(double a, double b) {
        mine = over_lanes(a, b);
        if (ROW_WARPS == 1) return;
        if (threadIdx.x % WARP == 0) at()[row_thread() / WARP] = mine;
        // Orders this warp's reads of the turn before, which is written again next, before it arrives.
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(&barriers[slot()]);
    }

    INLINE Two end() {
        if (ROW_WARPS == 1) return mine;
        barrier_wait(&barriers[slot()], turn & 1);
        Two sum = at()[0];
#pragma unroll
        for (int w = 1; w < ROW_WARPS; ++w) {
            const Two part = at()[w];
            sum.a += part.a, sum.b += part.b;
        }
        ++turn;
        return sum;
    }

    INLINE Two* at() const { return parts + ((turn & 1) * SLOTS + slot()) * ROW_WARPS; }
};

// gamma or beta of vector v.
template <class T> INLINE void get(double (&to)[VECTOR], const double* table, const T* from,
                                   double neutral, int v, int count) {
    const Vector<T> held = TABLES || !from ? Vector<T>{} : load(from + column(v), count);
#pragma unroll
    for (int i = 0; i < VECTOR; i += 2) {
        if (TABLES) {
            const Two two = two_of(table, v * ROW_THREADS + row_thread(), i, COLUMNS / VECTOR);
            to[i] = two.a, to[i + 1] = two.b;
        } else {
            to[i] = from ? lift(held.e[i]) : neutral;
            to[i + 1] = from ? lift(held.e[i + 1]) : neutral;
        }
    }
}

// Moments of a row about `center`, which is subtracted from what is held of it.
INLINE Two moments(double (&held)[ELEMENTS], double center) {
    Two sum = {0.0, 0.0};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int count = elements(v);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            double& e = held[v * VECTOR + i];
            // A select: a product would make NaN of what is past the end.
            e = i < count ? e - center : 0.0;
            sum.a += e;
            sum.b = fma(e, e, sum.b);
        }
    }
    return sum;
}

INLINE void forward_rows(const Parameters& p, unsigned char* shared) {
    double* tables = reinterpret_cast<double*>(shared);                         // (2, TABLE)
    Vector<X>* stages = reinterpret_cast<Vector<X>*>(tables + 2 * TABLE) + threadIdx.x;  // (STAGES, VECTORS, BLOCK)
    Two* parts = reinterpret_cast<Two*>(stages - threadIdx.x + STAGES * VECTORS * BLOCK);
    Exchange exchange = {parts, reinterpret_cast<Barrier*>(parts + 2 * WARPS), 0, {}};
    if (TABLES) {
        widen(tables, p.gamma, 1.0, COLUMNS / VECTOR);
        // -0 changes nothing, not even -0.
        widen(tables + TABLE, p.beta, -0.0, COLUMNS / VECTOR);
    }
    if (threadIdx.x < SLOTS) barrier_init(&exchange.barriers[threadIdx.x], ROW_WARPS);
    // Orders the tables and the barriers before their use.
    __syncthreads();
    const long long step = (long long)gridDim.x * SLOTS;
    const long long begin = (long long)blockIdx.x * SLOTS;
    long long at = begin + slot(), asked = at;

    const auto ask = [&](int stage) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int count = asked < p.rows ? elements(v) : 0;
            const X* from = p.x + (count ? asked * p.x_stride + column(v) : 0);
            fetch(&stages[(stage * VECTORS + v) * BLOCK], from, count);
        }
        commit_copies();
        asked += step;
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) ask(stage);
    double next = at < p.rows ? lift(p.x[at * p.x_stride]) : 0.0;
    int stage = 0;
    // Every thread of the block takes as many turns, rows past the end all 0.
    for (long long base = begin; base < p.rows; base += step, at += step) {
        const double k = next;
        if (at + step < p.rows) next = lift(p.x[(at + step) * p.x_stride]);
        wait_copies<STAGES - 1>();
        double held[ELEMENTS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const Vector<X> x = stages[(stage * VECTORS + v) * BLOCK];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) held[v * VECTOR + i] = lift(x.e[i]);
        }
        Two sum = moments(held, k);
        exchange.begin(sum.a, sum.b);
        // The row is in registers.
        ask(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        sum = exchange.end();
        double d = over(sum.a), var = fma(-d, d, over(sum.b)), base_d = 0.0;
        const bool again = d * d > 8.0 * var;
        // The lanes of a warp stay together, for what they exchange.
        if (__builtin_expect(ROW_THREADS < WARP ? __any_sync(ALL_LANES, again) : again, 0)) {
            base_d = again ? d : 0.0;
            sum = moments(held, base_d);
            exchange.begin(sum.a, sum.b);
            sum = exchange.end();
            d = over(sum.a), var = fma(-d, d, over(sum.b));
        }
        // Rounding can make the difference slightly negative; NaN stays.
        const double rstd = inverse_root((var < 0.0 ? 0.0 : var) + p.eps);
        if (at >= p.rows) continue;
        if (row_thread() == 0) {
            Wide mean = two_sum(k, base_d);
            mean = two_sum(mean.high, mean.low + d);
            p.mean[at] = mean.high, p.mean_lo[at] = mean.low, p.rstd[at] = rstd;
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            double gamma[VECTOR], beta[VECTOR];
            const int count = elements(v);
            get(gamma, tables, p.gamma, 1.0, v, count);
            get(beta, tables + TABLE, p.beta, -0.0, v, count);
            Vector<X> y;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                round_into(y.e[i], fma((held[v * VECTOR + i] - d) * rstd, gamma[i], beta[i]));
            put(p.out + at * p.out_stride + column(v), y, count);
        }
    }
}
