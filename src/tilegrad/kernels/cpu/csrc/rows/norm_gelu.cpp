// Norms, activations and column sums on rows of float32 or bfloat16, in one pass over memory; torch ops need five to ten.
// Compiled once per instruction set. The equations are in kernels/norm, kernels/activation and kernels/column_sum.

#include "rows/norm_gelu.h"

#include <algorithm>

#include "simd/convert.h"

namespace tilegrad {
namespace ISA {
namespace {

constexpr int N = Lanes<float>::N;
constexpr int64_t BLOCK = 64;  // rows per partial sum

// Σ f(c) over the columns: four vector accumulators, then the tail element by element.
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

// E: dtype of rows, P: dtype of parameters; both are converted to float in registers.
template <class E, class P>
struct NormOf {
    static E* row(const Rows& x, int64_t r) { return reinterpret_cast<E*>(x.data) + r * x.stride; }
    static const P* params(const char* p) { return reinterpret_cast<const P*>(p); }

    // to = x + f
    static const E* sum(const E* x, const E* f, E* to, int64_t c) {
        int64_t i = 0;
        for (; i + N <= c; i += N) narrow(to + i, widen(x + i) + widen(f + i));
        for (; i < c; ++i) convert(to[i], float(x[i]) + float(f[i]));
        return to;
    }

    static void fwd(const Norm& call, int64_t begin, int64_t end) {
        const int64_t c = call.c;
        const P *w = params(call.w), *b = params(call.b);
        for (int64_t r = begin; r < end; ++r) {
            const E* x = call.f.data ? sum(row(call.x, r), row(call.f, r), row(call.x1, r), c) : row(call.x, r);
            E* y = row(call.y, r);
            float mean = call.mean && !call.eps ? call.mean[r] : 0.0f;
            if (call.mean && call.eps) {
                mean = sum_of(c, [&](int64_t i) { return widen(x + i); }, [&](int64_t i) { return float(x[i]); }) / c;
                call.mean[r] = mean;
            }
            if (call.eps) {
                const float squares = sum_of(
                    c, [&](int64_t i) { V32 d = widen(x + i) - mean; return d * d; },
                    [&](int64_t i) { float d = x[i] - mean; return d * d; });
                call.rstd[r] = 1.0f / __builtin_sqrtf(squares / c + float(call.eps));
            }
            const float rstd = call.rstd[r];
            int64_t i = 0;
            for (; i + N <= c; i += N) {
                V32 v = (widen(x + i) - mean) * rstd * widen(w + i);
                narrow(y + i, b ? v + widen(b + i) : v);
            }
            for (; i < c; ++i) convert(y[i], (x[i] - mean) * rstd * w[i] + (b ? float(b[i]) : 0.0f));
        }
    }

    // dx += rstd (g − Σ g / C − x̂ Σ (g x̂) / C),  g = dy w
    static void rows(const Norm& call, int64_t begin, int64_t end) {
        const int64_t c = call.c;
        const P* w = params(call.w);
        for (int64_t r = begin; r < end; ++r) {
            const E *x = row(call.x, r), *dy = row(call.dy, r);
            E* dx = row(call.dx, r);
            const float mean = call.mean ? call.mean[r] : 0.0f, rstd = call.rstd[r];
            // clang-format off
            const float gx = rstd / c * sum_of(
                c, [&](int64_t i) { return widen(dy + i) * widen(w + i) * (widen(x + i) - mean); },
                [&](int64_t i) { return dy[i] * w[i] * (x[i] - mean); });
            const float g = !call.mean ? 0.0f : 1.0f / c * sum_of(
                c, [&](int64_t i) { return widen(dy + i) * widen(w + i); }, [&](int64_t i) { return dy[i] * w[i]; });
            // clang-format on
            const float slope = gx * rstd;
            int64_t i = 0;
            for (; i + N <= c; i += N) {
                V32 step = widen(dy + i) * widen(w + i) - g - (widen(x + i) - mean) * slope;
                narrow(dx + i, widen(dx + i) + step * rstd);
            }
            for (; i < c; ++i) convert(dx[i], dx[i] + (dy[i] * w[i] - g - (x[i] - mean) * slope) * rstd);
        }
    }

