// Backward: a thread computes dk and dv of a tile of columns in a loop over the blocks of rows that attend to it. dq is summed
// in the order of the tiles.
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
#include "attention/tile_loop.h"

namespace tilegrad::ISA {

// Statistics of each row of an open head.
template <class T>
struct Statistics {
    T *lse, *delta;  // a row that attends to no column has lse = +huge, delta = 0: p = ds = 0
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

    // In double, because dp − delta cancels.
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
void store_columns(const View& x, const Format<T>& format, const Head& head, int64_t j0, int64_t n, const T* rows, int64_t ld, int64_t width,
                   T factor) {
    for (int64_t j = 0; j < n; ++j)
        format.store(const_cast<char*>(at(x, format.bytes, head.b, head.kv, head.s.k0 + j0 + j)), rows + j * ld, width, x.d, factor);
}

// A block whose bias is −inf everywhere: ds = 0. `next_tile`: the order of dq, or null.
template <class T>
void masked_out_block(const BiasGradient<T>& dbias, int32_t* turns, const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n, T* zeros,
                      int32_t* next_tile, int32_t tile) {
    if (dbias.on) dbias.masked_out_block(turns, head, r0, m, j0, n, zeros);
    if (!next_tile) return;
    wait_for_order(next_tile, tile);
    advance_order(next_tile, tile);
}

template <class T>
struct Backward {
    static constexpr int L = Lanes<T>::N;

    // Slot of an open head.
    struct Open {
        T *q, *g, *dq;  // (rows, D), (rows, Dv), (rows, D); g = do
        T* row_sums;    // row sums of ds, for dbias
        Statistics<T> rows;
        int32_t* next_tile;  // per block of rows: the next tile of columns to add to dq
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
    T *k, *kt, *v, *vt, *dk, *dv_, *p, *ds;  // buffers of this thread
    T *rows_of_bias, *ds_of_bias, *column_sums;  // (TILE, TILE); (TILE, TILE), ds before the softcap's derivative; (G, TILE)
    typename Bias<T>::Rows of_bias{};            // rows_of_bias of the block

    Backward(const Call& call, BumpAllocator& allocator, int64_t worker) : call(call), slots(call, allocator, slot_bytes(*this), BiasGradient<T>::turns(call, TILE, TILE)) {
        for (int64_t w = 0; w <= worker; ++w) {
            k = allocator.take<T>(TILE * d);
            kt = allocator.take<T>(d * TILE);
            v = allocator.take<T>(TILE * dv);
            vt = allocator.take<T>(dv * TILE);
            dk = allocator.take<T>(TILE * d);
            dv_ = allocator.take<T>(TILE * dv);
            p = allocator.take<T>(TILE * TILE);
            ds = allocator.take<T>(TILE * TILE);
            rows_of_bias = allocator.take<T>(bias.on ? TILE * TILE : 0);
            ds_of_bias = with_dbias && call.softcap != 0 ? allocator.take<T>(TILE * TILE) : ds;
            column_sums = allocator.take<T>(with_dbias ? call.hq / call.hkv * TILE : 0);
        }
    }

    Open allocate(BumpAllocator& allocator) const {
        Open x;
        x.q = allocator.take<T>(max_rows * d);
        x.g = allocator.take<T>(max_rows * dv);
        x.dq = allocator.take<T>(max_rows * d);
        x.row_sums = allocator.take<T>(with_dbias ? max_rows : 0);
        x.rows.allocate(allocator, max_rows);
        x.next_tile = allocator.take<int32_t>((max_rows + TILE - 1) / TILE);
        return x;
    }

    int64_t tiles(const Head& head) const { return want_ds || want_dv ? (head.s.tk + TILE - 1) / TILE : 0; }

