// Lanes: L float64 as an array of native registers. Column j of a row is in lane j % L on every
// processor; processors differ in the lanes of one register alone.
#pragma once
#include "simd.h"

namespace {

// A loop over the registers of Lanes, unrolled: otherwise it would go through memory.
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < REGISTERS_OF; i++)

template <int L, int W = WIDEST> struct Lanes {
    static constexpr int REGISTERS_OF = L / W;
    using One = Register<double, W>;
    using Bits = Register<int64_t, W>;
    One v[L / W];

    friend INLINE Lanes operator+(Lanes a, Lanes b) {
        EACH a.v[i] += b.v[i];
        return a;
    }
    friend INLINE Lanes operator-(Lanes a, Lanes b) {
        EACH a.v[i] -= b.v[i];
        return a;
    }
    friend INLINE Lanes operator*(Lanes a, Lanes b) {
        EACH a.v[i] *= b.v[i];
        return a;
    }
    friend INLINE Lanes operator/(Lanes a, Lanes b) {
        EACH a.v[i] /= b.v[i];
        return a;
    }
    friend INLINE Lanes operator-(Lanes a) {
        EACH a.v[i] = -a.v[i];
        return a;
    }
    friend INLINE Lanes root(Lanes a) {
        EACH a.v[i] = Vector<W>::root(a.v[i]);
        return a;
    }
    friend INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
        EACH c.v[i] = Vector<W>::fma(a.v[i], b.v[i], c.v[i]);
        return c;
    }
    // All lanes are s.
    static INLINE Lanes all(double s) {
        Lanes a;
        EACH a.v[i] = s - One{};  // not 0 + s: -0.0 stays
        return a;
    }
    friend INLINE Lanes like(Lanes, double s) { return all(s); }

    // Subtracts with a fused multiply-add, by a -1 that the compiler cannot see. AMD Zen has
    // separate units that add and that multiply; this keeps the former free.
    friend INLINE Lanes minus(Lanes a, Lanes b) {
        One one = One{} - 1.0;
        Vector<W>::hide(one);
        EACH a.v[i] = Vector<W>::fma(b.v[i], one, a.v[i]);
        return a;
    }

    // One register with every bit in which a lane of a and that of b differ.
    friend INLINE Bits differences(Lanes a, Lanes b) {
        Bits all = {};
        EACH all |= (Bits)a.v[i] ^ (Bits)b.v[i];
        return all;
    }
    friend INLINE Lanes magnitude(Lanes a) {
        EACH a.v[i] = (One)((Bits)a.v[i] & INT64_MAX);
        return a;
    }
    // Keeps the lanes where the bits are set, and clears the others.
    template <class Mask> INLINE Lanes where(Mask mask) const {
        Lanes a = *this;
        EACH a.v[i] = (One)((Bits)a.v[i] & mask(i));
        return a;
    }
    // Keeps the first m lanes.
    friend INLINE Lanes first(Lanes a, Index m) {
        Bits place;
        for (int k = 0; k < W; k++) place[k] = k;
        return a.where([&](int i) INLINE_LAMBDA { return place + i * W < m; });
    }

    // Sums lanes by halves: lane i and lane i + 8, then i + 4, and so on.
    friend INLINE double total(Lanes a) {
        double s[W];
        for (int half = L / W / 2; half; half /= 2)
            for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
        write(s, a.v[0]);
        for (int half = W / 2; half; half /= 2)
            for (int i = 0; i < half; i++) s[i] += s[i + half];
        return s[0];
    }

    // Rounds to odd, two bits longer than a narrow type: truncates, and sets the last bit if
    // anything was lost. The result may be rounded again (Boldo and Melquiond 2008).
    friend INLINE Lanes odd(Lanes a, int digits) {
        int64_t mask = (1LL << (51 - digits)) - 1;
        EACH {
            Bits bits = (Bits)a.v[i];
            a.v[i] = (One)((bits | ((bits & mask) + mask)) & ~mask);
        }
        return a;
    }
    // Rounds high + low to odd, given that `high` is the sum rounded to nearest: if it is even and
    // `low` is not 0, takes its neighbour on the side of `low`.
    friend INLINE Lanes odd_sum(Lanes high, Lanes low) {
        EACH {
            Bits bits = (Bits)high.v[i];
            Bits away = ((bits ^ (Bits)low.v[i]) >> 63) | 1;
            Bits finite = (bits & INT64_MAX) < (0x7ffLL << 52);
            Bits moves = (low.v[i] != 0) & ((bits & 1) == 0) & finite;
            high.v[i] = (One)(bits + (moves & away));
        }
        return high;
    }
};

template <int L, int W = WIDEST> INLINE Lanes<L, W> broadcast(double s) {
    return Lanes<L, W>::all(s);
}

INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
INLINE double minus(double a, double b) { return a - b; }
INLINE double magnitude(double a) { return __builtin_fabs(a); }

// ---- memory ----

