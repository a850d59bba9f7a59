// Vector registers of float64, with conversions from and to the four element types.
//
// Every addition and every fused multiply-add is written out, and the compiler contracts none
// (-ffp-contract=off): all instruction sets give the same bits. Each set is a translation unit of
// its own, hence the unnamed namespaces.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// GCC 12 calls small functions that return structures, through memory, unless it is told not to.
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))  // of a lambda
// Keeps loops over a row out of line: many in one function take the compiler a minute.
#define NOINLINE __attribute__((noinline))

using Index = std::ptrdiff_t;

namespace {

using f32 = float;
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// NumPy's arrays need not be aligned.
template <class To> INLINE To read(const void* p) {
    To v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class From> INLINE void write(void* p, const From& v) { memcpy(p, &v, sizeof v); }

template <class T, int W> struct RegisterOf {
    typedef T type __attribute__((vector_size(sizeof(T) * W)));
};
template <class T, int W> using Register = typename RegisterOf<T, W>::type;
using D2 = Register<double, 2>;
using D4 = Register<double, 4>;
using D8 = Register<double, 8>;
// Registers of eight or sixteen numbers on their way to a narrow type.
using F8 = Register<float, 8>;
using U8 = Register<uint32_t, 8>;
using H8 = Register<uint16_t, 8>;
using H16 = Register<uint16_t, 16>;

// Float64 of the widest register; tests ask for fewer with `REGISTERS`.
#if defined(REGISTERS)
constexpr int WIDEST = REGISTERS;
#elif defined(__AVX512F__)
constexpr int WIDEST = 8;
#elif defined(__AVX2__)
constexpr int WIDEST = 4;
#else
constexpr int WIDEST = 2;
#endif
constexpr int AT_MOST_FOUR = WIDEST < 4 ? WIDEST : 4;

// ---- sixteen bits ----

#if defined(__AVX2__)
INLINE H16 both(H8 a, H8 b) { return (H16)_mm256_set_m128i((__m128i)b, (__m128i)a); }
INLINE U8 widened(H8 v) { return (U8)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE H16 high_halves(U8 a, U8 b) {
    __m256i mixed = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
    return (H16)_mm256_permute4x64_epi64(mixed, 0xd8);
}
// The low halves, in any order.
INLINE H16 low_halves(U8 a, U8 b) {
    return (H16)_mm256_blend_epi16((__m256i)(a << 16), (__m256i)b, 0x55);
}
INLINE U8 unordered(F8 a, F8 b) { return (U8)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q); }
INLINE bool any(U8 mask) { return !_mm256_testz_si256((__m256i)mask, (__m256i)mask); }
#else
INLINE H16 both(H8 a, H8 b) {
    H8 two[2] = {a, b};
    return read<H16>(two);
}
INLINE U8 widened(H8 v) { return __builtin_convertvector(v, U8); }
INLINE H16 high_halves(U8 a, U8 b) {
    return both(__builtin_convertvector(a >> 16, H8), __builtin_convertvector(b >> 16, H8));
}
INLINE H16 low_halves(U8 a, U8 b) {
    return both(__builtin_convertvector(a, H8), __builtin_convertvector(b, H8));
}
INLINE U8 unordered(F8 a, F8 b) { return (U8)(a != a) | (U8)(b != b); }
INLINE bool any(U8 mask) {
    uint32_t bits = 0;
    for (int i = 0; i < 8; i++) bits |= mask[i];
    return bits != 0;
}
#endif

#if defined(__F16C__)
INLINE F8 floats_of_half(H8 v) { return (F8)_mm256_cvtph_ps((__m128i)v); }
INLINE H8 half_of(F8 v) { return (H8)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
INLINE F8 floats_of_half(H8 v) {
    float16x8_t all = (float16x8_t)v;
    float32x4_t both[2] = {vcvt_f32_f16(vget_low_f16(all)), vcvt_f32_f16(vget_high_f16(all))};
    return read<F8>(both);
}
INLINE H8 half_of(F8 v) {
    float32x4_t both[2];
    write(both, v);
    return (H8)vcombine_f16(vcvt_f16_f32(both[0]), vcvt_f16_f32(both[1]));
}
#endif

INLINE F8 floats(const bf16* p) { return (F8)(widened(read<H8>(p)) << 16); }
INLINE F8 floats(const f16* p) { return floats_of_half(read<H8>(p)); }

INLINE double number(const double* p) { return read<double>(p); }
INLINE double number(const f32* p) { return read<f32>(p); }
INLINE double number(const bf16* p) {
    uint32_t bits = (uint32_t)read<uint16_t>(p) << 16;
    return read<f32>(&bits);
}
INLINE double number(const f16* p) { return floats_of_half(H8{read<uint16_t>(p)})[0]; }

// ---- one register of W float64 ----

template <int W> struct Vector;

// Intrinsics: GCC 12 makes three instructions of __builtin_convertvector where the processor has
// one.
#if defined(__AVX512F__)
template <> struct Vector<8> {
    static INLINE D8 fma(D8 a, D8 b, D8 c) { return _mm512_fmadd_pd(a, b, c); }
    static INLINE D8 root(D8 a) { return _mm512_sqrt_pd(a); }
    static INLINE D8 from(const f32* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
    template <class T> static INLINE D8 from(const T* p) { return _mm512_cvtps_pd(floats(p)); }
    static INLINE F8 singles(const D8* v) { return _mm512_cvtpd_ps(v[0]); }
    static INLINE void hide(D8& a) { asm("" : "+v"(a)); }
};
#endif
#if defined(__AVX2__)
template <> struct Vector<4> {
    static INLINE D4 fma(D4 a, D4 b, D4 c) { return _mm256_fmadd_pd(a, b, c); }
    static INLINE D4 root(D4 a) { return _mm256_sqrt_pd(a); }
    static INLINE D4 from(const f32* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
    static INLINE D4 from(const bf16* p) {
        __m128i four = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p));
        return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(four, 16)));
    }
    static INLINE D4 from(const f16* p) {
        return _mm256_cvtps_pd(_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)p)));
    }
    static INLINE F8 singles(const D4* v) {
        return _mm256_set_m128(_mm256_cvtpd_ps(v[1]), _mm256_cvtpd_ps(v[0]));
    }
    static INLINE void hide(D4& a) { asm("" : "+x"(a)); }
};
#endif
template <> struct Vector<2> {
#if defined(__aarch64__)
    static INLINE D2 fma(D2 a, D2 b, D2 c) {
        return (D2)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
    }
    static INLINE D2 root(D2 a) { return (D2)vsqrtq_f64((float64x2_t)a); }
    static INLINE void hide(D2& a) { asm("" : "+w"(a)); }
#else
    static INLINE D2 fma(D2 a, D2 b, D2 c) { return _mm_fmadd_pd(a, b, c); }
    static INLINE D2 root(D2 a) { return _mm_sqrt_pd(a); }
    static INLINE void hide(D2& a) { asm("" : "+x"(a)); }
#endif
    template <class T> static INLINE D2 from(const T* p) { return D2{number(p), number(p + 1)}; }
    static INLINE F8 singles(const D2* v) {
        return F8{(f32)v[0][0], (f32)v[0][1], (f32)v[1][0], (f32)v[1][1], (f32)v[2][0],
            (f32)v[2][1], (f32)v[3][0], (f32)v[3][1]};
    }
};