    // dw += Σ_n dy x̂,  db += Σ_n dy  for W vectors of columns; `add_column` is for one column
    template <int W, bool DW>
    static void add_columns(const Norm& call, int64_t i) {
        V32 dw[W] = {}, db[W] = {};
        for (int64_t first = 0; first < call.n; first += BLOCK) {
            V32 block_w[W] = {}, block_b[W] = {};
            for (int64_t r = first; r < at_most(first + BLOCK, call.n); ++r) {
                const E *x = DW ? row(call.x, r) + i : nullptr, *dy = row(call.dy, r) + i;
                const float mean = DW && call.mean ? call.mean[r] : 0.0f, rstd = DW ? call.rstd[r] : 0.0f;
                for (int u = 0; u < W; ++u) {
                    if (DW) block_w[u] += widen(dy + u * N) * ((widen(x + u * N) - mean) * rstd);
                    block_b[u] += widen(dy + u * N);
                }
            }
            for (int u = 0; u < W; ++u) {
                dw[u] += block_w[u];
                db[u] += block_b[u];
            }
        }
        for (int u = 0; u < W; ++u) {
            if (DW) store(call.dw + i + u * N, call.accumulate ? load(call.dw + i + u * N) + dw[u] : dw[u]);
            if (call.db) store(call.db + i + u * N, call.accumulate ? load(call.db + i + u * N) + db[u] : db[u]);
        }
    }

    static void add_column(const Norm& call, int64_t i) {
        float dw = 0.0f, db = 0.0f;
        for (int64_t first = 0; first < call.n; first += BLOCK) {
            float block_w = 0.0f, block_b = 0.0f;
            for (int64_t r = first; r < at_most(first + BLOCK, call.n); ++r) {
                const float dy = row(call.dy, r)[i];
                if (call.dw) block_w += dy * ((row(call.x, r)[i] - (call.mean ? call.mean[r] : 0.0f)) * call.rstd[r]);
                block_b += dy;
            }
            dw += block_w;
            db += block_b;
        }
        if (call.dw) call.dw[i] = call.accumulate ? call.dw[i] + dw : dw;
        if (call.db) call.db[i] = call.accumulate ? call.db[i] + db : db;
    }

    template <bool DW>
    static void loop_over_columns(const Norm& call, int64_t begin, int64_t end) {
        int64_t i = begin;
        for (; i + 4 * N <= end; i += 4 * N) add_columns<4, DW>(call, i);
        for (; i + N <= end; i += N) add_columns<1, DW>(call, i);
        for (; i < end; ++i) add_column(call, i);
    }

