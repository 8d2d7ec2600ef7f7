// The C ABI, and the choice of instruction set.

#include "call.h"
#include "team.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tilegrad {

namespace portable {
Kernels float_kernels();
Kernels double_kernels();
}  // namespace portable
#if defined(__x86_64__)
namespace avx2 { Kernels float_kernels(); }
namespace avx512 { Kernels float_kernels(); }
#endif

namespace {

enum Isa : int64_t { PORTABLE, AVX2, AVX512, AMX };

int64_t supported() {
    int64_t isa = 1 << PORTABLE;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) isa |= 1 << AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        isa |= 1 << AVX512;
#endif
    return isa;
}

Kernels kernels(const Call& call, int64_t isa) {
    if (call.dtype == FLOAT64) return portable::double_kernels();
#if defined(__x86_64__)
    if (isa == AVX2) return avx2::float_kernels();
    if (isa == AVX512 || isa == AMX) return avx512::float_kernels();
#endif
    return portable::float_kernels();
}

}  // namespace
}  // namespace tilegrad

using tilegrad::Call;

extern "C" {

#define EXPORT __attribute__((visibility("default")))

// What this library was built from.
EXPORT extern const char tilegrad_native_digest[] = DIGEST;

// Bits of Isa that this machine can run.
EXPORT int64_t tilegrad_native_supported() { return tilegrad::supported(); }

// Enough for any instruction set of this machine.
EXPORT int64_t tilegrad_native_scratch(const Call* call, int64_t backward) {
    int64_t most = 0;
    for (int64_t isa = 0; tilegrad::supported() >> isa; ++isa) {
        if (!(tilegrad::supported() >> isa & 1)) continue;
        const int64_t bytes = tilegrad::kernels(*call, isa).scratch_bytes(*call, backward);
        if (bytes > most) most = bytes;
    }
    return most;
}

EXPORT void tilegrad_native_run(const Call* call, int64_t backward) {
    const tilegrad::Kernels kernels = tilegrad::kernels(*call, call->isa);
    struct Context {
        const Call& call;
        const tilegrad::Kernels& kernels;
        bool backward;
    } context{*call, kernels, bool(backward)};
    kernels.prepare(*call, backward);
    tilegrad::run_team(
        int(call->threads),
        [](void* p, int worker) {
            auto& c = *static_cast<Context*>(p);
            c.kernels.work(c.call, c.backward, worker);
        },
        &context);
    kernels.finish(*call, backward);
}
}
