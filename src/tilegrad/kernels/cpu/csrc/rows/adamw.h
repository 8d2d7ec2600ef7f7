// One call of kernels/adamw on lean states as it crosses the C ABI. cpu/abi.py repeats this structure.
#pragma once

#include <cstdint>

namespace tilegrad {

// params, grads, m, v, rounded (n): float32 or bfloat16; v has the dtype of m
struct LeanAdamW {
    int64_t n, decayed, first, step, seed, threads, isa;  // first: the number of the first element
    int64_t params_dtype, grads_dtype, moments_dtype;
    char *params, *grads, *m, *v, *rounded;  // rounded: bfloat16, or null
    const float* scalars;                    // clip, keep1, take1, keep2, take2, rate, root, decay, eps
};

struct AdamWKernels {
    void (*lean)(const LeanAdamW&, int64_t begin, int64_t end);
};

constexpr int ADAMW_BLOCK = 256;  // elements updated together; a thread's first element is a multiple of it

}  // namespace tilegrad
