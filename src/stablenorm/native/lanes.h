// Lanes: L float64 as an array of native registers. Column j of a row is in lane j % L, whatever the
// processor; only how many lanes one register holds differs.
#pragma once
#include "simd.h"

namespace {

template <int L, int W = WIDEST> struct Lanes {
    static constexpr int REGISTERS_OF = L / W;
    Register<double, W> v[L / W];
};

// Lanes in memory would be lanes read back: all loops over registers are unrolled.
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < L / W; i++)

template <int L, int W> INLINE Lanes<L, W> operator+(Lanes<L, W> a, Lanes<L, W> b) { EACH a.v[i] += b.v[i]; return a; }
template <int L, int W> INLINE Lanes<L, W> operator-(Lanes<L, W> a, Lanes<L, W> b) { EACH a.v[i] -= b.v[i]; return a; }
template <int L, int W> INLINE Lanes<L, W> operator*(Lanes<L, W> a, Lanes<L, W> b) { EACH a.v[i] *= b.v[i]; return a; }
template <int L, int W> INLINE Lanes<L, W> operator/(Lanes<L, W> a, Lanes<L, W> b) { EACH a.v[i] /= b.v[i]; return a; }
template <int L, int W> INLINE Lanes<L, W> operator-(Lanes<L, W> a) { EACH a.v[i] = -a.v[i]; return a; }
template <int L, int W> INLINE Lanes<L, W> root(Lanes<L, W> a) { EACH a.v[i] = Vector<W>::root(a.v[i]); return a; }
template <int L, int W> INLINE Lanes<L, W> fma(Lanes<L, W> a, Lanes<L, W> b, Lanes<L, W> c) {
    EACH c.v[i] = Vector<W>::fma(a.v[i], b.v[i], c.v[i]);
    return c;
}

template <int L, int W = WIDEST> INLINE Lanes<L, W> spread(double s) {
    Lanes<L, W> r;
    EACH r.v[i] = s - Register<double, W>{};  // not 0 + s: -0.0 stays
    return r;
}
template <int L, int W> INLINE Lanes<L, W> like(Lanes<L, W>, double s) { return spread<L, W>(s); }

INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
INLINE double minus(double a, double b) { return a - b; }
INLINE double magnitude(double a) { return __builtin_fabs(a); }

// a - b by the units that multiply, which on many processors (AMD Zen) are others than those that add:
// a fused multiply-add with -1 from where the compiler cannot see it.
template <int L, int W> INLINE Lanes<L, W> minus(Lanes<L, W> a, Lanes<L, W> b) {
    Register<double, W> one = spread<W, W>(-1.0).v[0];
    Vector<W>::hide(one);
    EACH a.v[i] = Vector<W>::fma(b.v[i], one, a.v[i]);
    return a;
}

// ---- bits ----

template <int L, int W> struct Words {
    Register<int64_t, W> v[L / W];
};
template <int L, int W> INLINE Words<L, W> bits_of(Lanes<L, W> a) { return read<Words<L, W>>(&a); }
template <int L, int W> INLINE Lanes<L, W> magnitude(Lanes<L, W> a) {
    EACH a.v[i] = (Register<double, W>)((Register<int64_t, W>)a.v[i] & INT64_MAX);
    return a;
}

// The first m lanes, and zeros.
template <int L, int W> INLINE Lanes<L, W> first(Lanes<L, W> a, Index m) {
    Register<int64_t, W> place;
    for (int k = 0; k < W; k++) place[k] = k;
    EACH a.v[i] = (Register<double, W>)((Register<int64_t, W>)a.v[i] & (place + i * W < m));
    return a;
}

template <int L, int W> INLINE bool any(Words<L, W> a) {
    Register<int64_t, W> all = a.v[0];
    for (int i = 1; i < L / W; i++) all |= a.v[i];
    int64_t found = 0;
    for (int k = 0; k < W; k++) found |= all[k];
    return found != 0;
}

