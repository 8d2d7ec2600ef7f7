// Threads take pieces of c from a shared counter, and each piece is a product on one thread. If a core is busy with another
// process, the threads on other cores take more pieces. BLAS would give each of its threads an equal share, and threads that
// finish early would spin on the core that the last thread needs.
//
// Each number of c is one sum over k, in an order that depends only on k: the pieces do not change the result.

#include "gemm/gemm.h"

#include "threads/thread_pool.h"

namespace tilegrad {
namespace {

constexpr int64_t PIECES = 4;            // most pieces per thread; more than one only if they stay LARGE
constexpr int64_t LARGE = 512 * 512;     // elements of c per piece: BLAS packs a and b for each piece, too costly for a small one
constexpr int64_t SMALLEST = 1 << 18;    // multiplications per piece
constexpr int64_t UNIT = 16;             // rows and columns of a piece are multiples of UNIT, except at the end of c

Blas blas;

// Rows or columns of c, cut into parts.
struct Side {
    int64_t length, parts = 1;
    int64_t units() const { return length / UNIT; }
    int64_t begin(int64_t part) const { return part == parts ? length : units() * part / parts * UNIT; }
    int size(int64_t part) const { return int(begin(part + 1) - begin(part)); }
};

struct Work {
    const Gemm& call;
    Side rows, columns;
    int64_t next;  // piece
};

// Cuts c into `pieces` pieces with the least packing: a is packed once per part of the columns, b once per part of the rows.
bool cut(Side& rows, Side& columns, int64_t pieces) {
    int64_t least = INT64_MAX;
    for (int64_t parts = 1; parts <= pieces; ++parts) {
        const int64_t others = pieces / parts, copied = others * rows.length + parts * columns.length;
        if (parts * others != pieces || parts > rows.units() || others > columns.units() || copied >= least) continue;
        least = copied;
        rows.parts = parts;
        columns.parts = others;
    }
    return least < INT64_MAX;
}

void run_pieces(void* context, int) {
    auto& work = *static_cast<Work*>(context);
    const Gemm& call = work.call;
    const float alpha = 1, beta = float(call.accumulate);
    const int threads = blas.get_threads();
    if (threads != 1) blas.set_threads(1);
    const int64_t pieces = work.rows.parts * work.columns.parts;
    for (int64_t i; (i = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED)) < pieces;) {
        const int64_t row_part = i % work.rows.parts, column_part = i / work.rows.parts;
        const int64_t row = work.rows.begin(row_part), column = work.columns.begin(column_part);
        const int m = work.rows.size(row_part), n = work.columns.size(column_part);
        const float* a = call.a + (call.transpose_a ? row * call.lda : row);
        const float* b = call.b + (call.transpose_b ? column : column * call.ldb);
        blas.sgemm(call.transpose_a ? "T" : "N", call.transpose_b ? "T" : "N", &m, &n, &call.k, &alpha, a, &call.lda, b,
                   &call.ldb, &beta, call.c + row + column * call.ldc, &call.ldc);
    }
    if (threads != 1) blas.set_threads(threads);
}

}  // namespace

void use_blas(Blas found) { blas = found; }

void gemm(const Gemm& call) {
    Work work{call, {call.m}, {call.n}, 0};
    const int64_t numbers = int64_t(call.m) * call.n, threads = call.threads;
    int64_t pieces = threads;
    while (pieces > 1 && pieces < PIECES * threads && numbers / (2 * pieces) >= LARGE) pieces *= 2;
    if (pieces > numbers * call.k / SMALLEST) pieces = numbers * call.k / SMALLEST;
    while (pieces > 1 && !cut(work.rows, work.columns, pieces)) --pieces;
    run_on_threads(int(pieces < threads ? pieces : threads), run_pieces, &work);
}

}  // namespace tilegrad
