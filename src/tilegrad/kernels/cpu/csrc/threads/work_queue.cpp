#include "threads/work_queue.h"

#include <sched.h>

namespace tilegrad {

struct Slot {
    int64_t head;  // −1: free
    int64_t tiles, next, done;
    bool ready;
};

struct WorkQueue {
    int32_t lock;
    int64_t slots, heads, next_head;
    Slot slot[1];
};

namespace {

struct Locked {  // a spin lock, held for a few dozen instructions
    WorkQueue* queue;
    explicit Locked(WorkQueue* b) : queue(b) {
        for (int n = 0; __atomic_exchange_n(&queue->lock, 1, __ATOMIC_ACQUIRE); ++n)
            if (n > 100) sched_yield();
    }
    ~Locked() { __atomic_store_n(&queue->lock, 0, __ATOMIC_RELEASE); }
};

// The next task available now. DONE with head = −1 means that more tasks follow once a head that is being opened is ready.
Task try_next(WorkQueue* queue, int64_t slot) {
    Locked locked(queue);
    auto take = [&](int64_t s) { return Task{Task::COLUMNS, queue->slot[s].head, s, queue->slot[s].next++}; };
    auto left = [&](int64_t s) { return queue->slot[s].ready ? queue->slot[s].tiles - queue->slot[s].next : 0; };
    if (slot >= 0 && left(slot) > 0) return take(slot);
    if (queue->next_head < queue->heads)
        for (int64_t s = 0; s < queue->slots; ++s)
            if (queue->slot[s].head < 0) {
                queue->slot[s] = {queue->next_head++, 0, 0, 0, false};
                return {Task::OPEN, queue->slot[s].head, s, 0};
            }
    int64_t most = -1;
    bool more = queue->next_head < queue->heads;
    for (int64_t s = 0; s < queue->slots; ++s) {
        if (left(s) > 0 && (most < 0 || left(s) > left(most))) most = s;
        more |= queue->slot[s].head >= 0 && !queue->slot[s].ready;
    }
    if (most >= 0) return take(most);
    return {Task::DONE, more ? -1 : 0, -1, 0};
}

}  // namespace

int64_t queue_bytes(int64_t slots) { return int64_t(sizeof(WorkQueue) + (slots > 1 ? slots - 1 : 0) * sizeof(Slot)); }

WorkQueue* new_queue(char* memory, int64_t slots, int64_t heads) {
    WorkQueue* queue = reinterpret_cast<WorkQueue*>(memory);
    *queue = {0, slots, heads, 0, {}};
    for (int64_t s = 0; s < slots; ++s) queue->slot[s] = {-1, 0, 0, 0, false};
    return queue;
}

Task next_task(WorkQueue* queue, int64_t slot) {
    for (;;) {
        Task task = try_next(queue, slot);
        if (task.kind != Task::DONE || task.head == 0) return task;
        sched_yield();
    }
}

void opened(WorkQueue* queue, int64_t slot, int64_t tiles) {
    Locked locked(queue);
    queue->slot[slot].tiles = tiles;
    queue->slot[slot].ready = true;
}

bool finished(WorkQueue* queue, int64_t slot) {
    Locked locked(queue);
    return ++queue->slot[slot].done == queue->slot[slot].tiles;
}

void closed(WorkQueue* queue, int64_t slot) {
    Locked locked(queue);
    queue->slot[slot].head = -1;
    queue->slot[slot].ready = false;
}

void wait_for_order(const int32_t* next_tile, int32_t tile) {
    for (int n = 0; __atomic_load_n(next_tile, __ATOMIC_ACQUIRE) != tile; ++n)
        if (n > 1000) sched_yield();
}

void advance_order(int32_t* next_tile, int32_t to) { __atomic_store_n(next_tile, to, __ATOMIC_RELEASE); }

}  // namespace tilegrad
