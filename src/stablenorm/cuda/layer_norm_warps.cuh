// The fast backward of layer_norm.cu: warps of three kinds work on different rows, and no barrier
// stops the block. docs/explanation/fusing.md has their timeline.
//
// Asking warps fetch rows, STAGES at a time. Row warps take a row each and find its row sums: mean
// of g, and the slope. Column threads keep columns, and with them the sums over rows; they make dx.
// Three barriers of a stage hand it on: it is full of a row, the row's sums are ready, it is empty
// again. If blocks share a row, its row warps talk before the sums are ready (`share`): each posts
// its own before it waits for the others', and gets to a turn once the turns before have ended, so
// no block of a grid that runs at once waits for ever.
//
// A barrier is awaited by its parity. So each stage belongs to one row warp and one asking warp:
// otherwise a warp could be two rounds of the stage ahead, and take the parity of the round before
// for its own.

constexpr int ROW_SUM_WARPS = LN_ROW_WARPS;
constexpr int ASKING_WARPS = WHOLE ? 1 : ROW_SUM_WARPS;
static_assert(STAGES % ROW_SUM_WARPS == 0 && STAGES % ASKING_WARPS == 0,
    "a stage has one owner of each kind");

// Whether a bulk copy brings a row.
constexpr bool BULK = HAS_BULK && WHOLE && ALIGNED;

