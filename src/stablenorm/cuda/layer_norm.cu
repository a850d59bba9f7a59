// Layer normalization and its backward, one launch each: the equations of reference.py.
//
// Interface
// ---------
// One source, compiled on demand for one function and one configuration at a time, by these
// definitions (plan.py chooses them):
//   LN_FORWARD      1: layer_norm_forward is compiled; 0: layer_norm_backward
//   LN_X, LN_DY     dtype of x (of y and dx too) and of dy: 0 float16, 1 bfloat16, 2 float32,
//                   3 float64
//   LN_ARITHMETIC   0 float64, for data of 16 and 32 bits; 1 pairs of float64, as soon as float64
//                   takes part; 2 pairs of float32, for 16 and 32 bits where float64 is slow
//   LN_BLOCK, LN_ROW_THREADS   threads of a block and of a row; LN_BLOCK / LN_ROW_THREADS rows
//                   are in hand at a time
//   LN_VECTORS      16-byte vectors of x that a thread holds in registers; 0: any n, columns in
//                   a loop, one row at a time, read again for each pass
//   LN_STAGED       1: gamma (and beta) are kept in shared memory
//   LN_SHARED_SUMS  1: the sums over the rows of a chunk are kept in shared memory, not registers;
//                   backward only, one row in hand at a time
//   LN_LEAST_BLOCKS blocks that are to fit a multiprocessor
//   LN_CLUSTER      blocks that share a row, each LN_ROW_THREADS * LN_VECTORS vectors of it: 1, or
//                   2, 4 or 8 where a block has one row, in registers. Compute capability 9.0
//                   and above; the grid must be a multiple of it
// Entry points: extern "C" __global__ void layer_norm_forward(Parameters) and
// layer_norm_backward(Parameters): one argument, by value, 208 bytes. Grid and block are
// one-dimensional. Shared memory is dynamic only. The grid may have any number of blocks up to
// the chunks (backward), where those of a cluster count as one; with final_mode 2 all of them must
// be resident (cooperative launch), and there must be no clusters.
//
// Limits
// ------
// Arithmetic 1 scales the rows of x and eps, whatever their size; gamma, dy and their products
// must be zero or between 2**-850 and 2**850, or low words are lost (below) and sums overflow
// (above). Arithmetic 2 has 48 bits: a float32 result errs by at most 1 ulp, or, where it cancels,
// by 2**-44 (dgamma, dbeta: 2**-40) of the sum of magnitudes that it is made of. dy * gamma must
// be zero or between 2**-75 and 2**75; sums over rows must stay below 2**118, or low words
// overflow. With LN_VECTORS 0 the backward reads x twice and dy three times, from caches where they
// allow: rows that neither a block nor a cluster of them holds.
//
// What the compiler or a host shim must provide
// ---------------------------------------------
// __global__, __device__, __forceinline__, __launch_bounds__, __cluster_dims__, __align__,
// __shared__;
// threadIdx.x, blockIdx.x, gridDim.x;
// __syncthreads, __threadfence, __shfl_xor_sync(mask, v, lanes) of float and double with all 32
// lanes, atomicAdd(unsigned*, unsigned), atomicInc(unsigned*, unsigned), __nanosleep(unsigned);
// __ldcg and __stcg of double, float2 and double2 (make_float2, make_double2);
// __dadd_rn, __dmul_rn, __fma_rn, __ddiv_rn, __dsqrt_rn; __fadd_rn, __fmul_rn, __fmaf_rn,
// __fdiv_rn, __fsqrt_rn; __double2float_rn, __double2float_rz;
// __float_as_uint, __uint_as_float, __double_as_longlong, __longlong_as_double.
// Where __CUDA_ARCH__ is not defined, the two float16 conversions are done on integers instead of
// by the instruction, `load_acquire` is an atomicAdd of 0, and for LN_CLUSTER above 1 there must be
// __cluster_sync() and __cluster_map_shared_rank(pointer, rank).

// The fields of pack_parameters in plan.py, in the same order. Strides are in elements.
struct Parameters {
    const void* x;        // (rows, n), rows x_stride apart
    const void* dy;       // (rows, n), rows dy_stride apart; backward only
    const void* gamma;    // (n), contiguous, or null
    const void* beta;     // (n), contiguous, or null; forward only
    void* out;            // y, or dx or null: (rows, n), rows out_stride apart, dtype of x
    void* dgamma;         // (n), of gamma_type, or null
    void* dbeta;          // (n), of beta_type, or null
    double* mean;         // (rows) each: written by the forward, read by the backward
    double* mean_lo;      // (rows)
    double* rstd;         // (rows)
    double* rstd_lo;      // (rows), arithmetic 1 only, and so is mean_tail; null in a backward
    double* mean_tail;    // (rows)    whose forward was of another arithmetic
    short* exponent;      // (rows, 2), powers of two of mean_lo and of rstd; not in arithmetic 0,
                          // and null after a forward of that
    void* partials;       // (chunks, 2, n) numbers: dgamma, dbeta of each chunk
    void* segment_sums;   // (segments, 2, n) pairs of words
    unsigned* counters;   // (128), all zero before first use; left fit for the next launch
    long long rows, n, x_stride, dy_stride, out_stride;
    long long chunk_rows; // chunk k is rows [k * chunk_rows, (k + 1) * chunk_rows)
    double eps;
    int gamma_type, beta_type;
    int chunks, segments; // segment s is chunks [s * per, (s + 1) * per), per = ceil of the ratio
    int final_mode;       // 0: one chunk; 1: tickets; 2: grid barrier
    int unused;
};

