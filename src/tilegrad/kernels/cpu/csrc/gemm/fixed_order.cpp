// y = scale · x wᵀ + b for rows of float32 or bfloat16. Compiled once per instruction set.
//
// Each element of y has one register of N partial sums. Sum l adds the products k = l, l + N, l + 2N, … in this order, and a
// fixed tree adds the N sums. The last register is padded with zeros. So the bits of a row of y depend only on that
// row of x, on w and on b, not on the other rows, the threads or the schedule. There are two schedules:
//
//   stream   few rows: x and w are loaded in place, and w is read from memory once; each thread converts a small x to float32
//   panels   many rows: blocks of x and w are converted to float32 panels in scratch, which all tiles of the block read
//
// If x is bfloat16, a float32 w or b is rounded to bfloat16, as if it had been rounded before the call.

#include "gemm/fixed_order.h"

#include "simd/convert.h"

namespace tilegrad {
namespace ISA {
namespace {

constexpr int N = Lanes<float>::N;

// A register tile has ROWS × COLUMNS registers of partial sums. The remaining registers are for x and w.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 6;
#else
constexpr int ROWS = 3;
#endif
constexpr int COLUMNS = 4;
#if defined(__aarch64__)
constexpr int SPAN = 2;   // registers of a row of w that the stream schedule converts at once
#else
constexpr int SPAN = 1;
#endif
constexpr int64_t X_ROWS = 96, W_ROWS = 128;   // rows and columns of a block of y: multiples of ROWS and COLUMNS
constexpr int64_t DEPTH = 1024;                // columns of a panel
constexpr int64_t PIECE = 16;                  // fewest rows of w that a thread takes at a time in the stream schedule
constexpr int64_t AHEAD_IN_ROW = 1 << 10;      // bytes from the read to the prefetched address, for one row of w at a time
constexpr int64_t AHEAD = 16 << 10;            // the same for several rows at a time
constexpr int64_t MOST_CONVERTED = 16 << 10;   // most elements of x that a thread converts to float32, on its stack

#define UNROLL _Pragma("GCC unroll 16")

// How many rows of w the stream schedule reads at the same time, for R rows of x. A Neoverse N1 reads one row of w as fast
// as memory allows, two rows at 0.9 and four at 0.8 of that speed. But with one row of w there are only R chains of dependent
// additions, too few to hide their latency if w is bfloat16 or if x has several rows.
template <class W>
constexpr int together([[maybe_unused]] int R) {
#if defined(__aarch64__)
    return R == 1 && sizeof(W) == 4 ? 1 : 2;
#else
    return COLUMNS;
#endif
}

// A range of rows of w, which a thread takes. The first pieces are large, so that threads read long runs of memory. Later
// pieces are smaller, so that all threads end at the same time.
struct Piece {
    int64_t taken = 0, end = 0, first = 0;

