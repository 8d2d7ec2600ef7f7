// The rows of a kv head, and the columns that each row attends to.
//
// G = Hq / Hkv query heads share a kv head. Their rows are numbered together, r = i·G + g: adjacent rows have the same or the
// next position. So the rows of a tile attend to one range of columns, and no loop over query heads is needed.
//
//   distance(r, j) = i + Tk − Tq − j          row r attends to [lo, hi): −right ≤ distance ≤ left
//
// lo and hi never decrease with r. For a strip of rows, a tile is *unmasked* if all rows attend to all of its columns, *masked*
// if only some pairs attend, and *masked out* if none does. A tile that is masked out is skipped.
#pragma once

#include "attention/bump_allocator.h"
#include "attention/call.h"
#include "simd/convert.h"
#include "simd/product.h"

namespace tilegrad::ISA {

// A kv head of one sequence.
struct Head {
    int64_t b, kv, group;
    Sequence s;

    int64_t rows() const { return s.tq * group; }
    int64_t index(int64_t r) const { return group == 1 ? r : r / group; }  // i, without a division if G = 1
    int64_t token(int64_t r) const { return index(r) + s.q0; }
    int64_t position(int64_t r) const { return index(r) + s.tk - s.tq; }
    int64_t query_head(int64_t r) const { return group == 1 ? kv : kv * group + r % group; }
};

inline Head head_of(const Call& call, int64_t index) {
    int64_t b = index / call.hkv;
    return {b, index % call.hkv, call.hq / call.hkv, sequence(call, b)};
}

inline void attended_columns(const Call& call, const Head& head, int64_t r, int32_t* lo, int32_t* hi) {
    int64_t at = head.position(r), tk = head.s.tk;
    *lo = int32_t(call.left < 0 ? 0 : at_most(tk, at_least(0, at - call.left)));
    *hi = int32_t(call.right < 0 ? tk : at_least(0, at_most(tk, at + call.right + 1)));
}

struct Run {
    int64_t begin, end;
};

// The range of rows that attend to at least one column of [j0, j1).
inline Run rows_attending(const Call& call, const Head& head, int64_t j0, int64_t j1) {
    int64_t shift = head.s.tk - head.s.tq;
    int64_t first = call.right < 0 ? 0 : at_least(0, j0 - shift - call.right);
    int64_t last = call.left < 0 ? head.s.tq : at_most(head.s.tq, j1 - shift + call.left);
    return {first * head.group, at_least(first, last) * head.group};
}

inline const char* at(const View& x, int64_t bytes, int64_t b, int64_t h, int64_t t) {
    return x.data + (b * x.b + h * x.h + t * x.t) * bytes;
}

// Appends the new rows of k and v to the cache of a kv head (call.h).
inline void append(const Call& call, const Head& head, int64_t bytes) {
    if (!call.positions || !head.s.tk) return;
    const int64_t last = head.s.tk - 1;
    memcpy(const_cast<char*>(at(call.k, bytes, head.b, head.kv, last)), at(call.k_new, bytes, head.b, head.kv, 0), call.d * bytes);
    memcpy(const_cast<char*>(at(call.v, bytes, head.b, head.kv, last)), at(call.v_new, bytes, head.b, head.kv, 0), call.dv * bytes);
}

// Packs n rows of d elements, row r from address from(r). Zeros pad the columns to ld and the rows to `padded`.
template <class T, class From>
void pack(T* to, int64_t ld, const View& x, const Format<T>& format, int64_t n, int64_t padded, int64_t d, From from) {
    for (int64_t r = 0; r < n; ++r) {
        T* row = to + r * ld;
        format.load(row, from(r), d, x.d);
        for (int64_t i = d; i < ld; ++i) row[i] = 0;
    }
    memset(to + n * ld, 0, (padded - n) * ld * sizeof(T));
}

// Packs rows r0 … r0 + n of a tensor with query heads.
template <class T>
void pack_rows(T* to, int64_t ld, const View& x, const Format<T>& format, const Head& head, int64_t r0, int64_t n, int64_t padded,
               int64_t d) {
    pack(to, ld, x, format, n, padded, d,
         [&](int64_t r) { return at(x, format.bytes, head.b, head.query_head(r0 + r), head.token(r0 + r)); });
}

// Packs columns j0 … j0 + n of the scores: rows of k or v.
template <class T>
void pack_columns(T* to, int64_t ld, const View& x, const Format<T>& format, const Head& head, int64_t j0, int64_t n, int64_t padded,
                  int64_t d) {
    pack(to, ld, x, format, n, padded, d, [&](int64_t j) { return at(x, format.bytes, head.b, head.kv, head.s.k0 + j0 + j); });
}

// The columns of x from column `slice` on.
inline View from_column(View x, int64_t bytes, int64_t slice) {
    x.data += slice * x.d * bytes;
    return x;
}

// The same as `pack_rows` and `pack_columns`, but the n rows of d elements become rows r, r + 1, … of `to`.
template <class T>
void pack_rows(const Packed<T>& to, int64_t r, const View& x, const Format<T>& format, const Head& head, int64_t r0, int64_t n, int64_t padded,
               int64_t d) {
    for (int64_t slice = 0; slice < to.width; slice += SLICE)
        pack_rows(to.at(r, slice), to.columns(slice), from_column(x, format.bytes, slice), format, head, r0, n, padded, at_most(SLICE, d - slice));
}

template <class T>
void pack_columns(const Packed<T>& to, int64_t r, const View& x, const Format<T>& format, const Head& head, int64_t j0, int64_t n,
                  int64_t padded, int64_t d) {
    for (int64_t slice = 0; slice < to.width; slice += SLICE)
        pack_columns(to.at(r, slice), to.columns(slice), from_column(x, format.bytes, slice), format, head, j0, n, padded, at_most(SLICE, d - slice));
}

// to[c][r'] = from[r + r'][c] for m rows; rows of `to` have ld elements.
template <class T>
void transpose(T* to, int64_t ld, const Packed<T>& from, int64_t r, int64_t m) {
    for (int64_t slice = 0; slice < from.width; slice += SLICE)
        transpose(to + slice * ld, ld, from.at(r, slice), from.columns(slice), m, from.columns(slice));
}

inline double slope_of(const Call& call, const Head& head, int64_t r) {
    if (!call.slopes.data) return 0;
    return scalar(call.slopes.data, call.slopes_dtype, head.b * call.slopes.b + head.query_head(r) * call.slopes.h);
}

inline double sink_of(const Call& call, const Head& head, int64_t r) {
    return scalar(call.sinks.data, call.sinks_dtype, head.query_head(r) * call.sinks.h);
}

// Parameters of each row of a block, for vectors whose lanes are rows.
template <class T>
struct RowLanes {
    int32_t *lo, *hi, *index, *head;
    T *slope, *position, *alpha;

