// Forward: a thread computes a block of rows in a loop over the tiles of columns that the rows attend to.
//
//   row_max = sink, row_sum = 1  (or lowest, 0)
//   for each tile of columns:                k and v of the tile are packed once per block
//     for each strip of rows:                STRIP rows fill NV registers
//       sᵀ = k qᵀ                            only columns that the strip attends to; TILE × STRIP scores stay in L1
//       new_max = max(row_max, max s)
//       p = exp(s − new_max)                 row_sum uses p, acc uses p ∘ keep
//       alpha = exp(row_max − new_max)
//       row_sum = alpha · row_sum + Σ p
//       acc = alpha · acc + p v
//   o = acc / row_sum / (1 − dropout_p)        lse = row_max + log row_sum
//
// Scores are transposed so that lanes are rows: maxima and sums need no reduction across a register, and pᵀ has the layout that
// the second product reads. Each row is summed by one thread in a fixed order, whatever the number of threads. The order
// depends on the row's position alone: tiles begin at multiples of TILE, and pairs that the band masks out add p = 0. So a row
// has the same bits in any block of rows, and if it is decoded alone (call.h).
#pragma once

#include "simd/product.h"
#include "attention/bias.h"
#include "attention/dropout.h"
#include "attention/head_rows.h"
#include "attention/intervals.h"

namespace tilegrad::ISA {

template <class T>
struct Forward {
    static constexpr int L = Lanes<T>::N;
    static constexpr int64_t STRIP = NV * L % MR == 0 ? NV * L : MR;
    static constexpr int64_t ROWS_OF_BLOCK = (256 / STRIP) * STRIP;
    static constexpr int64_t FEW = STRIP / 2;  // most rows that are decoded one by one
    static_assert(STRIP % MR == 0 && STRIP % L == 0 && TILE % MR == 0, "strips and tiles are made of blocks of registers");

    const Call& call;
    const Intervals& intervals;
    const Format<T> format = format_of<T>(call.dtype);
    const int64_t d = round_up(call.d, L), dv = round_up(call.dv, L);  // padded
    const Bias<T> bias{call};
    const Dropout<T> dropout{call};
    const bool products = call.softcap == 0 && !call.slopes.data;  // a score is scale · q·k, plus a bias if there is one
    const bool plain = products && call.scale > 0 && !bias.on;

    // Buffers of a thread.
    Packed<T> rows_of_q, k, v, acc;
    T *qt, *s, *row_max, *row_sum;  // qt: [strip][d][STRIP]
    T *rows_of_bias, *bias_t;  // (STRIP, TILE), (TILE, STRIP)
    T* kt;                     // (d, TILE), for decoding
    RowLanes<T> lanes;
    IntervalColumns interval_columns;  // the intervals of the tile's columns, if intervals cross the block

    Forward(const Call& call, BumpAllocator& allocator, const Intervals& intervals) : call(call), intervals(intervals) {
        const int64_t rows = at_most(ROWS_OF_BLOCK, round_up(call.tq * (call.hq / call.hkv), STRIP));
        rows_of_q = {allocator.take<T>(STRIP * d), STRIP, d};
        qt = allocator.take<T>(rows * d);
        k = {allocator.take<T>(TILE * d), TILE, d};
        v = {allocator.take<T>(TILE * dv), TILE, dv};
        s = allocator.take<T>(TILE * STRIP);
        acc = {allocator.take<T>(rows * dv), rows, dv};
        row_max = allocator.take<T>(rows);
        row_sum = allocator.take<T>(rows);
        lanes.allocate(allocator, rows);
        interval_columns.allocate(allocator, intervals);
        rows_of_bias = allocator.take<T>(bias.on ? STRIP * TILE : 0);
        bias_t = allocator.take<T>(bias.on ? TILE * STRIP : 0);
        kt = allocator.take<T>(call.positions ? TILE * d : 0);
    }

