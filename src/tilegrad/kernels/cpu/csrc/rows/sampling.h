// One call of kernels/sampling as it crosses the C ABI: float32 logits. cpu/abi.py repeats this structure.
#pragma once

#include <cstdint>

#include "rows/norm_gelu.h"

namespace tilegrad {

// logits, seen (n, v)   settings (n, 5)   seeds, sequences, drawn, tokens, logprobs (n)
struct Sample {
    int64_t n, v, threads, isa, mass_bits;
    Rows logits, seen, numbers, places;  // seen: null without penalties; scratch of 4-byte numbers (n, v), places (n, 2 v)
    const float* settings;               // null: only logprobs of tokens
    const int64_t *seeds, *sequences, *drawn;
    int64_t* tokens;                     // read if settings is null, otherwise written
    float* logprobs;
};

struct SamplingKernels {
    void (*rows)(const Sample&, int64_t begin, int64_t end);
};

}  // namespace tilegrad
