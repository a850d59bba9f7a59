// The fast backward of layer_norm.cu by warps of three kinds, some rows apart, without a barrier of the block.
//
// Asking warps fetch rows, STAGES at a time. Row warps take a row each and find its row sums: mean of g, and
// the slope. Column threads keep columns, and with them the sums over rows; they make dx. Three barriers of
// a stage hand it on: it is full of a row, the row's sums are ready, it is empty again.
//
// A barrier is awaited by its parity. So each stage belongs to one row warp and one asking warp: otherwise a
// warp could be two turns of the stage ahead, and take the parity of the turn before for its own.

constexpr int ROW_SUM_WARPS = LN_ROW_WARPS, ASKING_WARPS = WHOLE ? 1 : ROW_SUM_WARPS;
static_assert(STAGES % ROW_SUM_WARPS == 0 && STAGES % ASKING_WARPS == 0, "a stage has one owner of each kind");

struct __align__(16) Record { double mean, mean_lo, rstd, mean_g, slope, unused; };

struct Pipeline {
    const Parameters& p;
    double* gamma;        // (ROW_VECTORS * VECTOR), a table
    float* small_gamma;   // (ROW_VECTORS * VECTOR), vector by vector
    Vector<X>* stages;    // (STAGES, 2, ROW_VECTORS): x, dy
    Record* records;      // (STAGES)
    Barrier *full, *ready, *empty;  // (STAGES) each
    long long turns;      // rows of this block

    INLINE const Vector<X>* stage(int s, int which) const { return stages + (s * 2 + which) * ROW_VECTORS; }

    // The row of a turn: chunks of this block one after the other.
    INLINE long long row_of(int turn) const {
        const int chunk = turn / (int)p.chunk_rows, within = turn - chunk * (int)p.chunk_rows;
        return (blockIdx.x + (long long)chunk * gridDim.x) * p.chunk_rows + within;
    }

    INLINE void ask(int warp) const {
        const int lane = threadIdx.x % WARP;
        constexpr bool BULK = HAS_BULK && WHOLE && ALIGNED;
        for (int turn = warp; turn < turns; turn += ASKING_WARPS) {
            const int s = turn % STAGES, round = turn / STAGES;
            if (round > 0) barrier_wait(&empty[s], (round - 1) & 1);
            const X *x = p.x + row_of(turn) * p.x_stride, *dy = p.dy + row_of(turn) * p.dy_stride;
            Vector<X>* to = stages + s * 2 * ROW_VECTORS;
            if constexpr (BULK) {
                constexpr int BYTES = N * (int)sizeof(X);
                if (lane != 0) continue;
                barrier_expect(&full[s], 2 * BYTES);
                copy_bulk(to, x, BYTES, &full[s]);
                copy_bulk(to + ROW_VECTORS, dy, BYTES, &full[s]);
            } else {
                for (int q = lane; q < ROW_VECTORS; q += WARP) {
                    const int rest = N - q * VECTOR, count = rest < VECTOR ? rest : VECTOR;
                    fetch(to + q, x + q * VECTOR, count);
                    fetch(to + ROW_VECTORS + q, dy + q * VECTOR, count);
                }
                commit_copies();
                wait_copies<0>();
                barrier_arrive(&full[s]);
            }
        }
    }

    // Call f for each vector of a row that this lane has.
    template <class F> INLINE void for_each_vector(F f) const {
#pragma unroll 1
        for (int q = threadIdx.x % WARP; q < ROW_VECTORS; q += WARP) f(q);
    }

