// The dropout mask of kernels/philox.py, the same bits: Philox4×32-10 as a function of (seed, b, h, i, j), a lane for each pair.
#pragma once

#include "attention/call.h"
#include "simd/convert.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tilegrad {
namespace ISA {

struct Halves {
    U32 high, low;
};

// The two halves of the 64-bit products a · m.
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

inline U32 same_word(uint32_t x) { return U32{} + x; }

// The first word of Philox4×32-10 for each counter (c0, c1, c2, c3).
inline U32 philox(U32 c0, U32 c1, U32 c2, U32 c3, uint64_t seed) {
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const Halves x = halves_of_product(c0, 0xD2511F53), y = halves_of_product(c2, 0xCD9E8D57);
        c0 = y.high ^ c1 ^ k0;
        c1 = y.low;
        c2 = x.high ^ c3 ^ k1;
        c3 = x.low;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

// Which pairs are dropped, and what the others are multiplied by.
template <class T>
struct Dropout {
    const bool on;
    const uint32_t threshold;  // words below it are dropped
    const uint64_t seed;
    const T kept;  // 1 / (1 − p)

    explicit Dropout(const Call& call)
        : on(call.dropout_p > 0), threshold(uint32_t(call.dropout_threshold)), seed(uint64_t(call.seed)), kept(T(1 / (1 - call.dropout_p))) {}

    // x where the pair (row i, column j) of query head h is kept, 0 where it is dropped.
    Vec<T> keep(Vec<T> x, Ints<T> i, Ints<T> j, Ints<T> h, int64_t b) const { return dropped(i, j, h, b) ? Vec<T>{} : x; }

    Ints<T> dropped(Ints<T> i, Ints<T> j, Ints<T> h, int64_t b) const;
};

template <>
inline Ints<float> Dropout<float>::dropped(Ints<float> i, Ints<float> j, Ints<float> h, int64_t b) const {
    return (Ints<float>)(philox((U32)j, (U32)i, (U32)h, same_word(uint32_t(b)), seed) < threshold);
}

template <>
inline Ints<double> Dropout<double>::dropped(Ints<double> i, Ints<double> j, Ints<double> h, int64_t b) const {
    U32 words[3] = {};  // of the pairs, then of nothing
    for (int n = 0; n < Lanes<double>::N; ++n) {
        words[0][n] = uint32_t(j[n]);
        words[1][n] = uint32_t(i[n]);
        words[2][n] = uint32_t(h[n]);
    }
    const U32 word = philox(words[0], words[1], words[2], same_word(uint32_t(b)), seed);
    Ints<double> out;
    for (int n = 0; n < Lanes<double>::N; ++n) out[n] = word[n] < threshold ? -1 : 0;
    return out;
}

}  // namespace ISA
}  // namespace tilegrad
