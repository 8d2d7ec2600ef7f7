// The walk over heads that are open in slots: what every thread of a team does. turns.h says who gets which tile.
//
// A kernel offers carve (a slot), open_head, tiles (how many a head has), tile (one of them) and close_head.
#pragma once

#include "simd/rows.h"
#include "threads/turns.h"

namespace tilegrad {
namespace ISA {

// What the threads of a call share, at the beginning of the scratch: the board, dsinks by sequence, and the slots.
struct Slots {
    int64_t n, slot_bytes;
    Board* board;
    double* dsinks;  // (B, Hq)
    char* first;

    Slots(const Call& call, Carver& carver, int64_t slot_bytes)
        : n(at_least(1, at_most(call.threads, call.b * call.hkv))), slot_bytes(slot_bytes) {
        board = reinterpret_cast<Board*>(carver.take<char>(board_bytes(n)));
        dsinks = carver.take<double>(call.b * call.hq);
        first = carver.take<char>(slot_bytes * n);
    }
};

template <class Kernel>
void walk(const Call& call, Kernel& kernel) {
    Board* board = kernel.slots.board;
    for (Task task = next_task(board, -1); task.kind != Task::DONE; task = next_task(board, task.slot)) {
        const Head head = head_of(call, task.head);
        Carver carver{kernel.slots.first + task.slot * kernel.slots.slot_bytes};
        const auto x = kernel.carve(carver);
        if (task.kind == Task::OPEN) {
            kernel.open_head(head, x);
            const int64_t tiles = kernel.tiles(head);
            opened(board, task.slot, tiles);
            if (tiles) continue;
        } else {
            kernel.tile(head, x, int32_t(task.tile));
            if (!finished(board, task.slot)) continue;
        }
        kernel.close_head(head, x, kernel.slots.dsinks);
        closed(board, task.slot);
    }
}

}  // namespace ISA
}  // namespace tilegrad
