// Arithmetic of layer_norm.cu: dtypes, float64, pairs of float64, and rounding once.

#define INLINE __device__ __forceinline__

// ---- dtypes ----

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};
using float32 = float;
using float64 = double;

using X = LN_X;
using Gamma = LN_GAMMA;
using Beta = LN_BETA;

// ---- float64: the compiler is told to contract nothing, so that + and * round once ----

INLINE double minus(double a, double b) { return a - b; }
INLINE double root(double a) { return __dsqrt_rn(a); }
INLINE double like(double, double s) { return s; }
INLINE double magnitude(double a) {
    return __longlong_as_double(__double_as_longlong(a) & 0x7fffffffffffffffll);
}
INLINE int exponent_field(double a) { return (int)(__double_as_longlong(a) >> 52) & 0x7ff; }
INLINE bool is_finite(double a) { return exponent_field(a) != 0x7ff; }
// 2**k, k from -1022 to 1023.
INLINE double power_of_two(int k) { return __longlong_as_double((long long)(k + 1023) << 52); }

// Return e with |a| = f * 2**e, f in [1/2, 1). It is -1086 for 0, 1025 for an infinity or a NaN.
INLINE int exponent_of(double a) {
    const int field = exponent_field(a);
    // A subnormal: its leading bit becomes an exponent once it is scaled up, exactly.
    return field ? field - 1022 : exponent_field(a * 0x1p64) - 1022 - 64;
}

INLINE int clamped(int k, int limit) { return k < -limit ? -limit : k > limit ? limit : k; }

// Return a * 2**k, rounded once where it does not fit, if |a| is between 2**-900 and 2**900. Two
// factors, because 2**k alone may be out of range; beyond 2**+-2000 nothing is left anyway.
INLINE double scaled(double a, int k) {
    const int whole = clamped(k, 2000);
    const int half = whole / 2;
    return a * power_of_two(half) * power_of_two(whole - half);
}

// The neighbor of `a`, which is neither zero nor infinite, in the direction of the sign of `low`.
INLINE double neighbor(double a, double low) {
    return __longlong_as_double(__double_as_longlong(a) + ((low > 0.0) == (a > 0.0) ? 1 : -1));
}

#include "../native/numbers.h"

// ---- numbers: what is summed along rows and over them; the equations are written in these ----

using Wide = Pair<double>;

#if LN_PAIRS
using Number = Wide;
INLINE Number number(double a) { return {a, 0.0}; }
INLINE Number difference(double a, double b) { return two_sum(a, -b); }
INLINE Number product(double a, double b) { return two_product(a, b); }
#else
using Number = double;
INLINE Number number(double a) { return a; }
INLINE Number difference(double a, double b) { return a - b; }
// Exact, for data of 32 bits at most.
INLINE Number product(double a, double b) { return a * b; }
#endif

INLINE double high(double a) { return a; }
INLINE double high(Wide a) { return a.high; }
INLINE double scaled_number(double v, int) { return v; }
INLINE Wide scaled_number(Wide v, int k) { return {scaled(v.high, k), scaled(v.low, k)}; }

// The value of a sum, with a low part of at most half an ulp; a NaN for that of an infinite sum.
INLINE double total(double a) { return a; }
INLINE Wide total(Wide a) { return is_finite(a.high) ? two_sum(a.high, a.low) : Wide{a.high, 0.0}; }

// Exact where the quotient is a float64, so that constant rows stay constant.
INLINE double over_n(double sum, double n) { return sum / n; }
INLINE Wide over_n(Wide sum, double n) {
    const double quotient = sum.high / n;
    return two_sum(quotient, (fma(-quotient, n, sum.high) + sum.low) / n);
}

// ---- elements as float64 ----

#ifdef __CUDA_ARCH__
INLINE double half_to_double(unsigned short bits) {
    double result;
    asm("cvt.f64.f16 %0, %1;" : "=d"(result) : "h"(bits));
    return result;
}
INLINE unsigned short double_to_half(double v) {
    unsigned short bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(v));
    return bits;
}
#endif

INLINE double lift(float16 v) { return half_to_double(v.bits); }
INLINE double lift(double v) { return v; }
template <class T> INLINE float small(T v) { return (float)lift(v); }
INLINE float small(bfloat16 v) { return __uint_as_float((unsigned)v.bits << 16); }

// ---- rounding once ----

// Toward zero, then the last bit set if anything was lost: never a midpoint of a narrower type,
// so that rounding twice is rounding once (Boldo and Melquiond, IEEE Trans. Comput. 57 (2008)).
INLINE float odd_float(double v) {
    const float cut = __double2float_rz(v);
    return __uint_as_float(__float_as_uint(cut) | ((double)cut != v ? 1u : 0u));
}

// The same of high + low: where high is even and inexact, its neighbor on the side of low.
INLINE double odd_sum(Wide v) {
    const bool even = (__double_as_longlong(v.high) & 1) == 0;
    return even && v.low != 0.0 && is_finite(v.high) ? neighbor(v.high, v.low) : v.high;
}

INLINE void round_into(float16& out, double v) { out.bits = double_to_half(v); }
INLINE void round_into(float& out, double v) { out = __double2float_rn(v); }
INLINE void round_into(double& out, double v) { out = v; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// Devices from 9.0 on convert between float64 and bfloat16 by one instruction, which rounds once.
INLINE double lift(bfloat16 v) {
    double result;
    asm("cvt.f64.bf16 %0, %1;" : "=d"(result) : "h"(v.bits));
    return result;
}
INLINE void round_into(bfloat16& out, double v) {
    asm("cvt.rn.bf16.f64 %0, %1;" : "=h"(out.bits) : "d"(v));
}
#else
INLINE double lift(bfloat16 v) { return small(v); }
INLINE void round_into(bfloat16& out, double v) {
    const unsigned bits = __float_as_uint(odd_float(v));
    // The carry of a NaN with all bits set would make it a zero.
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out.bits = is_nan ? 0x7fffu : (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
#endif

// v * 2**k as a float64, rounded once. Where that is subnormal, v.high may be a midpoint of their
// grid only because v.low is missing: then high is moved to the side of low before it is scaled
// down.
INLINE double scaled_once(Wide v, int k) {
    const double rounded = scaled(v.high, k);
    if (!(magnitude(rounded) <= 0x1p-1022) || v.low == 0.0) return rounded;
    const double lost = v.high - scaled(rounded, -k);
    // Half of the smallest subnormal, 2**-1075, in the scale of high.
    if (lost == 0.0 || magnitude(lost) != scaled(1.0, -1075 - k)) return rounded;
    return scaled(neighbor(v.high, v.low), k);
}

// Round v * 2**k; only pairs have a k.
template <class T> INLINE void round_scaled(T& out, double v, int) { round_into(out, v); }
template <class T> INLINE void round_scaled(T& out, Wide v, int k) {
    v = total(v);
    round_into(out, sizeof(T) == 8 ? scaled_once(v, k) : odd_sum(scaled_number(v, k)));
}
