// Layer normalization and its backward, one launch each: the equations of the reference.
//
// One source, compiled on demand for one function and one configuration at a time, by these
// definitions (plan.py chooses them):
//   LN_FORWARD      1: layer_norm_forward is compiled; 0: layer_norm_backward
//   LN_X, LN_DY     dtype of x (of y and dx too) and of dy: 0 float16, 1 bfloat16, 2 float32,
//                   3 float64
//   LN_PAIRS        0: float64 arithmetic, for data of 16 and 32 bits; 1: pairs of float64, as soon
//                   as float64 takes part
//   LN_ROW_THREADS, LN_SLOTS   threads of a row; rows that a block has in hand at a time
//   LN_VECTORS      16-byte vectors of x that a thread holds in registers; 0: any n, columns in
//                   a loop, one row at a time, read again for each pass
//   LN_LEAST_BLOCKS blocks that are to fit a multiprocessor
// Grid and block are one-dimensional, shared memory is dynamic only. The grid may have any number of
// blocks up to the chunks (backward); if `barrier` is set all of them must be resident (cooperative
// launch).
//
// With LN_PAIRS the rows of x and eps are scaled, whatever their size; gamma, dy and their products
// must be zero or between 2**-850 and 2**850, or low words are lost (below) and sums overflow (above).
//
// Beside the language this needs: __syncthreads, __threadfence, __nanosleep; __shfl_xor_sync of
// double with all 32 lanes; atomicAdd and atomicInc of unsigned; __ldcg and __stcg of double and
// double2; __dadd_rn, __dmul_rn, __fma_rn, __ddiv_rn, __dsqrt_rn, __double2float_rn and _rz; bits of
// floats as integers and back. Where __CUDA_ARCH__ is not defined, it needs half_to_float, float_to_half
// and load_acquire as well, which are instructions of the device.

// The fields of PARAMETERS in plan.py, in the same order. Strides are in elements.
struct Parameters {
    const void* x;        // (rows, n), rows x_stride apart
    const void* dy;       // (rows, n), rows dy_stride apart; backward only
    const void* gamma;    // (n), contiguous, or null
    const void* beta;     // (n), contiguous, or null; forward only
    void* out;            // y, or dx or null: (rows, n), rows out_stride apart, dtype of x
    void* dgamma;         // (n), of gamma_type, or null
    void* dbeta;          // (n), of beta_type, or null
    double* mean;         // (rows) each: written by the forward, read by the backward
    double* mean_lo;
    double* rstd;
    double* rstd_lo;      // these three with LN_PAIRS only; null in a backward whose forward was
    double* mean_tail;    //     without
    short* exponent;      // (rows, 2), powers of two of mean_lo and of rstd
    void* partials;       // (chunks, 2, n) numbers: dgamma, dbeta of each chunk
    unsigned* counters;   // (2), zero before first use; left fit for the next launch
    long long rows, n, x_stride, dy_stride, out_stride;
    long long chunk_rows; // chunk k is rows [k * chunk_rows, (k + 1) * chunk_rows)
    double eps;
    int gamma_type, beta_type;
    int chunks;
    int barrier;          // 1: all blocks add up the chunks; 0: the last one does
};

#include "layer_norm_numbers.cuh"
#include "layer_norm_memory.cuh"
#include "layer_norm_rows.cuh"

// Shared memory: a flag; two turns of two numbers for each warp; then what the kernels say.
constexpr int FLAG_BYTES = 16;
constexpr int REDUCTION_BYTES = 2 * 2 * WARPS * sizeof(Number);

#if LN_FORWARD

extern "C" __global__ void __launch_bounds__(BLOCK, LN_LEAST_BLOCKS)
layer_norm_forward(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Reduction reduction = {reinterpret_cast<Number*>(shared + FLAG_BYTES), 0};
    Parameter gamma = {p.gamma, p.gamma_type, p.n, 1, nullptr};
    // -0 changes nothing, not even -0.
    Parameter beta = {p.beta, p.beta_type, p.n, (Held)-0.0, nullptr};
    if (RESIDENT) {
        Held* staged = reinterpret_cast<Held*>(shared + FLAG_BYTES + REDUCTION_BYTES);
        gamma.stage(staged);
        beta.stage(staged + COLUMNS);
        // Orders both before their first use.
        __syncthreads();
    }
    const X* x = static_cast<const X*>(p.x);
    const long long step = (long long)gridDim.x * SLOTS;
    long long row = (long long)blockIdx.x * SLOTS + slot();
    Columns<X> next;
    next.open(x + row * p.x_stride, row < p.rows, p.n);
    // As many turns for every thread of the block, rows past the end masked: barriers are legal.
    for (long long base = (long long)blockIdx.x * SLOTS; base < p.rows; base += step, row += step) {
        const Columns<X> current = next;
        next.open(x + (row + step) * p.x_stride, row + step < p.rows, p.n);
        const Row statistic = statistics(current, p, reduction);
        if (current.present > 0 && row_thread() == 0) keep(statistic, p, row);
        X* y = static_cast<X*>(p.out) + row * p.out_stride;
#pragma unroll
        for (Index v = 0; v < vectors_of(p.n); ++v) {
            const Index col = column(v);
            const Vector<X> xs = current.at(v);
            Vector<X> result = {};
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                X rounded;
                const Number xhat = xhat_of(statistic, lift(xs, i));
                round_into(rounded, affine(xhat, gamma.at(col + i), beta.at(col + i)));
                set(result, i, rounded);
            }
            store(y + col, result, count_from(col, current.present));
        }
    }
}

#else

#include "layer_norm_sums.cuh"
#include "layer_norm_chunks.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, LN_LEAST_BLOCKS)
layer_norm_backward(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Reduction reduction = {reinterpret_cast<Number*>(shared + FLAG_BYTES), 0};
    unsigned char* rest = shared + FLAG_BYTES + REDUCTION_BYTES;
    Work work = {static_cast<const X*>(p.x), static_cast<const DY*>(p.dy),
                 static_cast<X*>(p.out), p.dgamma != nullptr || p.dbeta != nullptr,
                 {p.gamma, p.gamma_type, p.n, 1, nullptr}};
    if (RESIDENT) {
        work.gamma.stage(reinterpret_cast<Held*>(rest));
        // Orders gamma before its first use.
        __syncthreads();
    }
    for (long long chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
        const long long first = chunk * p.chunk_rows;
        const long long stop = first + p.chunk_rows < p.rows ? first + p.chunk_rows : p.rows;
        if (RESIDENT)
            resident_chunk(p, work, chunk, first, stop, reduction,
                           reinterpret_cast<Number*>(rest + COLUMNS * sizeof(Held)));
        else
            generic_chunk(p, work, chunk, first, stop, reduction,
                          reinterpret_cast<Projection*>(rest));
    }
    if (!work.summing) return;
    // The sums of the runs take the place of what the chunks needed.
    if (p.barrier) {
        grid_barrier(p.counters);
        finish(p, blockIdx.x, gridDim.x, reinterpret_cast<Pair*>(rest));
    } else if (is_last(p.counters + 1, reinterpret_cast<unsigned*>(shared))) {
        finish(p, 0, 1, reinterpret_cast<Pair*>(rest));
    }
}

#endif
