// Arithmetic of layer_norm.cu: dtypes, words, pairs of words, and rounding once.

#define LN_INLINE __device__ __forceinline__
#define LN_PAIRS (LN_ARITHMETIC != 0)

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

#if LN_ARITHMETIC == 2
using Word = float;
#else
using Word = double;
#endif

// What gamma and beta are held in: exactly, in every arithmetic that they can meet.
#if LN_ARITHMETIC == 1
using Held = double;
#else
using Held = float;
#endif

constexpr int WARP = 32;
constexpr int BLOCK = LN_BLOCK;
constexpr int ROW_THREADS = LN_ROW_THREADS;
constexpr int SLOTS = BLOCK / ROW_THREADS;
constexpr int WARPS = (BLOCK + WARP - 1) / WARP;
constexpr int ROW_WARPS = ROW_THREADS < WARP ? 1 : ROW_THREADS / WARP;
constexpr int VECTOR = 16 / sizeof(X);
constexpr bool RESIDENT = LN_VECTORS > 0;
constexpr int VECTORS = RESIDENT ? LN_VECTORS : 1;
// Of a block: those of a row, or of the part of it that one block of a cluster has.
constexpr int COLUMNS = ROW_THREADS * VECTORS * VECTOR;
constexpr int CLUSTER = LN_CLUSTER;
// Columns of rows that fit registers are counted in 32 bits, offsets always in 64.
#if LN_VECTORS
using Index = int;
#else
using Index = long long;
#endif
constexpr unsigned ALL_LANES = 0xffffffffu;

// ---- words: float64 or float32, every rounding named ----

LN_INLINE double add(double a, double b) { return __dadd_rn(a, b); }
LN_INLINE double mul(double a, double b) { return __dmul_rn(a, b); }
LN_INLINE double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
LN_INLINE double divide(double a, double b) { return __ddiv_rn(a, b); }
LN_INLINE double square_root(double a) { return __dsqrt_rn(a); }
LN_INLINE float add(float a, float b) { return __fadd_rn(a, b); }
LN_INLINE float mul(float a, float b) { return __fmul_rn(a, b); }
LN_INLINE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LN_INLINE float divide(float a, float b) { return __fdiv_rn(a, b); }
LN_INLINE float square_root(float a) { return __fsqrt_rn(a); }

LN_INLINE double magnitude(double a) {
    return __longlong_as_double(__double_as_longlong(a) & 0x7fffffffffffffffll);
}
LN_INLINE float magnitude(float a) { return __uint_as_float(__float_as_uint(a) & 0x7fffffffu); }
LN_INLINE bool is_finite(double a) {
    const long long field = 0x7ff0000000000000ll;
    return (__double_as_longlong(a) & field) != field;
}
LN_INLINE bool is_finite(float a) { return (__float_as_uint(a) & 0x7f800000u) != 0x7f800000u; }

// 2**k, k from -1022 to 1023.
LN_INLINE double power_of_two(int k) { return __longlong_as_double((long long)(k + 1023) << 52); }

// Return e with |a| = f * 2**e, f in [1/2, 1); a is neither zero nor NaN.
LN_INLINE int exponent_of(double a) {
    int field = (int)(__double_as_longlong(a) >> 52) & 0x7ff;
    // A subnormal: its leading bit becomes an exponent once it is scaled up, exactly.
    int lift = field == 0 ? 64 : 0;
    if (field == 0) field = (int)(__double_as_longlong(mul(a, 0x1p64)) >> 52) & 0x7ff;
    return field - 1022 - lift;
}

// Return a * 2**k, rounded once where it does not fit; |a| is between 2**-300 and 2**300, or k
// is such that nothing is lost. |k| <= 1500.
LN_INLINE double scaled(double a, int k) {
    int first = k < -500 ? -500 : k > 500 ? 500 : k;
    int rest = k - first;
    // A second step of more than 2**+-1000 would not be one normal number.
    int second = rest < -500 ? -500 : rest > 500 ? 500 : rest;
    return mul(mul(mul(a, power_of_two(first)), power_of_two(second)), power_of_two(rest - second));
}

// ---- pairs: hi + lo, |lo| at most half an ulp of hi unless said otherwise ----

struct Pair { Word hi, lo; };

// Knuth: fl(a + b) and its exact error.
LN_INLINE Pair two_sum(Word a, Word b) {
    Word total = add(a, b);
    Word b_part = add(total, -a);
    return {total, add(add(a, -add(total, -b_part)), add(b, -b_part))};
}

// Dekker: the same, given |a| >= |b| or a == 0.
LN_INLINE Pair fast_two_sum(Word a, Word b) {
    Word total = add(a, b);
    return {total, add(b, -add(total, -a))};
}

