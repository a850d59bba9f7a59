// Layer normalization and its backward, one launch each: the equations of the reference.
//
// One source, compiled on demand for one function and one configuration at a time, by these
// definitions (plan.py chooses them):
//   LN_FORWARD      1: layer_norm_forward is compiled; 0: layer_norm_backward
//   LN_X, LN_DY, LN_GAMMA, LN_BETA   dtype of x (of y and dx too), of dy, of gamma and dgamma, of beta
//                   and dbeta: 0 float16, 1 bfloat16, 2 float32, 3 float64
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
// Where __CUDA_ARCH__ is not defined, it needs half_to_float and float_to_half, which are instructions of
// the device.

#include "layer_norm_numbers.cuh"

// The fields of PARAMETERS in plan.py, in the same order. Strides are in elements.
struct Parameters {
    const X* x;           // (rows, n), rows x_stride apart
    const DY* dy;         // (rows, n), rows dy_stride apart; backward only
    const Gamma* gamma;   // (n), contiguous, or null
    const Beta* beta;     // (n), contiguous, or null; forward only
    X* out;               // y, or dx or null: (rows, n), rows out_stride apart
    Gamma* dgamma;        // (n), or null
    Beta* dbeta;          // (n), or null
    double* mean;         // (rows) each: written by the forward, read by the backward
    double* mean_lo;
    double* rstd;
    double* rstd_lo;      // these three with LN_PAIRS only; null in a backward whose forward was
    double* mean_tail;    //     without
    short* exponent;      // (rows, 2), powers of two of mean_lo and of rstd
    Number* partials;     // (chunks, 2, n): dgamma, dbeta of each chunk; null if neither is wanted
    unsigned* counter;    // zero before first use; left fit for the next launch
    long long rows, n, x_stride, dy_stride, out_stride;
    long long chunk_rows; // chunk k is rows [k * chunk_rows, (k + 1) * chunk_rows)
    double eps;
    int chunks;
    int barrier;          // 1: all blocks add up the chunks; 0: the last one does
};

#include "layer_norm_memory.cuh"
#include "layer_norm_rows.cuh"

#if LN_FORWARD

extern "C" __global__ void __launch_bounds__(BLOCK, LN_LEAST_BLOCKS)
layer_norm_forward(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Reduction reduction = {reinterpret_cast<Number*>(shared), 0};
    const Parameter<Gamma> gamma = {p.gamma, (Index)p.n, 1.0};
    // -0 changes nothing, not even -0.
    const Parameter<Beta> beta = {p.beta, (Index)p.n, -0.0};
    const long long first = (long long)blockIdx.x * SLOTS, step = (long long)gridDim.x * SLOTS;
    long long at = first + slot();
    Columns<X> next;
    next.open(p.x + at * p.x_stride, at < p.rows ? p.n : 0);
    // As many turns for every thread of the block, rows past the end empty: barriers are legal.
    for (long long base = first; base < p.rows; base += step, at += step) {
        const Columns<X> x = next;
        next.open(p.x + (at + step) * p.x_stride, at + step < p.rows ? p.n : 0);
        const Row row = statistics(x, p, reduction);
        if (x.n > 0 && row_thread() == 0) keep(row, p, at);
#pragma unroll
        for (Index v = 0; v < vectors_of(p.n); ++v) {
            const int count = count_of(v, x.n);
            Vector<X> y = {};
            for_each_of(count, [&](int i, double x, double gamma, double beta) {
                round_scaled(y.e[i], affine(xhat_of(row, x), gamma, beta), 0);
            }, x.at(v), gamma.at(v), beta.at(v));
            store(p.out + at * p.out_stride + column(v), y, count);
        }
    }
}

#else

#include "layer_norm_chunks.cuh"
#include "layer_norm_sums.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, LN_LEAST_BLOCKS)
layer_norm_backward(const Parameters p) {
    extern __shared__ __align__(16) unsigned char shared[];
    Reduction reduction = {reinterpret_cast<Number*>(shared), 0};
    // What the chunks need lies behind the two turns of a number for each warp.
    unsigned char* rest = shared + 2 * WARPS * sizeof(Number);
    for (long long chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
        const long long first = chunk * p.chunk_rows;
        const long long stop = first + p.chunk_rows < p.rows ? first + p.chunk_rows : p.rows;
        if (RESIDENT)
            resident_chunk(p, chunk, first, stop, reduction, reinterpret_cast<Number*>(rest));
        else
            generic_chunk(p, chunk, first, stop, reduction, reinterpret_cast<Projection*>(rest));
    }
    if (p.partials == nullptr || !blocks_met(p)) return;
    finish(p, p.barrier ? blockIdx.x : 0, p.barrier ? gridDim.x : 1);
}

#endif
