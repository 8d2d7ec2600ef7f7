// c (+)= a b on packed tiles: c (M, N), b (K, N) row-major; a (M, K) row-major, or transposed: (K, M).
//
// MR × NV registers of c are accumulated over k: enough to hide the latency of the multiply. Each k loads NV registers of b and
// MR elements of a. The sum of a tile starts at 0 and is added to c once, so the rounding error of a sum over T rows grows like
// √(T/TILE) + √TILE, not like √T. M is a multiple of MR, N of the lanes; K is arbitrary.
#pragma once

#include "simd/vector.h"

namespace tilegrad::ISA {

// MR × NV registers are for c, the others for b and a. TILE is a multiple of MR and of NV · lanes.
#if defined(__AVX512F__)
constexpr int MR = 8, NV = 2, TILE = 64;
#elif defined(__AVX2__)
constexpr int MR = 4, NV = 3, TILE = 96;
#elif defined(__aarch64__)
constexpr int MR = 8, NV = 2, TILE = 64;
#else
constexpr int MR = 4, NV = 2, TILE = 64;
#endif

// Packed rows. Rows of more than SLICE elements are stored in slices of SLICE columns, one slice after the other. The rows of a
// block are then in fewer pages and in more sets of the caches. A sum along a row adds the sums of its slices.
constexpr int64_t SLICE = 256;

template <class T>
struct Packed {
    T* data;
    int64_t rows, width;

    // The number of columns of a slice, and its part of row r. A slice is named by its first column.
    int64_t columns(int64_t slice) const { return at_most(SLICE, width - slice); }
    T* at(int64_t r, int64_t slice) const { return data + slice * rows + r * columns(slice); }

    void clear(int64_t n) const {  // rows 0 … n
        for (int64_t slice = 0; slice < width; slice += SLICE) memset(at(0, slice), 0, n * columns(slice) * sizeof(T));
    }
};

// One row that is not in slices.
template <class T>
Packed<T> whole_row(T* row, int64_t width) { return {row, 1, width}; }

enum Order {
    ROWS,
    TRANSPOSED,
};  // the layout of a

template <class T, int NV_, Order ORDER, int MR_ = MR>
inline __attribute__((always_inline)) void block(
    T* __restrict__ c, int64_t ldc, const T* __restrict__ a, int64_t lda, const T* __restrict__ b, int64_t ldb, int64_t k_end,
    bool add) {
    constexpr int L = Lanes<T>::N;
    Vec<T> acc[MR_][NV_];
    for (int m = 0; m < MR_; ++m)
        for (int n = 0; n < NV_; ++n) acc[m][n] = Vec<T>{};
    int64_t k = 0;
#if defined(__aarch64__)
    // The multiply can broadcast one lane, so a is loaded a register at a time.
    typedef T Four __attribute__((vector_size(16), aligned(alignof(T)), may_alias));
    constexpr int A = 16 / sizeof(T);
    if (ORDER == TRANSPOSED) {
        for (; k < k_end; ++k) {
            Vec<T> bk[NV_];
            for (int n = 0; n < NV_; ++n) bk[n] = load(b + k * ldb + n * L);
            for (int m = 0; m < MR_; m += A) {
                Vec<T> ak = *reinterpret_cast<const Four*>(a + k * lda + m);
#pragma GCC unroll 4
                for (int x = 0; x < A; ++x)
                    for (int n = 0; n < NV_; ++n) acc[m + x][n] += bk[n] * ak[x];
            }
        }
    } else {
        for (; k + A <= k_end; k += A) {
            Vec<T> am[MR_];
            for (int m = 0; m < MR_; ++m) am[m] = *reinterpret_cast<const Four*>(a + m * lda + k);
#pragma GCC unroll 4
            for (int x = 0; x < A; ++x) {
                Vec<T> bk[NV_];
                for (int n = 0; n < NV_; ++n) bk[n] = load(b + (k + x) * ldb + n * L);
                for (int m = 0; m < MR_; ++m)
                    for (int n = 0; n < NV_; ++n) acc[m][n] += bk[n] * am[m][x];
            }
        }
    }
#endif
    for (; k < k_end; ++k) {
        Vec<T> bk[NV_];
        for (int n = 0; n < NV_; ++n) bk[n] = load(b + k * ldb + n * L);
        for (int m = 0; m < MR_; ++m) {
            T x = ORDER == TRANSPOSED ? a[k * lda + m] : a[m * lda + k];
            for (int n = 0; n < NV_; ++n) acc[m][n] += bk[n] * x;
        }
    }
    for (int m = 0; m < MR_; ++m)
        for (int n = 0; n < NV_; ++n) store(c + m * ldc + n * L, add ? load(c + m * ldc + n * L) + acc[m][n] : acc[m][n]);
}

// Prefetches rows of c that the next block adds to: they are too far apart for the hardware prefetcher.
template <class T>
inline __attribute__((always_inline)) void prefetch_rows(const T* c, int64_t ldc, int64_t rows, int64_t n) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(c + r * ldc + i);
}

