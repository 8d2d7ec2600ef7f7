// The loop over the tiles of open heads, run by every thread of the pool. work_queue.h says which thread gets which tile.
//
// A kernel defines allocate (buffers of a slot), open_head, tiles (number of tiles of a head), tile and close_head.
#pragma once

#include "attention/head_rows.h"
#include "threads/work_queue.h"

namespace tilegrad::ISA {

// The scratch that all threads share: the queue, dsinks per sequence, the order counters `turns` of bias.h, the slots.
struct Slots {
    int64_t n, slot_bytes;
    WorkQueue* queue;
    double* dsinks;  // (B, Hq)
    int64_t n_turns;
    int32_t* turns;
    char* first;

    Slots(const Call& call, BumpAllocator& allocator, int64_t slot_bytes, int64_t n_turns = 0)
        : n(at_least(1, at_most(call.threads, call.b * call.hkv))), slot_bytes(slot_bytes), n_turns(n_turns) {
        queue = reinterpret_cast<WorkQueue*>(allocator.take<char>(queue_bytes(n)));
        dsinks = allocator.take<double>(call.b * call.hq);
        turns = allocator.take<int32_t>(n_turns);
        first = allocator.take<char>(slot_bytes * n);
    }
};

template <class Kernel>
int64_t slot_bytes(const Kernel& kernel) {
    BumpAllocator slot{nullptr};
    kernel.allocate(slot);
    return slot.used;
}

template <class Kernel>
void tile_loop(const Call& call, Kernel& kernel) {
    WorkQueue* queue = kernel.slots.queue;
    for (Task task = next_task(queue, -1); task.kind != Task::DONE; task = next_task(queue, task.slot)) {
        const Head head = head_of(call, task.head);
        BumpAllocator allocator{kernel.slots.first + task.slot * kernel.slots.slot_bytes};
        const auto x = kernel.allocate(allocator);
        if (task.kind == Task::OPEN) {
            kernel.open_head(head, x);
            const int64_t tiles = kernel.tiles(head);
            opened(queue, task.slot, tiles);
            if (tiles) continue;
        } else {
            kernel.tile(head, x, int32_t(task.tile));
            if (!finished(queue, task.slot)) continue;
        }
        kernel.close_head(head, x, kernel.slots.dsinks);
        closed(queue, task.slot);
    }
}

}  // namespace tilegrad::ISA