// By halves: lane i and lane i + 8, then i + 4, and so on.
template <int L, int W> INLINE double total(Lanes<L, W> a) {
    double s[W];
    for (int half = L / W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
    write(s, a.v[0]);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

// ---- memory ----

template <int L, int W = WIDEST, class T> INLINE Lanes<L, W> load(const T* p) {
    Lanes<L, W> r;
    if constexpr (sizeof(T) == 8) {
        EACH r.v[i] = read<Register<double, W>>(p + i * W);
    } else {
        EACH r.v[i] = Vector<W>::from(p + i * W);
    }
    return r;
}

// Truncated to two bits more than the narrow type has, the last one set if anything was lost, a number
// is never a midpoint of that type: it can be rounded again (Boldo and Melquiond 2008), by way of float32,
// through which so few bits pass exactly.
template <int DIGITS, int L, int W> INLINE Lanes<L, W> odd(Lanes<L, W> a) {
    constexpr int64_t mask = (1LL << (51 - DIGITS)) - 1;
    EACH {
        auto bits = (Register<int64_t, W>)a.v[i];
        a.v[i] = (Register<double, W>)((bits | ((bits & mask) + mask)) & ~mask);
    }
    return a;
}

INLINE H8 half_bits(F8 v, const bf16*) {
    U8 bits = (U8)v, near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // The carry of a NaN with all bits set would make it a zero.
    return low_halves(v == v ? near : U8{} + 0x7fc0);
}
INLINE H8 half_bits(F8 v, const f16*) { return half_of(v); }

// Where rounding by way of float32 may go wrong: at midpoints of the narrow type, of which one value in
// 2**16 (float16: 2**13) becomes one, and among float16's subnormals, which have others.
INLINE U8 in_doubt(F8 v, const bf16*) { return (U8)(((U8)v & 0xffff) == 0x8000); }
INLINE U8 in_doubt(F8 v, const f16*) {
    auto size = (Register<int32_t, 8>)v & 0x7fffffff;
    return (U8)(((U8)v & 0x1fff) == 0x1000) | (U8)(size < 0x38800000);
}
template <class T> constexpr int DIGITS = 24;
template <> constexpr int DIGITS<bf16> = 8;
template <> constexpr int DIGITS<f16> = 11;

// Rounds once, to nearest even; PAST: past the caches.
template <bool PAST = false, int L, int W, class T> INLINE void store(T* p, Lanes<L, W> a) {
    auto put = [](void* to, const auto& v) INLINED { PAST ? stream(to, v) : write(to, v); };
    if constexpr (sizeof(T) == 8) {
        EACH put(p + i * W, a.v[i]);
    } else if constexpr (sizeof(T) == 4) {
        for (int k = 0; k < L; k += 8) put(p + k, Vector<W>::singles(a.v + k / W));
    } else {
        U8 doubt = {};
        F8 v[L / 8];
        for (int k = 0; k < L / 8; k++) {
            v[k] = Vector<W>::singles(a.v + k * 8 / W);
            doubt |= in_doubt(v[k], p);
        }
        if (__builtin_expect(any(doubt), 0)) {
            a = odd<DIGITS<T>>(a);
            for (int k = 0; k < L / 8; k++) v[k] = Vector<W>::singles(a.v + k * 8 / W);
        }
        for (int k = 0; k < L / 8; k++) put(p + k * 8, half_bits(v[k], p));
    }
}

// The last m columns of a row, by way of a copy: nothing behind the row is read or written.
template <int L, int W = WIDEST, class T> INLINE Lanes<L, W> load(const T* p, Index m) {
    T copy[L] = {};
    memcpy(copy, p, (size_t)m * sizeof(T));
    return load<L, W>(copy);
}
template <int L, int W, class T> INLINE void store(T* p, Lanes<L, W> a, Index m) {
    T copy[L];
    store(copy, a);
    memcpy(p, copy, (size_t)m * sizeof(T));
}

}  // namespace