LN_INLINE Pair product_of(Word a, Word b) {
    Word product = mul(a, b);
    return {product, fma_rn(a, b, -product)};
}

LN_INLINE Pair negative(Pair a) { return {-a.hi, -a.lo}; }

LN_INLINE Pair add(Pair a, Pair b) {
    Pair high = two_sum(a.hi, b.hi), low = two_sum(a.lo, b.lo);
    high = fast_two_sum(high.hi, add(high.lo, low.hi));
    return fast_two_sum(high.hi, add(high.lo, low.lo));
}

LN_INLINE Pair mul(Pair a, Pair b) {
    Pair p = product_of(a.hi, b.hi);
    return two_sum(p.hi, fma_rn(a.hi, b.lo, fma_rn(a.lo, b.hi, p.lo)));
}

// ---- numbers: what is summed and multiplied, words or pairs ----

#if LN_PAIRS
using Number = Pair;

LN_INLINE Number number(Word a) { return {a, Word(0)}; }

// Add to a running sum, whose low word gathers what rounding takes from the high one.
LN_INLINE void accumulate(Number& sum, Number term) {
    Pair high = two_sum(sum.hi, term.hi);
    sum = {high.hi, add(sum.lo, add(high.lo, term.lo))};
}

LN_INLINE Number settled(Number a) { return two_sum(a.hi, a.lo); }

LN_INLINE Number over_n(Number sum, Word n, Word inverse) {
    Word quotient = mul(sum.hi, inverse);
    Word rest = add(fma_rn(-quotient, n, sum.hi), sum.lo);
    return two_sum(quotient, mul(rest, inverse));
}

// The low word may exceed half an ulp of the high one by a few bits: it is only summed.
LN_INLINE Number loose_product(Number a, Number b) {
    Pair p = product_of(a.hi, b.hi);
    return {p.hi, fma_rn(a.hi, b.lo, fma_rn(a.lo, b.hi, p.lo))};
}

LN_INLINE Number loose_product(Word a, Number b) {
    Pair p = product_of(a, b.hi);
    return {p.hi, fma_rn(a, b.lo, p.lo)};
}

LN_INLINE Number select(bool take, Number a) { return take ? a : Number{Word(0), Word(0)}; }

LN_INLINE Number exchanged(Number a, int lanes) {
    return {__shfl_xor_sync(ALL_LANES, a.hi, lanes), __shfl_xor_sync(ALL_LANES, a.lo, lanes)};
}

// (v + v_lo)**-0.5: a Newton step of second order from the word's own.
LN_INLINE Number reciprocal_root(Number v) {
    Word start = divide(Word(1), square_root(v.hi));
    Pair square = product_of(start, start);
    Pair one = product_of(v.hi, square.hi);
    Word error = add(one.lo, fma_rn(v.hi, square.lo, mul(v.lo, square.hi)));
    // A few units in the last place of 1; the subtraction is exact.
    Word delta = add(add(Word(1), -one.hi), -error);
    Word correction = fma_rn(mul(Word(0.375), delta), delta, mul(Word(0.5), delta));
    return fast_two_sum(start, mul(start, correction));
}
#else
using Number = Word;

LN_INLINE Number number(Word a) { return a; }
LN_INLINE void accumulate(Number& sum, Number term) { sum = add(sum, term); }
LN_INLINE Number settled(Number a) { return a; }
LN_INLINE Number select(bool take, Number a) { return take ? a : Word(0); }
LN_INLINE Number exchanged(Number a, int lanes) { return __shfl_xor_sync(ALL_LANES, a, lanes); }

// A division without its instructions: the quotient, and what its own remainder adds to it. It is
// exact where the quotient is a float64, so that constant rows stay constant.
LN_INLINE Number over_n(Number sum, Word n, Word inverse) {
    Word quotient = mul(sum, inverse);
    return fma_rn(fma_rn(-quotient, n, sum), inverse, quotient);
}
#endif

// ---- dtypes into words and back, each rounded once ----

LN_INLINE float float_of(Bfloat16 v) { return __uint_as_float((unsigned)v.bits << 16); }

#ifdef __CUDA_ARCH__
LN_INLINE float float_of(Float16 v) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(v.bits));
    return result;
}

LN_INLINE unsigned short float16_bits(float v) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}
#else
LN_INLINE float float_of(Float16 v) {
    unsigned rest = (v.bits & 0x7fffu) << 13;
    // As a float32 these bits are 2**112 too small, subnormals as well.
    unsigned size = __float_as_uint(__fmul_rn(__uint_as_float(rest), 0x1p112f));
    // Infinity and NaN keep their fraction under the larger exponent.
    if (rest >= 0x7c00u << 13) size = rest | 0x7f800000u;
    return __uint_as_float(size | (v.bits & 0x8000u) << 16);
}

