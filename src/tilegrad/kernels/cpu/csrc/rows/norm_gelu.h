// One call of an op on rows, as it crosses the C ABI: float32 or bfloat16, sums and parameters' gradients in float32,
// strides in elements. cpu/abi.py defines these structures a second time, and layout.h lists their fields.
#pragma once

#include <cstdint>

namespace tilegrad {

struct Rows {
    char* data;       // null: absent
    int64_t stride;   // from row to row; a row is contiguous
};

// kernels/norm: x, y, dy, dx (n, c)   w, b, dw, db (c)   mean, rstd (n)
struct Norm {
    int64_t n, c, threads, isa, accumulate;   // accumulate: dw += …, db += …
    int64_t dtype, param_dtype;         // of x, y, dy, dx; of w, b
    Rows x, y, dy, dx;                  // y: of the forward; dy, dx: of the backward; no x: db alone
    char *w, *b;
    float *mean, *rstd, *dw, *db;
    double eps;                         // of the forward; 0: mean and rstd are read
};

// kernels/activation: h, a, da, dh, n numbers each
struct Gelu {
    int64_t n, threads, isa, dtype;
    char *h, *a, *da, *dh;   // a: of the forward; da, dh: of the backward
};

// What each instruction set offers. Ranges are of rows (norm_rows), of columns (norm_columns) or of numbers (gelu); which
// thread takes which range changes no bit.
struct NormGeluKernels {
    void (*norm_fwd)(const Norm&, int64_t begin, int64_t end);
    void (*norm_rows)(const Norm&, int64_t begin, int64_t end);
    void (*norm_columns)(const Norm&, int64_t begin, int64_t end);
    void (*gelu)(const Gelu&, int64_t begin, int64_t end);
    int64_t lanes;
};

}  // namespace tilegrad
