// The backward of backward.h on AMX tiles, for bfloat16. Scores are transposed: sᵀ has one row per column j of s.
//
//   (1) sᵀ = k qᵀ            k row-major, q as pairs of columns
//   (2) dpᵀ = v doᵀ          v row-major, do as pairs of columns
//       pᵀ, dsᵀ              lanes are rows: lse, delta and the band are vectors; rounded to bfloat16
//   (3) dv += pᵀ do          do as pairs of rows
//   (4) dk += dsᵀ q          q as pairs of rows
//   (5) dqᵀ += kᵀ dsᵀ        dsᵀ also stored as pairs of rows; dq stays transposed until its head closes
//
// So only q, do and k are ever transposed. All sums are float32. In a block that an edge of the mask crosses, 32 × 32 squares
// that are masked out are skipped.
#pragma once

#include "attention/amx.h"
#include "attention/backward.h"

namespace tilegrad::ISA {

struct AmxBackward {
    static constexpr int64_t ROWS = 128, COLUMNS = 128;

    // The slot of an open head, in blocks of ROWS rows.
    struct Open {
        Bf16 *q_columns, *g_columns;  // [block][D/2][ROWS][2]; g = do
        Bf16 *q_rows, *g_rows;        // [rows/2][D][2]
        float* dq;                    // [block][D][ROWS]
        Statistics<float> rows;
        RowLanes<float> lanes;
        float* row_sums;  // row sums of ds, for dbias
        int32_t* next_tile;
    };

    const Call& call;
    const Format<float> dkv_format = format_of<float>(call.dkv_dtype);
    const int64_t d = round_up(call.d, STRIP), dv = round_up(call.dv, STRIP);  // padded
    const Bias<float> bias{call};
    const BiasGradient<float> dbias{call, COLUMNS, ROWS};
    const Dropout<float> dropout{call};
    const bool want_dq = call.dq.data, want_dk = call.dk.data, want_dv = call.dv_.data, want_ds = want_dq || want_dk || dbias.on;
    const bool products = call.softcap == 0 && !call.slopes.data;  // a score is scale · q·k, plus a bias if there is one
    const bool in_order = want_dq || dbias.by_row, with_dbias = BiasGradient<float>::possible(call);
    const int64_t max_rows = round_up(call.tq * (call.hq / call.hkv), ROWS);

    Slots slots;
    Intervals intervals;
    IntervalColumns interval_columns;  // the intervals of the tile's columns
    // Buffers of this thread.
    Bf16 *k, *v, *kt, *pairs, *p, *ds, *ds_pairs;
    float *dk, *dv_, *s, *dp, *row;
    float *rows_of_bias, *bias_t;          // (ROWS, COLUMNS), later reused for ds of dbias, and (COLUMNS, ROWS)
    float *ds_of_bias_t, *column_sums;     // (COLUMNS, ROWS), (G, COLUMNS)

    AmxBackward(const Call& call, BumpAllocator& allocator, int64_t worker) : call(call), slots(call, allocator, slot_bytes(*this), BiasGradient<float>::turns(call, COLUMNS, ROWS)), intervals(call, COLUMNS, allocator) {
        const int64_t widest = at_least(d, dv);
        for (int64_t w = 0; w <= worker; ++w) {
            k = allocator.take<Bf16>(COLUMNS * d);
            v = allocator.take<Bf16>(COLUMNS * dv);
            kt = allocator.take<Bf16>(COLUMNS * d);
            pairs = allocator.take<Bf16>(ROWS * widest);
            p = allocator.take<Bf16>(COLUMNS * ROWS);
            ds = allocator.take<Bf16>(COLUMNS * ROWS);
            ds_pairs = allocator.take<Bf16>(COLUMNS * ROWS);
            dk = allocator.take<float>(COLUMNS * d);
            dv_ = allocator.take<float>(COLUMNS * dv);
            s = allocator.take<float>(STRIP * ROWS);
            dp = allocator.take<float>(STRIP * ROWS);
            row = allocator.take<float>(ROWS * widest);
            rows_of_bias = allocator.take<float>(bias.on ? ROWS * COLUMNS : 0);
            bias_t = allocator.take<float>(bias.on ? COLUMNS * ROWS : 0);
            ds_of_bias_t = allocator.take<float>(with_dbias ? COLUMNS * ROWS : 0);
            column_sums = allocator.take<float>(with_dbias ? call.hq / call.hkv * COLUMNS : 0);
            interval_columns.allocate(allocator, intervals);
        }
    }

