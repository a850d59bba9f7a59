// What a CUDA kernel finds on the device, on the host: included before the kernel's source.
//
// Arithmetic is here; threads, barriers and memory are behind the functions of `shim::`, which
// fibers.cpp (random schedules, every access checked) and threads.cpp (ThreadSanitizer) define.
// Everything is correctly rounded and in the order written: compile with -ffp-contract=off.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define LN_HOST_SHIM 1

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) alignas(bytes)
#define __grid_constant__
// The driver rewrites the definitions of shared variables; one that it did not see is an error.
#define __shared__ shared_memory_was_not_rewritten
#define LN_SHARED_MEMORY(name) unsigned char* const name = shim::shim_dynamic_shared()

// ---- vectors ----

#define SHIM_VECTORS(name, T)                                                         \
    struct name##1 { T x; };                                                          \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                \
    struct name##3 { T x, y, z; };                                                    \
    struct alignas(sizeof(T) > 4 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };     \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTORS(char, signed char)
SHIM_VECTORS(uchar, unsigned char)
SHIM_VECTORS(short, short)
SHIM_VECTORS(ushort, unsigned short)
SHIM_VECTORS(int, int)
SHIM_VECTORS(uint, unsigned)
SHIM_VECTORS(longlong, long long)
SHIM_VECTORS(ulonglong, unsigned long long)
SHIM_VECTORS(float, float)
SHIM_VECTORS(double, double)
#undef SHIM_VECTORS

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// ---- threads and memory ----

namespace shim {
struct Place {
    dim3 thread, block, block_size, grid_size;
};
extern "C" const Place& shim_place();
extern "C" void shim_syncthreads(int line);
extern "C" void shim_syncwarp(unsigned mask, int line);
// Gives `bits` to the warp and returns those of `source_lane`.
extern "C" std::uint64_t shim_exchange(unsigned mask, std::uint64_t bits, int source_lane, int line);
// Gives one bit to the warp and returns those of all lanes of `mask`.
extern "C" unsigned shim_ballot(unsigned mask, bool bit, int line);
// A barrier of all blocks of the cluster; and where they have what `own` is in this one.
extern "C" void shim_cluster_barrier(int line);
extern "C" void* shim_in_block(void* own, unsigned rank);
extern "C" unsigned char* shim_dynamic_shared();
// The same address for all threads of a block, another one for each `site`.
extern "C" void* shim_static_shared(int site, std::size_t bytes);
extern "C" void shim_fence();
extern "C" void shim_sleep();
enum Change { ADD, INC, EXCH, OR, MAX };
extern "C" std::uint32_t shim_atomic32(std::uint32_t* word, Change change, std::uint32_t value);
extern "C" std::uint64_t shim_atomic64(std::uint64_t* word, Change change, std::uint64_t value);
extern "C" std::uint32_t shim_cas32(std::uint32_t* word, std::uint32_t compare, std::uint32_t value);
extern "C" std::uint32_t shim_load32(const std::uint32_t* word, bool acquire);
extern "C" void shim_store32(std::uint32_t* word, std::uint32_t value, bool release);
extern "C" std::uint64_t shim_flops[6];
}  // namespace shim

#define threadIdx (shim::shim_place().thread)
#define blockIdx (shim::shim_place().block)
#define blockDim (shim::shim_place().block_size)
#define gridDim (shim::shim_place().grid_size)
constexpr int warpSize = 32;

#define __syncthreads() shim::shim_syncthreads(__LINE__)
// A barrier that also orders memory, as the one of CUDA does.
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    shim::shim_syncwarp(mask, line);
}
inline void __cluster_sync(int line = __builtin_LINE()) { shim::shim_cluster_barrier(line); }
inline void* __cluster_map_shared_rank(void* own, unsigned rank) {
    return shim::shim_in_block(own, rank);
}
inline void __threadfence() { shim::shim_fence(); }
inline void __nanosleep(unsigned) { shim::shim_sleep(); }

inline int shim_lane() {
    const dim3 thread = threadIdx, size = blockDim;
    return int((thread.x + size.x * (thread.y + size.y * thread.z)) % 32);
}

template <class T>
inline T shim_exchanged(unsigned mask, T value, int source_lane, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a word of 64 bits");
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = shim::shim_exchange(mask, bits, source_lane, line);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    const int first = shim_lane() & ~(width - 1);
    return shim_exchanged(mask, value, first + (source & (width - 1)), line);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
    const int lane = shim_lane(), source = lane ^ lanes;
    // A lane of a later group is not read: the lane keeps its own value.
    return shim_exchanged(mask, value, (source / width) > (lane / width) ? lane : source, line);
}

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, int line = __builtin_LINE()) {
    const int lane = shim_lane(), source = lane + int(lanes);
    return shim_exchanged(mask, value, (source / width) > (lane / width) ? lane : source, line);
}

