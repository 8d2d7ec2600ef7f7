// The bump allocator of a call's scratch.
#pragma once

#include "simd/vector.h"

namespace tilegrad {
namespace ISA {

// Each allocation begins at a cache line. With no memory it only counts the bytes.
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

}  // namespace ISA
}  // namespace tilegrad
