// Threads take pieces of c from a counter, and each piece is a product on one thread. If a core is busy with something
// else, the other threads take more pieces. BLAS would give each of its threads an equal share, and the threads that are
// done first would poll for the last one without sleeping, on the core that it needs.
//
// A number of c is one sum over k in an order that depends on k alone: the pieces change no bit.

#include "gemm/gemm.h"

#include "threads/thread_pool.h"

namespace tilegrad {
namespace {

constexpr int64_t PIECES = 4;            // for each thread
constexpr int64_t SMALLEST = 1 << 18;    // multiplications in a piece
constexpr int64_t UNIT = 16;             // rows and columns of a piece come in units; the last piece has the rest

Blas blas;

// One side of c, cut into parts.
struct Side {
    int64_t length, parts = 1;
    int64_t units() const { return length / UNIT; }
    int64_t begin(int64_t part) const { return part == parts ? length : units() * part / parts * UNIT; }
    int size(int64_t part) const { return int(begin(part + 1) - begin(part)); }
    double part_length() const { return parts < units() ? double(length) / double(parts) : 0; }  // 0: can't be cut further
};

struct Work {
    const Gemm& call;
    Side rows, columns;
    int64_t next;  // piece
};

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
    const int64_t by_size = int64_t(call.m) * call.n * call.k / SMALLEST, most = PIECES * call.threads;
    const int64_t pieces = call.threads == 1 ? 1 : by_size < most ? by_size : most;
    while (work.rows.parts * work.columns.parts < pieces) {
        Side& longer = work.rows.part_length() > work.columns.part_length() ? work.rows : work.columns;
        if (longer.part_length() == 0) break;
        ++longer.parts;
    }
    const int64_t parts = work.rows.parts * work.columns.parts;
    run_on_threads(int(parts < call.threads ? parts : call.threads), run_pieces, &work);
}

}  // namespace tilegrad
