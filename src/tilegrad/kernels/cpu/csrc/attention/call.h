// One call of attention as it crosses the C ABI: sizes, views with strides in elements, options, scratch.
//
//   q (B, Hq, Tq, D)   k (B, Hkv, Tk, D)   v (B, Hkv, Tk, Dv)   o, do (B, Hq, Tq, Dv)   lse, dlse (B, Hq, Tq)   bias (B, Hq, Tq, Tk)
//
// Packed sequences: B of them, stride b = 0; cu_seqlens_q, cu_seqlens_k (B + 1) have their starts; tq, tk are the longest lengths.
// cpu/abi.py repeats `View` and `Call`, and layout.h lists their fields: the three are compared when the library is loaded.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tilegrad {

struct View {
    char* data;  // null: absent
    int64_t b, h, t, d;
};

struct Call {
    int64_t dtype, b, hq, hkv, tq, tk, d, dv;
    int64_t left, right;  // the band of mask.py; −1: open
    int64_t threads, isa;
    int64_t sinks_dtype, slopes_dtype, bias_dtype, dbias_dtype, dkv_dtype;
    int64_t dropout_threshold, seed;  // of philox.py
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    char* scratch;
    int64_t scratch_bytes;
    View q, k, v, o, lse;                           // o and lse: written by the forward, read by the backward
    View do_, dlse, dq, dk, dv_, dsinks;            // of the backward
    View sinks, slopes;                             // (Hq,) in h; slopes may have b
    View bias, dbias;                               // stride 0 where broadcast; dbias is added to unless all axes are kept
    double scale, softcap, dropout_p;
};

// One sequence of the batch: its first row in q and in k, and its lengths.
struct Sequence {
    int64_t q0, k0, tq, tk;
};

static inline Sequence sequence(const Call& call, int64_t b) {
    if (!call.cu_seqlens_q) return {0, 0, call.tq, call.tk};
    return {call.cu_seqlens_q[b], call.cu_seqlens_k[b], call.cu_seqlens_q[b + 1] - call.cu_seqlens_q[b], call.cu_seqlens_k[b + 1] - call.cu_seqlens_k[b]};
}

// The functions of one instruction set; a call's dtype selects the kernel.
struct Kernels {
    int64_t (*scratch_bytes)(const Call&, bool backward);
    void (*prepare)(const Call&, bool backward);            // by the caller, before the threads start
    void (*work)(const Call&, bool backward, int worker);   // by every thread of the pool
    void (*add_dsinks)(const Call&);                        // by the caller, after a backward with sinks
};

}  // namespace tilegrad
