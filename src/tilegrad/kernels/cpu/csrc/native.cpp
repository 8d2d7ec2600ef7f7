// The C ABI, and the selection of the instruction set.

#include "attention/cache_write.h"
#include "attention/call.h"
#include "gemm/fixed_order.h"
#include "gemm/gemm.h"
#include "layout.h"
#include "rows/adamw.h"
#include "rows/norm_gelu.h"
#include "rows/sampling.h"
#include "threads/thread_pool.h"

#if defined(WITH_amx)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tilegrad {

#define DECLARE_KERNELS(isa)                   \
    namespace isa {                            \
    Kernels float_kernels();                   \
    NormGeluKernels norm_gelu_kernels();       \
    SamplingKernels sampling_kernels();        \
    FixedOrderKernels fixed_order_kernels();   \
    AdamWKernels adamw_kernels();              \
    }
DECLARE_KERNELS(portable)
DECLARE_KERNELS(avx2)
DECLARE_KERNELS(avx512)
namespace portable {
Kernels double_kernels();
}
namespace amx {
Kernels bfloat16_kernels();
}

namespace {

enum Isa : int64_t {
    PORTABLE,
    AVX2,
    AVX512,
    AMX,
};

#if defined(WITH_amx)
// Linux lets a process use the 8 KiB of tile registers only after a request.
bool may_use_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

// WITH_…: instruction sets compiled into this library.
int64_t find_supported() {
    int64_t isa = 1 << PORTABLE;
#if defined(WITH_avx2)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) isa |= 1 << AVX2;
#endif
#if defined(WITH_avx512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        isa |= 1 << AVX512;
#endif
#if defined(WITH_amx)
    if ((isa >> AVX512 & 1) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
        __builtin_cpu_supports("amx-bf16") && may_use_tiles())
        isa |= 1 << AMX;
#endif
    return isa;
}

int64_t supported() {
    static const int64_t isa = find_supported();
    return isa;
}

// The kernels of an instruction set. Its attention kernels take every dtype but float64.
struct AllKernels {
    Kernels attention;
    NormGeluKernels norm_gelu;
    SamplingKernels sampling;
    FixedOrderKernels fixed_order;
    AdamWKernels adamw;
};

AllKernels kernels([[maybe_unused]] int64_t isa) {
#define KERNELS(isa) \
    { isa::float_kernels(), isa::norm_gelu_kernels(), isa::sampling_kernels(), isa::fixed_order_kernels(), isa::adamw_kernels() }
#if defined(WITH_avx512)
    if (isa >= AVX512) return KERNELS(avx512);
#endif
#if defined(WITH_avx2)
    if (isa == AVX2) return KERNELS(avx2);
#endif
    return KERNELS(portable);
}

Kernels attention_kernels(const Call& call, int64_t isa) {
    if (call.dtype == FLOAT64) return portable::double_kernels();
#if defined(WITH_amx)
    if (isa == AMX && call.dtype == BFLOAT16) return amx::bfloat16_kernels();
#endif
    return kernels(isa).attention;
}

// fn(call, begin, end) over 0 … n, in ranges of whole `unit`s, one per thread.
template <class T>
void parallel_for(const T& call, int64_t n, int64_t unit, void (*fn)(const T&, int64_t, int64_t)) {
    struct Context {
        const T& call;
        void (*fn)(const T&, int64_t, int64_t);
        int64_t n, run, next;
    } context{call, fn, n, ((n + unit - 1) / unit + call.threads - 1) / call.threads * unit, 0};
    if (!n) return;
    run_on_threads(
        int((n + context.run - 1) / context.run),
        [](void* p, int) {
            auto& c = *static_cast<Context*>(p);
            for (int64_t i; (i = __atomic_fetch_add(&c.next, c.run, __ATOMIC_RELAXED)) < c.n;)
                c.fn(c.call, i, i + c.run < c.n ? i + c.run : c.n);
        },
        &context);
}

}  // namespace
}  // namespace tilegrad

using tilegrad::Activation;
using tilegrad::Call;
using tilegrad::Norm;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// Hash of the sources this library was built from.
EXPORT extern const char tilegrad_native_digest[] = DIGEST;

// The fields of the structures; the last entry has no name.
EXPORT const tilegrad::Place* tilegrad_native_layout() { return tilegrad::LAYOUT; }

// Bits of Isa that this machine can run.
EXPORT int64_t tilegrad_native_supported() { return tilegrad::supported(); }

// Run on the threads of this OpenMP runtime; `parallel` is its GOMP_parallel.
EXPORT void tilegrad_native_use_openmp(tilegrad::Parallel parallel) { tilegrad::use_openmp(parallel); }

