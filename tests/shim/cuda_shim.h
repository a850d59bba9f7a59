// The device's functions that layer_norm.cu uses, on the host: included before it.
//
// Arithmetic is here; threads, barriers and memory are in fibers.cpp. Everything is correctly
// rounded and in the order written: compile with -ffp-contract=off.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// host_shim.py rewrites the definition of shared memory; one that it did not see is an error.
#define __shared__ shared_memory_was_not_rewritten

// ---- threads and memory ----

using Barrier = unsigned long long;
struct ShimIndex {
    unsigned x;
};
struct ShimPlace {
    ShimIndex thread, block, grid;
};
extern "C" {
ShimPlace shim_place();
unsigned char* shim_shared();
void shim_syncthreads(int line);
void shim_syncwarp(int line);
bool shim_any(bool value, int line);
double shim_exchange(double value, unsigned mask, int lanes, int line);
void shim_copy(void* to, const void* from, int bytes, int room, Barrier* barrier);
void shim_wait_copies(int left);
void shim_barrier_wait(Barrier* barrier, int parity, int line);
void __threadfence();
void __nanosleep(unsigned);
// Integers only: a sum of floats by atomics depends on the schedule, so there is none to call.
unsigned atomicAdd(unsigned* word, unsigned value);
void post(double* word, double value);
double peek(const double* word);
void commit_copies();
void barrier_init(Barrier* barrier, int count);
void barrier_expect(Barrier* barrier, int bytes);
}
#define threadIdx (shim_place().thread)
#define blockIdx (shim_place().block)
#define gridDim (shim_place().grid)
#define __syncthreads() shim_syncthreads(__LINE__)
#define __syncwarp() shim_syncwarp(__LINE__)
#define __any_sync(mask, value) shim_any(value, __LINE__)
#define __shfl_xor_sync(mask, value, lanes) shim_exchange(value, mask, lanes, __LINE__)
// Cache operators change the speed of an access alone.
inline double __ldcg(const double* p) { return *p; }
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline void __stcs(uint4* p, uint4 v) { *p = v; }

// ---- the other primitives of layer_norm_device.cuh ----

#ifndef SHIM_BULK
#define SHIM_BULK 1
#endif
constexpr bool HAS_BULK = SHIM_BULK;
inline void copy_async(void* to, const void* from, int bytes) {
    shim_copy(to, from, bytes, 16, nullptr);
}
inline void copy_async4(void* to, const void* from) { shim_copy(to, from, 4, 4, nullptr); }
inline void copy_bulk(void* to, const void* from, int bytes, Barrier* b) {
    shim_copy(to, from, bytes, bytes, b);
}
template <int left> inline void wait_copies() { shim_wait_copies(left); }
inline void barrier_arrive(Barrier* b) { barrier_expect(b, 0); }
#define barrier_wait(barrier, parity) shim_barrier_wait(barrier, parity, __LINE__)
inline void show_barriers() {}

// ---- arithmetic, each operation rounded once ----

inline long long __double_as_longlong(double v) { return __builtin_bit_cast(long long, v); }
inline double __longlong_as_double(long long v) { return __builtin_bit_cast(double, v); }
inline unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
inline float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }

inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
inline float __double2float_rn(double v) { return float(v); }
inline float __double2float_rz(double v) {
    const float near = float(v);
    return __builtin_fabs(double(near)) > __builtin_fabs(v) ? __builtin_nextafterf(near, 0.0f)
                                                            : near;
}

// Conversions that are instructions of the device.
inline double half_to_double(unsigned short bits) {
    return double(__builtin_bit_cast(_Float16, bits));
}
inline unsigned short double_to_half(double v) {
    return __builtin_bit_cast(unsigned short, (_Float16)v);
}
