// Arithmetic of layer_norm.cu: dtypes, float64, pairs of float64, and rounding once.

#define LN_INLINE __device__ __forceinline__

// ---- dtypes ----

struct Float16 { unsigned short bits; };
struct Bfloat16 { unsigned short bits; };

template <int code> struct Dtype;
template <> struct Dtype<0> { using type = Float16; };
template <> struct Dtype<1> { using type = Bfloat16; };
template <> struct Dtype<2> { using type = float; };
template <> struct Dtype<3> { using type = double; };

using X = Dtype<LN_X>::type;
using DY = Dtype<LN_DY>::type;
using Gamma = Dtype<LN_GAMMA>::type;
using Beta = Dtype<LN_BETA>::type;

// ---- float64, every rounding named ----

LN_INLINE double add(double a, double b) { return __dadd_rn(a, b); }
LN_INLINE double mul(double a, double b) { return __dmul_rn(a, b); }
LN_INLINE double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }

LN_INLINE double magnitude(double a) {
    return __longlong_as_double(__double_as_longlong(a) & 0x7fffffffffffffffll);
}

LN_INLINE bool is_finite(double a) {
    const long long field = 0x7ff0000000000000ll;
    return (__double_as_longlong(a) & field) != field;
}

// 2**k, k from -1022 to 1023.
LN_INLINE double power_of_two(int k) { return __longlong_as_double((long long)(k + 1023) << 52); }

// Return e with |a| = f * 2**e, f in [1/2, 1). It is -1086 for 0, 1025 for an infinity or a NaN.
LN_INLINE int exponent_of(double a) {
    const int field = (int)(__double_as_longlong(a) >> 52) & 0x7ff;
    if (field != 0) return field - 1022;
    // A subnormal: its leading bit becomes an exponent once it is scaled up, exactly.
    return ((int)(__double_as_longlong(mul(a, 0x1p64)) >> 52) & 0x7ff) - 1022 - 64;
}

LN_INLINE int clamped(int k, int limit) { return k < -limit ? -limit : k > limit ? limit : k; }

// Return a * 2**k, rounded once where it does not fit, if |a| is between 2**-900 and 2**900. Two
// factors, because 2**k alone may be out of range; beyond 2**+-2000 nothing is left anyway.
LN_INLINE double scaled(double a, int k) {
    const int whole = clamped(k, 2000), half = whole / 2;
    return mul(mul(a, power_of_two(half)), power_of_two(whole - half));
}

// The neighbor of `a`, which is neither zero nor infinite, in the direction of the sign of `lo`.
LN_INLINE double neighbor(double a, double lo) {
    return __longlong_as_double(__double_as_longlong(a) + ((lo > 0.0) == (a > 0.0) ? 1 : -1));
}

// ---- pairs: hi + lo, |lo| at most half an ulp of hi ----

struct Pair { double hi, lo; };

// Knuth: fl(a + b) and its exact error.
LN_INLINE Pair two_sum(double a, double b) {
    const double total = add(a, b), b_part = add(total, -a);
    return {total, add(add(a, -add(total, -b_part)), add(b, -b_part))};
}

// Dekker: the same, given |a| >= |b| or a == 0.
LN_INLINE Pair fast_two_sum(double a, double b) {
    const double total = add(a, b);
    return {total, add(b, -add(total, -a))};
}

LN_INLINE Pair product_of(double a, double b) {
    const double product = mul(a, b);
    return {product, fma_rn(a, b, -product)};
}

LN_INLINE Pair add(Pair a, Pair b) {
    Pair high = two_sum(a.hi, b.hi);
    const Pair low = two_sum(a.lo, b.lo);
    high = fast_two_sum(high.hi, add(high.lo, low.hi));
    return fast_two_sum(high.hi, add(high.lo, low.lo));
}

LN_INLINE Pair mul(Pair a, Pair b) {
    const Pair p = product_of(a.hi, b.hi);
    return fast_two_sum(p.hi, fma_rn(a.hi, b.lo, fma_rn(a.lo, b.hi, p.lo)));
}

LN_INLINE double shifted(double v, int) { return v; }
LN_INLINE Pair shifted(Pair v, int k) { return {scaled(v.hi, k), scaled(v.lo, k)}; }

// v**-0.5: a Newton step of second order from float64's own.
LN_INLINE Pair reciprocal_root(Pair v) {
    const double start = __ddiv_rn(1.0, __dsqrt_rn(v.hi));
    const Pair square = product_of(start, start), one = product_of(v.hi, square.hi);
    const double error = add(one.lo, fma_rn(v.hi, square.lo, mul(v.lo, square.hi)));
    // A few units in the last place of 1; the subtraction is exact.
    const double delta = add(add(1.0, -one.hi), -error);
    return fast_two_sum(start, mul(start, fma_rn(mul(0.375, delta), delta, mul(0.5, delta))));
}

// ---- numbers: what is summed along rows and over them; the equations are written in these ----