template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, int line = __builtin_LINE()) {
    const int lane = shim_lane(), first = lane & ~(width - 1), source = lane - int(lanes);
    return shim_exchanged(mask, value, source < first ? lane : source, line);
}

inline unsigned __ballot_sync(unsigned mask, int bit, int line = __builtin_LINE()) {
    return shim::shim_ballot(mask, bit != 0, line);
}
inline int __any_sync(unsigned mask, int bit, int line = __builtin_LINE()) {
    return __ballot_sync(mask, bit, line) != 0;
}
inline int __all_sync(unsigned mask, int bit, int line = __builtin_LINE()) {
    return __ballot_sync(mask, bit, line) == mask;
}

// Integers only: a sum of floats by atomics depends on the schedule, so there is none to call.
inline unsigned atomicAdd(unsigned* word, unsigned value) {
    return shim::shim_atomic32(word, shim::ADD, value);
}
inline int atomicAdd(int* word, int value) {
    return int(shim::shim_atomic32(reinterpret_cast<unsigned*>(word), shim::ADD, unsigned(value)));
}
inline unsigned long long atomicAdd(unsigned long long* word, unsigned long long value) {
    return shim::shim_atomic64(reinterpret_cast<std::uint64_t*>(word), shim::ADD, value);
}
inline unsigned atomicInc(unsigned* word, unsigned last) {
    return shim::shim_atomic32(word, shim::INC, last);
}
inline unsigned atomicExch(unsigned* word, unsigned value) {
    return shim::shim_atomic32(word, shim::EXCH, value);
}
inline unsigned atomicOr(unsigned* word, unsigned value) {
    return shim::shim_atomic32(word, shim::OR, value);
}
inline unsigned atomicMax(unsigned* word, unsigned value) {
    return shim::shim_atomic32(word, shim::MAX, value);
}
inline unsigned atomicCAS(unsigned* word, unsigned compare, unsigned value) {
    return shim::shim_cas32(word, compare, value);
}
// For what a kernel writes as inline assembly.
inline unsigned shim_load_acquire(const unsigned* word) { return shim::shim_load32(word, true); }
inline unsigned shim_load_relaxed(const unsigned* word) { return shim::shim_load32(word, false); }
inline void shim_store_release(unsigned* word, unsigned value) { shim::shim_store32(word, value, true); }

// Cache operators change the speed of an access alone.
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline T __ldcv(const T* p) { return *p; }
template <class T> inline void __stwb(T* p, T value) { *p = value; }
template <class T> inline void __stcg(T* p, T value) { *p = value; }
template <class T> inline void __stcs(T* p, T value) { *p = value; }
template <class T> inline void __stwt(T* p, T value) { *p = value; }

// ---- bits ----

template <class To, class From>
inline To shim_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    std::memcpy(&result, &value, sizeof result);
    return result;
}
inline long long __double_as_longlong(double v) { return shim_bits<long long>(v); }
inline double __longlong_as_double(long long v) { return shim_bits<double>(v); }
inline int __float_as_int(float v) { return shim_bits<int>(v); }
inline float __int_as_float(int v) { return shim_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return shim_bits<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return shim_bits<float>(v); }
inline int __double2hiint(double v) { return int(shim_bits<std::uint64_t>(v) >> 32); }
inline int __double2loint(double v) { return int(shim_bits<std::uint64_t>(v)); }
inline double __hiloint2double(int hi, int lo) {
    return shim_bits<double>(std::uint64_t(unsigned(hi)) << 32 | unsigned(lo));
}
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }

// ---- arithmetic, each operation rounded once ----

#ifdef SHIM_COUNT
enum { SHIM_ADD, SHIM_MUL, SHIM_FMA, SHIM_DIV, SHIM_SQRT, SHIM_CONVERT };
#define SHIM_OPERATION(kind) (++shim::shim_flops[kind])
#else
#define SHIM_OPERATION(kind) ((void)0)
#endif

