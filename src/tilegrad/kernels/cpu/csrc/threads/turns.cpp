#include "threads/turns.h"

#include <sched.h>

namespace tilegrad {

struct Slot {
    int64_t head;  // −1: free
    int64_t tiles, next, done;
    bool ready;
};

struct Board {
    int32_t lock;
    int64_t slots, heads, next_head;
    Slot slot[1];
};

namespace {

struct Locked {  // held for a few dozen instructions
    Board* board;
    explicit Locked(Board* b) : board(b) {
        for (int n = 0; __atomic_exchange_n(&board->lock, 1, __ATOMIC_ACQUIRE); ++n)
            if (n > 100) sched_yield();
    }
    ~Locked() { __atomic_store_n(&board->lock, 0, __ATOMIC_RELEASE); }
};

// A task of what is there now; head = −1: there will be more when a head that is being opened is ready.
Task look(Board* board, int64_t slot) {
    Locked locked(board);
    auto take = [&](int64_t s) { return Task{Task::COLUMNS, board->slot[s].head, s, board->slot[s].next++}; };
    auto left = [&](int64_t s) { return board->slot[s].ready ? board->slot[s].tiles - board->slot[s].next : 0; };
    if (slot >= 0 && left(slot) > 0) return take(slot);
    if (board->next_head < board->heads)
        for (int64_t s = 0; s < board->slots; ++s)
            if (board->slot[s].head < 0) {
                board->slot[s] = {board->next_head++, 0, 0, 0, false};
                return {Task::OPEN, board->slot[s].head, s, 0};
            }
    int64_t most = -1;
    bool more = board->next_head < board->heads;
    for (int64_t s = 0; s < board->slots; ++s) {
        if (left(s) > 0 && (most < 0 || left(s) > left(most))) most = s;
        more |= board->slot[s].head >= 0 && !board->slot[s].ready;
    }
    if (most >= 0) return take(most);
    return {Task::DONE, more ? -1 : 0, -1, 0};
}

}  // namespace

int64_t board_bytes(int64_t slots) { return int64_t(sizeof(Board) + (slots > 1 ? slots - 1 : 0) * sizeof(Slot)); }

Board* new_board(char* memory, int64_t slots, int64_t heads) {
    Board* board = reinterpret_cast<Board*>(memory);
    *board = {0, slots, heads, 0, {}};
    for (int64_t s = 0; s < slots; ++s) board->slot[s] = {-1, 0, 0, 0, false};
    return board;
}

Task next_task(Board* board, int64_t slot) {
    for (;;) {
        Task task = look(board, slot);
        if (task.kind != Task::DONE || task.head == 0) return task;
        sched_yield();
    }
}

void opened(Board* board, int64_t slot, int64_t tiles) {
    Locked locked(board);
    board->slot[slot].tiles = tiles;
    board->slot[slot].ready = true;
}

bool finished(Board* board, int64_t slot) {
    Locked locked(board);
    return ++board->slot[slot].done == board->slot[slot].tiles;
}

void closed(Board* board, int64_t slot) {
    Locked locked(board);
    board->slot[slot].head = -1;
    board->slot[slot].ready = false;
}

void wait_for_turn(const int32_t* turn, int32_t tile) {
    for (int n = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != tile; ++n)
        if (n > 1000) sched_yield();
}

void end_turn(int32_t* turn, int32_t tile) { __atomic_store_n(turn, tile + 1, __ATOMIC_RELEASE); }

}  // namespace tilegrad
