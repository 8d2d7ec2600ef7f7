// The thread pool. One call runs fn(context, 0 … n − 1), each number on its own thread; the calling thread is one of them.
//
// If the process has an OpenMP runtime, as with torch, its threads are used. They are warm, and other threads would share the
// cores with them while they spin. The runtime is found at run time (`use_openmp`), never linked. Without one, and in a forked
// child, where such a runtime hangs, the pool has its own threads.
#pragma once

namespace tilegrad {

using Parallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel

void use_openmp(Parallel parallel);

// May run fewer than n; every number from 0 on is passed once.
void run_on_threads(int n, void (*fn)(void* context, int worker), void* context);

}  // namespace tilegrad