    // Takes the next piece. Returns false if none is left. *next counts the pieces that all threads have taken.
    bool take(const FixedOrder& call, int64_t* next) {
        for (const int64_t ticket = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); taken <= ticket && end < call.m; ++taken) {
            first = end;
            end = at_most(first + round_up(at_least((call.m - first) / (2 * call.threads), PIECE), COLUMNS), call.m);
            if (taken == ticket) return ++taken, true;
        }
        return false;
    }
};

// A float32 that is read as the nearest bfloat16.
struct Rounded {
    float value;
    operator float() const { return BFloat16::of(value); }
};

inline V32 widen(const Rounded* p) {
    const U32 u = (U32)load(&p->value);
    const U32 nearest = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
    return (V32)((u & 0x7fffffff) > 0x7f800000 ? u | 0x400000 : nearest);
}
using tilegrad::ISA::widen;

// SPAN registers of contiguous elements.
template <class E>
inline void widen_span(const E* p, V32 (&v)[SPAN]) {
    for (int i = 0; i < SPAN; ++i) v[i] = widen(p + i * N);
}

#if defined(__aarch64__)  // zip runs on both vector pipes of a Neoverse N1, the shift of `widen` on one
inline void widen_span(const BFloat16* p, V32 (&v)[SPAN]) {
    const uint16x8_t bits = vld1q_u16(reinterpret_cast<const uint16_t*>(p)), zero = vdupq_n_u16(0);
    v[0] = (V32)vzip1q_u16(zero, bits);
    v[1] = (V32)vzip2q_u16(zero, bits);
}
#endif

// The first n elements, then zeros.
template <class E>
inline V32 widen_part(const E* p, int64_t n) {
    float part[N] = {};
    for (int64_t i = 0; i < n; ++i) part[i] = p[i];
    return load(part);
}

typedef float Four __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Index __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif

// Element i of the result, i < 4, is the sum of the elements i + 4 j of v, added by a tree over j.
inline Four folded(V32 v) {
    Four part[N / 4];
    memcpy(part, &v, sizeof v);
    for (int n = N / 8; n; n /= 2)
        for (int i = 0; i < n; ++i) part[i] += part[i + n];
    return part[0];
}

// The sums of four registers: the elements of a folded register are added as (0 + 2) + (1 + 3).
inline Four sums(V32 v0, V32 v1, V32 v2, V32 v3) {
    const Four a = folded(v0), b = folded(v1), c = folded(v2), d = folded(v3);
    const Four ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    const Four cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

#undef SHUFFLE

template <class X, class W>
struct Product {
    static const X* x_row(const FixedOrder& call, int64_t n) { return reinterpret_cast<const X*>(call.x.data) + n * call.x.stride; }
    static const W* w_row(const FixedOrder& call, int64_t m) { return reinterpret_cast<const W*>(call.w.data) + m * call.w.stride; }

    // Writes `count` ≤ 4 numbers of row n from column m on.
    static inline __attribute__((always_inline)) void put(const FixedOrder& call, int64_t n, int64_t m, int64_t count, Four total) {
        total *= float(call.scale);
        if (call.b)
            for (int64_t i = 0; i < count; ++i) total[i] += bias(call, m + i);
        X* y = reinterpret_cast<X*>(call.y.data) + n * call.y.stride + m;
        for (int64_t i = 0; i < count; ++i) convert(y[i], total[i]);
    }

    static float bias(const FixedOrder& call, int64_t m) {
        const float b = call.b_dtype == FLOAT32 ? reinterpret_cast<const float*>(call.b)[m]
                                                : float(reinterpret_cast<const BFloat16*>(call.b)[m]);
        return sizeof(X) == 2 ? float(BFloat16::of(b)) : b;
    }

    // acc[r][at + c] = the partial sums of row r of x and row m + c of w, c < C. A row of w after `last` is replaced by `last`.
    // Each step prefetches as many cache lines as it reads, in the order of memory.
    template <int R, int C, class E>
    static inline __attribute__((always_inline)) void stream_tile(
        const FixedOrder& call, const E* x0, int64_t stride, int64_t m, int64_t last, V32 (&acc)[R][COLUMNS], int at) {
        constexpr int LINE = 64 / int(sizeof(W)), STEP = SPAN * N > LINE ? SPAN * N : LINE;
        const int64_t whole = call.k - call.k % STEP;
        const E* x[R];
        const W *w[C], *fetched = w_row(call, m) + (C == 1 ? AHEAD_IN_ROW : AHEAD) / int64_t(sizeof(W));
        V32 sum[R][C];
        UNROLL for (int r = 0; r < R; ++r) x[r] = x0 + r * stride;
        UNROLL for (int c = 0; c < C; ++c) w[c] = w_row(call, at_most(m + c, last));
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < C; ++c) sum[r][c] = V32{};
        int64_t i = 0;
        for (; i < whole; i += STEP, fetched += C * STEP) {
            UNROLL for (int line = 0; line < C * STEP; line += LINE) __builtin_prefetch(fetched + line);
            UNROLL for (int u = 0; u < STEP; u += SPAN * N) {
                V32 wi[C][SPAN], xi[R];
                UNROLL for (int v = 0; v < SPAN; ++v) {
                    UNROLL for (int r = 0; r < R; ++r) xi[r] = widen(x[r] + i + u + v * N);
                    UNROLL for (int c = 0; c < C; ++c) {
                        if (v == 0) widen_span(w[c] + i + u, wi[c]);
                        UNROLL for (int r = 0; r < R; ++r) sum[r][c] += xi[r] * wi[c][v];
                    }
                }
            }
        }
        for (; i < call.k; i += N) {
            const int64_t left = call.k - i;
            UNROLL for (int c = 0; c < C; ++c) {
                const V32 wi = left < N ? widen_part(w[c] + i, left) : widen(w[c] + i);
                UNROLL for (int r = 0; r < R; ++r) sum[r][c] += (left < N ? widen_part(x[r] + i, left) : widen(x[r] + i)) * wi;
            }
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < C; ++c) acc[r][at + c] = sum[r][c];
    }

    // Computes R rows of y from n on, and COLUMNS columns from m on, but none after `last`. x is row n of call.x.
    template <int R, class E>
    static __attribute__((noinline)) void stream_rows(
        const FixedOrder& call, const E* x, int64_t stride, int64_t n, int64_t m, int64_t last) {
        constexpr int C = together<W>(R);
        V32 acc[R][COLUMNS];
        for (int c = 0; c < COLUMNS; c += C) stream_tile<R, C>(call, x, stride, at_most(m + c, last), last, acc, c);
        for (int r = 0; r < R; ++r)
            put(call, n + r, m, at_most(COLUMNS, last + 1 - m), sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]));
    }

