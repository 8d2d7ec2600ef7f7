// One call of attention as it crosses the C ABI: sizes, views with strides in elements, options, scratch.
//
//   q (B, Hq, Tq, D)   k (B, Hkv, Tk, D)   v (B, Hkv, Tk, Dv)   o, do (B, Hq, Tq, Dv)   lse, dlse (B, Hq, Tq)   bias (B, Hq, Tq, Tk)
//
// Packed sequences: B sequences with stride b = 0. cu_seqlens_q and cu_seqlens_k (B + 1) are their starts, tq and tk the longest
// lengths.
//
// Decoding: positions (B,) are the lengths of the caches k and v (B, Hkv, Tk, D) before this call, and Tq = 1. The forward
// appends the rows k_new and v_new (B, Hkv, D) at these positions, then row b attends to columns 0 … positions[b]. If a position
// is not in 0 … Tk − 1, nothing is appended, and the row attends to no column.
//
// cpu/abi.py repeats `View` and `Call`, layout.h lists their fields, and loading the library compares them.
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
    int64_t left, right;  // the band of mask.py; −1: unlimited
    int64_t threads, isa;
    int64_t sinks_dtype, slopes_dtype, bias_dtype, dbias_dtype, dkv_dtype;
    int64_t dropout_threshold, seed;  // see philox.py
    const int32_t *cu_seqlens_q, *cu_seqlens_k;
    const int64_t* positions;
    char* scratch;
    int64_t scratch_bytes;
    View q, k, v, o, lse;                           // o and lse: written by the forward, read by the backward
    View k_new, v_new;                              // with positions only
    View do_, dlse, dq, dk, dv_, dsinks;            // backward only
    View sinks, slopes;                             // (Hq,), stride h; slopes may be (B, Hq)
    View bias, dbias;                               // stride 0 along broadcast axes; with such axes dbias is accumulated, otherwise overwritten
    View intervals;                                 // int32 (B, Hkv, Tk, t), stride 0 along broadcast axes: intervals.h
    double scale, softcap, dropout_p;
};

// One sequence of the batch: its first row in q and in k, and its lengths.
struct Sequence {
    int64_t q0, k0, tq, tk;
};

static inline Sequence sequence(const Call& call, int64_t b) {
    if (call.positions) {
        const int64_t p = call.positions[b];
        return {0, 0, 1, p >= 0 && p < call.tk ? p + 1 : 0};
    }
    if (!call.cu_seqlens_q) return {0, 0, call.tq, call.tk};
    return {call.cu_seqlens_q[b], call.cu_seqlens_k[b], call.cu_seqlens_q[b + 1] - call.cu_seqlens_q[b], call.cu_seqlens_k[b + 1] - call.cu_seqlens_k[b]};
}

// The functions of one instruction set; the dtype of a call selects the kernel.
struct Kernels {
    int64_t (*scratch_bytes)(const Call&, bool backward);
    void (*prepare)(const Call&, bool backward);            // called before the threads start
    void (*work)(const Call&, bool backward, int worker);   // called by every thread of the pool
    void (*add_dsinks)(const Call&);                        // called after a backward with sinks
};

}  // namespace tilegrad
