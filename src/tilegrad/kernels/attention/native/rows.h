// The rows of a kv head, and what each row sees.
//
// G = Hq / Hkv query heads share a kv head. Their rows are one run, r = i·G + g: neighbours stand at the same or the next
// position, so what the rows of a tile see is still one run of columns, and grouped heads need no walk of their own.
//
//   distance(r, j) = i + Tk − Tq − j          row r sees [lo, hi): −right ≤ distance ≤ left
//
// lo and hi never fall as r grows. A tile is *whole* for a strip of rows if all of them see all of its columns.
#pragma once

#include "convert.h"

namespace tilegrad {
namespace ISA {

// A kv head of one sequence.
struct Head {
    int64_t b, kv, group;
    Sequence s;

    int64_t rows() const { return s.tq * group; }
    int64_t query_head(int64_t r) const { return kv * group + r % group; }
    int64_t position(int64_t r) const { return r / group + s.tk - s.tq; }
};

inline Head head_of(const Call& call, int64_t index) {
    int64_t b = index / call.hkv;
    return {b, index % call.hkv, call.hq / call.hkv, sequence(call, b)};
}

inline void seen_by(const Call& call, const Head& head, int64_t r, int32_t* lo, int32_t* hi) {
    int64_t at = head.position(r), tk = head.s.tk;
    *lo = int32_t(call.left < 0 ? 0 : at_most(tk, at_least(0, at - call.left)));
    *hi = int32_t(call.right < 0 ? tk : at_least(0, at_most(tk, at + call.right + 1)));
}

struct Run {
    int64_t begin, end;
};

// Rows that see some column of [j0, j1), as one run.
inline Run rows_seeing(const Call& call, const Head& head, int64_t j0, int64_t j1) {
    int64_t shift = head.s.tk - head.s.tq;
    int64_t first = call.right < 0 ? 0 : at_least(0, j0 - shift - call.right);
    int64_t last = call.left < 0 ? head.s.tq : at_most(head.s.tq, j1 - shift + call.left);
    return {first * head.group, at_least(first, last) * head.group};
}

// Rows r0 … r0 + n of a tensor with query heads, packed; `padded` − n rows of zeros follow.
template <class T>
void pack_rows(T* to, int64_t ld, const View& x, const Format<T>& format, const Head& head, int64_t r0, int64_t n, int64_t padded,
               int64_t d) {
    for (int64_t r = 0; r < n; ++r) {
        T* row = to + r * ld;
        int64_t t = (r0 + r) / head.group + head.s.q0;
        format.load(row, at(x, format.bytes, head.b, head.query_head(r0 + r), t), d, x.d);
        for (int64_t i = d; i < ld; ++i) row[i] = 0;
    }
    memset(to + n * ld, 0, (padded - n) * ld * sizeof(T));
}

// Columns j0 … j0 + n of k or v, in the same way.
template <class T>
void pack_columns(T* to, int64_t ld, const View& x, const Format<T>& format, const Head& head, int64_t j0, int64_t n, int64_t padded,
                  int64_t d) {
    for (int64_t j = 0; j < n; ++j) {
        T* row = to + j * ld;
        format.load(row, at(x, format.bytes, head.b, head.kv, head.s.k0 + j0 + j), d, x.d);
        for (int64_t i = d; i < ld; ++i) row[i] = 0;
    }
    memset(to + n * ld, 0, (padded - n) * ld * sizeof(T));
}

// The options that act on a score, for one row: c · tanh(s / c), − slope · |distance|, −inf where not seen.
template <class T>
struct Score {
    T scale, softcap;
    T slope, position;
    int32_t lo, hi;  // columns of the tile

    // s − shift, s of mask.py, from a product x = q·k, columns j … j + lanes of a tile that begins at j0;
    // *derivative = ds/dx / scale. One rounding fewer where the shift goes into the last multiply.
    template <bool EDGE>
    Vec<T> minus(T shift, Vec<T> x, int64_t j, int64_t j0, Vec<T>* derivative) const {
        Vec<T> s;
        if (softcap != 0) {
            Vec<T> t = hyperbolic_tangent(x * (scale / softcap));
            s = t * softcap - shift;
            if (derivative) *derivative = 1 - t * t;
        } else {
            s = x * scale - shift;
        }
        if (slope != 0) {
            Vec<T> column = __builtin_convertvector(iota<T>(), Vec<T>) + T(j + j0);
            Vec<T> distance = position - column;
            s = s - slope * (distance < 0 ? -distance : distance);
        }
        return EDGE ? hide(s, j) : s;
    }

    Vec<T> hide(Vec<T> s, int64_t j) const {
        typedef typename Lanes<T>::Integer Integer;
        Ints<T> column = iota<T>() + Integer(j);
        return (column >= Integer(lo)) & (column < Integer(hi)) ? s : all(-T(__builtin_inf()));
    }
};

inline double slope_of(const Call& call, const Head& head, int64_t r) {
    if (!call.slopes.data) return 0;
    return number(call.slopes.data, call.slopes_dtype, head.b * call.slopes.b + head.query_head(r) * call.slopes.h);
}

inline double sink_of(const Call& call, const Head& head, int64_t r) {
    return number(call.sinks.data, call.sinks_dtype, head.query_head(r) * call.sinks.h);
}

// Takes runs of the scratch, each beginning at a cache line; with no memory it only counts.
struct Carver {
    char* at;
    int64_t used = 0;

    template <class T>
    T* take(int64_t n) {
        T* p = at ? reinterpret_cast<T*>(at + used) : nullptr;
        used += round_up(n * int64_t(sizeof(T)), 64);
        return p;
    }
};

}  // namespace ISA
}  // namespace tilegrad
