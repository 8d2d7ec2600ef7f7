// Backward: a thread computes dk and dv of a tile of columns in a loop over the blocks of rows that attend to the tile. dq is
// summed in the order of the tiles.
//
//   open a head:     q, do packed; delta = rowsum(do ∘ o) − dlse; dq = 0
//   tile of columns: k, kᵀ, vᵀ packed; dk = dv = 0
//     for each block of rows:
//       p  = exp(s − lse)           s = scores of q kᵀ
//       ds = p ∘ (do vᵀ − delta)    do vᵀ ∘ keep / (1 − dropout_p) with dropout
//       dbias += ds                 bias.h; then ds ∘= 1 − tanh² with a softcap
//       dv += (p ∘ keep)ᵀ do
//       dk += dsᵀ q
//       dq += ds k                  after all lower tiles: work_queue.h
//     dk · scale and dv / (1 − dropout_p) are written
//   close a head:    dq · scale is written; dsink = −Σ exp(sink − lse) · delta per query head; sequences are summed at the end
//
// Five GEMMs per tile, and each score is computed once. In masked blocks, strips of MR rows or columns skip masked-out parts.
#pragma once

#include "simd/product.h"
#include "attention/bias.h"
#include "attention/dropout.h"
#include "attention/head_rows.h"
#include "attention/intervals.h"
#include "attention/tile_loop.h"

namespace tilegrad::ISA {

// Statistics of each row of an open head.
template <class T>
struct Statistics {
    T *lse, *delta;  // a row whose lse is −inf gets lse = +huge and delta = 0, so p = ds = 0
    int32_t *lo, *hi;

    void allocate(BumpAllocator& allocator, int64_t rows) {
        lse = allocator.take<T>(rows);
        delta = allocator.take<T>(rows);
        lo = allocator.take<int32_t>(rows);
        hi = allocator.take<int32_t>(rows);
    }

    // `o` and `g` are buffers for one row of o and of do.
    void fill(const Call& call, const Format<T>& format, const Head& head, int64_t padded, T* o, T* g) {
        const int64_t rows = head.rows();
        const T huge = sizeof(T) == 4 ? T(__FLT_MAX__) : T(__DBL_MAX__);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t h = head.query_head(r), t = head.token(r);
            format.load(o, at(call.o, format.bytes, head.b, h, t), call.dv, call.o.d);
            format.load(g, at(call.do_, format.bytes, head.b, h, t), call.dv, call.do_.d);
            lse[r] = *reinterpret_cast<const T*>(at(call.lse, sizeof(T), head.b, h, t));
            delta[r] = dot(o, g, call.dv);
            if (call.dlse.data) delta[r] -= *reinterpret_cast<const T*>(at(call.dlse, sizeof(T), head.b, h, t));
            if (lse[r] == -T(__builtin_inf())) {
                lse[r] = huge;
                delta[r] = 0;
            }
            attended_columns(call, head, r, lo + r, hi + r);
        }
        for (int64_t r = rows; r < padded; ++r) {
            lse[r] = huge;
            delta[r] = 0;
            lo[r] = rows ? lo[rows - 1] : 0;
            hi[r] = rows ? hi[rows - 1] : 0;
        }
    }