template <int L, int W = WIDEST, class T> INLINE Lanes<L, W> load(const T* p) {
    Lanes<L, W> a;
    for (int i = 0; i < L / W; i++) {
        if constexpr (sizeof(T) == 8)
            a.v[i] = read<Register<double, W>>(p + i * W);
        else
            a.v[i] = Vector<W>::from(p + i * W);
    }
    return a;
}
// Loads m columns of a row, a constant L or the last ones: through a copy, so that nothing behind
// the row is read.
template <int L, int W = WIDEST, class T> INLINE Lanes<L, W> load(const T* p, Index m) {
    if (__builtin_constant_p(m) && m == L) return load<L, W>(p);
    T copy[L] = {};
    memcpy(copy, p, (size_t)m * sizeof(T));
    return load<L, W>(copy);
}

// ---- rounding ----
//
// The processor rounds float64 to float32, once. Sixteen bits are rounded by way of float32, which
// is right unless the float32 is a midpoint of the narrow type (`may_round_twice`): then float64 is
// first rounded to odd, which leaves no midpoint.

template <class T> constexpr int DIGITS = 24;
template <> constexpr int DIGITS<bf16> = 8;
template <> constexpr int DIGITS<f16> = 11;

// Whether two registers of float32 have a midpoint of the narrow type, which one value in 2**16
// becomes, or a NaN of bfloat16. Midpoints of float16 and of its subnormals end in twelve zeros.
// Integers round bfloat16, which sets no flag: the product overflows where bfloat16 does, from
// 0x1.ffp127 on.
INLINE bool may_round_twice(F8 a, F8 b, const bf16*) {
    constexpr f32 overflows = 0x1.008040p0f;
    return any((U8)(low_halves((U8)a, (U8)b) == 0x8000) | unordered(a * overflows, b * overflows));
}
INLINE bool may_round_twice(F8 a, F8 b, const f16*) {
    return any((U8)(((U8)a & 0xfff) == 0) | (U8)(((U8)b & 0xfff) == 0));
}

// Rounds two registers of float32 to nearest even; `without_midpoints`, those that may not round
// twice.
INLINE H16 rounded(F8 a, F8 b, const bf16*) {
    auto near = [](F8 v) INLINE_LAMBDA {
        U8 bits = (U8)v;
        // The carry of a NaN with all bits set would make it a zero.
        return v == v ? bits + 0x7fff + ((bits >> 16) & 1) : U8{} + 0x7fc00000;
    };
    return high_halves(near(a), near(b));
}
INLINE H16 rounded(F8 a, F8 b, const f16*) { return both(half_of(a), half_of(b)); }
INLINE H16 rounded_without_midpoints(F8 a, F8 b, const bf16*) {
    return high_halves((U8)a + 0x8000, (U8)b + 0x8000);
}
INLINE H16 rounded_without_midpoints(F8 a, F8 b, const f16* p) { return rounded(a, b, p); }

template <class T, int W> INLINE H16 rounded_sixteen(Lanes<16, W> a, const T* p) {
    F8 low = Vector<W>::singles(a.v);
    F8 high = Vector<W>::singles(a.v + 8 / W);
    if (__builtin_expect(!may_round_twice(low, high, p), 1))
        return rounded_without_midpoints(low, high, p);
    a = odd(a, DIGITS<T>);
    return rounded(Vector<W>::singles(a.v), Vector<W>::singles(a.v + 8 / W), p);
}

// Rounds once, to nearest even, and stores; `past`: with non-temporal stores.
template <int L, int W, class T> INLINE void store(T* p, Lanes<L, W> a, bool past = false) {
    auto put = [=](void* to, const auto& v) INLINE_LAMBDA { past ? stream(to, v) : write(to, v); };
    if constexpr (sizeof(T) == 8) {
        for (int i = 0; i < L / W; i++) put(p + i * W, a.v[i]);
    } else if constexpr (sizeof(T) == 4) {
        for (int k = 0; k < L; k += 8) put(p + k, Vector<W>::singles(a.v + k / W));
    } else if constexpr (L == 8) {
        Lanes<16, W> twice;
        for (int i = 0; i < 16 / W; i++) twice.v[i] = a.v[i % (8 / W)];
        H16 bits = rounded_sixteen(twice, p);
        put(p, read<H8>(&bits));
    } else {
        static_assert(L == 16);
        put(p, rounded_sixteen(a, p));
    }
}

// Stores m columns of a row, a constant L or the last ones.
template <int L, int W, class T>
INLINE void store(T* p, Lanes<L, W> a, Index m, bool past = false) {
    if (__builtin_constant_p(m) && m == L) return store(p, a, past);
    T copy[L];
    store(copy, a);
    memcpy(p, copy, (size_t)m * sizeof(T));
}

// ---- columns ----

// Calls f(j, count) for the columns from start to stop, L at a time; `count` is L, a constant once
// f is inlined, or less, at the end. `reversed`: whole registers from the last one on.
template <int L, class F>
INLINE void each_columns(Index start, Index stop, F f, bool reversed = false) {
    Index whole = (stop - start) / L;
    Index end = start + whole * L;
    Index step = reversed ? -L : L;
    Index j = reversed ? end - L : start;
// Unrolling makes GCC 12 keep the sums of `measure` in memory where there are 16 registers: 0.17
// ns, without it 0.09.
#pragma GCC unroll 1
    for (; whole > 0; whole--, j += step) f(j, (Index)L);
    if (end < stop) f(end, stop - end);
}

INLINE Index at_most(Index a, Index most) { return a < most ? a : most; }

}  // namespace