    // About the mean of g: any number near it will do. A float32 sum, or one of float64 where that might be
    // out of range.
    INLINE double guess(const Vector<X>* dy) const {
        float sums[4] = {};
        for_each_vector([&](int q) {
            const Vector<X> d = dy[q];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i)
                sums[i % 4] = __fmaf_rn(small(d.e[i]), small_gamma[q * VECTOR + i], sums[i % 4]);
        });
        double sum = (double)((sums[0] + sums[1]) + (sums[2] + sums[3]));
        sum = over_lanes(sum, 0.0).a;
        if (!(magnitude(sum) > 0x1p-60 && magnitude(sum) < 0x1p100)) {
            sum = 0.0;
            for_each_vector([&](int q) {
                const Vector<X> d = dy[q];
#pragma unroll
                for (int i = 0; i < VECTOR; ++i)
                    sum = fma(lift(d.e[i]), gamma[place(q, i, ROW_VECTORS)], sum);
            });
            sum = over_lanes(sum, 0.0).a;
        }
        return over(sum);
    }

    INLINE void sum_rows(int warp) const {
        for (int turn = warp; turn < turns; turn += ROW_SUM_WARPS) {
            const int s = turn % STAGES;
            const long long row = row_of(turn);
            const double mean = p.mean[row], mean_lo = p.mean_lo[row], rstd = p.rstd[row];
            barrier_wait(&full[s], turn / STAGES & 1);
            const Vector<X>*xs = stage(s, 0), *dys = stage(s, 1);
            const double k = guess(dys);
            double sums[2][4] = {};
            for_each_vector([&](int q) {
                const Vector<X> x = xs[q], dy = dys[q];
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    const bool there = WHOLE || q * VECTOR + i < N;
                    const double c = (lift(x.e[i]) - mean) - mean_lo;
                    const double g = fma(lift(dy.e[i]), gamma[place(q, i, ROW_VECTORS)], -k);
                    sums[0][i % 4] += there ? g : 0.0;
                    sums[1][i % 4] = fma(there ? g : 0.0, c, sums[1][i % 4]);
                }
            });
            const Two sum = over_lanes((sums[0][0] + sums[0][1]) + (sums[0][2] + sums[0][3]),
                                       (sums[1][0] + sums[1][1]) + (sums[1][2] + sums[1][3]));
            // Orders the reads of this warp before its arrival.
            __syncwarp();
            if (threadIdx.x % WARP == 0) {
                records[s] = {mean, mean_lo, rstd, k + over(sum.a), over(sum.b) * rstd * rstd, 0.0};
                barrier_arrive(&ready[s]);
            }
        }
    }

    INLINE void keep_columns() const {
        int s = 0, parity = 0;
        for (int chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
            const long long first = chunk * p.chunk_rows, rest = p.rows - first;
            double sums[2][ELEMENTS] = {};
            X* out = p.out + first * p.out_stride + column(0);
            // A 32-bit number of rows and one address: every register counts here.
            for (int left = (int)(rest < p.chunk_rows ? rest : p.chunk_rows); left > 0; --left) {
                barrier_wait(&full[s], parity);
                barrier_wait(&ready[s], parity);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    // The last vectors of a short row are looked at, and left alone.
                    const int q = v * ROW_THREADS + threadIdx.x, seen = q < ROW_VECTORS ? q : 0;
                    // Read again for each vector: kept, it would take ten registers too many.
                    const Record r = records[s];
                    const Vector<X> x = stage(s, 0)[seen], dy = stage(s, 1)[seen];
                    // Orders the reads of this warp before its arrival, and keeps the compiler from loading all
                    // vectors at once, which takes more registers than there are.
                    __syncwarp();
                    if (v == VECTORS - 1 && threadIdx.x % WARP == 0) barrier_arrive(&empty[s]);
                    Vector<X> dx;
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        double &dgamma = sums[0][v * VECTOR + i], &dbeta = sums[1][v * VECTOR + i];
                        const double d = lift(dy.e[i]), c = (lift(x.e[i]) - r.mean) - r.mean_lo;
                        dgamma = fma(c * r.rstd, d, dgamma);
                        dbeta += d;
                        const double g = fma(d, gamma[place(seen, i, ROW_VECTORS)], -r.mean_g);
                        round_into(dx.e[i], fma(-c, r.slope, g) * r.rstd);
                    }
                    if (p.out) put(out + v * ROW_THREADS * VECTOR, dx, elements(v));
                }
                if (++s == STAGES) s = 0, parity ^= 1;
                out += p.out_stride;
            }
#pragma unroll
            for (int e = 0; e < 2 * ELEMENTS && p.partials; ++e) {
                const int col = column(e % ELEMENTS / VECTOR) + e % VECTOR;
                if (col < N) p.partials[(2LL * chunk + e / ELEMENTS) * N + col] = sums[e / ELEMENTS][e % ELEMENTS];
            }
        }
    }
};

INLINE void warps_chunks(const Parameters& p, unsigned char* shared) {
    constexpr int ROOM = ROW_VECTORS * VECTOR;
    double* gamma = reinterpret_cast<double*>(shared);
    float* small_gamma = reinterpret_cast<float*>(gamma + ROOM);
    Vector<X>* stages = reinterpret_cast<Vector<X>*>(small_gamma + ROOM);
    Record* records = reinterpret_cast<Record*>(stages + STAGES * 2 * ROW_VECTORS);
    Barrier* full = reinterpret_cast<Barrier*>(records + STAGES);
    const long long blocks = gridDim.x, last = (p.chunks - 1) % blocks == blockIdx.x;
    const long long turns = (p.chunks - 1 - blockIdx.x + blocks) / blocks * p.chunk_rows -
                            (last ? p.chunks * p.chunk_rows - p.rows : 0);
    const Pipeline line = {p, gamma, small_gamma, stages, records, full, full + STAGES, full + 2 * STAGES, turns};
    widen(gamma, p.gamma, 1.0, ROW_VECTORS);
    for (int at = threadIdx.x; at < ROOM; at += LN_THREADS)
        small_gamma[at] = at >= N ? 0.0f : p.gamma ? (float)lift(p.gamma[at]) : 1.0f;
    if (threadIdx.x < STAGES) {
        barrier_init(&line.full[threadIdx.x], HAS_BULK && WHOLE && ALIGNED ? 1 : WARP);
        barrier_init(&line.ready[threadIdx.x], 1);
        barrier_init(&line.empty[threadIdx.x], ROW_WARPS);
        show_barriers();
    }
    // Orders the tables and the barriers before their use.
    __syncthreads();
    const int warp = threadIdx.x / WARP - ROW_WARPS;
    if (warp < 0) line.keep_columns();
    else if (warp < ROW_SUM_WARPS) line.sum_rows(warp);
    else line.ask(warp - ROW_SUM_WARPS);
}
