// Forward: a thread owns a block of rows and walks the columns that the block sees, a tile at a time.
//
//   row_max = sink, row_sum = 1  (or lowest, 0)
//   for each tile of columns:                     k transposed and v are packed once for the block
//     for each strip of MR rows:                  MR × TILE scores stay in the first cache
//       s = q kᵀ                                  only columns that the strip sees
//       new_max = max(row_max, max s)
//       p = exp(s − new_max)
//       alpha = exp(row_max − new_max)
//       row_sum = alpha · row_sum + Σ p
//       acc = alpha · acc + p v
//   o = acc / row_sum        lse = row_max + log row_sum
//
// Each row has one owner and one order of sums: results do not depend on the number of threads.
#pragma once

#include "product.h"
#include "rows.h"

namespace tilegrad {
namespace ISA {

template <class T>
struct Forward {
    static constexpr int64_t ROWS_OF_BLOCK = 2 * TILE;
    static constexpr int L = Lanes<T>::N;

    const Call& call;
    const Format<T> format = format_of<T>(call.dtype);
    const int64_t d = round_up(call.d, L), dv = round_up(call.dv, L);  // padded
    const bool plain = call.softcap == 0 && !call.slopes.data && call.scale > 0;

    // Buffers of a thread.
    T *q, *k, *kt, *v, *s, *acc, *row_max, *row_sum;
    int32_t *lo, *hi;

    Forward(const Call& call, Carver& carver) : call(call) {
        const int64_t rows = block_rows(call);
        q = carver.take<T>(rows * d);
        k = carver.take<T>(TILE * d);
        kt = carver.take<T>(d * TILE);
        v = carver.take<T>(TILE * dv);
        s = carver.take<T>(MR * TILE);
        acc = carver.take<T>(rows * dv);
        row_max = carver.take<T>(rows);
        row_sum = carver.take<T>(rows);
        lo = carver.take<int32_t>(rows);
        hi = carver.take<int32_t>(rows);
    }

    static int64_t block_rows(const Call& call) {
        return at_most(ROWS_OF_BLOCK, round_up(call.tq * (call.hq / call.hkv), MR));
    }

    static int64_t blocks(const Call& call) {  // of the longest sequence
        int64_t rows = call.tq * (call.hq / call.hkv);
        return (rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;
    }

    // Blocks are numbered from the end of the sequence, where causal rows have the most to do.
    void item(int64_t index) {
        const int64_t n_blocks = blocks(call), n_heads = call.b * call.hkv;
        const Head head = head_of(call, index % n_heads);
        const int64_t r0 = (n_blocks - 1 - index / n_heads) * ROWS_OF_BLOCK;
        if (r0 < head.rows()) rows(head, r0, at_most(ROWS_OF_BLOCK, head.rows() - r0));
    }

    void rows(const Head& head, int64_t r0, int64_t m) {
        const int64_t padded = round_up(m, MR);
        pack_rows(q, d, call.q, format, head, r0, m, padded, call.d);
        for (int64_t r = 0; r < padded; ++r) {
            const int64_t row = at_most(r0 + r, r0 + m - 1);
            seen_by(call, head, row, lo + r, hi + r);
            row_max[r] = lowest();
            row_sum[r] = 0;
            if (call.sinks.data) {
                const T sink = T(sink_of(call, head, row));
                row_max[r] = sink > lowest() ? sink : lowest();
                row_sum[r] = scalar_exponential(sink - row_max[r]);
            }
        }
        memset(acc, 0, padded * dv * sizeof(T));
        const int64_t first = lo[0], last = hi[m - 1];
        for (int64_t j0 = first; j0 < last; j0 += TILE) columns(head, r0, padded, j0, at_most(TILE, last - j0));
        write(head, r0, m);
    }

    void columns(const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n) {
        const int64_t padded = round_up(n, L);
        pack_columns(k, d, call.k, format, head, j0, n, padded, call.d);
        transpose(kt, TILE, k, d, padded, d);
        pack_columns(v, dv, call.v, format, head, j0, n, padded, call.dv);
        for (int64_t r = 0; r < m; r += MR) {
            const int64_t begin = at_least(0, lo[r] - j0) / L * L, end = at_most(n, hi[r + MR - 1] - j0);
            if (begin >= end) continue;
            const int64_t stop = round_up(end, L);
            product<T, ROWS>(s + begin, TILE, q + r * d, d, kt + begin, TILE, MR, stop - begin, d, false);
            const bool whole = lo[r + MR - 1] <= j0 + begin && hi[r] >= j0 + stop;
            for (int64_t x = 0; x < MR; ++x) {
                if (whole)
                    softmax<false>(head, r0, r + x, x, j0, begin, stop);
                else
                    softmax<true>(head, r0, r + x, x, j0, begin, stop);
            }
            product<T, ROWS>(acc + r * dv, dv, s + begin, TILE, v + begin * dv, dv, MR, dv, end - begin, true);
        }
    }

    // One row of the strip: scores → p, the row's maximum and sum, and acc rescaled.
    template <bool EDGE>
    void softmax(const Head& head, int64_t r0, int64_t r, int64_t x, int64_t j0, int64_t begin, int64_t stop) {
        T* row = s + x * TILE;
        Score<T> score{T(call.scale), T(call.softcap), 0, 0, int32_t(lo[r] - j0), int32_t(hi[r] - j0)};
        Vec<T> largest = all(-T(__builtin_inf()));
        T factor = 1;
        if (plain) {
            factor = score.scale;
            for (int64_t j = begin; j < stop; j += L) {
                Vec<T> y = load(row + j);
                if (EDGE) store(row + j, y = score.hide(y, j));
                largest = larger(largest, y);
            }
        } else {
            const int64_t of = at_most(r0 + r, head.rows() - 1);
            score.slope = T(slope_of(call, head, of));
            score.position = T(head.position(of));
            for (int64_t j = begin; j < stop; j += L) {
                Vec<T> y = score.template minus<EDGE>(0, load(row + j), j, j0, nullptr);
                store(row + j, y);
                largest = larger(largest, y);
            }
        }
        const T of_tile = maximum<T>(largest) * factor;
        const T new_max = of_tile > row_max[r] ? of_tile : row_max[r];
        Vec<T> total{};
        for (int64_t j = begin; j < stop; j += L) {
            Vec<T> p = exponential(load(row + j) * factor - new_max);
            store(row + j, p);
            total += p;
        }
        if (new_max != row_max[r]) {
            const T alpha = scalar_exponential(row_max[r] - new_max);
            row_sum[r] *= alpha;
            T* a = acc + r * dv;
            for (int64_t i = 0; i < dv; i += L) store(a + i, load(a + i) * alpha);
            row_max[r] = new_max;
        }
        row_sum[r] += sum<T>(total);
    }

    void write(const Head& head, int64_t r0, int64_t m) {
        for (int64_t r = 0; r < m; ++r) {
            const int64_t h = head.query_head(r0 + r), t = (r0 + r) / head.group + head.s.q0;
            if (call.o.data) {
                const T factor = row_sum[r] == 0 ? 0 : 1 / row_sum[r];
                format.store(const_cast<char*>(at(call.o, format.bytes, head.b, h, t)), acc + r * dv, call.dv, call.o.d, factor);
            }
            if (call.lse.data)
                *reinterpret_cast<T*>(const_cast<char*>(at(call.lse, sizeof(T), head.b, h, t))) =
                    row_max[r] + logarithm(row_sum[r]);
        }
    }

    static T lowest() { return sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__); }
};

}  // namespace ISA
}  // namespace tilegrad
