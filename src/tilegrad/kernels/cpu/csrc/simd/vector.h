// Vectors of one register of the target instruction set, and the functions that softmax needs.
//
// Everything is in namespace ISA, so that the same source compiled for several instruction sets shares no symbols. No template
// of the C++ library is instantiated here, because the linker would keep one copy for all instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef ISA
#error "compile with -DISA=name"
#endif

namespace tilegrad::ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr int N = WIDTH / 4;
    typedef float V __attribute__((vector_size(WIDTH)));
    typedef float U __attribute__((vector_size(WIDTH), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(WIDTH)));
    typedef int32_t Integer;
};

template <>
struct Lanes<double> {
    static constexpr int N = WIDTH / 8;
    typedef double V __attribute__((vector_size(WIDTH)));
    typedef double U __attribute__((vector_size(WIDTH), aligned(8), may_alias));
    typedef int64_t I __attribute__((vector_size(WIDTH)));
    typedef int64_t Integer;
};

template <class T> using Vec = typename Lanes<T>::V;
template <class T> using Ints = typename Lanes<T>::I;
using V32 = Vec<float>;
using V64 = Vec<double>;
using I32 = Ints<float>;

template <class T> inline Vec<T> load(const T* p) { return *reinterpret_cast<const typename Lanes<T>::U*>(p); }
template <class T> inline void store(T* p, Vec<T> v) { *reinterpret_cast<typename Lanes<T>::U*>(p) = v; }
template <class T> inline Vec<T> all(T x) { return Vec<T>{} + x; }

// x, rounded before it is added to anything. Otherwise -ffp-contract=fast would turn s · scale − lse into one fma, which
// subtracts a rounded lse from an unrounded product.
template <class V>
inline __attribute__((always_inline)) V rounded(V x) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
    return __builtin_assoc_barrier(x);
#else  // an empty asm statement, after which the compiler assumes that x changed
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__SSE2__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#else
    __asm__("" : "+m"(x));
#endif
    return x;
#endif
}

// The larger of two; NaN if b is NaN.
template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
#if defined(__aarch64__)
inline V32 larger(V32 a, V32 b) { return (V32)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
#endif

template <class T>
inline Ints<T> iota() {
    Ints<T> i;
    for (int n = 0; n < Lanes<T>::N; ++n) i[n] = n;
    return i;
}

template <class T>
inline bool any(Ints<T> mask) {
    typename Lanes<T>::Integer bits = 0;
    for (int n = 0; n < Lanes<T>::N; ++n) bits |= mask[n];
    return bits != 0;
}

template <class T>
inline T sum(Vec<T> v) {
    for (int n = Lanes<T>::N / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) v[i] += v[i + n];
    return v[0];
}

#if defined(__aarch64__)
template <> inline float sum<float>(V32 v) { return vaddvq_f32((float32x4_t)v); }
#endif

// exp(x) for x ≤ 88, error about 1 ulp; exactly 0 below −88 and for −inf; NaN stays NaN.
//   x = n ln2 + r, |r| ≤ ln2/2;  n is in the low bits of x/ln2 + 1.5·2²³ + 127, already biased as an exponent
inline V32 exponential(V32 x) {
    constexpr float SHIFT = 12582912.0f + 127.0f;
    x = larger(all(-88.0f), x);
    V32 shifted = x * 1.44269504f + SHIFT;
    V32 n = shifted - SHIFT;
    V32 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V32 p = r * 1.38145406e-3f + 8.36874545e-3f;
    p = p * r + 4.16683890e-2f;
    p = p * r + 1.66665211e-1f;
    p = p * r + 4.99999940e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (V32)((I32)shifted << 23);
}

inline V64 exponential(V64 x) {
    for (int n = 0; n < Lanes<double>::N; ++n) x[n] = __builtin_exp(x[n]);
    return x;
}

// tanh(x) and 1 − tanh²(x): an odd polynomial below 0.625, otherwise with e = exp(−2|x|): ±(1 − e) / (1 + e) and
// 4 e / (1 + e)², because 1 − tanh² would cancel.
template <class T>
struct Tanh {
    Vec<T> value, slope;
};

inline Tanh<float> hyperbolic_tangent(V32 x) {
    V32 a = x < 0.0f ? -x : x;
    V32 y = x * x;
    V32 p = y * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * y - 5.37397155531e-2f;
    p = p * y + 1.33314422036e-1f;
    p = p * y - 3.33332819422e-1f;
    V32 small = p * y * x + x;
    V32 e = exponential(-2.0f * a);
    V32 r = 1.0f / (1.0f + e);
    V32 big = 1.0f - 2.0f * e * r;
    big = x < 0.0f ? -big : big;
    return {a < 0.625f ? small : big, a < 0.625f ? 1.0f - small * small : 4.0f * e * r * r};
}

inline Tanh<double> hyperbolic_tangent(V64 x) {
    V64 slope;
    for (int n = 0; n < Lanes<double>::N; ++n) {
        const double cosh = __builtin_cosh(x[n]);
        slope[n] = 1.0 / (cosh * cosh);
        x[n] = __builtin_tanh(x[n]);
    }
    return {x, slope};
}

inline float logarithm(float x) { return __builtin_logf(x); }
inline double logarithm(double x) { return __builtin_log(x); }

// On x86, flushes subnormal results to 0 while in scope, because each takes a hundred cycles there.
struct NoSubnormals {
#if defined(__SSE2__)
    const unsigned before = __builtin_ia32_stmxcsr();
    NoSubnormals() { __builtin_ia32_ldmxcsr(before | 0x8000); }
    ~NoSubnormals() { __builtin_ia32_ldmxcsr(before); }
#else
    NoSubnormals() {}
#endif
};

inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace tilegrad::ISA
