// The fast backward of layer_norm.cu for rows within a warp: no barrier of the block but for a
// chunk's sums.
//
// The lanes of a row, a slot, hold it in STAGES of their own. For each row: the slope, mean of (g -
// mean of g) * (x - mean), then dx, then the next row is asked for; the sums over rows stay in
// registers until a chunk ends, when `flush` adds up the slots. g is centered before it meets x -
// mean, so that a large mean of g costs no digit. The slope therefore needs the mean of g first,
// two exchanges a row; but the sum of g of the *next* row travels with the slope of this one, and
// one is left. Rows past the end are all 0 and add 0, so that no lane leaves its warp. Read next:
// layer_norm_warps.cuh, for rows that are too long for this.

// The rows of a slot, chunk by chunk; in between lie the chunks of the other blocks.
struct Cursor {
    const Parameters& p;
    long long row = blockIdx.x * p.chunk_rows + slot();
    int left = (int)p.chunk_rows / SLOTS;

    // Return whether a chunk ends with the row in hand.
    INLINE bool advance() {
        row += SLOTS;
        if (--left > 0) return false;
        left = (int)p.chunk_rows / SLOTS;
        row += (gridDim.x - 1) * p.chunk_rows;
        return true;
    }
};

INLINE void do_rows(const Parameters& p, unsigned char* shared) {
    // The table of gamma, what `flush` combines, and the stages.
    const Table gamma = {reinterpret_cast<double*>(shared)};
    double* combined = gamma.memory + Table::SIZE;
    const Stages stages = {
        p, reinterpret_cast<Vector<X>*>(combined + BLOCK * VECTOR) + threadIdx.x};
    const auto sum_of_g = [&](int s) {
        double sum = 0.0;
        unrolled<VECTORS>([&](int v) {
            const Vector<X> dy = *stages.at(s, 1, v);
            unrolled<VECTOR>(
                [&](int i) { sum = fma(lift(dy.e[i]), gamma.at(vector_of(v), i), sum); });
        });
        return sum;
    };
    // Call f(i, x - mean, dy, gamma) for the elements of vector v of this thread.
    const auto for_each_element = [&](int s, int v, const Record& row, auto f) {
        const Vector<X> x = *stages.at(s, 0, v);
        const Vector<X> dy = *stages.at(s, 1, v);
        const int count = elements(v);
        unrolled<VECTOR>([&](int i) {
            // A select, since x - mean is not 0 past the end; dy is.
            const double c = i < count ? row.centered(lift(x.e[i])) : 0.0;
            f(i, c, lift(dy.e[i]), gamma.at(vector_of(v), i));
        });
    };
    gamma.widen(gamma_of(p));
    // Orders the table before its use.
    __syncthreads();
    Cursor asked = {p};
    Cursor at = {p};
    const auto ask = [&](int s) {
        stages.ask(s, asked.row);
        asked.advance();
    };
    const auto record = [&] { return at.row < p.rows ? record_of(p, at.row) : Record{}; };
    unrolled<STAGES>(ask);
    wait_copies<STAGES - 1>();
    Record next = record();
    next.mean_g = over(over_lanes({0.0, sum_of_g(0)}).b);
    double sums[2][ELEMENTS] = {};
    int s = 0;
    for (long long chunk = blockIdx.x; chunk < p.chunks;) {
        Record row = next;
        const long long here = at.row;
        const bool ends = at.advance();
        next = record();
        // This row and the next have arrived.
        wait_copies<STAGES - 2>();
        double slope = 0.0;
        unrolled<VECTORS>([&](int v) {
            for_each_element(s, v, row, [&](int, double c, double dy, double gamma) {
                slope = fma(fma(dy, gamma, -row.mean_g), c, slope);
            });
        });
        const int after = s + 1 == STAGES ? 0 : s + 1;
        const Two both = over_lanes({slope, sum_of_g(after)});
        next.mean_g = over(both.b);
        row.slope = over(both.a) * row.rstd * row.rstd;
        unrolled<VECTORS>([&](int v) {
            Vector<X> dx;
            for_each_element(s, v, row, [&](int i, double c, double dy, double gamma) {
                const int e = v * VECTOR + i;
                round_into(dx.e[i], row.pull_back(c, dy, gamma, sums[0][e], sums[1][e]));
            });
            if (p.out && here < p.rows)
                store(p.out + here * p.out_stride + column(v), dx, elements(v));
        });
        ask(s);
        s = after;
        if (!ends) continue;
        unrolled<2>([&](int which) {
            unrolled<ELEMENTS>([&](int e) {
#pragma unroll
                for (int lanes = ROW_THREADS; lanes < WARP; lanes *= 2)
                    sums[which][e] = sums[which][e] + exchanged(sums[which][e], lanes);
            });
            unrolled<VECTORS>([&](int v) {
                if (p.partials) flush(p, chunk, which, v, &sums[which][v * VECTOR], combined);
            });
            unrolled<ELEMENTS>([&](int e) { sums[which][e] = 0.0; });
        });
        chunk += gridDim.x;
    }
    // Copies still on their way would land in memory that `finish` uses.
    wait_copies<0>();
}