#if LN_PAIRS
using Number = Pair;
LN_INLINE Number number(double a) { return {a, 0.0}; }
LN_INLINE Number difference(double a, double b) { return two_sum(a, -b); }
LN_INLINE Number product(double a, double b) { return product_of(a, b); }
#else
using Number = double;
LN_INLINE Number number(double a) { return a; }
LN_INLINE Number difference(double a, double b) { return add(a, -b); }
// Exact, for data of 32 bits at most.
LN_INLINE Number product(double a, double b) { return mul(a, b); }
#endif

LN_INLINE double high(double a) { return a; }
LN_INLINE double high(Pair a) { return a.hi; }

LN_INLINE double negative(double a) { return -a; }
LN_INLINE Pair negative(Pair a) { return {-a.hi, -a.lo}; }

// The low word of a running sum gathers what rounding takes from the high one.
LN_INLINE void accumulate(double& sum, double term) { sum = add(sum, term); }
LN_INLINE void accumulate(Pair& sum, Pair term) {
    const Pair high = two_sum(sum.hi, term.hi);
    sum = {high.hi, add(sum.lo, add(high.lo, term.lo))};
}
LN_INLINE void accumulate(Pair& sum, double term) { accumulate(sum, Pair{term, 0.0}); }

// A running sum as a number. The low word of an infinite one is a NaN.
LN_INLINE double settled(double a) { return a; }
LN_INLINE Pair settled(Pair a) { return is_finite(a.hi) ? two_sum(a.hi, a.lo) : Pair{a.hi, 0.0}; }

// Exact where the quotient is a float64, so that constant rows stay constant.
LN_INLINE double over_n(double sum, double n) { return __ddiv_rn(sum, n); }
LN_INLINE Pair over_n(Pair sum, double n) {
    const double quotient = __ddiv_rn(sum.hi, n);
    return two_sum(quotient, __ddiv_rn(add(fma_rn(-quotient, n, sum.hi), sum.lo), n));
}

// ---- elements as float64 ----

#ifdef __CUDA_ARCH__
LN_INLINE float half_to_float(unsigned short bits) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
    return result;
}

LN_INLINE unsigned short float_to_half(float v) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}
#endif

LN_INLINE double lift(Float16 v) { return half_to_float(v.bits); }
LN_INLINE double lift(Bfloat16 v) { return __uint_as_float((unsigned)v.bits << 16); }
LN_INLINE double lift(float v) { return v; }
LN_INLINE double lift(double v) { return v; }

// ---- rounding once ----

// Toward zero, then the last bit set if anything was lost: never a midpoint of a narrower type,
// so that rounding twice is rounding once (Boldo and Melquiond, IEEE Trans. Comput. 57 (2008)).
LN_INLINE float odd_float(double v) {
    const float kept = __double2float_rz(v);
    return __uint_as_float(__float_as_uint(kept) | ((double)kept != v ? 1u : 0u));
}

// The same of hi + lo: where hi is even and inexact, its neighbor on the side of lo.
LN_INLINE double odd_sum(Pair v) {
    const bool even = (__double_as_longlong(v.hi) & 1) == 0;
    return even && v.lo != 0.0 && is_finite(v.hi) ? neighbor(v.hi, v.lo) : v.hi;
}

LN_INLINE unsigned short bfloat16_bits(float v) {
    const unsigned bits = __float_as_uint(v);
    // The carry of a NaN with all bits set would make it a zero.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

LN_INLINE void round_into(Float16& out, double v) { out.bits = float_to_half(odd_float(v)); }
LN_INLINE void round_into(Bfloat16& out, double v) { out.bits = bfloat16_bits(odd_float(v)); }
LN_INLINE void round_into(float& out, double v) { out = __double2float_rn(v); }
LN_INLINE void round_into(double& out, double v) { out = v; }

// v * 2**k as a float64, rounded once. Where that is subnormal, v.hi may be a midpoint of their grid
// only because v.lo is missing: then hi is moved to the side of lo before it is scaled down.
LN_INLINE double scaled_once(Pair v, int k) {
    const double rounded = scaled(v.hi, k);
    if (!(magnitude(rounded) <= 0x1p-1022) || v.lo == 0.0) return rounded;
    const double lost = add(v.hi, -scaled(rounded, -k));
    // Half of the smallest subnormal, 2**-1075, in the scale of hi.
    if (lost == 0.0 || magnitude(lost) != scaled(1.0, -1075 - k)) return rounded;
    return scaled(neighbor(v.hi, v.lo), k);
}

// Round v * 2**k; only pairs have a k.
template <class T> LN_INLINE void round_scaled(T& out, double v, int) { round_into(out, v); }
template <class T> LN_INLINE void round_scaled(T& out, Pair v, int k) {
    round_into(out, sizeof(T) == 8 ? scaled_once(v, k) : odd_sum(shifted(v, k)));
}
