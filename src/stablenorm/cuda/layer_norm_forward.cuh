// The fast forward of layer_norm.cu: one pass over a row, which is read once; several rows a block.
//
// The threads of a row ask for it some rows ahead, hold it in registers, and exchange two sums. The
// first element k is a guess of the mean. Moments about k give mean = k + d and var = mean((x -
// k)^2) - d^2, for any k. The subtraction cancels if k is far from the mean: it has lost three bits
// of 53 where d^2 > 8 var, and there the moments are taken once more, about k + d. (rows.h allows 2
// var, for a guess from more elements: every sixth element of a normal row is farther than that
// from the mean.) The mean is kept as two words, since one would have too few digits for a row
// whose elements differ in their last bit. Read next: layer_norm_short.cuh, the backward of such
// rows.

// Rows up to here have tables of gamma and beta; longer ones read them again, from the caches.
constexpr bool TABLES = N <= 4096;

// Sums over the threads of a row, whose warps meet at a barrier of their own.
INLINE Two over_row(Exchange<Two>& exchange, Two mine) {
    return exchange.over_warps(over_lanes(mine), [](Two a, Two b) { return a + b; });
}

// gamma or beta of vector v.
template <class T>
INLINE void get(double (&to)[VECTOR], Table table, const Columns<T>& from, int v) {
    if constexpr (TABLES) {
        unrolled<VECTOR / 2>([&](int i) {
            const Two two = *reinterpret_cast<const Two*>(&table.at(vector_of(v), 2 * i));
            to[2 * i] = two.a;
            to[2 * i + 1] = two.b;
        });
    } else {
        const Vector<T> held = from.row ? load(from.row + column(v), elements(v)) : Vector<T>{};
        unrolled<VECTOR>([&](int i) { to[i] = from.row ? lift(held.e[i]) : from.neutral; });
    }
}

// Moments of a row about `center`, which is subtracted from what is held of it.
INLINE Two moments(double (&held)[ELEMENTS], double center) {
    Two sum = {0.0, 0.0};
    unrolled<VECTORS>([&](int v) {
        const int count = elements(v);
        unrolled<VECTOR>([&](int i) {
            double& e = held[v * VECTOR + i];
            // A select: a product would make NaN of what is past the end.
            e = i < count ? e - center : 0.0;
            sum.a += e;
            sum.b = fma(e, e, sum.b);
        });
    });
    return sum;
}

// Write y of row `at`, given x - k for a guess k of its mean, and the mean of that.
INLINE void write(const Parameters& p, long long at, const double (&held)[ELEMENTS], double mean,
    double rstd, Table gamma, Table beta) {
    unrolled<VECTORS>([&](int v) {
        double scale[VECTOR], shift[VECTOR];
        get(scale, gamma, gamma_of(p), v);
        get(shift, beta, beta_of(p), v);
        Vector<X> y;
        unrolled<VECTOR>([&](int i) {
            round_into(y.e[i], fma((held[v * VECTOR + i] - mean) * rstd, scale[i], shift[i]));
        });
        store(p.out + at * p.out_stride + column(v), y, elements(v));
    });
}

INLINE void do_rows(const Parameters& p, unsigned char* shared) {
    double* tables = reinterpret_cast<double*>(shared);
    const Table gamma = {tables};
    const Table beta = {tables + Table::SIZE};
    Vector<X>* rows = reinterpret_cast<Vector<X>*>(tables + (TABLES ? 2 * Table::SIZE : 0));
    const Stages stages = {p, rows + threadIdx.x};
    Two* parts = reinterpret_cast<Two*>(rows + STAGES * VECTORS * BLOCK);
    Exchange<Two> exchange = {parts, reinterpret_cast<Barrier*>(parts + 2 * WARPS)};
    if (TABLES) {
        gamma.widen(gamma_of(p));
        beta.widen(beta_of(p));
    }
    if (threadIdx.x < SLOTS) barrier_init(&exchange.barriers[threadIdx.x], WARPS_OF_ROW);
    // Orders the tables and the barriers before their use.
    __syncthreads();
    const long long step = (long long)gridDim.x * SLOTS;
    const long long begin = (long long)blockIdx.x * SLOTS;
    long long at = begin + slot();
    long long asked = at;
    const auto ask = [&](int s) {
        stages.ask(s, asked);
        asked += step;
    };
    unrolled<STAGES>(ask);
    double next = at < p.rows ? lift(p.x[at * p.x_stride]) : 0.0;
    int stage = 0;
    // Every thread of the block takes as many turns, rows past the end all 0.
    for (long long base = begin; base < p.rows; base += step, at += step) {
        const double k = next;
        if (at + step < p.rows) next = lift(p.x[(at + step) * p.x_stride]);
        wait_copies<STAGES - 1>();
        double held[ELEMENTS];
        unrolled<VECTORS>([&](int v) {
            const Vector<X> x = *stages.at(stage, 0, v);
            unrolled<VECTOR>([&](int i) { held[v * VECTOR + i] = lift(x.e[i]); });
        });
        // The row is in registers.
        ask(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        Two sum = over_row(exchange, moments(held, k));
        double d = over(sum.a);
        double var = fma(-d, d, over(sum.b));
        double base_d = 0.0;
        const bool again = d * d > 8.0 * var;
        // The lanes of a warp stay together, for what they exchange.
        if (__builtin_expect(ROW_THREADS < WARP ? __any_sync(ALL_LANES, again) : again, 0)) {
            base_d = again ? d : 0.0;
            sum = over_row(exchange, moments(held, base_d));
            d = over(sum.a);
            var = fma(-d, d, over(sum.b));
        }
        // Rounding can make the difference slightly negative; NaN stays.
        const double rstd = inverse_root((var < 0.0 ? 0.0 : var) + p.eps);
        if (at >= p.rows) continue;
        if (row_thread() == 0) {
            Wide mean = two_sum(k, base_d);
            mean = two_sum(mean.high, mean.low + d);
            p.mean[at] = mean.high;
            p.mean_lo[at] = mean.low;
            p.rstd[at] = rstd;
        }
        write(p, at, held, d, rstd, gamma, beta);
    }
}
