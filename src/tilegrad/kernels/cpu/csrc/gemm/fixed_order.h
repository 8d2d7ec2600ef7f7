// A call of y = scale · x wᵀ + b through the C ABI. The order of additions depends only on k. cpu/abi.py repeats the structure,
// and layout.h lists its fields.
#pragma once

#include <cstdint>

#include "rows/norm_gelu.h"

namespace tilegrad {

// x (n, k), y (n, m) of one dtype   w (m, k)   b (m)
struct FixedOrder {
    int64_t n, m, k, threads, isa, dtype, w_dtype, b_dtype;
    Rows x, w, y;
    const char* b;   // null: absent
    char* scratch;   // panel_bytes for each thread; null: few rows, which need none
    double scale;
};

// Functions of one instruction set.
struct FixedOrderKernels {
    void (*work)(const FixedOrder&, int64_t* next, int worker);   // next: counter from which threads take work
    int64_t panel_bytes;
};

}  // namespace tilegrad
