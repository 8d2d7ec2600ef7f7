// The thread pool. One call: fn(context, 0 … n − 1), each on a thread of its own, the caller's being one of them.
//
// If the process has an OpenMP runtime, as one with torch has, its threads are used: they are warm, and others would have
// to share the cores with them while they spin. It is found at run time (`use_openmp`), never linked. Else, and in a forked
// child, where such a runtime hangs, a pool of our own.
#pragma once

namespace tilegrad {

using Parallel = void (*)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);  // GOMP_parallel

void use_openmp(Parallel parallel);

// May run fewer than n; every number from 0 on is given once.
void run_on_threads(int n, void (*fn)(void* context, int worker), void* context);

}  // namespace tilegrad
