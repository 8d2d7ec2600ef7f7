// Conversion of rows between the caller's dtype and the accumulation type, and the transpose of a packed tile.
#pragma once

#include "dtype.h"
#include "simd/vector.h"

namespace tilegrad::ISA {

inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

struct BFloat16 {
    uint16_t bits;
    operator float() const { return as_float(uint32_t(bits) << 16); }
    static BFloat16 of(float x) {  // round to nearest even; NaN stays NaN
        uint32_t u = as_bits(x);
        uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        return {uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded)};
    }
};

struct Float16 {
    uint16_t bits;
    operator float() const {
        uint32_t a = uint32_t(bits & 0x7fff) << 13;
        float x = as_float(a) * as_float(0x77800000);  // 2¹¹²: rebias, correct for subnormals too
        uint32_t special = a >= 0x0f800000 ? a | 0x7f800000 : as_bits(x);
        return as_float(special | uint32_t(bits & 0x8000) << 16);
    }
    static Float16 of(float x) {
        uint32_t u = as_bits(x), a = u & 0x7fffffff;
        uint32_t normal = (a + 0xc8000fff + ((a >> 13) & 1)) >> 13;
        uint32_t subnormal = as_bits(as_float(a) + 0.5f) - 0x3f000000;
        uint32_t huge = a > 0x7f800000 ? 0x7e00 : 0x7c00;
        uint32_t h = a >= 0x47800000 ? huge : a < 0x38800000 ? subnormal
                                                             : normal;
        return {uint16_t(h | (u >> 16 & 0x8000))};
    }
};

inline void convert(float& to, float x) { to = x; }
inline void convert(double& to, double x) { to = x; }
inline void convert(BFloat16& to, float x) { to = BFloat16::of(x); }
inline void convert(Float16& to, float x) { to = Float16::of(x); }

// A register of floats from contiguous elements, and back.
inline V32 widen(const float* p) { return load(p); }
inline void narrow(float* p, V32 v) { store(p, v); }

typedef uint32_t U32 __attribute__((vector_size(WIDTH)));
typedef uint16_t U16 __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t U16Unaligned __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));

inline V32 widen(const BFloat16* p) {
#if defined(__aarch64__)  // one instruction; GCC makes two of the lines below
    return (V32)vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), 16);
#else
    const U16 bits = *reinterpret_cast<const U16Unaligned*>(p);
    return (V32)(__builtin_convertvector(bits, U32) << 16);
#endif
}

inline void narrow(BFloat16* p, V32 v) {  // BFloat16::of
    const U32 u = (U32)v;
    const U32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const U32 bits = (u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded;
    *reinterpret_cast<U16Unaligned*>(p) = __builtin_convertvector(bits, U16);
}

// A dtype: conversion of strided rows of n elements to and from packed rows of T.
template <class T>
struct Format {
    int64_t bytes;
    void (*load)(T* to, const char* from, int64_t n, int64_t stride);
    void (*store)(char* to, const T* from, int64_t n, int64_t stride, T factor);
};

template <class T, class E>
void load_row(T* to, const char* from, int64_t n, int64_t stride) {
    const E* e = reinterpret_cast<const E*>(from);
    if (stride == 1)
        for (int64_t i = 0; i < n; ++i) to[i] = T(e[i]);
    else
        for (int64_t i = 0; i < n; ++i) to[i] = T(e[i * stride]);
}

template <class T, class E>
void store_row(char* to, const T* from, int64_t n, int64_t stride, T factor) {
    E* e = reinterpret_cast<E*>(to);
    if (stride == 1)
        for (int64_t i = 0; i < n; ++i) convert(e[i], from[i] * factor);
    else
        for (int64_t i = 0; i < n; ++i) convert(e[i * stride], from[i] * factor);
}

template <class T, class E>
constexpr Format<T> format() { return {sizeof(E), load_row<T, E>, store_row<T, E>}; }

template <class T>
Format<T> format_of(int64_t dtype);

template <>
inline Format<float> format_of<float>(int64_t dtype) {
    return dtype == BFLOAT16  ? format<float, BFloat16>()
           : dtype == FLOAT16 ? format<float, Float16>()
                              : format<float, float>();
}

template <>
inline Format<double> format_of<double>(int64_t) { return format<double, double>(); }

// One element of a small tensor of any of the four float dtypes.
inline double scalar(const char* data, int64_t dtype, int64_t at) {
    switch (dtype) {
        case FLOAT64: return reinterpret_cast<const double*>(data)[at];
        case BFLOAT16: return reinterpret_cast<const BFloat16*>(data)[at];
        case FLOAT16: return reinterpret_cast<const Float16*>(data)[at];
        default: return reinterpret_cast<const float*>(data)[at];
    }
}

inline void add_scalar(char* data, int64_t dtype, int64_t at, double x) {
    switch (dtype) {
        case FLOAT64: reinterpret_cast<double*>(data)[at] += x; break;
        case BFLOAT16: {
            auto* p = reinterpret_cast<BFloat16*>(data) + at;
            *p = BFloat16::of(float(*p) + float(x));
            break;
        }
        case FLOAT16: {
            auto* p = reinterpret_cast<Float16*>(data) + at;
            *p = Float16::of(float(*p) + float(x));
            break;
        }
        default: reinterpret_cast<float*>(data)[at] += float(x);
    }
}

// to[n][m] = from[m][n] with row strides to_ld and from_ld; 4 × 4 blocks of float go through registers.
inline void transpose(float* to, int64_t to_ld, const float* from, int64_t from_ld, int64_t m, int64_t n) {
    int64_t i = 0;
#if !defined(__clang__)  // clang has another name for the shuffle, and vectorises the loop below
    typedef float Four __attribute__((vector_size(16)));
    typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int32_t Index __attribute__((vector_size(16)));
    for (; i + 4 <= m; i += 4) {
        int64_t j = 0;
        for (; j + 4 <= n; j += 4) {
            Four r[4];
            for (int x = 0; x < 4; ++x) r[x] = *reinterpret_cast<const Unaligned*>(from + (i + x) * from_ld + j);
            Four a = __builtin_shuffle(r[0], r[1], Index{0, 4, 1, 5}), b = __builtin_shuffle(r[0], r[1], Index{2, 6, 3, 7});
            Four c = __builtin_shuffle(r[2], r[3], Index{0, 4, 1, 5}), d = __builtin_shuffle(r[2], r[3], Index{2, 6, 3, 7});
            Four out[4] = {__builtin_shuffle(a, c, Index{0, 1, 4, 5}), __builtin_shuffle(a, c, Index{2, 3, 6, 7}),
                           __builtin_shuffle(b, d, Index{0, 1, 4, 5}), __builtin_shuffle(b, d, Index{2, 3, 6, 7})};
            for (int x = 0; x < 4; ++x) *reinterpret_cast<Unaligned*>(to + (j + x) * to_ld + i) = out[x];
        }
        for (; j < n; ++j)
            for (int x = 0; x < 4; ++x) to[j * to_ld + i + x] = from[(i + x) * from_ld + j];
    }
#endif
    for (; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) to[j * to_ld + i] = from[i * from_ld + j];
}

inline void transpose(double* to, int64_t to_ld, const double* from, int64_t from_ld, int64_t m, int64_t n) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) to[j * to_ld + i] = from[i * from_ld + j];
}

}  // namespace tilegrad::ISA