    static void columns(const Norm& call, int64_t begin, int64_t end) {
        call.dw ? loop_over_columns<true>(call, begin, end) : loop_over_columns<false>(call, begin, end);
    }
};

template <class Run>
inline void with_dtypes(const Norm& call, Run run) {
    if (call.dtype == FLOAT32) run(NormOf<float, float>{});
    else if (call.param_dtype == FLOAT32) run(NormOf<BFloat16, float>{});
    else run(NormOf<BFloat16, BFloat16>{});
}

void norm_fwd(const Norm& call, int64_t begin, int64_t end) {
    with_dtypes(call, [&](auto norm) { norm.fwd(call, begin, end); });
}
void norm_rows(const Norm& call, int64_t begin, int64_t end) {
    with_dtypes(call, [&](auto norm) { norm.rows(call, begin, end); });
}
void norm_columns(const Norm& call, int64_t begin, int64_t end) {
    with_dtypes(call, [&](auto norm) { norm.columns(call, begin, end); });
}

constexpr float C = 2.0f * 0.7978845608028654f * 0.044715f, K = 1.0f / 0.044715f;

// a = h σ(z),  z = C (h² + K) h,  σ(z) = 1 / (1 + e),  e = exp(−z), with −z clamped to FAR so that e is finite
constexpr float FAR = 80.0f;

inline V32 gelu_fwd(V32 h) {
    V32 z = (h * h + K) * h * C;
    V32 e = exponential(-z > FAR ? all(FAR) : -z);
    return -z > FAR ? V32{} : h / (1.0f + e);
}

// gelu' = σ(z) + h z' σ(z) σ(−z),  h z' = 3 C (h² + K/3) h,  σ(−z) = e σ(z);  0 if −z > FAR
inline V32 gelu_slope(V32 h) {
    V32 z = (h * h + K) * h * C;
    V32 e = exponential(-z > FAR ? all(FAR) : -z);
    V32 s = 1.0f / (1.0f + e);
    V32 slope = s + (h * h + K / 3.0f) * h * (3.0f * C) * s * (e * s);
    return -z > FAR ? V32{} : slope;
}

struct Gelu {
    static V32 value(V32 h) { return gelu_fwd(h); }
    static V32 slope(V32 h) { return gelu_slope(h); }
};

// max(h, 0)² and 2 max(h, 0); NaN stays NaN
struct Relu2 {
    static V32 value(V32 h) { return h <= 0.0f ? V32{} : h * h; }
    static V32 slope(V32 h) { return h <= 0.0f ? V32{} : 2.0f * h; }
};

template <class Of, class E>
void elements_of(const Activation& call, int64_t begin, int64_t end) {
    const E *h = reinterpret_cast<const E*>(call.h), *da = reinterpret_cast<const E*>(call.da);
    E* out = reinterpret_cast<E*>(call.a ? call.a : call.dh);
    int64_t i = begin;
    for (; i + N <= end; i += N)
        narrow(out + i, call.a ? Of::value(widen(h + i)) : widen(da + i) * Of::slope(widen(h + i)));
    float tail_h[N] = {}, tail_da[N] = {};
    for (int64_t j = i; j < end; ++j) {
        tail_h[j - i] = h[j];
        if (!call.a) tail_da[j - i] = da[j];
    }
    const V32 tail = call.a ? Of::value(load(tail_h)) : load(tail_da) * Of::slope(load(tail_h));
    for (int64_t j = i; j < end; ++j) convert(out[j], tail[j - i]);
}

template <class Of>
void with_dtype(const Activation& call, int64_t begin, int64_t end) {
    call.dtype == FLOAT32 ? elements_of<Of, float>(call, begin, end) : elements_of<Of, BFloat16>(call, begin, end);
}

// silu(h) = h σ(h), with e = exp(−|h|): h / (1 + e) or, for h < 0, h e / (1 + e), which is 0 below −88
inline V32 silu(V32 h) {
    V32 e = exponential(h < 0.0f ? h : -h);
    V32 s = (h < 0.0f ? e : all(1.0f)) / (1.0f + e);
    return h < -88.0f ? V32{} : h * s;
}

inline V32 activated(int64_t kind, V32 h, V32 up) { return kind == TANH ? hyperbolic_tangent(h).value : silu(h) * up; }

// a = tanh(h), or silu(h) ∘ up. A whole register and a part of one are computed by the same function.
template <class E>
void forward_of(const Activation& call, int64_t begin, int64_t end) {
    while (begin < end) {
        const int64_t row = begin / call.columns, column = begin % call.columns;
        const int64_t n = std::min(end - begin, call.columns - column), at = row * call.stride + column;
        const E *h = reinterpret_cast<const E*>(call.h) + at, *up = reinterpret_cast<const E*>(call.up ? call.up : call.h) + at;
        E* a = reinterpret_cast<E*>(call.a) + begin;
        int64_t i = 0;
        for (; i + N <= n; i += N) narrow(a + i, activated(call.kind, widen(h + i), widen(up + i)));
        float tail_h[N] = {}, tail_up[N] = {};
        for (int64_t j = i; j < n; ++j) {
            tail_h[j - i] = h[j];
            tail_up[j - i] = up[j];
        }
        const V32 tail = activated(call.kind, load(tail_h), load(tail_up));
        for (int64_t j = i; j < n; ++j) convert(a[j], tail[j - i]);
        begin += n;
    }
}

void activation(const Activation& call, int64_t begin, int64_t end) {
    if (call.kind == GELU) with_dtype<Gelu>(call, begin, end);
    else if (call.kind == RELU2) with_dtype<Relu2>(call, begin, end);
    else call.dtype == FLOAT32 ? forward_of<float>(call, begin, end) : forward_of<BFloat16>(call, begin, end);
}

}  // namespace

NormGeluKernels norm_gelu_kernels() { return {norm_fwd, norm_rows, norm_columns, activation, N}; }

}  // namespace ISA
}  // namespace tilegrad