    static int64_t blocks(const Call& call) {  // blocks of the longest sequence
        return (call.tq * (call.hq / call.hkv) + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;
    }

    // Blocks are numbered from the end of the sequence, where causal rows have the most work.
    void item(int64_t index) {
        const int64_t n_blocks = blocks(call), n_heads = call.b * call.hkv;
        const Head head = head_of(call, index % n_heads);
        const int64_t r0 = (n_blocks - 1 - index / n_heads) * ROWS_OF_BLOCK;
        if (r0 < head.rows()) rows(head, r0, at_most(ROWS_OF_BLOCK, head.rows() - r0));
    }

    void rows(const Head& head, int64_t r0, int64_t m) {
        const int64_t padded = round_up(m, STRIP);
        append(call, head, format.bytes);
        for (int64_t r = 0; r < m; r += STRIP) {
            pack_rows(rows_of_q, 0, call.q, format, head, r0 + r, at_most(STRIP, m - r), STRIP, call.d);
            transpose(qt + r * d, STRIP, rows_of_q, 0, STRIP);
        }
        lanes.fill(call, head, r0, m, padded);
        start_rows(call, head, r0, m, padded, row_max, row_sum);
        acc.clear(padded);
        const int64_t first = lanes.lo[0], last = lanes.hi[m - 1];
        const bool few = call.positions && m <= FEW;
        for (int64_t j0 = first / TILE * TILE; j0 < last; j0 += TILE)
            few ? columns_of_few(head, m, j0, at_most(TILE, last - j0)) : columns(head, r0, m, j0, at_most(TILE, last - j0));
        for (int64_t r = 0; r < m; ++r) {
            const T divisor = row_sum[r] * T(1 - call.dropout_p);
            if (divisor != 0)  // multiplying by 1 / row_sum would add a rounding error to the whole row
                change_row(r, [&](Vec<T> x) { return x / divisor; });
            write_row(call, format, head, r0 + r, acc, r, row_max[r] + logarithm(row_sum[r]));
        }
    }

    void columns(const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n) {
        const int64_t tile = j0 / TILE;
        if (intervals.on && intervals.mask_out(head, r0, m, tile)) return;
        if (intervals.on) interval_columns.load(intervals, head, tile);
        const int64_t padded = round_up(n, MR), skipped = at_least(0, lanes.lo[0] - j0) / MR * MR;
        if (bias.on && bias.same_in_rows && !bias.load_transposed(bias_t, STRIP, rows_of_bias, TILE, head, r0, 1, j0, n)) return;
        pack_columns(k, skipped, call.k, format, head, j0 + skipped, n - skipped, padded - skipped, call.d);
        pack_columns(v, skipped, call.v, format, head, j0 + skipped, n - skipped, padded - skipped, call.dv);
        for (int64_t r = 0; r < m; r += STRIP) {
            int64_t begin = at_least(0, lanes.lo[r] - j0), end = at_most(n, lanes.hi[r + STRIP - 1] - j0);
            const bool crossed = intervals.on && intervals.touch(head, r0 + r, at_most(STRIP, m - r), tile);
            if (crossed) {
                const Run run = interval_columns.without_masked_out({begin, end}, lanes.index[r], lanes.index[r + STRIP - 1]);
                begin = run.begin;
                end = run.end;
            }
            if (begin >= end) continue;
            if (bias.on && !bias.same_in_rows &&
                !bias.load_transposed(bias_t, STRIP, rows_of_bias, TILE, head, r0 + r, at_most(STRIP, m - r), j0, n))
                continue;
            const int64_t a = begin / MR * MR;
            product_along(s, STRIP, k, a, qt + r * d, STRIP, round_up(end - a, MR), STRIP);
            const bool unmasked = !crossed && lanes.lo[r + STRIP - 1] <= j0 + a && lanes.hi[r] >= j0 + end;
            bool rescale = false;
            for (int64_t x = r; x < r + STRIP; x += L)
                rescale |= dropout.on ? softmax<true, true>(head, x, x - r, j0, a, end, crossed)
                           : unmasked ? softmax<false, false>(head, x, x - r, j0, a, end, crossed)
                                      : softmax<true, false>(head, x, x - r, j0, a, end, crossed);
            if (rescale)
                for (int64_t x = r; x < r + STRIP; ++x)
                    if (lanes.alpha[x] != 1) change_row(x, [&](Vec<T> y) { return y * lanes.alpha[x]; });
            add_product<T, TRANSPOSED>(acc, r, s, STRIP, v, a, STRIP, end - a);
        }
    }

    // Row r of acc becomes f(row).
    template <class F>
    void change_row(int64_t r, F f) const {
        for (int64_t slice = 0; slice < dv; slice += SLICE)
            for (int64_t i = 0; i < acc.columns(slice); i += L) store(acc.at(r, slice) + i, f(load(acc.at(r, slice) + i)));
    }

    // The same as `columns`, for m ≤ FEW rows without bias and dropout. Lanes are columns, because few rows would leave lanes
    // unused. The rows of k and v are read in place if they need no conversion.
    void columns_of_few(const Head& head, int64_t m, int64_t j0, int64_t n) {
        constexpr int64_t UNIT = MR > L ? MR : L;  // registers of columns begin at multiples of UNIT, and end inside the tile
        static_assert(TILE % UNIT == 0 && UNIT % 4 == 0, "a tile is a whole number of units, and a unit a multiple of four columns");
        const int64_t a = at_least(0, lanes.lo[0] - j0) / UNIT * UNIT, padded = round_up(n, UNIT);
        const bool in_place = call.dtype == (sizeof(T) == 4 ? FLOAT32 : FLOAT64) && call.k.d == 1 && call.v.d == 1 && d == call.d && dv == call.dv;
        if (in_place) {
            transpose(kt + a, TILE, reinterpret_cast<const T*>(at(call.k, sizeof(T), head.b, head.kv, head.s.k0 + j0 + a)), call.k.t, n - a, d);
        } else {
            pack_columns(k, a, call.k, format, head, j0 + a, n - a, n - a, call.d);
            pack_columns(v, a, call.v, format, head, j0 + a, n - a, n - a, call.dv);
            transpose(kt + a, TILE, k, a, n - a);
        }
        const T* rows_of_v = reinterpret_cast<const T*>(at(call.v, sizeof(T), head.b, head.kv, head.s.k0 + j0 + a));
        for (int64_t r = 0; r < m; ++r) {
            for (int64_t slice = 0; slice < d; slice += SLICE)
                row_product(s + a, rows_of_q.at(r, slice), kt + slice * TILE + a, TILE, padded - a, rows_of_q.columns(slice), slice > 0);
            softmax_of_row(r, j0, a, padded);
            if (lanes.alpha[r] != 1) change_row(r, [&](Vec<T> x) { return x * lanes.alpha[r]; });
            for (int64_t slice = 0; slice < dv; slice += SLICE) {
                const int64_t columns = v.columns(slice);
                if (in_place)
                    row_product(acc.at(r, slice), s + a, rows_of_v + slice, call.v.t, columns, n - a, true);
                else
                    row_product(acc.at(r, slice), s + a, v.at(a, slice), columns, columns, n - a, true);
            }
        }
    }

    // The same as `softmax`, for row r alone. Lanes are columns a … end of the tile. Sums have the same order.
    void softmax_of_row(int64_t r, int64_t j0, int64_t a, int64_t end) {
        typedef T Four __attribute__((vector_size(4 * sizeof(T)), aligned(alignof(T)), may_alias));
        const Score<T> score(call, lanes.slope[r], lanes.position[r], lanes.lo[r], lanes.hi[r]);
        const T factor = plain ? score.scale : T(1);
        Vec<T> largest = all(-T(__builtin_inf()));
        for (int64_t y = a; y < end; y += L) {
            const Ints<T> column = score.same(j0 + y) + iota<T>();
            Vec<T> z = load(s + y);
            if (!plain) z = products ? score.product(z) + Vec<T>{} : score.of(z, Vec<T>{}, column, nullptr);
            z = score.mask(z, column);
            store(s + y, z);
            largest = larger(largest, z);
        }
        for (int n = 1; n < L; ++n) largest[0] = larger(all(largest[0]), all(largest[n]))[0];
        const Vec<T> old_max = all(row_max[r]), new_max = larger(old_max, all(largest[0]) * factor);
        for (int64_t y = a; y < end; y += L) store(s + y, exponential(rounded(load(s + y) * factor) - new_max));
        Four totals = {};
        for (int64_t y = a; y < end; y += 4) totals += *reinterpret_cast<const Four*>(s + y);
        const Vec<T> total = all((totals[0] + totals[1]) + (totals[2] + totals[3]));
        const Vec<T> alpha = exponential(old_max - new_max), sum = all(row_sum[r]) * alpha + total;
        lanes.alpha[r] = alpha[0];
        row_sum[r] = sum[0];
        row_max[r] = new_max[0];
    }

    // One register of rows x, x + 1, … (lanes `lane`, … of the strip), columns a … end of the tile: scores → p; updates
    // row_max, row_sum and alpha. True if a maximum increased.
    template <bool MASKED, bool DROPPING>
    bool softmax(const Head& head, int64_t x, int64_t lane, int64_t j0, int64_t a, int64_t end, bool crossed) {
        const int64_t j = j0 + a, n = end - a;
        T* scores = s + lane;
        const Score<T> score(call, lanes, x);
        const T factor = plain ? score.scale : T(1);
        const Vec<T> old_max = load(row_max + x);
        const Ints<T> index = load_ints<T>(lanes.index + x);
        Vec<T> largest = all(-T(__builtin_inf()));
        for (int64_t y = 0; y < n; ++y) {
            Vec<T> z = load(scores + y * STRIP);
            if (!plain) {
                const Vec<T> b = bias.on ? bias.lanes(bias_t, STRIP, a + y, lane) : Vec<T>{};
                z = products ? score.product(z) + b : score.of(z, b, score.same(j + y), nullptr);
            }
            if (MASKED) z = score.mask(z, score.same(j + y));
            if (MASKED && crossed) z = interval_columns.mask_rows<T>(z, index, a + y);
            if (MASKED || !plain) store(scores + y * STRIP, z);
            largest = larger(largest, z);
        }
        const Vec<T> new_max = larger(old_max, largest * factor);
        Ints<T> dropped[DROPPING ? TILE : 1];
        if (DROPPING) dropout.draw(dropped, n, head.b, load_ints<T>(lanes.head + x), index, score.same(j), 1);
        auto probability = [&](int64_t y) {
            const Vec<T> p = exponential(rounded(load(scores + y * STRIP) * factor) - new_max);
            store(scores + y * STRIP, DROPPING ? dropout.unless(dropped[y], p) : p);
            return p;
        };
        Vec<T> totals[4] = {};  // four short sums round less than one long sum
        int64_t y = 0;
        for (; y + 4 <= n; y += 4)
            for (int u = 0; u < 4; ++u) totals[u] += probability(y + u);
        if (y < n) totals[0] += probability(y);  // constant indices keep the sums in registers
        if (y + 1 < n) totals[1] += probability(y + 1);
        if (y + 2 < n) totals[2] += probability(y + 2);
        const Vec<T> total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
        const Vec<T> alpha = exponential(old_max - new_max);
        store(lanes.alpha + x, alpha);
        store(row_sum + x, load(row_sum + x) * alpha + total);
        store(row_max + x, new_max);
        return any<T>(new_max != old_max);
    }
};

}  // namespace tilegrad::ISA