LN_INLINE unsigned short float16_bits(float v) {
    unsigned bits = __float_as_uint(v), size = bits & 0x7fffffffu, result;
    if (size > 0x7f800000u) return 0x7fffu;
    if (size >= 0x477ff000u) {
        // From the midpoint between the largest, 65504, and 65536 on.
        result = 0x7c00u;
    } else if (size < 113u << 23) {
        // Subnormal: adding 0.5, whose ulp is 2**-24, rounds to their grid.
        result = __float_as_uint(__fadd_rn(__uint_as_float(size), 0.5f)) - 0x3f000000u;
    } else {
        result = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
    }
    return (unsigned short)(result | bits >> 16 & 0x8000u);
}
#endif

LN_INLINE unsigned short bfloat16_bits(float v) {
    unsigned bits = __float_as_uint(v);
    // The carry of a NaN with all bits set would make it a zero.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Toward zero, then the last bit set if anything was lost: never a midpoint of a narrower type,
// so that rounding twice is rounding once (Boldo and Melquiond, IEEE Trans. Comput. 57 (2008)).
LN_INLINE float odd_float(double v) {
    float kept = __double2float_rz(v);
    return __uint_as_float(__float_as_uint(kept) | ((double)kept != v ? 1u : 0u));
}

// The same of hi + lo: where hi is even and inexact, its neighbour on the side of lo.
LN_INLINE double odd_sum(double hi, double lo) {
    long long bits = __double_as_longlong(hi);
    bool move = (bits & 1) == 0 && lo != 0.0 && is_finite(hi);
    long long step = (lo > 0.0) == (hi > 0.0) ? 1 : -1;
    return move ? __longlong_as_double(bits + step) : hi;
}

LN_INLINE float odd_sum(float hi, float lo) {
    unsigned bits = __float_as_uint(hi);
    bool move = (bits & 1u) == 0 && lo != 0.0f && is_finite(hi);
    unsigned step = (lo > 0.0f) == (hi > 0.0f) ? 1u : 0xffffffffu;
    return move ? __uint_as_float(bits + step) : hi;
}

LN_INLINE void round_into(Float16& out, double v) { out.bits = float16_bits(odd_float(v)); }
LN_INLINE void round_into(Bfloat16& out, double v) { out.bits = bfloat16_bits(odd_float(v)); }
LN_INLINE void round_into(float& out, double v) { out = __double2float_rn(v); }
LN_INLINE void round_into(double& out, double v) { out = v; }
LN_INLINE void round_into(Float16& out, float v) { out.bits = float16_bits(v); }
LN_INLINE void round_into(Bfloat16& out, float v) { out.bits = bfloat16_bits(v); }
LN_INLINE void round_into(float& out, float v) { out = v; }

// Round a settled pair; a word that is wide enough needs no second one.
template <class T> LN_INLINE void round_into(T& out, Pair v) {
    if (sizeof(T) == sizeof(Word)) round_into(out, v.hi);
    else round_into(out, odd_sum(v.hi, v.lo));
}

#if LN_ARITHMETIC == 1
// Move hi off a midpoint of the subnormal grid, to the side of lo, before it is scaled down:
// elsewhere scaling loses nothing, and what is lost there is no midpoint.
LN_INLINE double off_midpoint(Pair v, int k) {
    double rounded = scaled(v.hi, k);
    if (!(magnitude(rounded) <= 0x1p-1022) || v.lo == 0.0) return v.hi;
    double lost = add(v.hi, -scaled(rounded, -k));
    // Half of the smallest subnormal, 2**-1075, in the scale of hi.
    if (lost == 0.0 || magnitude(lost) != scaled(1.0, -1075 - k)) return v.hi;
    long long bits = __double_as_longlong(v.hi);
    return __longlong_as_double(bits + ((v.lo > 0.0) == (v.hi > 0.0) ? 1 : -1));
}
#endif

// Round v * 2**k.
LN_INLINE void round_scaled(X& out, Number v, int k) {
#if LN_ARITHMETIC == 1
    if (k != 0 && sizeof(X) == 8) {
        round_into(out, scaled(off_midpoint(v, k), k));
        return;
    }
#elif LN_ARITHMETIC == 2
    if (k != 0) {
        // The range of float32 is left for once; 48 bits fit.
        round_into(out, mul(add((double)v.hi, (double)v.lo), power_of_two(k)));
        return;
    }
#endif
    round_into(out, v);
}
