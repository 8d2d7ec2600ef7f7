// The thread pool. One call runs fn(context, 0 … n − 1), each number on its own thread; the calling thread is one of them.
//
// If the process has an OpenMP runtime, as with torch, the runtime's threads are used. They are warm, and while they spin,
// other threads would have to share the cores with them. The runtime is found at run time (`use_openmp`), never linked. Without
// a runtime, and in a forked child, where a runtime would hang, the pool has its own threads.
#pragma once

namespace tilegrad {

using Parallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel

void use_openmp(Parallel parallel);

// May use fewer than n threads. `worker` is then 0, 1, … for the threads in use.
void run_on_threads(int n, void (*fn)(void* context, int worker), void* context);

}  // namespace tilegrad
