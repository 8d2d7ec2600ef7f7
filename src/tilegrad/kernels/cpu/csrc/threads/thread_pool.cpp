// The pool sleeps between calls and serves one call at a time. If the pool is busy with a call of another Python thread, a call
// runs on the calling thread alone, with the same result. The pool's threads block all signals. They are never joined, because
// an idle thread holds no resources. After fork() a child has no threads and starts its own pool.

#include "threads/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace tilegrad {
namespace {

constexpr int SPINS = 2000;  // polls before a thread sleeps

struct Pool {
    std::mutex busy;  // locked during a call
    std::mutex mutex;
    std::condition_variable wake;
    int threads = 0;  // without the calling thread

    void (*fn)(void*, int) = nullptr;
    void* context = nullptr;
    int wanted = 0;                  // threads of the current call, without the calling thread
    std::atomic<uint64_t> call{0};   // incremented by each call
    std::atomic<int> running{0};

    void run(int n, void (*f)(void*, int), void* c) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            grow(n - 1);
            fn = f;
            context = c;
            wanted = n - 1 < threads ? n - 1 : threads;
            running.store(wanted);
            call.fetch_add(1);
        }
        wake.notify_all();
        f(c, 0);
        for (int i = 0; running.load(std::memory_order_acquire); ++i)
            if (i > SPINS) std::this_thread::yield();
    }

    void grow(int n) {
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
        try {
            for (; threads < n; ++threads) std::thread(&Pool::loop, this, threads, call.load()).detach();
        } catch (const std::system_error&) {
            // The system has no more threads: the existing ones do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void loop(int index, uint64_t seen) {
        for (;;) {
            for (int i = 0; i < SPINS && call.load(std::memory_order_acquire) == seen; ++i) {}
            void (*f)(void*, int) = nullptr;
            void* c = nullptr;
            {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return call.load() != seen; });
                seen = call.load();
                if (index >= wanted) continue;
                f = fn;
                c = context;
            }
            f(c, index + 1);
            running.fetch_sub(1, std::memory_order_release);
        }
    }
};

Pool* pool = nullptr;
Parallel openmp = nullptr;
pthread_once_t once = PTHREAD_ONCE_INIT;

void start() {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] {
        pool = new Pool;
        openmp = nullptr;
    });
}

struct Numbered {
    void (*fn)(void*, int);
    void* context;
    std::atomic<int> next{0};
};

}  // namespace

void use_openmp(Parallel parallel) {
    pthread_once(&once, start);
    openmp = parallel;
}

void run_on_threads(int n, void (*fn)(void*, int), void* context) {
    pthread_once(&once, start);
    if (n > 1 && openmp) {
        Numbered numbered{fn, context};
        openmp(
            [](void* data) {
                auto& x = *static_cast<Numbered*>(data);
                x.fn(x.context, x.next.fetch_add(1));
            },
            &numbered, unsigned(n), 0);
        return;
    }
    std::unique_lock<std::mutex> lock(pool->busy, std::defer_lock);
    if (n > 1 && lock.try_lock()) pool->run(n, fn, context);
    else fn(context, 0);
}

}  // namespace tilegrad
