// AdamW on lean states. Compiled once per instruction set, without fused multiply-adds, so the results have the bits of
// kernels/adamw/torch_ops.py. The equations are in kernels/adamw/__init__.py, stochastic rounding is in
// kernels/stochastic_rounding.py.

#include "rows/adamw.h"

#include "attention/dropout.h"
#include "simd/convert.h"

namespace tilegrad {
namespace ISA {
namespace {

constexpr int N = Lanes<float>::N;
constexpr uint32_t MOMENTS = 0x4D4F4D53, PARAMETERS = 0x50415253;

// words[4 j + k] = word k of Philox4×32-10 of the counter (quad + j, step, stream): ADAMW_BLOCK words.
void draw(uint32_t* words, int64_t quad, uint32_t step, uint32_t stream, uint64_t seed) {
    for (int j = 0; j < ADAMW_BLOCK / 4; j += N) {
        U32 c0, c1, c2 = U32{} + step, c3 = U32{} + stream;
        for (int n = 0; n < N; ++n) {
            c0[n] = uint32_t(quad + j + n);
            c1[n] = uint32_t((quad + j + n) >> 32);
        }
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        for (int round = 0; round < 10; ++round) {
            const Halves x = halves_of_product(c0, 0xD2511F53), y = halves_of_product(c2, 0xCD9E8D57);
            c0 = y.high ^ c1 ^ k0;
            c1 = y.low;
            c2 = x.high ^ c3 ^ k1;
            c3 = x.low;
            k0 += 0x9E3779B9;
            k1 += 0xBB67AE85;
        }
        for (int n = 0; n < N; ++n) {
            uint32_t* to = words + 4 * (j + n);
            to[0] = c0[n], to[1] = c1[n], to[2] = c2[n], to[3] = c3[n];
        }
    }
}

void read(float* to, const char* from, int64_t dtype, int64_t at, int n) {
    if (dtype == BFLOAT16)
        for (int i = 0; i < n; ++i) to[i] = reinterpret_cast<const BFloat16*>(from)[at + i];
    else
        memcpy(to, reinterpret_cast<const float*>(from) + at, sizeof(float) * n);
}

// Writes x as float32, or rounded stochastically to bfloat16 with the 16 bits of each word from bit `shift` on.
void write(char* to, int64_t dtype, int64_t at, const float* x, int n, const uint32_t* words, int shift) {
    if (dtype != BFLOAT16) {
        memcpy(reinterpret_cast<float*>(to) + at, x, sizeof(float) * n);
        return;
    }
    uint16_t* out = reinterpret_cast<uint16_t*>(to) + at;
    for (int i = 0; i < n; ++i) {
        const uint32_t given = as_bits(x[i]), size = given & 0x7fffffff, bits = words[i] >> shift & 0xffff;
        const uint32_t up = given + (size > 0x7f7f0000 ? 0 : bits);
        out[i] = uint16_t(size > 0x7f800000 ? 0x7fc0 : up >> 16);
    }
}

void lean(const LeanAdamW& call, int64_t begin, int64_t end) {
    const float *s = call.scalars, clip = s[0], keep1 = s[1], take1 = s[2], keep2 = s[3], take2 = s[4];
    const float rate = s[5], root = s[6], decay = s[7], eps = s[8];
    float g[ADAMW_BLOCK], m[ADAMW_BLOCK], v[ADAMW_BLOCK], p[ADAMW_BLOCK];
    uint32_t words[ADAMW_BLOCK];
    for (int64_t at = begin; at < end; at += ADAMW_BLOCK) {
        const int n = int(end - at < ADAMW_BLOCK ? end - at : ADAMW_BLOCK);
        const int64_t quad = (call.first + at) / 4, left = call.decayed - at;
        const int decayed = int(left < 0 ? 0 : left < n ? left : n);
        read(g, call.grads, call.grads_dtype, at, n);
        read(m, call.m, call.moments_dtype, at, n);
        read(v, call.v, call.moments_dtype, at, n);
        read(p, call.params, call.params_dtype, at, n);
        for (int i = 0; i < decayed; ++i) p[i] = p[i] - p[i] * decay;
        for (int i = 0; i < n; ++i) {
            const float clipped = g[i] * clip;
            m[i] = m[i] * keep1 + clipped * take1;
            v[i] = v[i] * keep2 + clipped * clipped * take2;
            p[i] = p[i] - m[i] * rate / (sqrtf(v[i]) * root + eps);
        }
        if (call.moments_dtype == BFLOAT16) draw(words, quad, uint32_t(call.step), MOMENTS, uint64_t(call.seed));
        write(call.m, call.moments_dtype, at, m, n, words, 0);
        write(call.v, call.moments_dtype, at, v, n, words, 16);
        if (call.params_dtype == BFLOAT16) draw(words, quad, uint32_t(call.step), PARAMETERS, uint64_t(call.seed));
        write(call.params, call.params_dtype, at, p, n, words, 0);
        if (call.rounded)
            for (int i = 0; i < n; ++i) reinterpret_cast<BFloat16*>(call.rounded)[at + i] = BFloat16::of(p[i]);
    }
}

}  // namespace

AdamWKernels adamw_kernels() { return {lean}; }

}  // namespace ISA
}  // namespace tilegrad
