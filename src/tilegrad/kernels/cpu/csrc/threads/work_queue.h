// The work queue of a call whose threads share heads, and the ordered accumulation of dq.
//
// The unit of work is a tile of columns of a kv head; one thread computes its dk and dv. All tiles of a head add to the head's
// dq, so a head is *open* in a slot of the scratch (packed q and do, dq in the accumulation type) while its tiles run. Each thread
// opens a new head while there are any, then computes tiles of heads that other threads have opened. So a few long
// sequences keep every core busy, and there is at most one slot per thread.
//
// dq is the same on any number of threads because tiles of columns add to a block of rows in increasing order (ordered
// accumulation): `next_tile` of the block is the tile that adds next. The queue hands out tiles in that order too, so the
// lowest tile never waits.
#pragma once

#include <cstdint>

namespace tilegrad {

struct Task {
    enum Kind {
        OPEN,
        COLUMNS,
        DONE,
    } kind;
    int64_t head, slot, tile;
};

struct WorkQueue;  // shared by the threads of one call, in its scratch

int64_t queue_bytes(int64_t slots);
WorkQueue* new_queue(char* memory, int64_t slots, int64_t heads);

Task next_task(WorkQueue*, int64_t slot);                  // slot: where this thread worked last, or −1
void opened(WorkQueue*, int64_t slot, int64_t tiles);      // the tiles of the head in this slot may start
bool finished(WorkQueue*, int64_t slot);                   // a tile is done; true if it was the last: the caller closes the head
void closed(WorkQueue*, int64_t slot);

void wait_for_order(const int32_t* next_tile, int32_t tile);
void advance_order(int32_t* next_tile, int32_t to);

}  // namespace tilegrad
