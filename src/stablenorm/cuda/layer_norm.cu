// Layer normalization and its backward, one launch each: the equations of reference/equations.py.
//
// y and dx of a row take two sums along it; dgamma and dbeta are sums over rows. A block adds up
// chunks of rows and puts their sums away; then all blocks meet, and share the columns of what is
// left to add (layer_norm_sums.cuh). What is added to what depends on shape and dtypes alone, and
// so do the bits. Read next: layer_norm_general.cuh, for any n and dtypes; then _forward, _short
// and _warps, which read each row from memory once.
//
// One source, compiled for one function and one configuration at a time: each field of Kernel in
// plan.py is a definition, LN_ and its name. The dtype of x chooses the arithmetic: pairs of
// float64 for float64, float64 for the others. The grid may have any number of blocks up to the
// chunks, or groups of LN_PARTS blocks; with partial sums or parts all of them must be resident
// (cooperative launch).
//
// The rows of float64 and eps are scaled, whatever their size. gamma, dy and their products must be
// zero or between 2**-850 and 2**850: beyond, sums overflow, and low words of pairs are lost below.

#include "layer_norm_numbers.cuh"

// plan.py reads the names, in their order. Strides are in elements.
struct Parameters {
    const X* x;                     // (rows, n), rows x_stride apart
    const X* dy;                    // (rows, n), rows dy_stride apart; backward only
    const Gamma* gamma;             // (n), contiguous, or null
    const Beta* beta;               // (n), contiguous, or null; forward only
    X* out;                         // y, or dx or null: (rows, n), rows out_stride apart
    Gamma* dgamma;                  // (n), or null
    Beta* dbeta;                    // (n), or null
    double *mean, *mean_lo, *rstd;  // (rows) each: written by the forward, read by the backward
    double *rstd_lo, *mean_tail;    // the same, these and exponent with LN_PAIRS only
    short* exponent;                // (rows, 2), powers of two of mean_lo and of rstd
    Number* partials;  // (chunks, 2, n): dgamma, dbeta of each chunk; null if neither is wanted
    // Zero before first use, and fit for the next launch. 32 bytes on: boxes if LN_PARTS > 1.
    unsigned* counter;
    long long rows, n, x_stride, dy_stride, out_stride;
    long long chunk_rows;  // chunk k is rows [k * chunk_rows, (k + 1) * chunk_rows)
    long long chunks;
    double eps;
};

#include "layer_norm_device.cuh"
#include "layer_norm_memory.cuh"
#include "layer_norm_sums.cuh"
#if LN_N == 0
#include "layer_norm_general.cuh"
#else
#include "layer_norm_fast.cuh"
#if LN_FORWARD
#include "layer_norm_forward.cuh"
#elif LN_ROW_WARPS
#include "layer_norm_warps.cuh"
#else
#include "layer_norm_short.cuh"
#endif
#endif

extern "C" __global__ void __launch_bounds__(LN_THREADS, LN_LEAST_BLOCKS)
    LN_ENTRY(const Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    do_rows(p, shared);
    if (LN_FORWARD || p.partials == nullptr) return;
    meet_blocks(p);
    finish(p, reinterpret_cast<Wide*>(shared));
}