template <class T> INLINE T sum_of(const T (&parts)[4]) {
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

struct Pipeline {
    const Parameters& p;
    Table gamma;
    float* small_gamma;             // (Table::SIZE), vector by vector
    Vector<X>* stages;              // (STAGES, 2, ROW_VECTORS): x, dy
    Record* records;                // (STAGES)
    Barrier *full, *ready, *empty;  // (STAGES) each

    INLINE Vector<X>* stage(int s, int which) const {
        return stages + (s * 2 + which) * ROW_VECTORS;
    }

    // The rows of this block, chunk by chunk, are its turns 0, 1, 2, ... For turns first, first +
    // step, ... call f(stage, how many turns used that stage before, row).
    template <class F> INLINE void for_each_turn(int first, int step, F f) const {
        const unsigned size = (unsigned)p.chunk_rows;
        for (unsigned turn = first;; turn += step) {
            const unsigned row = (group() + turn / size * groups()) * size + turn % size;
            if (row >= p.rows) return;
            f(turn % STAGES, turn / STAGES, row);
        }
    }

    INLINE Next next_after(unsigned row) const {
        const unsigned size = (unsigned)p.chunk_rows;
        const unsigned rows = (unsigned)p.rows;
        const unsigned after = row + 1;
        if (after < rows && after % size > 0) return SAME_CHUNK;
        return after + (groups() - 1) * size < rows ? NEXT_CHUNK : NO_ROW;
    }

    // Call f for each vector of a row that this lane has.
    template <class F> INLINE void for_each_vector(F f) const {
#pragma unroll 1
        for (int q = threadIdx.x % WARP; q < ROW_VECTORS; q += WARP) f(q);
    }

    // Ask for a row. If it begins within a word, its first element is left out, and `move_up` makes
    // room for it.
    INLINE void fetch_row(Vector<X>* to, const X* from) const {
        const int missing = is_multiple(from, 4) ? 0 : 1;
        if constexpr (ALIGNED) {
            for_each_vector([&](int q) {
                fetch(to + q, from + q * VECTOR, q < N / VECTOR ? VECTOR : N % VECTOR);
            });
        } else {
#pragma unroll 1
            for (int e = threadIdx.x % WARP * PER_WORD; e < ROW_VECTORS * VECTOR;
                e += WARP * PER_WORD)
                fetch_word(to->e, from + missing, e, N - missing);
        }
    }
    INLINE void move_up(Vector<X>* row, const X* from) const {
        if (is_multiple(from, 4)) return;
        const X first = from[0];
        // Orders the copies, of all lanes, before they are read.
        __syncwarp();
        // From the end on: what a vector takes from the one before it is still there.
#pragma unroll 1
        for (int begin = (ROW_VECTORS - 1) / WARP * WARP; begin >= 0; begin -= WARP) {
            const int q = begin + threadIdx.x % WARP;
            Vector<X> v = {};
            if (q < ROW_VECTORS) {
                v.e[0] = q > 0 ? row[q - 1].e[VECTOR - 1] : first;
                unrolled<VECTOR - 1>([&](int i) { v.e[i + 1] = row[q].e[i]; });
            }
            // Orders these reads before the vectors are written.
            __syncwarp();
            if (q < ROW_VECTORS) row[q] = v;
        }
    }

    INLINE void ask(int warp) const {
        // One lane asks for bulk copies. The others would not stay with it, and might miss a phase.
        if (BULK && threadIdx.x % WARP != 0) return;
        for_each_turn(warp, ASKING_WARPS, [&](int s, int round, long long row) {
            if (round > 0) barrier_wait(&empty[s], (round - 1) & 1);
            const X* x = p.x + row * p.x_stride + first_column();
            const X* dy = p.dy + row * p.dy_stride + first_column();
            if constexpr (BULK) {
                constexpr int BYTES = N * (int)sizeof(X);
                barrier_expect(&full[s], 2 * BYTES);
                copy_bulk(stage(s, 0), x, BYTES, &full[s]);
                copy_bulk(stage(s, 1), dy, BYTES, &full[s]);
            } else {
                fetch_row(stage(s, 0), x);
                fetch_row(stage(s, 1), dy);
                commit_copies();
                wait_copies<0>();
                if constexpr (!ALIGNED && sizeof(X) < 4) {
                    move_up(stage(s, 0), x);
                    move_up(stage(s, 1), dy);
                }
                barrier_arrive(&full[s]);
            }
        });
    }

    // A guess of the mean of g: any number near it will do. A float32 sum, or one of float64 where
    // that might be out of range.
    INLINE double guess(const Vector<X>* dy) const {
        float sums[4] = {};
        for_each_vector([&](int q) {
            const Vector<X> d = dy[q];
            unrolled<VECTOR>([&](int i) {
                sums[i % 4] = __fmaf_rn(small(d.e[i]), small_gamma[q * VECTOR + i], sums[i % 4]);
            });
        });
        double sum = over_lanes({sum_of(sums), 0.0}).a;
        if (!(magnitude(sum) > 0x1p-60 && magnitude(sum) < 0x1p100)) {
            sum = 0.0;
            for_each_vector([&](int q) {
                const Vector<X> d = dy[q];
                unrolled<VECTOR>([&](int i) { sum = fma(lift(d.e[i]), gamma.at(q, i), sum); });
            });
            sum = over_lanes({sum, 0.0}).a;
        }
        return over(sum);
    }

    // Combine what the row warps of a row's parts have: the mean of g, here near k; the mean of (g
    // - k) * c; and that of c, which is x - mean. All parts get the same bits.
    //
    // A box of three words goes from each part to each. A word is empty if it is +0, and its reader
    // empties it. A warp has two boxes to each part. It fills one again after it has read that
    // part's next word, posted after that part had emptied the box. The fence orders the two.
    INLINE void share(int turn, Record& row, double k, double c) const {
        const int part = blockIdx.x % PARTS;
        const int other = threadIdx.x % PARTS;
        const bool speaks = threadIdx.x % WARP < PARTS;
        double* boxes =
            reinterpret_cast<double*>(p.counter) + 4 +
            (group() * 2 * ROW_SUM_WARPS + turn % (2 * ROW_SUM_WARPS)) * 4 * PARTS * PARTS;
        double* to = boxes + (other * PARTS + part) * 4;
        double* from = boxes + (part * PARTS + other) * 4;
        double words[3] = {row.mean_g, fma(k - row.mean_g, c, row.slope), c};
        unrolled<3>([&](int i) {
            if (speaks) post(to + i, words[i] == 0.0 ? -0.0 : words[i]);
        });
        unrolled<3>([&](int i) {
            do words[i] = peek(from + i);
            while (__double_as_longlong(words[i]) == 0);
        });
        row.mean_g = over_parts(words[0]);
        row.slope = over_parts(fma(words[0] - row.mean_g, words[2], words[1]));
        // Orders the looks of all lanes before the words are emptied.
        __syncwarp();
        unrolled<3>([&](int i) {
            if (speaks) post(from + i, 0.0);
        });
        __threadfence();
    }

    // The mean over the parts, neighboring lanes, in a fixed tree.
    INLINE double over_parts(double v) const {
#pragma unroll
        for (int lanes = 1; lanes < PARTS; lanes *= 2) v = v + exchanged(v, lanes);
        return v * (1.0 / PARTS);
    }

    INLINE void sum_rows(int warp) const {
        for_each_turn(warp, ROW_SUM_WARPS, [&](int s, int round, long long at) {
            Record row = record_of(p, at);
            barrier_wait(&full[s], round & 1);
            const Vector<X>* xs = stage(s, 0);
            const Vector<X>* dys = stage(s, 1);
            const double k = guess(dys);
            double sums[PARTS > 1 ? 3 : 2][4] = {};
            for_each_vector([&](int q) {
                const Vector<X> x = xs[q];
                const Vector<X> dy = dys[q];
                unrolled<VECTOR>([&](int i) {
                    const bool there = WHOLE || q * VECTOR + i < N;
                    const double c = row.centered(lift(x.e[i]));
                    const double g = fma(lift(dy.e[i]), gamma.at(q, i), -k);
                    sums[0][i % 4] += there ? g : 0.0;
                    sums[1][i % 4] = fma(there ? g : 0.0, c, sums[1][i % 4]);
                    if constexpr (PARTS > 1) sums[2][i % 4] += c;
                });
            });
            const Two sum = over_lanes({sum_of(sums[0]), sum_of(sums[1])});
            row.mean_g = k + over(sum.a);
            row.slope = over(sum.b);
            if constexpr (PARTS > 1)
                share(round * STAGES + s, row, k, over(over_lanes({sum_of(sums[2]), 0.0}).a));
            row.slope = row.slope * row.rstd * row.rstd;
            // Orders the reads of this warp before its arrival.
            __syncwarp();
            if (threadIdx.x % WARP != 0) return;
            row.next = next_after(at);
            records[s] = row;
            barrier_arrive(&ready[s]);
        });
    }

    // Column threads read the row and the step after it from the record, which saves registers.
    INLINE void keep_columns() const {
        int s = 0;
        int parity = 0;
        for (Next next = SAME_CHUNK; next != NO_ROW;) {
            double sums[2][ELEMENTS] = {};
            unsigned row;
            do {
                // `full` comes before `ready`, but makes the copies visible to this thread.
                barrier_wait(&full[s], parity);
                barrier_wait(&ready[s], parity);
                next = records[s].next;
                unrolled<VECTORS>([&](int v) { row = keep_vector(s, v, sums); });
                if (++s == STAGES) {
                    s = 0;
                    parity ^= 1;
                }
            } while (next == SAME_CHUNK);
            const long long chunk = row / (unsigned)p.chunk_rows;
#pragma unroll
            for (int e = 0; e < 2 * ELEMENTS && p.partials; ++e) {
                const int col = column(e % ELEMENTS / VECTOR) + e % VECTOR;
                const long long at =
                    (2 * chunk + e / ELEMENTS) * (N * PARTS) + first_column() + col;
                if (col < N) p.partials[at] = sums[e / ELEMENTS][e % ELEMENTS];
            }
        }
    }

    // Do vector v of the row in stage s; return the number of that row.
    INLINE unsigned keep_vector(int s, int v, double (&sums)[2][ELEMENTS]) const {
        // Threads past the end read the last vector, and store nothing.
        const int q = vector_of(v);
        const int seen = q < ROW_VECTORS ? q : ROW_VECTORS - 1;
        // Read again for each vector: kept, it would take ten registers too many.
        const Record row = records[s];
        const Vector<X> x = stage(s, 0)[seen];
        const Vector<X> dy = stage(s, 1)[seen];
        // Orders the reads of this warp before its arrival, and keeps the compiler from loading all
        // vectors at once, which takes more registers than there are.
        __syncwarp();
        if (v == VECTORS - 1 && threadIdx.x % WARP == 0) barrier_arrive(&empty[s]);
        Vector<X> dx;
        unrolled<VECTOR>([&](int i) {
            const int e = v * VECTOR + i;
            const double c = row.centered(lift(x.e[i]));
            const double d = lift(dy.e[i]);
            round_into(dx.e[i], row.pull_back(c, d, gamma.at(seen, i), sums[0][e], sums[1][e]));
        });
        if (p.out)
            store(p.out + row.row * p.out_stride + first_column() + column(v), dx, elements(v));
        return row.row;
    }
};

INLINE void do_rows(const Parameters& p, unsigned char* shared) {
    const Table gamma = {reinterpret_cast<double*>(shared)};
    float* small_gamma = reinterpret_cast<float*>(gamma.memory + Table::SIZE);
    Vector<X>* stages = reinterpret_cast<Vector<X>*>(small_gamma + Table::SIZE);
    Record* records = reinterpret_cast<Record*>(stages + STAGES * 2 * ROW_VECTORS);
    Barrier* full = reinterpret_cast<Barrier*>(records + STAGES);
    const Pipeline line = {
        p, gamma, small_gamma, stages, records, full, full + STAGES, full + 2 * STAGES};
    gamma.widen(gamma_of(p));
    // Each thread reads what it has just written.
    for (int at = threadIdx.x; at < Table::SIZE; at += LN_THREADS)
        small_gamma[at] = (float)gamma.at(at / VECTOR, at % VECTOR);
    if (threadIdx.x < STAGES) {
        barrier_init(&line.full[threadIdx.x], BULK ? 1 : WARP);
        barrier_init(&line.ready[threadIdx.x], 1);
        barrier_init(&line.empty[threadIdx.x], WARPS_OF_ROW);
        if constexpr (HAS_BULK) show_barriers();
    }
    // Orders the tables and the barriers before their use.
    __syncthreads();
    const int warp = threadIdx.x / WARP - WARPS_OF_ROW;
    if (warp < 0)
        line.keep_columns();
    else if (warp < ROW_SUM_WARPS)
        line.sum_rows(warp);
    else
        line.ask(warp - ROW_SUM_WARPS);
}