    Open allocate(BumpAllocator& allocator) const {
        Open x;
        x.q_columns = allocator.take<Bf16>(max_rows * d);
        x.g_columns = allocator.take<Bf16>(max_rows * dv);
        x.q_rows = allocator.take<Bf16>(max_rows * d);
        x.g_rows = allocator.take<Bf16>(max_rows * dv);
        x.dq = allocator.take<float>(max_rows * d);
        x.row_sums = allocator.take<float>(with_dbias ? max_rows : 0);
        x.rows.allocate(allocator, max_rows);
        x.lanes.allocate(allocator, max_rows);
        x.next_tile = allocator.take<int32_t>(max_rows / ROWS);
        return x;
    }

    int64_t tiles(const Head& head) const { return want_ds || want_dv ? (head.s.tk + COLUMNS - 1) / COLUMNS : 0; }

    void open_head(const Head& head, Open x) {
        const int64_t rows = head.rows();
        for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
            const int64_t m = at_most(ROWS, rows - r0), padded = round_up(m, STRIP);
            pack_rows(pairs, d, call.q, BF16_BITS, head, r0, m, padded, call.d);
            pairs_of_columns(x.q_columns + r0 * d, ROWS, pairs, padded, d);
            pairs_of_rows(x.q_rows + r0 * d, pairs, padded, d);
            pack_rows(pairs, dv, call.do_, BF16_BITS, head, r0, m, padded, call.dv);
            pairs_of_columns(x.g_columns + r0 * dv, ROWS, pairs, padded, dv);
            pairs_of_rows(x.g_rows + r0 * dv, pairs, padded, dv);
        }
        memset(x.dq, 0, round_up(rows, ROWS) * d * sizeof(float));
        if (dbias.by_row) memset(x.row_sums, 0, rows * sizeof(float));
        x.rows.fill(call, BF16_ROWS, head, round_up(rows, STRIP), row, row + ROWS / 2 * at_least(d, dv));
        x.lanes.fill(call, head, 0, rows, round_up(rows, STRIP));
        for (int64_t r0 = 0; r0 < rows; r0 += ROWS)
            x.next_tile[r0 / ROWS] = intervals.next(head, r0, at_most(ROWS, rows - r0), x.rows.lo[r0] / COLUMNS);
    }

    void tile(const Head& head, const Open& x, int32_t tile) {
        const int64_t j0 = tile * COLUMNS, n = at_most(COLUMNS, head.s.tk - j0), padded = round_up(n, STRIP);
        pack_columns(k, d, call.k, BF16_BITS, head, j0, n, padded, call.d);
        pack_columns(v, dv, call.v, BF16_BITS, head, j0, n, padded, call.dv);
        if (want_dq) {
            pairs_of_columns(pairs, COLUMNS, k, padded, d);
            columns_of_pairs(kt, COLUMNS, pairs, COLUMNS, padded, d);
        }
        memset(dk, 0, padded * d * sizeof(float));
        memset(dv_, 0, padded * dv * sizeof(float));
        dbias.start_columns(column_sums, head, COLUMNS);
        if (intervals.on) interval_columns.load(intervals, head, tile);
        bool attended = !bias.on || (bias.same_in_rows && bias.load_transposed(bias_t, ROWS, rows_of_bias, COLUMNS, head, 0, 1, j0, n));
        const Run attending = rows_attending(call, head, j0, j0 + n);
        for (int64_t r0 = attending.begin / ROWS * ROWS; r0 < attending.end; r0 += ROWS) {
            const int64_t m = at_most(ROWS, head.rows() - r0);
            if (intervals.on && intervals.mask_out(head, r0, m, tile)) {
                if (dbias.on) dbias.masked_out_block(slots.turns, head, r0, m, j0, n, s);
                continue;
            }
            if (bias.on && !bias.same_in_rows)
                attended = bias.load_transposed(bias_t, ROWS, rows_of_bias, COLUMNS, head, r0, m, j0, n);
            if (attended)
                block(head, x, r0, tile, n);
            else
                masked_out_block(dbias, slots.turns, head, r0, m, j0, n, s, in_order ? x.next_tile + r0 / ROWS : nullptr, tile,
                                 intervals.next(head, r0, m, tile + 1));
        }
        dbias.end_columns(slots.turns, column_sums, head, j0, n, COLUMNS);
        for (int64_t j = 0; want_dk && j < n; ++j)
            store_row(call.dk, dkv_format, head.b, head.kv, head.s.k0 + j0 + j, whole_row(dk + j * d, d), 0, call.d, float(call.scale));
        for (int64_t j = 0; want_dv && j < n; ++j)
            store_row(call.dv_, dkv_format, head.b, head.kv, head.s.k0 + j0 + j, whole_row(dv_ + j * dv, dv), 0, call.dv, dropout.kept);
    }

    // The strips of the block's rows that attend to at least one of columns j … j + n.
    Run strips_attending(const int32_t* lo, const int32_t* hi, int64_t m, int64_t j, int64_t n) const {
        int64_t a = 0, b = m;
        while (a < m && hi[a + STRIP - 1] <= j) a += STRIP;
        while (b > a && lo[b - STRIP] >= j + n) b -= STRIP;
        return {a, b};
    }

