// Norms and gelu on rows of float32: one walk over memory where a chain of torch ops has five to ten. Compiled once for
// each instruction set. The equations are in kernels/norm.py and kernels/activation.py.

#include "rowwise.h"

#include "vector.h"

namespace tilegrad {
namespace ISA {
namespace {

constexpr int N = Lanes<float>::N;
constexpr int64_t BLOCK = 64;  // rows whose sum is rounded on its own

// Σ f(c) over the columns, in four chains; the tail one by one.
template <class Vector, class Scalar>
inline float sum_of(int64_t c, Vector vector, Scalar scalar) {
    V32 s[4] = {};
    int64_t i = 0;
    for (; i + 4 * N <= c; i += 4 * N)
        for (int u = 0; u < 4; ++u) s[u] += vector(i + u * N);
    for (; i + N <= c; i += N) s[0] += vector(i);
    float total = sum<float>((s[0] + s[1]) + (s[2] + s[3]));
    for (; i < c; ++i) total += scalar(i);
    return total;
}

void norm_fwd(const Norm& call, int64_t begin, int64_t end) {
    const int64_t c = call.c;
    const float *w = call.w, *b = call.b;
    for (int64_t r = begin; r < end; ++r) {
        const float* x = call.x.data + r * call.x.stride;
        float* y = call.y.data + r * call.y.stride;
        float mean = 0.0f;
        if (call.mean) {
            mean = sum_of(c, [&](int64_t i) { return load(x + i); }, [&](int64_t i) { return x[i]; }) / c;
            call.mean[r] = mean;
        }
        const float squares = sum_of(
            c, [&](int64_t i) { V32 d = load(x + i) - mean; return d * d; },
            [&](int64_t i) { float d = x[i] - mean; return d * d; });
        const float rstd = 1.0f / __builtin_sqrtf(squares / c + float(call.eps));
        call.rstd[r] = rstd;
        int64_t i = 0;
        for (; i + N <= c; i += N) {
            V32 v = (load(x + i) - mean) * rstd * load(w + i);
            store(y + i, b ? v + load(b + i) : v);
        }
        for (; i < c; ++i) y[i] = (x[i] - mean) * rstd * w[i] + (b ? b[i] : 0.0f);
    }
}

// dx += rstd (g − Σ g / C − x̂ Σ (g x̂) / C),  g = dy w
void norm_rows(const Norm& call, int64_t begin, int64_t end) {
    const int64_t c = call.c;
    const float* w = call.w;
    for (int64_t r = begin; r < end; ++r) {
        const float *x = call.x.data + r * call.x.stride, *dy = call.dy.data + r * call.dy.stride;
        float* dx = call.dx.data + r * call.dx.stride;
        const float mean = call.mean ? call.mean[r] : 0.0f, rstd = call.rstd[r];
        const float gx = rstd / c * sum_of(
            c, [&](int64_t i) { return load(dy + i) * load(w + i) * (load(x + i) - mean); },
            [&](int64_t i) { return dy[i] * w[i] * (x[i] - mean); });
        const float g = !call.mean ? 0.0f : 1.0f / c * sum_of(
            c, [&](int64_t i) { return load(dy + i) * load(w + i); }, [&](int64_t i) { return dy[i] * w[i]; });
        const float slope = gx * rstd;
        int64_t i = 0;
        for (; i + N <= c; i += N) {
            V32 step = load(dy + i) * load(w + i) - g - (load(x + i) - mean) * slope;
            store(dx + i, load(dx + i) + step * rstd);
        }
        for (; i < c; ++i) dx[i] += (dy[i] * w[i] - g - (x[i] - mean) * slope) * rstd;
    }
}

// dw += Σ_n dy x̂,  db += Σ_n dy  for W vectors of columns, or for one column
template <int W>
inline void add_columns(const Norm& call, int64_t i) {
    V32 dw[W] = {}, db[W] = {};
    for (int64_t first = 0; first < call.n; first += BLOCK) {
        V32 block_w[W] = {}, block_b[W] = {};
        for (int64_t r = first; r < at_most(first + BLOCK, call.n); ++r) {
            const float *x = call.x.data + r * call.x.stride + i, *dy = call.dy.data + r * call.dy.stride + i;
            const float mean = call.mean ? call.mean[r] : 0.0f, rstd = call.rstd[r];
            for (int u = 0; u < W; ++u) {
                block_w[u] += load(dy + u * N) * ((load(x + u * N) - mean) * rstd);
                block_b[u] += load(dy + u * N);
            }
        }
        for (int u = 0; u < W; ++u) {
            dw[u] += block_w[u];
            db[u] += block_b[u];
        }
    }
    for (int u = 0; u < W; ++u) {
        if (call.dw) store(call.dw + i + u * N, call.adds ? load(call.dw + i + u * N) + dw[u] : dw[u]);
        if (call.db) store(call.db + i + u * N, call.adds ? load(call.db + i + u * N) + db[u] : db[u]);
    }
}

inline void add_column(const Norm& call, int64_t i) {
    float dw = 0.0f, db = 0.0f;
    for (int64_t first = 0; first < call.n; first += BLOCK) {
        float block_w = 0.0f, block_b = 0.0f;
        for (int64_t r = first; r < at_most(first + BLOCK, call.n); ++r) {
            const float x = call.x.data[r * call.x.stride + i], dy = call.dy.data[r * call.dy.stride + i];
            block_w += dy * ((x - (call.mean ? call.mean[r] : 0.0f)) * call.rstd[r]);
            block_b += dy;
        }
        dw += block_w;
        db += block_b;
    }
    if (call.dw) call.dw[i] = call.adds ? call.dw[i] + dw : dw;
    if (call.db) call.db[i] = call.adds ? call.db[i] + db : db;
}

void norm_columns(const Norm& call, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 4 * N <= end; i += 4 * N) add_columns<4>(call, i);
    for (; i + N <= end; i += N) add_columns<1>(call, i);
    for (; i < end; ++i) add_column(call, i);
}

constexpr float C = 2.0f * 0.7978845608028654f * 0.044715f, K = 1.0f / 0.044715f;

// a = h σ(z),  z = C (h² + K) h,  σ(z) = 1 / (1 + e),  e = exp(−z), which is kept finite
constexpr float FAR = 80.0f;

inline V32 gelu_fwd(V32 h) {
    V32 z = (h * h + K) * h * C;
    V32 e = exponential(-z > FAR ? all(FAR) : -z);
    return -z > FAR ? V32{} : h / (1.0f + e);
}

// gelu' = σ(z) + h z' σ(z) σ(−z),  h z' = 3 C (h² + K/3) h,  σ(−z) = e σ(z);  0 far to the left
inline V32 gelu_slope(V32 h) {
    V32 z = (h * h + K) * h * C;
    V32 e = exponential(-z > FAR ? all(FAR) : -z);
    V32 s = 1.0f / (1.0f + e);
    V32 slope = s + (h * h + K / 3.0f) * h * (3.0f * C) * s * (e * s);
    return -z > FAR ? V32{} : slope;
}

void gelu(const Gelu& call, int64_t begin, int64_t end) {
    float tail_h[N] = {}, tail_da[N] = {};
    int64_t i = begin;
    for (; i + N <= end; i += N) {
        V32 h = load(call.h + i);
        if (call.a) store(call.a + i, gelu_fwd(h));
        else store(call.dh + i, load(call.da + i) * gelu_slope(h));
    }
    for (int64_t j = i; j < end; ++j) {
        tail_h[j - i] = call.h[j];
        if (!call.a) tail_da[j - i] = call.da[j];
    }
    V32 out = call.a ? gelu_fwd(load(tail_h)) : load(tail_da) * gelu_slope(load(tail_h));
    for (int64_t j = i; j < end; ++j) (call.a ? call.a : call.dh)[j] = out[j - i];
}

}  // namespace

Rowwise rowwise() { return {norm_fwd, norm_rows, norm_columns, gelu, N}; }

}  // namespace ISA
}  // namespace tilegrad
