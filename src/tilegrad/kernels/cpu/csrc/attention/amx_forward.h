// The forward of forward.h on AMX tiles, for bfloat16. As in the backward, open heads have slots (work_queue.h): k and v are
// packed once for all rows of a head.
//
//   open a head:     k row-major, v transposed
//   block of rows:   q as pairs of columns
//     for each tile of columns, for each strip of 32 rows:
//       sᵀ = k qᵀ                               float32
//       pᵀ = 2^((s − row_max)·log2 e)           p ∘ keep is rounded to bfloat16, as pairs of rows; lanes are rows
//       accᵀ = alpha ∘ accᵀ + vᵀ pᵀ             float32
//
// A row that attends to no column of a tile has p = 0 there.
#pragma once

#include "attention/amx.h"
#include "attention/bias.h"
#include "attention/dropout.h"
#include "attention/intervals.h"
#include "attention/tile_loop.h"

namespace tilegrad::ISA {

struct AmxForward {
    static constexpr int64_t ROWS = 256, COLUMNS = 128;

    struct Open {
        Bf16* k;   // [columns][D]
        Bf16* vt;  // [tile][Dv][COLUMNS]
    };

    const Call& call;
    const int64_t d = round_up(call.d, STRIP), dv = round_up(call.dv, STRIP);  // padded
    const Bias<float> bias{call};
    const Dropout<float> dropout{call};
    const bool products = call.softcap == 0 && !call.slopes.data;  // a score is scale · q·k, plus a bias if there is one
    const bool plain = products && call.scale > 0 && !bias.on;
    const int64_t max_columns = round_up(call.tk, COLUMNS);

    Slots slots;
    Intervals intervals;
    IntervalColumns interval_columns;  // the intervals of the tile's columns, if intervals cross the block
    // Buffers of a thread.
    Bf16 *rows_of_q, *q, *v, *pairs, *p;
    float *s, *acc, *o, *row_max, *row_sum;
    float *rows_of_bias, *bias_t;  // (STRIP, COLUMNS), (COLUMNS, STRIP)
    RowLanes<float> lanes;

    AmxForward(const Call& call, BumpAllocator& allocator, int64_t worker) : call(call), slots(call, allocator, slot_bytes(*this)), intervals(call, COLUMNS, allocator) {
        const int64_t rows = at_most(ROWS, round_up(call.tq * (call.hq / call.hkv), STRIP));
        for (int64_t w = 0; w <= worker; ++w) {
            rows_of_q = allocator.take<Bf16>(STRIP * d);
            q = allocator.take<Bf16>(rows * d);
            v = allocator.take<Bf16>(COLUMNS * dv);
            pairs = allocator.take<Bf16>(COLUMNS * dv);
            p = allocator.take<Bf16>(COLUMNS * STRIP);
            s = allocator.take<float>(COLUMNS * STRIP);
            acc = allocator.take<float>(rows * dv);
            o = allocator.take<float>(STRIP * dv);
            row_max = allocator.take<float>(rows);
            row_sum = allocator.take<float>(rows);
            lanes.allocate(allocator, rows);
            interval_columns.allocate(allocator, intervals);
            rows_of_bias = allocator.take<float>(bias.on ? STRIP * COLUMNS : 0);
            bias_t = allocator.take<float>(bias.on ? COLUMNS * STRIP : 0);
        }
    }

    Open allocate(BumpAllocator& allocator) const { return {allocator.take<Bf16>(max_columns * d), allocator.take<Bf16>(max_columns * dv)}; }

    int64_t tiles(const Head& head) const { return (head.rows() + ROWS - 1) / ROWS; }

    void open_head(const Head& head, const Open& x) {
        const int64_t tk = head.s.tk;
        append(call, head, sizeof(Bf16));
        for (int64_t j0 = 0; j0 < tk; j0 += COLUMNS) {
            const int64_t n = at_most(COLUMNS, tk - j0), padded = round_up(n, STRIP);
            pack_columns(x.k + j0 * d, d, call.k, BF16_BITS, head, j0, n, padded, call.d);
            pack_columns(v, dv, call.v, BF16_BITS, head, j0, n, padded, call.dv);
            pairs_of_columns(pairs, COLUMNS, v, padded, dv);
            columns_of_pairs(x.vt + j0 * dv, COLUMNS, pairs, COLUMNS, padded, dv);
        }
    }

