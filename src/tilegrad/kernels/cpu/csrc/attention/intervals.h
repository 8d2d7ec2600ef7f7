// Intervals: rows [start, end) of q that do not attend to a column, one or two of them for each column of a kv head.
//
// The edges of a tile of columns are the least and largest start and end of its intervals, found once per call. They say whether
// a block of rows is masked out in the tile and skipped, is in no interval, or may be partly in an interval. Only in the last
// case is each pair tested. Rows are indices i, the same for all query heads of a kv head.
#pragma once

#include "attention/head_rows.h"

namespace tilegrad::ISA {

// The edges of one interval in a tile of columns. An empty interval counts as [NEVER, −1): it masks out no tile, and touches
// none.
struct Edges {
    int32_t first_start, last_start, first_end, last_end;
};

struct Intervals {
    static constexpr int32_t NEVER = INT32_MAX;

    const Call& call;
    const int64_t n = call.intervals.data ? call.intervals.t / 2 : 0;  // intervals of a column
    const bool on = n > 0;
    const int64_t columns, tiles;  // columns of a tile, tiles of a head
    Edges* edges;                  // (B or 1, Hkv or 1, tiles, n)

    Intervals(const Call& call, int64_t columns, BumpAllocator& allocator)
        : call(call), columns(columns), tiles((call.tk + columns - 1) / columns) {
        edges = allocator.take<Edges>(sequences() * heads() * tiles * n);
    }

    int64_t sequences() const { return call.intervals.b ? call.b : 1; }
    int64_t heads() const { return call.intervals.h ? call.hkv : 1; }

    const int32_t* column(int64_t b, int64_t kv, int64_t j) const {
        return reinterpret_cast<const int32_t*>(call.intervals.data) + b * call.intervals.b + kv * call.intervals.h + j * call.intervals.t;
    }

    // Called before the threads start.
    void find_edges() const {
        Edges* to = edges;
        for (int64_t b = 0; on && b < sequences(); ++b)
            for (int64_t kv = 0; kv < heads(); ++kv)
                for (int64_t j0 = 0; j0 < call.tk; j0 += columns, to += n) {
                    for (int64_t x = 0; x < n; ++x) to[x] = {NEVER, -1, NEVER, -1};
                    for (int64_t j = j0; j < at_most(j0 + columns, call.tk); ++j)
                        for (int64_t x = 0; x < n; ++x) extend(to[x], column(b, kv, j)[2 * x], column(b, kv, j)[2 * x + 1]);
                }
    }

    static void extend(Edges& edges, int32_t start, int32_t end) {
        if (start >= end) start = NEVER, end = -1;
        edges = {start < edges.first_start ? start : edges.first_start, start > edges.last_start ? start : edges.last_start,
                 end < edges.first_end ? end : edges.first_end, end > edges.last_end ? end : edges.last_end};
    }

    const Edges* of(const Head& head, int64_t tile) const {
        return edges + ((call.intervals.b ? head.b : 0) * heads() + (call.intervals.h ? head.kv : 0)) * tiles * n + tile * n;
    }

    // True if one interval contains all rows r0 … r0 + m in every column of the tile.
    bool mask_out(const Head& head, int64_t r0, int64_t m, int64_t tile) const {
        const Edges* e = of(head, tile);
        for (int64_t x = 0; x < n; ++x)
            if (e[x].last_start <= head.index(r0) && head.index(r0 + m - 1) < e[x].first_end) return true;
        return false;
    }

    // False if no interval contains any of rows r0 … r0 + m in any column of the tile.
    bool touch(const Head& head, int64_t r0, int64_t m, int64_t tile) const {
        const Edges* e = of(head, tile);
        for (int64_t x = 0; x < n; ++x)
            if (e[x].first_start <= head.index(r0 + m - 1) && head.index(r0) < e[x].last_end) return true;
        return false;
    }

    // The first tile from `tile` on that is not masked out for these rows.
    int32_t next(const Head& head, int64_t r0, int64_t m, int64_t tile) const {
        while (on && tile < tiles && mask_out(head, r0, m, tile)) ++tile;
        return int32_t(tile);
    }
};

// The intervals of the columns of a tile, in separate arrays: start[x][j], end[x][j].
struct IntervalColumns {
    int64_t n;
    int32_t *start[2], *end[2];

    void allocate(BumpAllocator& allocator, const Intervals& intervals) {
        n = intervals.n;
        for (int64_t x = 0; x < n; ++x) {
            start[x] = allocator.take<int32_t>(intervals.columns);
            end[x] = allocator.take<int32_t>(intervals.columns);
        }
    }

    // Columns after the last have empty intervals.
    void load(const Intervals& intervals, const Head& head, int64_t tile) {
        const int64_t j0 = tile * intervals.columns, last = at_most(intervals.columns, intervals.call.tk - j0);
        const int32_t* from = intervals.column(head.b, head.kv, j0);
        for (int64_t j = 0; j < intervals.columns; ++j)
            for (int64_t x = 0; x < n; ++x) {
                start[x][j] = j < last ? from[j * 2 * n + 2 * x] : 0;
                end[x][j] = j < last ? from[j * 2 * n + 2 * x + 1] : 0;
            }
    }

    // True if one interval contains all rows i … last in column j.
    bool mask_out(int64_t i, int64_t last, int64_t j) const {
        for (int64_t x = 0; x < n; ++x)
            if (start[x][j] <= i && last < end[x][j]) return true;
        return false;
    }

    // The run of columns, without the columns on either side that are masked out for rows i … last.
    Run without_masked_out(Run run, int64_t i, int64_t last) const {
        while (run.begin < run.end && mask_out(i, last, run.begin)) ++run.begin;
        while (run.begin < run.end && mask_out(i, last, run.end - 1)) --run.end;
        return run;
    }

    // Masks the scores of column j, whose lanes are the rows `index`.
    template <class T>
    Vec<T> mask_rows(Vec<T> s, Ints<T> index, int64_t j) const {
        for (int64_t x = 0; x < n; ++x) s = ((index >= start[x][j]) & (index < end[x][j])) ? all(-T(__builtin_inf())) : s;
        return s;
    }

    // Masks the scores of row i, whose lanes are the columns j, j + 1, …
    template <class T>
    Vec<T> mask_columns(Vec<T> s, int64_t i, int64_t j) const {
        typedef typename Lanes<T>::Integer Integer;
        for (int64_t x = 0; x < n; ++x)
            s = ((load_ints<T>(start[x] + j) <= Integer(i)) & (load_ints<T>(end[x] + j) > Integer(i))) ? all(-T(__builtin_inf())) : s;
        return s;
    }
};

}  // namespace tilegrad::ISA