    void block(const Head& head, const Open& x, int64_t r0, int32_t tile, int64_t n) {
        const int64_t j0 = tile * COLUMNS, m = at_most(ROWS, round_up(head.rows() - r0, STRIP)), n_padded = round_up(n, STRIP);
        const int32_t *lo = x.rows.lo + r0, *hi = x.rows.hi + r0;
        const bool crossed = intervals.on && intervals.touch(head, r0, at_most(ROWS, head.rows() - r0), tile);
        const bool unmasked = !crossed && n == n_padded && lo[m - 1] <= j0 && hi[0] >= j0 + n;
        Run strips[COLUMNS / STRIP];
        if (dbias.on && !unmasked) memset(ds_of_bias_t, 0, COLUMNS * ROWS * sizeof(float));
        for (int64_t j = 0; j < n_padded; j += STRIP) {
            const Run attending = unmasked ? Run{0, m} : strips_attending(lo, hi, m, j0 + j, at_most(STRIP, n - j));
            strips[j / STRIP] = attending;
            for (int64_t i = attending.begin; i < attending.end; i += STRIP) {
                tile_product<false>(s + i, ROWS, k + j * d, d, x.q_columns + r0 * d + 2 * i, 2 * ROWS, d);
                if (want_ds) tile_product<false>(dp + i, ROWS, v + j * dv, dv, x.g_columns + r0 * dv + 2 * i, 2 * ROWS, dv);
            }
            dropout.on ? p_and_ds<true>(head, x, r0, j0, j, attending, unmasked, crossed)
                       : p_and_ds<false>(head, x, r0, j0, j, attending, unmasked, crossed);
        }
        const int64_t rows = at_most(ROWS, head.rows() - r0);
        if (dbias.on) {
            transpose(rows_of_bias, COLUMNS, ds_of_bias_t, ROWS, n_padded, m);
            dbias.block(slots.turns, column_sums, head, r0, rows, j0, n, rows_of_bias, COLUMNS);
        }
        for (int64_t j = 0; j < n_padded; j += STRIP) {
            const int64_t a = strips[j / STRIP].begin, k_end = strips[j / STRIP].end - a;
            if (k_end <= 0) continue;
            if (want_dv)
                for (int64_t i = 0; i < dv; i += STRIP)
                    tile_product<true>(dv_ + j * dv + i, dv, p + j * ROWS + a, ROWS, x.g_rows + (r0 + a) * dv + 2 * i, 2 * dv, k_end);
            if (want_dk)
                for (int64_t i = 0; i < d; i += STRIP)
                    tile_product<true>(dk + j * d + i, d, ds + j * ROWS + a, ROWS, x.q_rows + (r0 + a) * d + 2 * i, 2 * d, k_end);
        }
        if (!in_order) return;
        wait_for_order(x.next_tile + r0 / ROWS, tile);
        if (dbias.by_row) dbias.rows(x.row_sums + r0, rows, n, rows_of_bias, COLUMNS);
        for (int64_t i = 0; want_dq && i < m; i += STRIP) {  // the strips of columns that these rows attend to are adjacent
            int64_t a = n_padded, b = 0;
            for (int64_t j = 0; j < n_padded; j += STRIP)
                if (strips[j / STRIP].begin <= i && i < strips[j / STRIP].end) {
                    a = at_most(a, j);
                    b = j + STRIP;
                }
            if (a >= b) continue;
            for (int64_t e = 0; e < d; e += STRIP)
                tile_product<true>(x.dq + (r0 * d + e * ROWS) + i, ROWS, kt + e * COLUMNS + a, COLUMNS, ds_pairs + a * ROWS + 2 * i, 2 * ROWS,
                                   b - a);
        }
        advance_order(x.next_tile + r0 / ROWS, intervals.next(head, r0, rows, tile + 1));
    }

    // The terms of a score besides the product: none, only a bias, or any of softcap, slopes and bias.
    enum Form { PRODUCT, BIASED, ANY };

    template <bool DROPPING>
    void p_and_ds(const Head& head, const Open& x, int64_t r0, int64_t j0, int64_t j, Run attending, bool unmasked, bool crossed) {
        if (!products)
            p_and_ds<true, ANY, DROPPING>(head, x, r0, j0, j, attending, crossed);
        else if (bias.on)
            unmasked ? p_and_ds<false, BIASED, DROPPING>(head, x, r0, j0, j, attending, crossed)
                     : p_and_ds<true, BIASED, DROPPING>(head, x, r0, j0, j, attending, crossed);
        else
            unmasked ? p_and_ds<false, PRODUCT, DROPPING>(head, x, r0, j0, j, attending, crossed)
                     : p_and_ds<true, PRODUCT, DROPPING>(head, x, r0, j0, j, attending, crossed);
    }