    void allocate(BumpAllocator& allocator, int64_t rows) {
        lo = allocator.take<int32_t>(rows);
        hi = allocator.take<int32_t>(rows);
        index = allocator.take<int32_t>(rows);
        head = allocator.take<int32_t>(rows);
        slope = allocator.take<T>(rows);
        position = allocator.take<T>(rows);
        alpha = allocator.take<T>(rows);
    }

    // From row m on, the last of the m rows is repeated.
    void fill(const Call& call, const Head& of, int64_t r0, int64_t m, int64_t padded) {
        for (int64_t r = 0; r < padded; ++r) {
            const int64_t row = r0 + at_most(r, m - 1);
            attended_columns(call, of, row, lo + r, hi + r);
            index[r] = int32_t(of.index(row));
            head[r] = int32_t(of.query_head(row));
            slope[r] = T(slope_of(call, of, row));
            position[r] = T(of.position(row));
        }
    }
};

template <class T>
Ints<T> load_ints(const int32_t* p) {
    Ints<T> x;
    for (int n = 0; n < Lanes<T>::N; ++n) x[n] = p[n];
    return x;
}

// Options that change a score: c · tanh(s / c), − slope · |distance|, −inf if masked. Lanes are either rows, with one column in
// common, or columns of one row.
template <class T>
struct Score {
    typedef typename Lanes<T>::Integer Integer;
    T scale, softcap;
    Vec<T> slope, position;
    Ints<T> lo, hi;