template <class T, Order ORDER>
void product(T* c, int64_t ldc, const T* a, int64_t lda, const T* b, int64_t ldb, int64_t m_end, int64_t n_end, int64_t k_end,
             bool add) {
    constexpr int L = Lanes<T>::N;
    const int64_t step = ORDER == TRANSPOSED ? 1 : lda;
    int64_t n = 0;
    for (; n + NV * L <= n_end; n += NV * L)
        for (int64_t m = 0; m < m_end; m += MR) {
            if (add && ldc >= SLICE) prefetch_rows(m + MR < m_end ? c + (m + MR) * ldc + n : c + n + NV * L, ldc, MR, NV * L);
            block<T, NV, ORDER>(c + m * ldc + n, ldc, a + m * step, lda, b + n, ldb, k_end, add);
        }
    for (; n < n_end; n += L)
        for (int64_t m = 0; m < m_end; m += MR)
            block<T, 1, ORDER>(c + m * ldc + n, ldc, a + m * step, lda, b + n, ldb, k_end, add);
}

// c = a b for rows r … of a; b (width, ldb).
template <class T>
void product_along(T* c, int64_t ldc, const Packed<T>& a, int64_t r, const T* b, int64_t ldb, int64_t m_end, int64_t n_end) {
    for (int64_t slice = 0; slice < a.width; slice += SLICE)
        product<T, ROWS>(c, ldc, a.at(r, slice), a.columns(slice), b + slice * ldb, ldb, m_end, n_end, a.columns(slice), slice > 0);
}

// c += a b for rows r … of c and rows j … of b.
template <class T, Order ORDER>
void add_product(const Packed<T>& c, int64_t r, const T* a, int64_t lda, const Packed<T>& b, int64_t j, int64_t m_end, int64_t k_end) {
    for (int64_t slice = 0; slice < c.width; slice += SLICE)
        product<T, ORDER>(c.at(r, slice), c.columns(slice), a, lda, b.at(j, slice), b.columns(slice), m_end, c.columns(slice), k_end, true);
}

// c (+)= a b for one row a; the same bits as a row of `product`.
template <class T>
void row_product(T* c, const T* a, const T* b, int64_t ldb, int64_t n_end, int64_t k_end, bool add) {
    constexpr int L = Lanes<T>::N, SUMS = TILE / L % 8 == 0 ? 8 : 4;  // enough sums to hide the latency of the multiply
    int64_t n = 0;
    for (; n + SUMS * L <= n_end; n += SUMS * L) block<T, SUMS, ROWS, 1>(c + n, 0, a, 0, b + n, ldb, k_end, add);
    for (; n < n_end; n += L) block<T, 1, ROWS, 1>(c + n, 0, a, 0, b + n, ldb, k_end, add);
}

}  // namespace tilegrad::ISA
