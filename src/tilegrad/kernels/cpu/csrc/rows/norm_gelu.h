// One call of an op on rows, as it crosses the C ABI: float32 or bfloat16; sums and gradients of parameters are float32;
// strides are in elements. cpu/abi.py repeats these structures, and layout.h lists their fields.
#pragma once

#include <cstdint>

namespace tilegrad {

struct Rows {
    char* data;       // null: absent
    int64_t stride;   // between rows; a row is contiguous
};

// kernels/norm: x, y, dy, dx (n, c)   w, b, dw, db (c)   mean, rstd (n)
struct Norm {
    int64_t n, c, threads, isa, accumulate;   // accumulate: dw += …, db += …
    int64_t dtype, param_dtype;         // dtype of x, y, dy, dx; dtype of w, b
    Rows x, y, dy, dx;                  // y: forward; dy, dx: backward; without x only db is computed
    char *w, *b;
    float *mean, *rstd, *dw, *db;
    double eps;                         // forward; 0: mean and rstd are inputs
    Rows f, x1;                         // forward: x1 = x + f replaces x; x1 may be x
};

// kernels/activation: a, da, dh (n)   h, up: rows of `columns` numbers, `stride` apart; in a backward h (n)
struct Activation {
    int64_t n, threads, isa, dtype, kind, columns, stride;
    char *h, *up, *a, *da, *dh;   // a: forward; da, dh: backward of gelu and relu2; up: a = silu(h) ∘ up
};

enum ActivationKind : int64_t {
    GELU,
    TANH,
    SWIGLU,
    RELU2,
};

// Functions of one instruction set. Ranges are rows (norm_fwd, norm_rows), columns (norm_columns) or elements (activation). The
// results do not depend on how ranges are split among threads.
struct NormGeluKernels {
    void (*norm_fwd)(const Norm&, int64_t begin, int64_t end);
    void (*norm_rows)(const Norm&, int64_t begin, int64_t end);
    void (*norm_columns)(const Norm&, int64_t begin, int64_t end);
    void (*activation)(const Activation&, int64_t begin, int64_t end);
    int64_t lanes;
};

}  // namespace tilegrad