    // x has the rows of call.x, in their own dtype or in float32.
    template <class E>
    static void stream_pieces(const FixedOrder& call, const E* x, int64_t stride, int64_t* next) {
        for (Piece piece; piece.take(call, next);)
            for (int64_t m = piece.first, last = piece.end - 1; m <= last; m += COLUMNS)
                for (int64_t n = 0; n < call.n; n += ROWS) {
                    const E* from = x + n * stride;
                    switch (at_most(ROWS, call.n - n)) {
                        case 1: stream_rows<1>(call, from, stride, n, m, last); break;
                        case 2: stream_rows<2>(call, from, stride, n, m, last); break;
                        case 3: stream_rows<3>(call, from, stride, n, m, last); break;
#if defined(__AVX512F__) || defined(__aarch64__)
                        case 4: stream_rows<4>(call, from, stride, n, m, last); break;
                        case 5: stream_rows<5>(call, from, stride, n, m, last); break;
                        case 6: stream_rows<6>(call, from, stride, n, m, last); break;
#endif
                    }
                }
    }

    static __attribute__((noinline)) void stream_converted(const FixedOrder& call, int64_t* next) {
        float x[MOST_CONVERTED];
        for (int64_t n = 0; n < call.n; ++n) pack<1>(x + n * call.k, x_row(call, n), call.x.stride, 1, call.k);
        stream_pieces(call, x, call.k, next);
    }

    static void stream(const FixedOrder& call, int64_t* next) {
        if constexpr (sizeof(X) == 2)
            if (call.n * call.k <= MOST_CONVERTED && call.k % N == 0) return stream_converted(call, next);
        stream_pieces(call, x_row(call, 0), call.x.stride, next);
    }

    // to[i][r] = register i of row r if r < rows, else zeros
    template <int R, class E>
    static inline __attribute__((always_inline)) void pack(float* to, const E* from, int64_t stride, int64_t rows, int64_t k) {
        for (int r = 0; r < R; ++r) {
            const E* row = from + r * stride;
            float* at = to + r * N;
            int64_t i = 0;
            if (r < rows)
                for (; i + N <= k; i += N, at += R * N) store(at, widen(row + i));
            for (; i < k; i += N, at += R * N) store(at, r < rows ? widen_part(row + i, k - i) : V32{});
        }
    }