    // Computed in double, because dp − delta cancels.
    static T dot(const T* a, const T* b, int64_t n) {
        double sums[4] = {};
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (int u = 0; u < 4; ++u) sums[u] += double(a[i + u]) * double(b[i + u]);
        for (; i < n; ++i) sums[0] += double(a[i]) * double(b[i]);
        return T((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }

    // dsinks (B, Hq) = −Σ exp(sink − lse) · delta, for each query head of this kv head.
    void sink_gradients(const Call& call, const Head& head, double* dsinks) const {
        for (int64_t g = 0; g < head.group; ++g) {
            double total = 0;
            const double sink = sink_of(call, head, g);
            for (int64_t r = g; r < head.rows(); r += head.group)
                total -= __builtin_exp(sink - double(lse[r])) * double(delta[r]);
            dsinks[head.b * call.hq + head.query_head(g)] = total;
        }
    }
};

// Stores rows j0 … j0 + n of dk or dv.
template <class T>
void store_columns(const View& x, const Format<T>& format, const Head& head, int64_t j0, int64_t n, const Packed<T>& rows, int64_t d, T factor) {
    for (int64_t j = 0; j < n; ++j) store_row(x, format, head.b, head.kv, head.s.k0 + j0 + j, rows, j, d, factor);
}

// Handles a block whose bias is −inf everywhere: ds = 0. `next_tile` is the block's entry of Open::next_tile, or null; `after` is
// its next value.
template <class T>
void masked_out_block(const BiasGradient<T>& dbias, int32_t* turns, const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n, T* zeros,
                      int32_t* next_tile, int32_t tile, int32_t after) {
    if (dbias.on) dbias.masked_out_block(turns, head, r0, m, j0, n, zeros);
    if (!next_tile) return;
    wait_for_order(next_tile, tile);
    advance_order(next_tile, after);
}

template <class T>
struct Backward {
    static constexpr int L = Lanes<T>::N;

    // The slot of an open head.
    struct Open {
        Packed<T> q, g, dq;  // (rows, D), (rows, Dv), (rows, D); g = do
        T* row_sums;         // row sums of ds, for dbias
        Statistics<T> rows;
        int32_t* next_tile;  // per block of rows: the next tile of columns that adds to dq; intervals do not mask it out
    };

    const Call& call;
    const Format<T> format = format_of<T>(call.dtype), dkv_format = format_of<T>(call.dkv_dtype);
    const int64_t d = round_up(call.d, L), dv = round_up(call.dv, L);  // padded
    const Bias<T> bias{call};
    const BiasGradient<T> dbias{call, TILE, TILE};
    const Dropout<T> dropout{call};
    const bool want_dq = call.dq.data, want_dk = call.dk.data, want_dv = call.dv_.data, want_ds = want_dq || want_dk || dbias.on;
    const bool plain = call.softcap == 0 && !call.slopes.data;
    const bool in_order = want_dq || dbias.by_row;
    const bool with_dbias = BiasGradient<T>::possible(call);
    const int64_t max_rows = round_up(call.tq * (call.hq / call.hkv), MR);

    Slots slots;
    Intervals intervals;
    IntervalColumns interval_columns;  // the intervals of the tile's columns
    Packed<T> k, v, dk, dv_;  // buffers of this thread
    T *kt, *vt, *p, *ds;
    T *rows_of_bias, *ds_of_bias, *column_sums;  // (TILE, TILE); (TILE, TILE), ds before the softcap's derivative; (G, TILE)
    typename Bias<T>::Rows of_bias{};            // the rows of the bias for the block

    Backward(const Call& call, BumpAllocator& allocator, int64_t worker) : call(call), slots(call, allocator, slot_bytes(*this), BiasGradient<T>::turns(call, TILE, TILE)), intervals(call, TILE, allocator) {
        for (int64_t w = 0; w <= worker; ++w) {
            k = {allocator.take<T>(TILE * d), TILE, d};
            kt = allocator.take<T>(d * TILE);
            v = {allocator.take<T>(TILE * dv), TILE, dv};
            vt = allocator.take<T>(dv * TILE);
            dk = {allocator.take<T>(TILE * d), TILE, d};
            dv_ = {allocator.take<T>(TILE * dv), TILE, dv};
            p = allocator.take<T>(TILE * TILE);
            ds = allocator.take<T>(TILE * TILE);
            rows_of_bias = allocator.take<T>(bias.on ? TILE * TILE : 0);
            ds_of_bias = with_dbias && call.softcap != 0 ? allocator.take<T>(TILE * TILE) : ds;
            column_sums = allocator.take<T>(with_dbias ? call.hq / call.hkv * TILE : 0);
            interval_columns.allocate(allocator, intervals);
        }
    }

    Open allocate(BumpAllocator& allocator) const {
        Open x;
        x.q = {allocator.take<T>(max_rows * d), max_rows, d};
        x.g = {allocator.take<T>(max_rows * dv), max_rows, dv};
        x.dq = {allocator.take<T>(max_rows * d), max_rows, d};
        x.row_sums = allocator.take<T>(with_dbias ? max_rows : 0);
        x.rows.allocate(allocator, max_rows);
        x.next_tile = allocator.take<int32_t>((max_rows + TILE - 1) / TILE);
        return x;
    }

    int64_t tiles(const Head& head) const { return want_ds || want_dv ? (head.s.tk + TILE - 1) / TILE : 0; }

    void open_head(const Head& head, Open x) {
        const int64_t rows = head.rows(), padded = round_up(rows, MR);
        pack_rows(x.q, 0, call.q, format, head, 0, rows, padded, call.d);
        pack_rows(x.g, 0, call.do_, format, head, 0, rows, padded, call.dv);
        x.dq.clear(padded);
        if (dbias.by_row) memset(x.row_sums, 0, rows * sizeof(T));
        x.rows.fill(call, format, head, padded, v.data, vt);
        for (int64_t r0 = 0; r0 < rows; r0 += TILE) x.next_tile[r0 / TILE] = intervals.next(head, r0, at_most(TILE, rows - r0), x.rows.lo[r0] / TILE);
    }

    void advance(const Head& head, const Open& x, int64_t r0, int32_t tile) const {
        advance_order(x.next_tile + r0 / TILE, intervals.next(head, r0, at_most(TILE, head.rows() - r0), tile + 1));
    }

    void tile(const Head& head, const Open& x, int32_t tile) {
        const int64_t j0 = tile * TILE, n = at_most(TILE, head.s.tk - j0);
        pack_columns(k, 0, call.k, format, head, j0, n, TILE, call.d);
        pack_columns(v, 0, call.v, format, head, j0, n, TILE, call.dv);
        transpose(kt, TILE, k, 0, round_up(n, L));
        transpose(vt, TILE, v, 0, round_up(n, L));
        dk.clear(TILE);
        dv_.clear(TILE);
        dbias.start_columns(column_sums, head, TILE);
        if (intervals.on) interval_columns.load(intervals, head, tile);
        if (bias.on && bias.same_in_rows) of_bias = bias.load(rows_of_bias, TILE, head, 0, 1, j0, n);
        const Run attending = rows_attending(call, head, j0, j0 + n);
        for (int64_t r0 = attending.begin / TILE * TILE; r0 < attending.end; r0 += TILE) {
            const int64_t m = at_most(TILE, head.rows() - r0);
            const int64_t last = r0 + round_up(m, MR) - 1;
            if (intervals.on && intervals.mask_out(head, r0, m, tile)) {
                if (dbias.on) dbias.masked_out_block(slots.turns, head, r0, m, j0, n, ds);
                continue;
            }
            const bool crossed = intervals.on && intervals.touch(head, r0, m, tile);
            if (bias.on && !bias.same_in_rows) of_bias = bias.load(rows_of_bias, TILE, head, r0, m, j0, n);
            if (bias.on && !of_bias.data)
                masked_out_block(dbias, slots.turns, head, r0, m, j0, n, ds, in_order ? x.next_tile + r0 / TILE : nullptr, tile,
                                 intervals.next(head, r0, m, tile + 1));
            else if (!crossed && n == TILE && m == TILE && x.rows.lo[last] <= j0 && x.rows.hi[r0] >= j0 + n)
                unmasked_block(head, x, r0, tile);
            else
                masked_block(head, x, r0, m, tile, n, crossed);
        }
        dbias.end_columns(slots.turns, column_sums, head, j0, n, TILE);
        if (want_dk) store_columns(call.dk, dkv_format, head, j0, n, dk, call.d, T(call.scale));
        if (want_dv) store_columns(call.dv_, dkv_format, head, j0, n, dv_, call.dv, dropout.kept);
    }

    void unmasked_block(const Head& head, const Open& x, int64_t r0, int32_t tile) {
        product_along(p, TILE, x.q, r0, kt, TILE, TILE, TILE);
        if (want_ds) product_along(ds, TILE, x.g, r0, vt, TILE, TILE, TILE);
        for (int64_t r = 0; r < TILE; ++r) p_and_ds<false>(head, x, r0, r, tile * TILE, 0, TILE);
        if (dbias.on) dbias.block(slots.turns, column_sums, head, r0, TILE, tile * TILE, TILE, ds_of_bias, TILE);
        if (want_dv) add_product<T, TRANSPOSED>(dv_, 0, p, TILE, x.g, r0, TILE, TILE);
        if (want_dk) add_product<T, TRANSPOSED>(dk, 0, ds, TILE, x.q, r0, TILE, TILE);
        if (!in_order) return;
        wait_for_order(x.next_tile + r0 / TILE, tile);
        if (want_dq) add_product<T, ROWS>(x.dq, r0, ds, TILE, k, 0, TILE, TILE);
        if (dbias.by_row) dbias.rows(x.row_sums + r0, TILE, TILE, ds_of_bias, TILE);
        advance(head, x, r0, tile);
    }

    void masked_block(const Head& head, const Open& x, int64_t r0, int64_t m, int32_t tile, int64_t n, bool crossed) {
        const int64_t j0 = tile * TILE;
        const int32_t *lo = x.rows.lo + r0, *hi = x.rows.hi + r0;
        Run strips[TILE / MR];  // the columns that some row of a strip of MR rows attends to
        for (int64_t r = 0; r < m; r += MR) {
            Run run{at_least(0, lo[r] - j0), at_most(n, hi[r + MR - 1] - j0)};
            if (crossed) run = interval_columns.without_masked_out(run, head.index(r0 + r), head.index(at_most(r0 + r + MR, head.rows()) - 1));
            strips[r / MR] = {run.begin / L * L, run.end};
        }
        memset(p, 0, TILE * TILE * sizeof(T));
        memset(ds, 0, TILE * TILE * sizeof(T));
        if (ds_of_bias != ds) memset(ds_of_bias, 0, TILE * TILE * sizeof(T));
        for (int64_t r = 0; r < m; r += MR) {
            const int64_t begin = strips[r / MR].begin, stop = round_up(strips[r / MR].end, L);
            if (begin >= strips[r / MR].end) continue;
            product_along(p + r * TILE + begin, TILE, x.q, r0 + r, kt + begin, TILE, MR, stop - begin);
            if (want_ds) product_along(ds + r * TILE + begin, TILE, x.g, r0 + r, vt + begin, TILE, MR, stop - begin);
            for (int64_t y = r; y < r + MR; ++y) p_and_ds<true>(head, x, r0, y, j0, begin, stop, crossed);
        }
        if (dbias.on) dbias.block(slots.turns, column_sums, head, r0, m, j0, n, ds_of_bias, TILE);
        for (int64_t j = 0; j < n; j += MR) {  // rows a … b attend to at least one of columns j … j + MR
            int64_t a = 0, b = m;
            while (a < m && hi[a] <= j0 + j) ++a;
            while (b > a && lo[b - 1] >= j0 + j + MR) --b;
            auto apart = [&](const Run& run) { return run.begin >= run.end || run.begin >= j + MR || run.end <= j; };
            while (crossed && a < b && apart(strips[a / MR])) a = (a / MR + 1) * MR;
            while (crossed && a < b && apart(strips[(b - 1) / MR])) b = (b - 1) / MR * MR;
            if (a >= b) continue;
            if (want_dv) add_product<T, TRANSPOSED>(dv_, j, p + a * TILE + j, TILE, x.g, r0 + a, MR, b - a);
            if (want_dk) add_product<T, TRANSPOSED>(dk, j, ds + a * TILE + j, TILE, x.q, r0 + a, MR, b - a);
        }
        if (!in_order) return;
        wait_for_order(x.next_tile + r0 / TILE, tile);
        if (dbias.by_row) dbias.rows(x.row_sums + r0, m, n, ds_of_bias, TILE);
        for (int64_t r = 0; r < m; r += MR) {
            const int64_t begin = strips[r / MR].begin, stop = strips[r / MR].end;
            if (want_dq && begin < stop)
                add_product<T, ROWS>(x.dq, r0 + r, ds + r * TILE + begin, TILE, k, begin, MR, stop - begin);
        }
        advance(head, x, r0, tile);
    }

    // One row: products → p and ds. `crossed`: intervals may mask pairs out.
    template <bool MASKED>
    void p_and_ds(const Head& head, const Open& x, int64_t r0, int64_t r, int64_t j0, int64_t begin, int64_t stop, bool crossed = false) {
        if (dropout.on)
            bias.on ? p_and_ds<MASKED, true, true>(head, x, r0, r, j0, begin, stop, crossed)
                    : p_and_ds<MASKED, false, true>(head, x, r0, r, j0, begin, stop, crossed);
        else
            bias.on ? p_and_ds<MASKED, true, false>(head, x, r0, r, j0, begin, stop, crossed)
                    : p_and_ds<MASKED, false, false>(head, x, r0, r, j0, begin, stop, crossed);
    }

    template <bool MASKED, bool BIASED, bool DROPPING>
    void p_and_ds(const Head& head, const Open& x, int64_t r0, int64_t r, int64_t j0, int64_t begin, int64_t stop, bool crossed) {
        T *row = p + r * TILE, *drow = ds + r * TILE;
        const int64_t of = at_most(r0 + r, head.rows() - 1);
        const Vec<T> lse = all(x.rows.lse[r0 + r]), delta = all(x.rows.delta[r0 + r]);
        const Score<T> score(call, T(slope_of(call, head, of)), T(head.position(of)), x.rows.lo[of], x.rows.hi[of]);
        const T* row_of_bias = of_bias.data + at_most(r, head.rows() - 1 - r0) * of_bias.ld;
        if (BIASED) bias.prefetch(head, r0 + r + MR, j0 + begin, stop - begin);
        Ints<T> column = iota<T>() + typename Lanes<T>::Integer(j0 + begin);
        Ints<T> dropped[DROPPING ? TILE / L : 1];
        if (DROPPING)
            dropout.draw(dropped, (stop - begin) / L, head.b, score.same(head.query_head(of)), score.same(head.index(of)), column, L);
        for (int64_t j = begin; j < stop; j += L, column += L) {
            Vec<T> derivative = all(T(1)), s = load(row + j);
            const Vec<T> b = BIASED ? load(row_of_bias + j) : Vec<T>{};
            if (!plain)
                s = score.of(s, b, column, &derivative);
            else
                s = BIASED ? score.product(s) + b : score.product(s);
            if (MASKED) s = score.mask(s, column);
            if (MASKED && crossed) s = interval_columns.mask_columns<T>(s, head.index(of), j);
            const Vec<T> e = exponential(s - lse);
            Vec<T> dp = load(drow + j), r_of_o = e;
            if (DROPPING) {
                dp = dropout.unless(dropped[(j - begin) / L], dp * dropout.kept);
                r_of_o = dropout.unless(dropped[(j - begin) / L], e);
            }
            Vec<T> de = e * (dp - delta);
            if (BIASED && ds_of_bias != ds) store(ds_of_bias + r * TILE + j, de);
            if (!plain) de *= derivative;
            store(row + j, r_of_o);
            store(drow + j, de);
        }
    }

    void close_head(const Head& head, const Open& x, double* dsinks) {
        if (call.dsinks.data) x.rows.sink_gradients(call, head, dsinks);
        dbias.end_rows(slots.turns, x.row_sums, head);
        if (!want_dq) return;
        for (int64_t r = 0; r < head.rows(); ++r)
            store_row(call.dq, format, head.b, head.query_head(r), head.token(r), x.dq, r, call.d, T(call.scale));
    }
};

}  // namespace tilegrad::ISA
