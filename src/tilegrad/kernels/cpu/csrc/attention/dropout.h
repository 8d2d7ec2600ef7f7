// The dropout mask of kernels/philox.py, bit for bit: Philox4×32-10 as a function of (seed, b, h, i, j), one lane per pair.
#pragma once

#include "attention/call.h"
#include "simd/convert.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tilegrad::ISA {

struct Halves {
    U32 high, low;
};

// The high and the low half of the 64-bit product a · m.
inline Halves halves_of_product(U32 a, uint32_t m) {
#if defined(__aarch64__)
    const uint32x4_t x = (uint32x4_t)a;
    const uint32x2_t times = vdup_n_u32(m);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), times));
    const uint32x4_t last = vreinterpretq_u32_u64(vmull_u32(vget_high_u32(x), times));
    return {(U32)vuzp2q_u32(first, last), (U32)vuzp1q_u32(first, last)};
#elif defined(__SSE2__)
    typedef uint64_t U64 __attribute__((vector_size(WIDTH)));
    const U64 times = U64{} + m;
    U64 even = (U64)a, odd = (U64)a >> 32;
#if defined(__AVX512F__)
    even = (U64)_mm512_mul_epu32((__m512i)even, (__m512i)times), odd = (U64)_mm512_mul_epu32((__m512i)odd, (__m512i)times);
#elif defined(__AVX2__)
    even = (U64)_mm256_mul_epu32((__m256i)even, (__m256i)times), odd = (U64)_mm256_mul_epu32((__m256i)odd, (__m256i)times);
#else
    even = (U64)_mm_mul_epu32((__m128i)even, (__m128i)times), odd = (U64)_mm_mul_epu32((__m128i)odd, (__m128i)times);
#endif
    const U64 low = U64{} + 0xffffffff;
    return {(U32)(even >> 32 | (odd & ~low)), (U32)((even & low) | odd << 32)};
#else
    Halves out;
    for (int n = 0; n < Lanes<float>::N; ++n) {
        const uint64_t product = uint64_t(a[n]) * m;
        out.high[n] = uint32_t(product >> 32);
        out.low[n] = uint32_t(product);
    }
    return out;
#endif
}

// Words drawn at once. The rounds of one word depend on each other, so as many words as fit in registers are interleaved.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int DRAWS = 4;
#else
constexpr int DRAWS = 2;
#endif

// c0[n] = the first word of Philox4×32-10 of the counter (c0[n], c1, c2, c3).
template <int N>
inline __attribute__((always_inline)) void philox(U32 (&c0)[N], U32 c1, U32 c2, U32 c3, uint64_t seed) {
    U32 c[3][N];
    for (int n = 0; n < N; ++n) c[0][n] = c1, c[1][n] = c2, c[2][n] = c3;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            const Halves x = halves_of_product(c0[n], 0xD2511F53), y = halves_of_product(c[1][n], 0xCD9E8D57);
            c0[n] = y.high ^ c[0][n] ^ k0;
            c[0][n] = y.low;
            c[1][n] = x.high ^ c[2][n] ^ k1;
            c[2][n] = x.low;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
}

// Which pairs are dropped, and the factor for the pairs that are kept.
template <class T>
struct Dropout {
    const bool on;
    const uint32_t threshold;  // words below it are dropped
    const uint64_t seed;
    const T kept;  // 1 / (1 − p)

    explicit Dropout(const Call& call)
        : on(call.dropout_p > 0), threshold(uint32_t(call.dropout_threshold)), seed(uint64_t(call.seed)), kept(T(1 / (1 - call.dropout_p))) {}

    // dropped[x] for x < n: one register of pairs (row i, column j + x · step) of query head h.
    void draw(Ints<T>* dropped, int64_t n, int64_t b, Ints<T> h, Ints<T> i, Ints<T> j, int step) const;

    static Vec<T> unless(Ints<T> dropped, Vec<T> x) { return dropped ? Vec<T>{} : x; }
};

template <>
inline void Dropout<float>::draw(I32* dropped, int64_t n, int64_t b, I32 h, I32 i, I32 j, int step) const {
    int64_t x = 0;
    for (; x + DRAWS <= n; x += DRAWS) {
        U32 words[DRAWS];
        for (int y = 0; y < DRAWS; ++y) words[y] = (U32)(j + int32_t(x + y) * step);
        philox(words, (U32)i, (U32)h, U32{} + uint32_t(b), seed);
        for (int y = 0; y < DRAWS; ++y) dropped[x + y] = (I32)(words[y] < threshold);
    }
    for (; x < n; ++x) {
        U32 word[1] = {(U32)(j + int32_t(x) * step)};
        philox(word, (U32)i, (U32)h, U32{} + uint32_t(b), seed);
        dropped[x] = (I32)(word[0] < threshold);
    }
}

template <>
inline void Dropout<double>::draw(Ints<double>* dropped, int64_t n, int64_t b, Ints<double> h, Ints<double> i, Ints<double> j, int step) const {
    for (int64_t x = 0; x < n; ++x) {
        U32 word[1] = {}, rows{}, heads{};  // half of the lanes are unused
        for (int y = 0; y < Lanes<double>::N; ++y) {
            word[0][y] = uint32_t(j[y] + x * step);
            rows[y] = uint32_t(i[y]);
            heads[y] = uint32_t(h[y]);
        }
        philox(word, rows, heads, U32{} + uint32_t(b), seed);
        for (int y = 0; y < Lanes<double>::N; ++y) dropped[x][y] = word[0][y] < threshold ? -1 : 0;
    }
}

}  // namespace tilegrad::ISA