    // Adds the products of `registers` registers of panels x and w to the sums of a tile. Unless `first`, the sums are loaded from
    // `partial`. If `last`, rows × columns of them are written to y from (n, m) on, otherwise they are stored in `partial`.
    static __attribute__((noinline)) void panel_tile(
        const FixedOrder& call, const float* __restrict__ x, const float* __restrict__ w, int64_t registers,
        float* __restrict__ partial, bool first, bool last, int64_t n, int64_t rows, int64_t m, int64_t columns) {
        V32 acc[ROWS][COLUMNS];
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLUMNS; ++c) acc[r][c] = first ? V32{} : load(partial + (r * COLUMNS + c) * N);
        for (int64_t i = 0; i < registers; ++i, x += ROWS * N, w += COLUMNS * N) {
            V32 wi[COLUMNS];
            for (int c = 0; c < COLUMNS; ++c) wi[c] = load(w + c * N);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const V32 xi = load(x + r * N);
                for (int c = 0; c < COLUMNS; ++c) acc[r][c] += xi * wi[c];
            }
        }
        if (last) {
            for (int r = 0; r < ROWS; ++r) {
                const Four total = sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
                if (r < rows) put(call, n + r, m, columns, total);
            }
        } else {
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < COLUMNS; ++c) store(partial + (r * COLUMNS + c) * N, acc[r][c]);
        }
    }

    static constexpr int64_t X_PANEL = X_ROWS * DEPTH, W_PANEL = COLUMNS * DEPTH, PARTIAL = X_ROWS * W_ROWS * N;

    // One block of y: X_ROWS rows from n on, `width` columns from m on.
    static void block(const FixedOrder& call, float* scratch, int64_t n, int64_t m, int64_t width) {
        float *x_panel = scratch, *w_panel = x_panel + X_PANEL, *partial = w_panel + W_PANEL;
        const int64_t rows = at_most(X_ROWS, call.n - n), columns = at_most(width, call.m - m);
        for (int64_t k = 0; k < call.k; k += DEPTH) {
            const int64_t depth = at_most(DEPTH, call.k - k), registers = (depth + N - 1) / N;
            for (int64_t r = 0; r < rows; r += ROWS)
                pack<ROWS>(x_panel + r * DEPTH, x_row(call, n + r) + k, call.x.stride, rows - r, depth);
            float* sums_of_tile = partial;
            for (int64_t c = 0; c < columns; c += COLUMNS) {
                pack<COLUMNS>(w_panel, w_row(call, m + c) + k, call.w.stride, columns - c, depth);
                for (int64_t r = 0; r < rows; r += ROWS, sums_of_tile += ROWS * COLUMNS * N)
                    panel_tile(call, x_panel + r * DEPTH, w_panel, registers, sums_of_tile, k == 0, k + DEPTH >= call.k, n + r,
                               at_most(ROWS, rows - r), m + c, at_most(COLUMNS, columns - c));
            }
        }
    }

    static void panels(const FixedOrder& call, int64_t* next, int worker) {
        float* scratch = reinterpret_cast<float*>(call.scratch) + worker * (X_PANEL + W_PANEL + PARTIAL);
        const int64_t down = (call.n + X_ROWS - 1) / X_ROWS;
        int64_t width = W_ROWS;
        while (width > 4 * COLUMNS && down * ((call.m + width - 1) / width) < 4 * call.threads) width /= 2;
        const int64_t blocks = down * ((call.m + width - 1) / width);
        for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < blocks;)
            block(call, scratch, i % down * X_ROWS, i / down * width, width);
    }

    static void work(const FixedOrder& call, int64_t* next, int worker) {
        if (!call.k) return zeros(call, next);
        call.scratch ? panels(call, next, worker) : stream(call, next);
    }

    static void zeros(const FixedOrder& call, int64_t* next) {
        for (int64_t n; (n = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < call.n;)
            for (int64_t m = 0; m < call.m; m += 4) put(call, n, m, at_most(4, call.m - m), Four{});
    }
};

void work(const FixedOrder& call, int64_t* next, int worker) {
    if (call.dtype == BFLOAT16)
        call.w_dtype == BFLOAT16 ? Product<BFloat16, BFloat16>::work(call, next, worker)
                                 : Product<BFloat16, Rounded>::work(call, next, worker);
    else
        call.w_dtype == BFLOAT16 ? Product<float, BFloat16>::work(call, next, worker)
                                 : Product<float, float>::work(call, next, worker);
}

using Any = Product<float, float>;
constexpr int64_t PANEL_BYTES = 4 * (Any::X_PANEL + Any::W_PANEL + Any::PARTIAL);

}  // namespace

FixedOrderKernels fixed_order_kernels() { return {work, PANEL_BYTES}; }

}  // namespace ISA
}  // namespace tilegrad
