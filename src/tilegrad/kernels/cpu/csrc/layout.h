// The offset of each field of the C ABI's structures. cpu/abi.py compares them when it loads the library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cache_write.h"
#include "attention/call.h"
#include "gemm/fixed_order.h"
#include "gemm/gemm.h"
#include "rows/adamw.h"
#include "rows/norm_gelu.h"
#include "rows/sampling.h"

namespace tilegrad {

struct Place {
    const char *structure, *field;  // field "": the end of the structure
    int64_t offset;                 // bytes
};

#define AT(S, field) {#S, #field, int64_t(offsetof(S, field))}
#define END(S) {#S, "", int64_t(sizeof(S))}

// clang-format off
constexpr Place LAYOUT[] = {
    AT(View, data), AT(View, b), AT(View, h), AT(View, t), AT(View, d), END(View),
    AT(Rows, data), AT(Rows, stride), END(Rows),
    AT(Call, dtype), AT(Call, b), AT(Call, hq), AT(Call, hkv), AT(Call, tq), AT(Call, tk), AT(Call, d), AT(Call, dv),
    AT(Call, left), AT(Call, right), AT(Call, threads), AT(Call, isa), AT(Call, sinks_dtype), AT(Call, slopes_dtype),
    AT(Call, bias_dtype), AT(Call, dbias_dtype), AT(Call, dkv_dtype), AT(Call, dropout_threshold), AT(Call, seed),
    AT(Call, cu_seqlens_q), AT(Call, cu_seqlens_k), AT(Call, positions), AT(Call, scratch), AT(Call, scratch_bytes),
    AT(Call, q), AT(Call, k), AT(Call, v), AT(Call, o), AT(Call, lse), AT(Call, k_new), AT(Call, v_new),
    AT(Call, do_), AT(Call, dlse), AT(Call, dq), AT(Call, dk), AT(Call, dv_), AT(Call, dsinks),
    AT(Call, sinks), AT(Call, slopes), AT(Call, bias), AT(Call, dbias), AT(Call, intervals), AT(Call, scale), AT(Call, softcap), AT(Call, dropout_p), END(Call),
    AT(CacheWrite, n), AT(CacheWrite, b), AT(CacheWrite, hkv), AT(CacheWrite, capacity), AT(CacheWrite, head_bytes),
    AT(CacheWrite, k_bytes), AT(CacheWrite, v_bytes), AT(CacheWrite, threads), AT(CacheWrite, k), AT(CacheWrite, v),
    AT(CacheWrite, slots), AT(CacheWrite, k_cache), AT(CacheWrite, v_cache), END(CacheWrite),
    AT(Norm, n), AT(Norm, c), AT(Norm, threads), AT(Norm, isa), AT(Norm, accumulate), AT(Norm, dtype), AT(Norm, param_dtype),
    AT(Norm, x), AT(Norm, y), AT(Norm, dy), AT(Norm, dx), AT(Norm, w), AT(Norm, b), AT(Norm, mean), AT(Norm, rstd),
    AT(Norm, dw), AT(Norm, db), AT(Norm, eps), AT(Norm, f), AT(Norm, x1), END(Norm),
    AT(Activation, n), AT(Activation, threads), AT(Activation, isa), AT(Activation, dtype), AT(Activation, kind),
    AT(Activation, columns), AT(Activation, stride),
    AT(Activation, h), AT(Activation, up), AT(Activation, a), AT(Activation, da), AT(Activation, dh), END(Activation),
    AT(Sample, n), AT(Sample, v), AT(Sample, threads), AT(Sample, isa), AT(Sample, mass_bits),
    AT(Sample, logits), AT(Sample, seen), AT(Sample, numbers), AT(Sample, places), AT(Sample, settings), AT(Sample, seeds),
    AT(Sample, sequences), AT(Sample, drawn), AT(Sample, tokens), AT(Sample, logprobs), END(Sample),
    AT(LeanAdamW, n), AT(LeanAdamW, decayed), AT(LeanAdamW, first), AT(LeanAdamW, step), AT(LeanAdamW, seed), AT(LeanAdamW, threads),
    AT(LeanAdamW, isa), AT(LeanAdamW, params_dtype), AT(LeanAdamW, grads_dtype), AT(LeanAdamW, moments_dtype), AT(LeanAdamW, params),
    AT(LeanAdamW, grads), AT(LeanAdamW, m), AT(LeanAdamW, v), AT(LeanAdamW, rounded), AT(LeanAdamW, scalars), END(LeanAdamW),
    AT(Gemm, transpose_a), AT(Gemm, transpose_b), AT(Gemm, m), AT(Gemm, n), AT(Gemm, k), AT(Gemm, lda), AT(Gemm, ldb), AT(Gemm, ldc),
    AT(Gemm, accumulate), AT(Gemm, threads), AT(Gemm, a), AT(Gemm, b), AT(Gemm, c), END(Gemm),
    AT(FixedOrder, n), AT(FixedOrder, m), AT(FixedOrder, k), AT(FixedOrder, threads), AT(FixedOrder, isa), AT(FixedOrder, dtype),
    AT(FixedOrder, w_dtype), AT(FixedOrder, b_dtype), AT(FixedOrder, x), AT(FixedOrder, w), AT(FixedOrder, y), AT(FixedOrder, b),
    AT(FixedOrder, scratch), AT(FixedOrder, scale), END(FixedOrder),
    {nullptr, nullptr, 0},
};
// clang-format on

#undef AT
#undef END

}  // namespace tilegrad