// Whether any has one of these bits.
template <int W> INLINE bool any_of(Register<int64_t, W> a, int64_t bits) {
#if defined(__AVX512F__)
    if constexpr (W == 8) return _mm512_test_epi64_mask((__m512i)a, _mm512_set1_epi64(bits));
#endif
#if defined(__AVX2__)
    if constexpr (W == 4) return !_mm256_testz_si256((__m256i)a, _mm256_set1_epi64x(bits));
#endif
    int64_t all = 0;
    for (int k = 0; k < W; k++) all |= a[k];
    return all & bits;
}

// ---- non-temporal stores, where the processor has them ----

#if defined(__x86_64__)
template <class Part, class From> INLINE void stream_parts(char* p, const From& v) {
    for (size_t i = 0; i < sizeof v; i += sizeof(Part)) {
        Part part = read<Part>((const char*)&v + i);
        if constexpr (sizeof part == 32)
            _mm256_stream_si256((__m256i*)(p + i), part);
        else
            _mm_stream_si128((__m128i*)(p + i), part);
    }
}
// Takes the widest store that the address allows: NumPy's large arrays begin 16 bytes behind a
// page.
template <class From> INLINE void stream(void* p, const From& v) {
    if (sizeof v < 32 || (uintptr_t)p % 32) return stream_parts<__m128i>((char*)p, v);
    stream_parts<__m256i>((char*)p, v);
}
#else
template <class From> INLINE void stream(void* p, const From& v) { write(p, v); }
#endif

}  // namespace