#include "layer_norm_numbers.cuh"
#include "layer_norm_clusters.cuh"
#include "layer_norm_memory.cuh"
#include "layer_norm_rows.cuh"

#if LN_CLUSTER > 1
#define LN_CLUSTER_DIMS __cluster_dims__(LN_CLUSTER, 1, 1)
#else
#define LN_CLUSTER_DIMS
#endif

#if LN_FORWARD

extern "C" __global__ void LN_CLUSTER_DIMS __launch_bounds__(BLOCK, LN_LEAST_BLOCKS)
layer_norm_forward(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Reduction reduction = {reinterpret_cast<Number*>(shared + FLAG_BYTES), 0};
    Parameter gamma = {p.gamma, p.gamma_type, p.n, 1, nullptr};
    // -0 changes nothing, not even -0.
    Parameter beta = {p.beta, p.beta_type, p.n, (Held)-0.0, nullptr};
    if (LN_STAGED) {
        Held* staged = reinterpret_cast<Held*>(shared + FLAG_BYTES + REDUCTION_BYTES);
        gamma.stage(staged);
        beta.stage(staged + COLUMNS);
        // Orders both before their first use.
        __syncthreads();
    }
    begin_cluster();
    const X* x = static_cast<const X*>(p.x);
    X* y = static_cast<X*>(p.out);
    const long long step = (long long)teams() * SLOTS;
    long long row = (long long)team() * SLOTS + threadIdx.x / ROW_THREADS;
    Columns<X> next;
    open(next, x + row * p.x_stride, row < p.rows, p.n);
    // As many turns for every thread of the cluster, rows past the end masked: barriers are legal.
    for (long long base = (long long)team() * SLOTS; base < p.rows; base += step, row += step) {
        const Columns<X> current = next;
        open(next, x + (row + step) * p.x_stride, row + step < p.rows, p.n);
        const Row statistic = statistics(current, p, reduction);
        if (current.present > 0 && row_thread() == 0 && rank() == 0) keep(statistic, p, row);
        X* out = y + row * p.out_stride;
        const bool aligned = is_aligned(out);
#pragma unroll
        for (Index v = 0; v < vectors_of(p.n); ++v) {
            const Index col = column(v);
            const int count = count_from(col, current.present);
            const Vector<X> xs = vector_at(current, v, count);
            Vector<X> result = {};
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                const Number xhat = xhat_of(statistic, raised(statistic, lift(xs, i)));
                X rounded;
                round_into(rounded, affine(xhat, gamma.at(col + i), beta.at(col + i)));
                set(result, i, rounded);
            }
            store(out + col, result, count, aligned);
        }
    }
}

#else

#include "layer_norm_sums.cuh"
#include "layer_norm_chunks.cuh"

extern "C" __global__ void LN_CLUSTER_DIMS __launch_bounds__(BLOCK, LN_LEAST_BLOCKS)
layer_norm_backward(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    volatile unsigned* flag = reinterpret_cast<unsigned*>(shared);
    Reduction reduction = {reinterpret_cast<Number*>(shared + FLAG_BYTES), 0};
    unsigned char* rest = shared + FLAG_BYTES + REDUCTION_BYTES;
    Parameter gamma = {p.gamma, p.gamma_type, p.n, 1, nullptr};
    unsigned char* beyond = rest;
    if (LN_STAGED) {
        gamma.stage(reinterpret_cast<Held*>(rest));
        beyond += COLUMNS * sizeof(Held);
        // Orders gamma before its first use.
        __syncthreads();
    }
    const Work work = {static_cast<const X*>(p.x), static_cast<const DY*>(p.dy),
                       static_cast<X*>(p.out), p.dgamma != nullptr || p.dbeta != nullptr};
    begin_cluster();
    for (long long chunk = team(); chunk < p.chunks; chunk += teams()) {
        const long long first = chunk * p.chunk_rows;
        const long long stop = first + p.chunk_rows < p.rows ? first + p.chunk_rows : p.rows;
        if (RESIDENT)
            resident_chunk(p, work, chunk, first, stop, gamma, reduction,
                           reinterpret_cast<Number*>(beyond));
        else
            generic_chunk(p, work, chunk, first, stop, gamma, reduction,
                          reinterpret_cast<Projection*>(beyond));
        if (work.summing && p.final_mode == 1) finish_by_tickets(p, chunk, flag);
    }
    if (CLUSTER == 1 && work.summing && p.final_mode == 2) {
        grid_barrier(p.counters);
        finish_spread(p, reinterpret_cast<Pair*>(rest));
    }
}

#endif
