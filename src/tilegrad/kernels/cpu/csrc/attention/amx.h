// Matrix products on AMX tiles, and the layouts that the tiles read: bfloat16 inputs, float32 sums, 16 × 16 elements at a time.
//
//   c (M, N) (+)= a (M, K) b (K, N)      a row-major; b as pairs of rows: [K/2][N][2]; M, N, K multiples of 32
//
// `pairs_of_rows` makes b from a packed matrix, `pairs_of_columns` from the transpose of that matrix.
#pragma once

#include <immintrin.h>

#include "attention/head_rows.h"

namespace tilegrad::ISA {

using Bf16 = uint16_t;  // the bits of a bfloat16

constexpr int64_t STRIP = 32;  // rows and columns of a block of c: 2 × 2 tiles

// Each thread configures its tiles when it begins to work and releases them afterwards, so an idle thread has no tile state.
struct TileConfiguration {
    TileConfiguration() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } eight_full_tiles;
        _tile_loadconfig(&eight_full_tiles);
    }
    ~TileConfiguration() { _tile_release(); }
};

// A 32 × 32 block of c. Leading dimensions are in elements; ldb = 2 N, the length of a row of pairs.
template <bool ADD>
inline __attribute__((always_inline)) void tile_product(float* c, int64_t ldc, const Bf16* a, int64_t lda, const Bf16* b, int64_t ldb,
                                                        int64_t k_end) {
    if (ADD) {
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(1, c + 16, ldc * 4);
        _tile_loadd(2, c + 16 * ldc, ldc * 4);
        _tile_loadd(3, c + 16 * ldc + 16, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < k_end; k += 32) {
        _tile_loadd(4, a + k, lda * 2);
        _tile_loadd(6, b + k / 2 * ldb, ldb * 2);
        _tile_loadd(7, b + k / 2 * ldb + 32, ldb * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda + k, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    _tile_stored(2, c + 16 * ldc, ldc * 4);
    _tile_stored(3, c + 16 * ldc + 16, ldc * 4);
}

inline void load_bf16_row(Bf16* to, const char* from, int64_t n, int64_t stride) {
    const Bf16* e = reinterpret_cast<const Bf16*>(from);
    if (stride == 1)
        memcpy(to, e, n * sizeof(Bf16));
    else
        for (int64_t i = 0; i < n; ++i) to[i] = e[i * stride];
}

constexpr Format<Bf16> BF16_BITS{2, load_bf16_row, nullptr};

constexpr Format<float> BF16_ROWS = format<float, BFloat16>();

// to[r/2][c][2] = from[r][c] for m rows of n columns; m and n are even.
inline void pairs_of_rows(Bf16* to, const Bf16* from, int64_t m, int64_t n) {
    for (int64_t r = 0; r < m; r += 2) {
        const Bf16 *even = from + r * n, *odd = even + n;
        for (int64_t c = 0; c < n; c += 16) {
            const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + c)));
            const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + c)));
            _mm512_storeu_si512(to + r * n + 2 * c, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
        }
    }
}

// to[c/2][r][2] = from[r][c]; rows of `to` have ld pairs. A pair moves as one 32-bit element.
inline void pairs_of_columns(Bf16* to, int64_t ld, const Bf16* from, int64_t m, int64_t n) {
    transpose(reinterpret_cast<float*>(to), ld, reinterpret_cast<const float*>(from), n / 2, m, n / 2);
}

// to[c][r] = from[r][c] from the layout of pairs_of_columns; m is a multiple of 16.
inline void columns_of_pairs(Bf16* to, int64_t ld, const Bf16* pairs, int64_t pairs_ld, int64_t m, int64_t n) {
    for (int64_t c = 0; c < n; c += 2)
        for (int64_t r = 0; r < m; r += 16) {
            const __m512i x = _mm512_loadu_si512(pairs + (c / 2 * pairs_ld + r) * 2);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + c * ld + r), _mm512_cvtepi32_epi16(x));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (c + 1) * ld + r), _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
        }
}

inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

// 2ˣ with relative error 3e−6, under 1/1000 of a bfloat16 ulp; 0 for −inf; NaN stays NaN.
inline __m512 exponential_of_2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.58285e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590643e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312419e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// Permutation of 16-bit lanes that interleaves the two halves of a register.
constexpr uint16_t PAIRED[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// exp(s − shift). Multiplies by log2 e last: s · log2 e would round differently from lse, and finfo.min would become −inf.
inline __m512 exponential_of_difference(__m512 s, __m512 shift) {
    return exponential_of_2(_mm512_mul_ps(_mm512_sub_ps(s, shift), _mm512_set1_ps(1.44269504f)));
}

}  // namespace tilegrad::ISA