    void open_head(const Head& head, Open x) {
        const int64_t rows = head.rows(), padded = round_up(rows, MR);
        pack_rows(x.q, d, call.q, format, head, 0, rows, padded, call.d);
        pack_rows(x.g, dv, call.do_, format, head, 0, rows, padded, call.dv);
        memset(x.dq, 0, padded * d * sizeof(T));
        if (dbias.by_row) memset(x.row_sums, 0, rows * sizeof(T));
        x.rows.fill(call, format, head, padded, v, vt);
        for (int64_t r0 = 0; r0 < rows; r0 += TILE) x.next_tile[r0 / TILE] = x.rows.lo[r0] / TILE;
    }

    void tile(const Head& head, const Open& x, int32_t tile) {
        const int64_t j0 = tile * TILE, n = at_most(TILE, head.s.tk - j0);
        pack_columns(k, d, call.k, format, head, j0, n, TILE, call.d);
        pack_columns(v, dv, call.v, format, head, j0, n, TILE, call.dv);
        transpose(kt, TILE, k, d, round_up(n, L), d);
        transpose(vt, TILE, v, dv, round_up(n, L), dv);
        memset(dk, 0, TILE * d * sizeof(T));
        memset(dv_, 0, TILE * dv * sizeof(T));
        dbias.start_columns(column_sums, head, TILE);
        if (bias.on && bias.same_in_rows) of_bias = bias.load(rows_of_bias, TILE, head, 0, 1, j0, n);
        const Run attending = rows_attending(call, head, j0, j0 + n);
        for (int64_t r0 = attending.begin / TILE * TILE; r0 < attending.end; r0 += TILE) {
            const int64_t m = at_most(TILE, head.rows() - r0);
            const int64_t last = r0 + round_up(m, MR) - 1;
            if (bias.on && !bias.same_in_rows) of_bias = bias.load(rows_of_bias, TILE, head, r0, m, j0, n);
            if (bias.on && !of_bias.data)
                masked_out_block(dbias, slots.turns, head, r0, m, j0, n, ds, in_order ? x.next_tile + r0 / TILE : nullptr, tile);
            else if (n == TILE && m == TILE && x.rows.lo[last] <= j0 && x.rows.hi[r0] >= j0 + n)
                unmasked_block(head, x, r0, tile);
            else
                masked_block(head, x, r0, m, tile, n);
        }
        dbias.end_columns(slots.turns, column_sums, head, j0, n, TILE);
        if (want_dk) store_columns(call.dk, dkv_format, head, j0, n, dk, d, call.d, T(call.scale));
        if (want_dv) store_columns(call.dv_, dkv_format, head, j0, n, dv_, dv, call.dv, dropout.kept);
    }

    void unmasked_block(const Head& head, const Open& x, int64_t r0, int32_t tile) {
        const T *q = x.q + r0 * d, *g = x.g + r0 * dv;
        product<T, ROWS>(p, TILE, q, d, kt, TILE, TILE, TILE, d, false);
        if (want_ds) product<T, ROWS>(ds, TILE, g, dv, vt, TILE, TILE, TILE, dv, false);
        for (int64_t r = 0; r < TILE; ++r) p_and_ds<false>(head, x, r0, r, tile * TILE, 0, TILE);
        if (dbias.on) dbias.block(slots.turns, column_sums, head, r0, TILE, tile * TILE, TILE, ds_of_bias, TILE);
        if (want_dv) product<T, TRANSPOSED>(dv_, dv, p, TILE, g, dv, TILE, dv, TILE, true);
        if (want_dk) product<T, TRANSPOSED>(dk, d, ds, TILE, q, d, TILE, d, TILE, true);
        if (!in_order) return;
        wait_for_order(x.next_tile + r0 / TILE, tile);
        if (want_dq) product<T, ROWS>(x.dq + r0 * d, d, ds, TILE, k, d, TILE, d, TILE, true);
        if (dbias.by_row) dbias.rows(x.row_sums + r0, TILE, TILE, ds_of_bias, TILE);
        advance_order(x.next_tile + r0 / TILE, tile);
    }

