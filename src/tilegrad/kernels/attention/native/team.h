// Threads for one call: fn(context, 0 … n − 1), each on a thread of its own, the caller's being one of them.
#pragma once

namespace tilegrad {

void run_team(int n, void (*fn)(void* context, int worker), void* context);

}  // namespace tilegrad
