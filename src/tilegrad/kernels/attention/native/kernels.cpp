// The kernels of one instruction set: compiled once for each, with -DISA=name and the compiler's flags for it.

#include "backward.h"
#include "forward.h"

namespace tilegrad {
namespace ISA {
namespace {

// Forward: a counter of items, then the buffers of one thread after the other.
template <class T>
int64_t forward_scratch(const Call& call) {
    Carver counter{nullptr}, thread{nullptr};
    counter.take<int64_t>(1);
    Forward<T>(call, thread);
    return counter.used + thread.used * call.threads;
}

template <class T>
void forward_work(const Call& call, int worker) {
    int64_t* next = reinterpret_cast<int64_t*>(call.scratch);
    Carver thread{nullptr};
    Forward<T>(call, thread);
    Carver carver{call.scratch + round_up(sizeof(int64_t), 64) + worker * thread.used};
    Forward<T> forward(call, carver);
    const int64_t items = Forward<T>::blocks(call) * call.b * call.hkv;
    for (int64_t i; (i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < items;) forward.item(i);
}

template <class T>
int64_t backward_scratch(const Call& call) {
    Carver carver{nullptr};
    Backward<T>(call, carver, call.threads - 1);
    return carver.used;
}

template <class T>
void backward_prepare(const Call& call) {
    Carver carver{call.scratch};
    Backward<T> shared(call, carver, 0);
    new_board(reinterpret_cast<char*>(shared.board), Backward<T>::slots(call), call.b * call.hkv);
}

template <class T>
void backward_work(const Call& call, int worker) {
    Carver carver{call.scratch};
    Backward<T>(call, carver, worker).work();
}

template <class T>
void backward_finish(const Call& call) {
    Carver carver{call.scratch};
    if (call.dsinks.data) Backward<T>(call, carver, 0).add_dsinks();
}

template <class T>
constexpr Kernels of() {
    return {
        [](const Call& c, bool backward) { return backward ? backward_scratch<T>(c) : forward_scratch<T>(c); },
        [](const Call& c, bool backward) {
            if (backward) backward_prepare<T>(c);
            else *reinterpret_cast<int64_t*>(c.scratch) = 0;
        },
        [](const Call& c, bool backward, int worker) {
            backward ? backward_work<T>(c, worker) : forward_work<T>(c, worker);
        },
        [](const Call& c, bool backward) { if (backward) backward_finish<T>(c); },
    };
}

}  // namespace

Kernels float_kernels() { return of<float>(); }
#ifdef WITH_DOUBLE
Kernels double_kernels() { return of<double>(); }
#endif

}  // namespace ISA
}  // namespace tilegrad