    void masked_block(const Head& head, const Open& x, int64_t r0, int64_t m, int32_t tile, int64_t n) {
        const int64_t j0 = tile * TILE;
        const int32_t *lo = x.rows.lo + r0, *hi = x.rows.hi + r0;
        auto first = [&](int64_t r) { return at_least(0, lo[r] - j0) / L * L; };
        auto end = [&](int64_t r) { return at_most(n, hi[r + MR - 1] - j0); };
        memset(p, 0, TILE * TILE * sizeof(T));
        memset(ds, 0, TILE * TILE * sizeof(T));
        if (ds_of_bias != ds) memset(ds_of_bias, 0, TILE * TILE * sizeof(T));
        for (int64_t r = 0; r < m; r += MR) {
            const int64_t begin = first(r), stop = round_up(end(r), L);
            if (begin >= end(r)) continue;
            const T *q = x.q + (r0 + r) * d, *g = x.g + (r0 + r) * dv;
            product<T, ROWS>(p + r * TILE + begin, TILE, q, d, kt + begin, TILE, MR, stop - begin, d, false);
            if (want_ds) product<T, ROWS>(ds + r * TILE + begin, TILE, g, dv, vt + begin, TILE, MR, stop - begin, dv, false);
            for (int64_t y = r; y < r + MR; ++y) p_and_ds<true>(head, x, r0, y, j0, begin, stop);
        }
        if (dbias.on) dbias.block(slots.turns, column_sums, head, r0, m, j0, n, ds_of_bias, TILE);
        for (int64_t j = 0; j < n; j += MR) {  // rows a … b attend to at least one of columns j … j + MR
            int64_t a = 0, b = m;
            while (a < m && hi[a] <= j0 + j) ++a;
            while (b > a && lo[b - 1] >= j0 + j + MR) --b;
            const T *q = x.q + (r0 + a) * d, *g = x.g + (r0 + a) * dv;
            if (want_dv) product<T, TRANSPOSED>(dv_ + j * dv, dv, p + a * TILE + j, TILE, g, dv, MR, dv, b - a, true);
            if (want_dk) product<T, TRANSPOSED>(dk + j * d, d, ds + a * TILE + j, TILE, q, d, MR, d, b - a, true);
        }
        if (!in_order) return;
        wait_for_order(x.next_tile + r0 / TILE, tile);
        if (dbias.by_row) dbias.rows(x.row_sums + r0, m, n, ds_of_bias, TILE);
        for (int64_t r = 0; r < m; r += MR) {
            const int64_t begin = first(r), stop = end(r);
            if (want_dq && begin < stop)
                product<T, ROWS>(x.dq + (r0 + r) * d, d, ds + r * TILE + begin, TILE, k + begin * d, d, MR, d, stop - begin, true);
        }
        advance_order(x.next_tile + r0 / TILE, tile);
    }

    // One row: products → p and ds.
    template <bool MASKED>
    void p_and_ds(const Head& head, const Open& x, int64_t r0, int64_t r, int64_t j0, int64_t begin, int64_t stop) {
        if (dropout.on)
            bias.on ? p_and_ds<MASKED, true, true>(head, x, r0, r, j0, begin, stop) : p_and_ds<MASKED, false, true>(head, x, r0, r, j0, begin, stop);
        else
            bias.on ? p_and_ds<MASKED, true, false>(head, x, r0, r, j0, begin, stop) : p_and_ds<MASKED, false, false>(head, x, r0, r, j0, begin, stop);
    }

    template <bool MASKED, bool BIASED, bool DROPPING>
    void p_and_ds(const Head& head, const Open& x, int64_t r0, int64_t r, int64_t j0, int64_t begin, int64_t stop) {
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
            const Vec<T> e = exponential((MASKED ? score.mask(s, column) : s) - lse);
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
        for (int64_t r = 0; r < head.rows(); ++r) {
            const int64_t h = head.query_head(r), t = head.token(r);
            format.store(const_cast<char*>(at(call.dq, format.bytes, head.b, h, t)), x.dq + r * d, call.d, call.dq.d, T(call.scale));
        }
    }
};

}  // namespace tilegrad::ISA