// Use this BLAS for matrix products.
EXPORT void tilegrad_native_use_blas(tilegrad::Sgemm sgemm, int (*get_threads)(), void (*set_threads)(int)) {
    tilegrad::use_blas({sgemm, get_threads, set_threads});
}

// Scratch bytes that are enough for every instruction set of this machine.
EXPORT int64_t tilegrad_native_scratch(const Call* call, int64_t backward) {
    int64_t most = 0;
    for (int64_t isa = 0; tilegrad::supported() >> isa; ++isa) {
        if (!(tilegrad::supported() >> isa & 1)) continue;
        const int64_t bytes = tilegrad::attention_kernels(*call, isa).scratch_bytes(*call, backward);
        if (bytes > most) most = bytes;
    }
    return most;
}

EXPORT void tilegrad_native_run(const Call* call, int64_t backward) {
    const tilegrad::Kernels kernels = tilegrad::attention_kernels(*call, call->isa);
    struct Context {
        const Call& call;
        const tilegrad::Kernels& kernels;
        bool backward;
    } context{*call, kernels, bool(backward)};
    kernels.prepare(*call, backward);
    tilegrad::run_on_threads(
        int(call->threads),
        [](void* p, int worker) {
            auto& c = *static_cast<Context*>(p);
            c.kernels.work(c.call, c.backward, worker);
        },
        &context);
    if (backward && call->dsinks.data) kernels.add_dsinks(*call);
}

EXPORT void tilegrad_native_attention_fwd(const Call* call) { tilegrad_native_run(call, 0); }

// Calls the functions one after the other, each with its structure.
EXPORT void tilegrad_native_run_all(int64_t n, void (*const* functions)(const void*), const void* const* calls) {
    for (int64_t i = 0; i < n; ++i) functions[i](calls[i]);
}

EXPORT void tilegrad_native_cache_write(const tilegrad::CacheWrite* call) {
    tilegrad::parallel_for(*call, call->n, 1, tilegrad::cache_write);
}

EXPORT void tilegrad_native_norm_fwd(const Norm* call) {
    tilegrad::parallel_for(*call, call->n, 1, tilegrad::kernels(call->isa).norm_gelu.norm_fwd);
}

EXPORT void tilegrad_native_norm_bwd(const Norm* call) {
    const tilegrad::NormGeluKernels rows = tilegrad::kernels(call->isa).norm_gelu;
    if (call->dx.data) tilegrad::parallel_for(*call, call->n, 1, rows.norm_rows);
    if (call->dw || call->db) tilegrad::parallel_for(*call, call->c, 4 * rows.lanes, rows.norm_columns);
}

EXPORT void tilegrad_native_activation(const Activation* call) {
    const tilegrad::NormGeluKernels rows = tilegrad::kernels(call->isa).norm_gelu;
    tilegrad::parallel_for(*call, call->n, rows.lanes, rows.activation);
}

EXPORT void tilegrad_native_sample(const tilegrad::Sample* call) {
    tilegrad::parallel_for(*call, call->n, 1, tilegrad::kernels(call->isa).sampling.rows);
}

EXPORT void tilegrad_native_lean_adamw(const tilegrad::LeanAdamW* call) {
    tilegrad::parallel_for(*call, call->n, tilegrad::ADAMW_BLOCK, tilegrad::kernels(call->isa).adamw.lean);
}

EXPORT void tilegrad_native_gemm(const tilegrad::Gemm* call) { tilegrad::gemm(*call); }

// Scratch bytes per thread of a product of many rows, enough for every instruction set of this machine.
EXPORT int64_t tilegrad_native_panel_bytes() {
    int64_t most = 0;
    for (int64_t isa = 0; tilegrad::supported() >> isa; ++isa) {
        const int64_t bytes = tilegrad::kernels(isa).fixed_order.panel_bytes;
        if ((tilegrad::supported() >> isa & 1) && bytes > most) most = bytes;
    }
    return most;
}

EXPORT void tilegrad_native_fixed_order(const tilegrad::FixedOrder* call) {
    struct Context {
        const tilegrad::FixedOrder& call;
        void (*work)(const tilegrad::FixedOrder&, int64_t*, int);
        int64_t next;
    } context{*call, tilegrad::kernels(call->isa).fixed_order.work, 0};
    if (!call->n || !call->m) return;
    tilegrad::run_on_threads(
        int(call->threads),
        [](void* p, int worker) {
            auto& c = *static_cast<Context*>(p);
            c.work(c.call, &c.next, worker);
        },
        &context);
}
}
