// Bump allocator for a call's scratch.
#pragma once

#include "simd/vector.h"

namespace tilegrad::ISA {

// Allocations are aligned to cache lines. If `at` is null, the allocator only counts bytes.
struct BumpAllocator {
    char* at;
    int64_t used = 0;

    template <class T>
    T* take(int64_t n) {
        T* p = at ? reinterpret_cast<T*>(at + used) : nullptr;
        used += round_up(n * int64_t(sizeof(T)), 64);
        return p;
    }
};

}  // namespace tilegrad::ISA
