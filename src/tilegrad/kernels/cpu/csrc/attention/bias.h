// Bias added to the scores, and its gradient dbias: ds summed over the axes along which the bias is broadcast.
//
// A bool bias is read as 0 and −inf. Blocks that are −inf everywhere are skipped, so padding costs no time.
//
// dbias is summed in an order that does not depend on the number of threads:
//
//   no broadcast axis      each element belongs to one block, which stores it
//   q and k not broadcast  each head adds its block; the block's entry of `turns` says which head is next
//   only q broadcast       a tile of columns sums its rows, then heads add their tiles in order
//   k broadcast            a row sums its columns in the order of dq, then heads add their rows in order when they close
//
// A tile waits only for tiles of lower heads, and the queue hands out heads in increasing order. So the lowest head never
// waits.
#pragma once

#include "attention/head_rows.h"
#include "threads/work_queue.h"

namespace tilegrad::ISA {

template <class T>
void load_bool_row(T* to, const char* from, int64_t n, int64_t stride) {
    const T masked_out = -T(__builtin_inf());
    for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride] ? T(0) : masked_out;
}

template <class T>
Format<T> bias_format(int64_t dtype) {
    if (dtype == BOOL) return {1, load_bool_row<T>, nullptr};
    if (dtype == FLOAT32) return format<T, float>();
    return format_of<T>(dtype);  // the dtype of q
}

inline char* pair_at(const View& x, int64_t bytes, const Head& head, int64_t r, int64_t j) {
    return x.data + (head.b * x.b + head.query_head(r) * x.h + head.index(r) * x.t + j * x.d) * bytes;
}

template <class T>
struct Bias {
    // The bias of a block, with row stride `ld`, which is 0 if all rows are equal. data is null if the whole block is −inf.
    struct Rows {
        const T* data;
        int64_t ld;
    };

    const Call& call;
    const bool on = call.bias_dtype != NONE;
    const Format<T> format = bias_format<T>(call.bias_dtype);
    const bool same_in_rows = call.bias.t == 0 && (call.hq == call.hkv || call.bias.h == 0);
    const bool in_place = call.bias_dtype == (sizeof(T) == 4 ? FLOAT32 : FLOAT64) && call.bias.d == 1 && call.hq == call.hkv;

    // The bias of rows r0 … r0 + m and columns j0 … j0 + n. It is copied to `buffer` if n < width or if the layout differs.
    Rows load(T* buffer, int64_t width, const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n) const {
        const int64_t rows = same_in_rows ? 1 : m;
        const char* from = pair_at(call.bias, format.bytes, head, r0, j0);
        Rows x{reinterpret_cast<const T*>(from), same_in_rows ? 0 : call.bias.t};
        const bool packed = !in_place || n < width;
        if (packed) {
            for (int64_t r = 0; r < rows; ++r) {
                T* row = buffer + r * width;
                format.load(row, r ? pair_at(call.bias, format.bytes, head, r0 + r, j0) : from, n, call.bias.d);
                for (int64_t j = n; j < width; ++j) row[j] = 0;
            }
            x = {buffer, same_in_rows ? 0 : width};
        }
        for (int64_t r = 0; r < rows; ++r)
            if (!masked_out(x.data + r * x.ld, n)) return x;
        return {nullptr, 0};
    }

    // Prefetches columns j0 … j0 + n of row r: rows are too far apart for the hardware prefetcher.
    void prefetch(const Head& head, int64_t r, int64_t j0, int64_t n) const {
        constexpr int64_t LINE = 64;  // bytes
        if (same_in_rows || call.bias.d != 1 || r >= head.rows()) return;
        const char* row = pair_at(call.bias, format.bytes, head, r, j0);
        for (int64_t x = 0; x < n * format.bytes; x += LINE) __builtin_prefetch(row + x);
    }

    // Writes the result of `load`, transposed to (width, rows), for lanes that are rows; m ≤ rows. Writes one row if all rows
    // are equal. Returns false if all elements are −inf.
    bool load_transposed(T* to, int64_t rows, T* buffer, int64_t width, const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n) const {
        const Rows x = load(same_in_rows ? to : buffer, width, head, r0, m, j0, n);
        for (int64_t r = r0 + m; r < r0 + 2 * m; ++r) prefetch(head, r, j0, n);
        if (!x.data) return false;
        if (same_in_rows) {
            if (x.data != to) memcpy(to, x.data, width * sizeof(T));
            return true;
        }
        transpose(to, rows, x.data, x.ld, m, width);
        for (int64_t j = 0; m < rows && j < width; ++j) memset(to + j * rows + m, 0, (rows - m) * sizeof(T));
        return true;
    }

    // One register of the result of load_transposed: column j, rows r, r + 1, …
    Vec<T> lanes(const T* transposed, int64_t rows, int64_t j, int64_t r) const {
        return same_in_rows ? all(transposed[j]) : tilegrad::ISA::load(transposed + j * rows + r);
    }

    static bool masked_out(const T* row, int64_t n) {
        for (int64_t j = 0; j < n; ++j)
            if (row[j] != -T(__builtin_inf())) return false;  // NaN is not masked out
        return true;
    }
};

