// A float32 matrix product as it crosses the C ABI: one BLAS call, split into pieces for several threads. cpu/abi.py repeats
// the structure, and layout.h lists its fields.
#pragma once

#include <cstdint>

namespace tilegrad {

// As in BLAS, matrices are column-major: c (m, n) = op(a) (m, k) op(b) (k, n), or c += …
struct Gemm {
    int32_t transpose_a, transpose_b, m, n, k, lda, ldb, ldc, accumulate, threads;
    const float *a, *b;
    float* c;
};

using Sgemm = void (*)(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

struct Blas {
    Sgemm sgemm;
    int (*get_threads)();  // how many threads sgemm uses when this thread calls it
    void (*set_threads)(int);
};

void use_blas(Blas blas);

void gemm(const Gemm& call);

}  // namespace tilegrad