    // Columns j … j + 32 of the tile, two at a time: products → p, ds, and ds as pairs of rows.
    template <bool MASKED, Form FORM, bool DROPPING>
    void p_and_ds(const Head& head, const Open& x, int64_t r0, int64_t j0, int64_t j, Run attending, bool crossed) {
        const bool biased = FORM == BIASED || (FORM == ANY && bias.on);
        for (int64_t y = 0; y < STRIP; y += 2) {
            for (int64_t i = attending.begin; i < attending.end; i += 16) {
                const __m512 lse = _mm512_loadu_ps(x.rows.lse + r0 + i), delta = _mm512_loadu_ps(x.rows.delta + r0 + i);
                __m512 e[2], de[2];
                I32 dropped[2];
                if (DROPPING)
                    dropout.draw(dropped, 2, head.b, load_ints<float>(x.lanes.head + r0 + i), load_ints<float>(x.lanes.index + r0 + i),
                                 Score<float>::same(j0 + j + y), 1);
                for (int64_t z = 0; z < 2; ++z) {
                    const int64_t column = j0 + j + y + z;
                    V32 score = load(s + (y + z) * ROWS + i), derivative = all(1.0f);
                    const V32 b = biased ? bias.lanes(bias_t, ROWS, j + y + z, i) : V32{};
                    if (FORM == ANY) {
                        const Score<float> of_rows(call, x.lanes, r0 + i);
                        score = of_rows.of(score, b, of_rows.same(column), &derivative);
                    } else {
                        score = rounded(score * float(call.scale));
                        if (FORM == BIASED) score += b;
                    }
                    e[z] = exponential_of_difference((__m512)score, lse);
                    __m512 dp_of = _mm512_loadu_ps(dp + (y + z) * ROWS + i), r_of = e[z];
                    if (DROPPING) {
                        dp_of = (__m512)dropout.unless(dropped[z], (V32)dp_of * dropout.kept);
                        r_of = (__m512)dropout.unless(dropped[z], (V32)r_of);
                    }
                    de[z] = _mm512_mul_ps(e[z], _mm512_sub_ps(dp_of, delta));
                    e[z] = r_of;
                    V32 ds_before_softcap = (V32)de[z];
                    if (FORM == ANY) de[z] = _mm512_mul_ps(de[z], (__m512)derivative);
                    if (MASKED) {
                        const __m512i at = _mm512_set1_epi32(int32_t(column));
                        const __m512i lo = _mm512_loadu_si512(x.rows.lo + r0 + i), hi = _mm512_loadu_si512(x.rows.hi + r0 + i);
                        __mmask16 attended = _mm512_cmple_epi32_mask(lo, at) & _mm512_cmplt_epi32_mask(at, hi);
                        if (crossed) {
                            const V32 masked = interval_columns.mask_rows<float>(V32{}, load_ints<float>(x.lanes.index + r0 + i), j + y + z);
                            attended &= _mm512_cmpeq_ps_mask((__m512)masked, _mm512_setzero_ps());
                        }
                        e[z] = _mm512_maskz_mov_ps(attended, e[z]);
                        de[z] = _mm512_maskz_mov_ps(attended, de[z]);
                        ds_before_softcap = (V32)_mm512_maskz_mov_ps(attended, (__m512)ds_before_softcap);
                    }
                    if (FORM != PRODUCT && dbias.on) store(ds_of_bias_t + (j + y + z) * ROWS + i, ds_before_softcap);
                }
                const int64_t first = (j + y) * ROWS + i;
                const __m256i d0 = to_bf16(de[0]), d1 = to_bf16(de[1]);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + first), to_bf16(e[0]));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + first + ROWS), to_bf16(e[1]));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(ds + first), d0);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(ds + first + ROWS), d1);
                _mm512_storeu_si512(ds_pairs + (j + y) * ROWS + 2 * i,
                                    _mm512_or_si512(_mm512_cvtepu16_epi32(d0), _mm512_slli_epi32(_mm512_cvtepu16_epi32(d1), 16)));
            }
        }
    }

    void close_head(const Head& head, const Open& x, double* dsinks) {
        if (call.dsinks.data) x.rows.sink_gradients(call, head, dsinks);
        dbias.end_rows(slots.turns, x.row_sums, head);
        if (!want_dq) return;
        for (int64_t r0 = 0; r0 < head.rows(); r0 += ROWS) {
            transpose(row, d, x.dq + r0 * d, ROWS, d, ROWS);
            for (int64_t r = r0; r < at_most(r0 + ROWS, head.rows()); ++r)
                store_row(call.dq, BF16_ROWS, head.b, head.query_head(r), head.token(r), whole_row(row + (r - r0) * d, d), 0, call.d,
                          float(call.scale));
        }
    }
};

}  // namespace tilegrad::ISA