inline double __dadd_rn(double a, double b) { SHIM_OPERATION(SHIM_ADD); return a + b; }
inline double __dsub_rn(double a, double b) { SHIM_OPERATION(SHIM_ADD); return a - b; }
inline double __dmul_rn(double a, double b) { SHIM_OPERATION(SHIM_MUL); return a * b; }
inline double __fma_rn(double a, double b, double c) { SHIM_OPERATION(SHIM_FMA); return std::fma(a, b, c); }
inline double __ddiv_rn(double a, double b) { SHIM_OPERATION(SHIM_DIV); return a / b; }
inline double __drcp_rn(double a) { SHIM_OPERATION(SHIM_DIV); return 1.0 / a; }
inline double __dsqrt_rn(double a) { SHIM_OPERATION(SHIM_SQRT); return std::sqrt(a); }
inline float __fadd_rn(float a, float b) { SHIM_OPERATION(SHIM_ADD); return a + b; }
inline float __fsub_rn(float a, float b) { SHIM_OPERATION(SHIM_ADD); return a - b; }
inline float __fmul_rn(float a, float b) { SHIM_OPERATION(SHIM_MUL); return a * b; }
inline float __fmaf_rn(float a, float b, float c) { SHIM_OPERATION(SHIM_FMA); return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { SHIM_OPERATION(SHIM_DIV); return a / b; }
inline float __frcp_rn(float a) { SHIM_OPERATION(SHIM_DIV); return 1.0f / a; }
inline float __fsqrt_rn(float a) { SHIM_OPERATION(SHIM_SQRT); return std::sqrt(a); }

// 1 / sqrt(a), rounded once. The float64 quotient decides unless it is close to a midpoint of
// float32; squares of midpoints times `a` need 75 bits, and __float128 holds 113.
inline float __frsqrt_rn(float a) {
    SHIM_OPERATION(SHIM_SQRT);
    const float near = float(1.0 / std::sqrt(double(a)));
    if (!(near > 0) || std::isinf(near)) return near;
    const float neighbors[] = {std::nextafter(near, 0.0f), std::nextafter(near, INFINITY)};
    const __float128 low = ((__float128)near + neighbors[0]) / 2;
    const __float128 high = ((__float128)near + neighbors[1]) / 2;
    if (low * low * a > 1) return neighbors[0];
    if (high * high * a < 1) return neighbors[1];
    return near;
}

inline float __double2float_rn(double v) { SHIM_OPERATION(SHIM_CONVERT); return float(v); }
inline float __double2float_rz(double v) {
    SHIM_OPERATION(SHIM_CONVERT);
    const float near = float(v);
    return std::fabs(double(near)) > std::fabs(v) ? std::nextafter(near, 0.0f) : near;
}
inline double __int2double_rn(int v) { return v; }
inline double __uint2double_rn(unsigned v) { return v; }
inline double __ll2double_rn(long long v) { return double(v); }
inline double __ull2double_rn(unsigned long long v) { return double(v); }
inline float __int2float_rn(int v) { return float(v); }
inline float __ll2float_rn(long long v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }

using std::fabs; using std::fma; using std::fmax; using std::fmin; using std::frexp;
using std::ilogb; using std::isfinite; using std::isinf; using std::isnan; using std::ldexp;
using std::scalbn; using std::signbit; using std::sqrt;

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }

// ---- kernels as functions of the bytes of their parameters ----

namespace shim {
template <class T>
inline T take(const unsigned char* bytes, std::size_t& offset) {
    offset = (offset + alignof(T) - 1) / alignof(T) * alignof(T);
    T value;
    std::memcpy(&value, bytes + offset, sizeof value);
    offset += sizeof value;
    return value;
}
template <class... Parameters>
inline void call(void (*kernel)(Parameters...), const unsigned char* bytes) {
    std::size_t offset = 0;
    // In braces: they are taken from left to right.
    struct Call {
        Call(void (*kernel)(Parameters...), Parameters... values) { kernel(values...); }
    } done{kernel, take<Parameters>(bytes, offset)...};
    (void)done;
    (void)offset;
}
template <class... Parameters>
constexpr std::size_t size_of_parameters(void (*)(Parameters...)) {
    std::size_t offset = 0;
    ((offset = (offset + alignof(Parameters) - 1) / alignof(Parameters) * alignof(Parameters)
               + sizeof(Parameters)), ...);
    return offset;
}
}  // namespace shim
extern "C" char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end __attribute__((visibility("hidden")));
#define SHIM_LIBRARY                                                                           \
    extern "C" void shim_library(std::uintptr_t* range) {                                      \
        range[0] = reinterpret_cast<std::uintptr_t>(&__ehdr_start);                            \
        range[1] = reinterpret_cast<std::uintptr_t>(&_end);                                    \
    }
#define SHIM_ENTRY(name)                                                                       \
    extern "C" void shim_call_##name(const unsigned char* bytes) { shim::call(name, bytes); }  \
    extern "C" std::size_t shim_size_##name() { return shim::size_of_parameters(name); }