    Score(const Call& call, const RowLanes<T>& rows, int64_t r)  // lanes are rows r, r + 1, …
        : scale(T(call.scale)), softcap(T(call.softcap)), slope(load(rows.slope + r)), position(load(rows.position + r)) {
        lo = load_ints<T>(rows.lo + r);
        hi = load_ints<T>(rows.hi + r);
    }

    Score(const Call& call, T slope, T position, int32_t lo, int32_t hi)  // lanes are columns of one row
        : scale(T(call.scale)), softcap(T(call.softcap)), slope(all(slope)), position(all(position)), lo(Ints<T>{} + lo), hi(Ints<T>{} + hi) {}

    // s of mask.py from products x = q·k and a bias; *derivative = ds/dx / scale. Forward and backward compute the same bits.
    // So lse is subtracted from the score that it was computed from, and the largest score of a row has p = 1 / row_sum,
    // however large the score is.
    Vec<T> of(Vec<T> x, Vec<T> bias, Ints<T> column, Vec<T>* derivative) const {
        Vec<T> s, slope_of_cap = all(T(1));
        if (softcap != 0) {
            const Tanh<T> t = hyperbolic_tangent(rounded(x * (scale / softcap)));
            s = rounded(t.value * softcap);
            slope_of_cap = t.slope;
        } else {
            s = rounded(x * scale);
        }
        if (derivative) *derivative = slope_of_cap;
        const Vec<T> distance = position - __builtin_convertvector(column, Vec<T>);
        return s + bias - rounded(slope * (distance < 0 ? -distance : distance));
    }

    Vec<T> product(Vec<T> x) const { return rounded(x * scale); }

    Vec<T> mask(Vec<T> s, Ints<T> column) const {
        return ((lo <= column) & (hi > column)) ? s : all(-T(__builtin_inf()));
    }

    static Ints<T> same(int64_t column) { return Ints<T>{} + Integer(column); }
};

// Sets row_max and row_sum to their values before the first column: those of the sink alone, if there is one.
template <class T>
void start_rows(const Call& call, const Head& head, int64_t r0, int64_t m, int64_t padded, T* row_max, T* row_sum) {
    const T lowest = sizeof(T) == 4 ? T(-__FLT_MAX__) : T(-__DBL_MAX__);
    for (int64_t r = 0; r < padded; ++r) {
        const T sink = call.sinks.data ? T(sink_of(call, head, r0 + at_most(r, m - 1))) : lowest;
        row_max[r] = sink < lowest ? lowest : sink;  // NaN stays NaN
        row_sum[r] = sink <= lowest ? 0 : 1;
    }
}

// Stores the first d elements of row r of `from` in a row of x.
template <class T>
void store_row(const View& x, const Format<T>& format, int64_t b, int64_t h, int64_t t, const Packed<T>& from, int64_t r, int64_t d, T factor) {
    for (int64_t slice = 0; slice < from.width; slice += SLICE)
        format.store(const_cast<char*>(at(from_column(x, format.bytes, slice), format.bytes, b, h, t)), from.at(r, slice), at_most(SLICE, d - slice),
                     x.d, factor);
}

// Writes row n of `o`, and lse, to row r of the head.
template <class T>
void write_row(const Call& call, const Format<T>& format, const Head& head, int64_t r, const Packed<T>& o, int64_t n, T lse, T factor = 1) {
    const int64_t h = head.query_head(r), t = head.token(r);
    if (call.o.data) store_row(call.o, format, head.b, h, t, o, n, call.dv, factor);
    if (call.lse.data) *reinterpret_cast<T*>(const_cast<char*>(at(call.lse, sizeof(T), head.b, h, t))) = lse;
}

}  // namespace tilegrad::ISA