    // Blocks are numbered from the end of the sequence, where causal rows have the most work.
    void tile(const Head& head, const Open& x, int32_t number) {
        const int64_t r0 = (tiles(head) - 1 - number) * ROWS, m = at_most(ROWS, head.rows() - r0), padded = round_up(m, STRIP);
        for (int64_t r = 0; r < m; r += STRIP) {
            pack_rows(rows_of_q, d, call.q, BF16_BITS, head, r0 + r, at_most(STRIP, m - r), STRIP, call.d);
            pairs_of_columns(q + r * d, STRIP, rows_of_q, STRIP, d);
        }
        lanes.fill(call, head, r0, m, padded);
        start_rows(call, head, r0, m, padded, row_max, row_sum);
        memset(acc, 0, padded * dv * sizeof(float));
        for (int64_t j0 = lanes.lo[0] / COLUMNS * COLUMNS; j0 < lanes.hi[m - 1]; j0 += COLUMNS)
            columns(head, x, r0, m, j0);
        for (int64_t r = 0; r < m; ++r) {
            if (r % STRIP == 0) transpose(o, dv, acc + r * dv, STRIP, dv, STRIP);
            const float factor = row_sum[r] == 0 ? 0 : dropout.kept / row_sum[r], lse = row_max[r] + logarithm(row_sum[r]);
            write_row(call, BF16_ROWS, head, r0 + r, whole_row(o + r % STRIP * dv, dv), 0, lse, factor);
        }
    }

    void close_head(const Head&, const Open&, double*) {}

    void columns(const Head& head, const Open& x, int64_t r0, int64_t m, int64_t j0) {
        const int64_t n = at_most(COLUMNS, head.s.tk - j0);
        if (intervals.on && intervals.mask_out(head, r0, m, j0 / COLUMNS)) return;
        if (intervals.on) interval_columns.load(intervals, head, j0 / COLUMNS);
        if (bias.on && bias.same_in_rows && !bias.load_transposed(bias_t, STRIP, rows_of_bias, COLUMNS, head, r0, 1, j0, n)) return;
        for (int64_t r = 0; r < m; r += STRIP) strip(head, x, r0, r, at_most(STRIP, m - r), j0, n);
    }

    void strip(const Head& head, const Open& x, int64_t r0, int64_t r, int64_t m, int64_t j0, int64_t n) {
        const int64_t begin = at_least(0, lanes.lo[r] - j0) / STRIP * STRIP, end = at_most(n, lanes.hi[r + STRIP - 1] - j0);
        if (begin >= end || (intervals.on && intervals.mask_out(head, r0 + r, m, j0 / COLUMNS))) return;
        const bool crossed = intervals.on && intervals.touch(head, r0 + r, m, j0 / COLUMNS);
        if (bias.on && !bias.same_in_rows && !bias.load_transposed(bias_t, STRIP, rows_of_bias, COLUMNS, head, r0 + r, m, j0, n)) return;
        const int64_t stop = round_up(end, STRIP);
        for (int64_t j = begin; j < stop; j += STRIP)
            tile_product<false>(s + j * STRIP, STRIP, x.k + (j0 + j) * d, d, q + r * d, 2 * STRIP, d);
        const bool unmasked = !crossed && lanes.lo[r + STRIP - 1] <= j0 + begin && lanes.hi[r] >= j0 + stop;
        bool rescale = false;
        for (int64_t y = 0; y < STRIP; y += 16)
            rescale |= bias.on ? softmax<true>(head, r, y, j0, begin, stop, unmasked, crossed)
                               : softmax<false>(head, r, y, j0, begin, stop, unmasked, crossed);
        float* out = acc + r * dv;
        if (rescale)
            for (int64_t y = 0; y < STRIP; y += 16) {
                const V32 alpha = load(lanes.alpha + r + y);
                for (int64_t i = y; i < dv * STRIP; i += STRIP) store(out + i, load(out + i) * alpha);
            }
        for (int64_t i = 0; i < dv; i += STRIP)
            tile_product<true>(out + i * STRIP, STRIP, x.vt + j0 * dv + i * COLUMNS + begin, COLUMNS, p + begin * STRIP, 2 * STRIP,
                               stop - begin);
    }

