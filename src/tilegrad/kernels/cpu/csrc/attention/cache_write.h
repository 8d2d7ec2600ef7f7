// Copies rows of k and v to slots of the caches (B, Hkv, capacity, D): row n to sequence slot / capacity, position slot % capacity.
#pragma once

#include <cstdint>
#include <cstring>

namespace tilegrad {

struct CacheWrite {
    int64_t n, b, hkv, capacity, head_bytes;  // head_bytes: bytes of D elements
    int64_t k_bytes, v_bytes, threads;        // k_bytes, v_bytes: bytes from one row to the next
    const char *k, *v;
    const int64_t* slots;
    char *k_cache, *v_cache;
};

static inline void cache_write(const CacheWrite& call, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
        const int64_t slot = call.slots[n];
        if (slot < 0 || slot >= call.b * call.capacity) continue;
        for (int64_t h = 0; h < call.hkv; ++h) {
            const int64_t to = ((slot / call.capacity * call.hkv + h) * call.capacity + slot % call.capacity) * call.head_bytes;
            memcpy(call.k_cache + to, call.k + n * call.k_bytes + h * call.head_bytes, call.head_bytes);
            memcpy(call.v_cache + to, call.v + n * call.v_bytes + h * call.head_bytes, call.head_bytes);
        }
    }
}

}  // namespace tilegrad