template <class T>
struct BiasGradient {
    const Call& call;
    const bool on = call.dbias.data != nullptr;
    const View& sums = call.dbias;  // stride 0 along broadcast axes; dtype T, or any dtype if no axis is broadcast
    const bool keeps_b = sums.b || call.b == 1, keeps_h = sums.h || call.hq == 1;
    const bool keeps_q = sums.t || call.tq == 1, keeps_k = sums.d || call.tk == 1;
    const bool stored = keeps_b && keeps_h && keeps_q && keeps_k;
    const bool in_turn = on && !(keeps_b && keeps_h);
    const bool by_row = on && !keeps_k;                  // a row sums its columns
    const bool by_column = on && keeps_k && !keeps_q;    // a tile of columns sums its rows
    const bool by_block = on && keeps_k && keeps_q;
    const Format<T> format = bias_format<T>(call.dbias_dtype);
    const int64_t tile_columns, block_rows;

    BiasGradient(const Call& call, int64_t tile_columns, int64_t block_rows)
        : call(call), tile_columns(tile_columns), block_rows(block_rows) {}

    static bool possible(const Call& call) { return call.bias_dtype != NONE && call.bias_dtype != BOOL; }

    // Upper bound of the number of order counters: one per block.
    static int64_t turns(const Call& call, int64_t tile_columns, int64_t block_rows) {
        if (!possible(call)) return 0;
        return (call.tk / tile_columns + 1) * (call.tq * (call.hq / call.hkv) / block_rows + 1);
    }

    void wait(int32_t* turn, const Head& head) const {
        if (in_turn) wait_for_order(turn, number(head));
    }

    void advance(int32_t* turn, const Head& head) const {
        if (in_turn) advance_order(turn, number(head) + 1);
    }

    int32_t number(const Head& head) const { return int32_t(head.b * call.hkv + head.kv); }

    void add(T* to, const T* from, int64_t n) const {
        if (sums.d == 1)
            for (int64_t j = 0; j < n; ++j) to[j] += from[j];
        else
            for (int64_t j = 0; j < n; ++j) to[j * sums.d] += from[j];
    }

    T* sum(const Head& head, int64_t r, int64_t j) const { return reinterpret_cast<T*>(pair_at(sums, sizeof(T), head, r, j)); }

    // Adds ds of rows r0 … r0 + m and columns j0 … j0 + n to dbias, or to column_sums (G, ld) of a tile.
    void block(int32_t* turns, T* column_sums, const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n, const T* ds, int64_t ld) const {
        if (by_column)
            for (int64_t r = 0; r < m; ++r) {
                T* to = column_sums + (r0 + r) % head.group * ld;
                for (int64_t j = 0; j < n; ++j) to[j] += ds[r * ld + j];
            }
        if (!by_block) return;
        int32_t* turn = turns + j0 / tile_columns * (call.tq * head.group / block_rows + 1) + r0 / block_rows;
        wait(turn, head);
        for (int64_t r = 0; r < m; ++r)
            if (stored)
                format.store(pair_at(sums, format.bytes, head, r0 + r, j0), ds + r * ld, n, sums.d, 1);
            else
                add(sum(head, r0 + r, j0), ds + r * ld, n);
        advance(turn, head);
    }

    // The same as `block`, for a masked-out block: ds = 0.
    void masked_out_block(int32_t* turns, const Head& head, int64_t r0, int64_t m, int64_t j0, int64_t n, T* zeros) const {
        if (!by_block) return;
        memset(zeros, 0, n * sizeof(T));
        int32_t* turn = turns + j0 / tile_columns * (call.tq * head.group / block_rows + 1) + r0 / block_rows;
        wait(turn, head);
        if (stored)
            for (int64_t r = 0; r < m; ++r) format.store(pair_at(sums, format.bytes, head, r0 + r, j0), zeros, n, sums.d, 1);
        advance(turn, head);
    }

    void start_columns(T* column_sums, const Head& head, int64_t ld) const {
        if (by_column) memset(column_sums, 0, head.group * ld * sizeof(T));
    }

    void end_columns(int32_t* turns, const T* column_sums, const Head& head, int64_t j0, int64_t n, int64_t ld) const {
        if (!by_column) return;
        int32_t* turn = turns + j0 / tile_columns;
        wait(turn, head);
        for (int64_t g = 0; g < head.group; ++g) add(sum(head, g, j0), column_sums + g * ld, n);
        advance(turn, head);
    }

    // row_sums += the sums of the rows of ds.
    void rows(T* row_sums, int64_t m, int64_t n, const T* ds, int64_t ld) const {
        for (int64_t r = 0; r < m; ++r) {
            double total = 0;
            for (int64_t j = 0; j < n; ++j) total += double(ds[r * ld + j]);
            row_sums[r] += T(total);
        }
    }

    void end_rows(int32_t* turns, const T* row_sums, const Head& head) const {
        if (!by_row) return;
        wait(turns, head);
        for (int64_t g = 0; g < head.group; ++g) {
            double total = 0;
            for (int64_t r = g; r < head.rows(); r += head.group)
                if (keeps_q)
                    *sum(head, r, 0) += row_sums[r];
                else
                    total += double(row_sums[r]);
            if (!keeps_q) *sum(head, g, 0) += T(total);
        }
        advance(turns, head);
    }
};

}  // namespace tilegrad::ISA