    template <bool BIASED>
    bool softmax(const Head& head, int64_t r, int64_t y, int64_t j0, int64_t begin, int64_t stop, bool unmasked, bool crossed) {
        return dropout.on ? softmax<true, BIASED, true>(head, r, y, j0, begin, stop, crossed)
               : unmasked ? softmax<false, BIASED, false>(head, r, y, j0, begin, stop, crossed)
                          : softmax<true, BIASED, false>(head, r, y, j0, begin, stop, crossed);
    }

    // 16 rows from r + y, columns begin … stop: scores → p; updates row_max, row_sum and alpha. True if a maximum increased.
    template <bool MASKED, bool BIASED, bool DROPPING>
    bool softmax(const Head& head, int64_t r, int64_t y, int64_t j0, int64_t begin, int64_t stop, bool crossed) {
        const Score<float> score(call, lanes, r + y);
        const float factor = plain ? score.scale : 1.0f;
        const I32 index = load_ints<float>(lanes.index + r + y);
        const __m512 old_max = _mm512_loadu_ps(row_max + r + y), nothing = _mm512_set1_ps(-__builtin_inff());
        float* scores = s + y;
        __m512 largest = nothing, largest2 = nothing;
        if (BIASED || !plain || MASKED)
            for (int64_t j = begin; j < stop; ++j) {
                V32 z = load(scores + j * STRIP);
                if (BIASED || !plain) {
                    const V32 b = BIASED ? bias.lanes(bias_t, STRIP, j, y) : V32{};
                    z = products ? score.product(z) + b : score.of(z, b, score.same(j0 + j), nullptr);
                }
                if (MASKED) z = score.mask(z, score.same(j0 + j));
                if (MASKED && crossed) z = interval_columns.mask_rows<float>(z, index, j);
                store(scores + j * STRIP, z);
            }
        for (int64_t j = begin; j < stop; j += 2) {
            largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + j * STRIP));
            largest2 = _mm512_max_ps(largest2, _mm512_loadu_ps(scores + (j + 1) * STRIP));
        }
        largest = _mm512_max_ps(largest, largest2);
        const __m512 new_max = _mm512_max_ps((__m512)((V32)largest * factor), old_max);
        auto exponential = [&](int64_t j) {
            return exponential_of_difference((__m512)rounded(load(scores + j * STRIP) * factor), new_max);
        };
        __m512 total = _mm512_setzero_ps(), total2 = total;
        I32 dropped[DROPPING ? COLUMNS : 1];
        if (DROPPING)
            dropout.draw(dropped, stop - begin, head.b, load_ints<float>(lanes.head + r + y), index,
                         score.same(j0 + begin), 1);
        const __m512i paired = _mm512_loadu_si512(PAIRED);
        for (int64_t j = begin; j < stop; j += 2) {
            __m512 a = exponential(j), b = exponential(j + 1);
            total = _mm512_add_ps(total, a);
            total2 = _mm512_add_ps(total2, b);
            if (DROPPING) {
                a = (__m512)dropout.unless(dropped[j - begin], (V32)a);
                b = (__m512)dropout.unless(dropped[j + 1 - begin], (V32)b);
            }
            _mm512_storeu_si512(p + j * STRIP + 2 * y, _mm512_permutexvar_epi16(paired, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
        }
        const __m512 alpha = exponential_of_difference(old_max, new_max);
        _mm512_storeu_ps(lanes.alpha + r + y, alpha);
        _mm512_storeu_ps(row_sum + r + y, _mm512_fmadd_ps(_mm512_loadu_ps(row_sum + r + y), alpha, _mm512_add_ps(total, total2)));
        _mm512_storeu_ps(row_max + r + y, new_max);
        return _mm512_cmpneq_ps_mask(old_max, new_max) != 0;
    }
};

}  // namespace tilegrad::ISA
