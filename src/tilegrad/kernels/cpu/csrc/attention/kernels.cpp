// The kernels of one instruction set. Compiled once per instruction set, with -DISA=name and its compiler flags.

#include "attention/backward.h"
#include "attention/forward.h"
#if defined(__AMX_BF16__)
#include "attention/amx_backward.h"
#include "attention/amx_forward.h"
#endif

namespace tilegrad::ISA {
namespace {

#if !defined(__AMX_BF16__)
struct TileConfiguration {
    TileConfiguration() {}
};
#endif

// A kernel with independent blocks. Scratch: a work counter, the edges of intervals, then the buffers of each thread.
template <class Kernel>
struct IndependentBlocks {
    struct Shared {
        int64_t* next;
        Intervals intervals;

        Shared(const Call& call, BumpAllocator& allocator) : next(allocator.take<int64_t>(1)), intervals(call, TILE, allocator) {}
    };

    static int64_t scratch_bytes(const Call& call) {
        BumpAllocator common{nullptr}, thread{nullptr};
        const Shared shared(call, common);
        Kernel(call, thread, shared.intervals);
        return common.used + thread.used * call.threads;
    }

    static void prepare(const Call& call) {
        BumpAllocator allocator{call.scratch};
        const Shared shared(call, allocator);
        *shared.next = 0;
        shared.intervals.find_edges();
    }

    static void work(const Call& call, int worker) {
        BumpAllocator allocator{call.scratch}, thread{nullptr};
        const Shared shared(call, allocator);
        Kernel(call, thread, shared.intervals);
        allocator.used += worker * thread.used;
        Kernel kernel(call, allocator, shared.intervals);
        const int64_t items = Kernel::blocks(call) * call.b * call.hkv;
        for (int64_t i; (i = __atomic_fetch_add(shared.next, 1, __ATOMIC_RELAXED)) < items;) kernel.item(i);
    }
};

// A kernel whose threads work on the same open heads (work_queue.h).
template <class Kernel>
struct SharedHeads {
    static int64_t scratch_bytes(const Call& call) {
        BumpAllocator allocator{nullptr};
        Kernel(call, allocator, call.threads - 1);
        return allocator.used;
    }

    static Slots shared(const Call& call) {
        BumpAllocator allocator{call.scratch};
        return Kernel(call, allocator, 0).slots;
    }

    static void prepare(const Call& call) {
        BumpAllocator allocator{call.scratch};
        const Kernel kernel(call, allocator, 0);
        const Slots slots = kernel.slots;
        kernel.intervals.find_edges();
        new_queue(reinterpret_cast<char*>(slots.queue), slots.n, call.b * call.hkv);
        memset(slots.turns, 0, slots.n_turns * sizeof(int32_t));
    }

    static void work(const Call& call, int worker) {
        BumpAllocator allocator{call.scratch};
        Kernel kernel(call, allocator, worker);
        tile_loop(call, kernel);
    }
};

template <class F, class B>
constexpr Kernels of() {
    return {
        [](const Call& c, bool backward) { return backward ? B::scratch_bytes(c) : F::scratch_bytes(c); },
        [](const Call& c, bool backward) { backward ? B::prepare(c) : F::prepare(c); },
        [](const Call& c, bool backward, int worker) {
            const NoSubnormals flushed;
            const TileConfiguration tiles;
            backward ? B::work(c, worker) : F::work(c, worker);
        },
        [](const Call& c) {
            const double* dsinks = B::shared(c).dsinks;
            for (int64_t h = 0; h < c.hq; ++h) {
                double total = 0;
                for (int64_t b = 0; b < c.b; ++b) total += dsinks[b * c.hq + h];
                add_scalar(c.dsinks.data, c.sinks_dtype, h * c.dsinks.h, total);
            }
        },
    };
}

}  // namespace

#if defined(__AMX_BF16__)
Kernels bfloat16_kernels() { return of<SharedHeads<AmxForward>, SharedHeads<AmxBackward>>(); }
#else
Kernels float_kernels() { return of<IndependentBlocks<Forward<float>>, SharedHeads<Backward<float>>>(); }
#endif
#if defined(WITH_DOUBLE)
Kernels double_kernels() { return of<IndependentBlocks<Forward<double>>, SharedHeads<Backward<double>>>(); }
#endif

}  // namespace tilegrad::ISA
