// A job is announced by making `generation` odd. Each thread has a run of neighbouring parts, whose
// rows stay in its core's cache over the calls of a loop, and claims them from the run's atomic
// counter; a thread that is done claims parts of the others' runs. Any number of helpers may join,
// at any time; the caller waits only for helpers that have begun. A helper that has just worked
// looks for more for some microseconds, since the next call of a loop comes soon, and then sleeps.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#if !defined(_WIN32)
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#endif

namespace pool {
namespace {

// Spin time of an idle helper: longer than the Python code between two calls, too short to show up
// as load.
constexpr auto SPIN = std::chrono::microseconds(100);
using Clock = std::chrono::steady_clock;

// Members that different threads write are in cache lines of their own.
struct Pool {
    alignas(64) std::atomic<bool> taken{false};
    alignas(64) std::atomic<unsigned> generation{0};
    std::atomic<Work> work{nullptr};
    std::atomic<void*> data{nullptr};
    std::atomic<Index> count{0};
    std::atomic<int> threads{0}, processor{-1};
    alignas(64) std::atomic<int> working{0};
    std::atomic<Clock::time_point> ended{Clock::time_point::min()};
    alignas(64) std::atomic<int> asleep{0};
    std::mutex mutex;
    std::condition_variable woken;
    int helpers = 0;
    struct alignas(64) Run {
        std::atomic<Index> claimed{0};
    } runs[MOST];
};

// The pool is never destroyed: helpers may outlive all else. A forked child, which has no helpers,
// makes it anew.
alignas(Pool) unsigned char memory[sizeof(Pool)];
Pool* pool = new (memory) Pool;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#if !defined(__linux__)
int sched_getcpu() { return -1; }
#endif

// Moves a helper off the caller's processor: in a process with the threads of other libraries,
// Linux may wake it there and leave both on it for milliseconds. (2, 128, 1024) in turns with
// PyTorch: 47 us, without this 61 to 91.
void leave([[maybe_unused]] int processor) {
#if defined(__linux__)
    cpu_set_t all, others;
    if (sched_getcpu() != processor || sched_getaffinity(0, sizeof all, &all)) return;
    others = all;
    CPU_CLR(processor, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others))
        sched_setaffinity(0, sizeof all, &all);
#endif
}

void do_parts(int thread) {
    Work work = pool->work.load(std::memory_order_relaxed);
    void* data = pool->data.load(std::memory_order_relaxed);
    Index count = pool->count.load(std::memory_order_relaxed);
    Index threads = pool->threads.load(std::memory_order_relaxed);
    for (Index k = 0; k < threads; k++) {
        Index run = (thread + k) % threads;
        Index first = run * count / threads;
        Index parts = (run + 1) * count / threads - first;
        for (Index i;
            (i = pool->runs[run].claimed.fetch_add(1, std::memory_order_relaxed)) < parts;)
            work(data, first + i, thread);
    }
}

[[noreturn]] void help(int thread) {
    DefaultControl control;  // the thread that starts a helper hands it its own
    unsigned seen = 0;
    auto until = Clock::now() + SPIN;
    for (unsigned turns = 1;; turns++) {
        unsigned now = pool->generation.load(std::memory_order_acquire);
        if (now % 2 == 1 && now != seen) {
            leave(pool->processor.load(std::memory_order_relaxed));
            // The caller ends the job, then waits for the helpers that it finds at work; a later
            // helper sees the end.
            pool->working.fetch_add(1);
            if (pool->generation.load() == now && thread < pool->threads.load()) do_parts(thread);
            pool->working.fetch_sub(1, std::memory_order_release);
            seen = now;
            until = Clock::now() + SPIN;
        }
        pause();
        // Reading the clock takes as long as several looks at `generation`.
        if (turns % 64 || Clock::now() < until) continue;
        std::unique_lock<std::mutex> lock(pool->mutex);
        pool->asleep.fetch_add(1);
        pool->woken.wait(lock, [&] {
            unsigned next = pool->generation.load();
            return next % 2 == 1 && next != seen;
        });
        pool->asleep.fetch_sub(1);
        until = Clock::now() + SPIN;
    }
}

void start_helpers(int wanted) {
#if !defined(_WIN32)
    static const int once = pthread_atfork(nullptr, nullptr, [] { pool = new (memory) Pool; });
    (void)once;
    // Block signals in helpers: Python's own threads handle them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    // If the system refuses another thread, go on with the helpers that there are.
    try {
        for (; pool->helpers < wanted; pool->helpers++)
            std::thread(help, pool->helpers + 1).detach();
    } catch (const std::exception&) {
    }
#if !defined(_WIN32)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
}

}  // namespace

void run(Index count, int threads, bool wake, Work work, void* data) {
    if (threads > MOST) threads = MOST;
    if (threads > count) threads = (int)count;
    if (threads <= 1 || pool->taken.exchange(true, std::memory_order_acquire)) {
        for (Index part = 0; part < count; part++) work(data, part, 0);
        return;
    }
    if (wake && pool->helpers < threads - 1) start_helpers(threads - 1);
    pool->work.store(work, std::memory_order_relaxed);
    pool->data.store(data, std::memory_order_relaxed);
    pool->count.store(count, std::memory_order_relaxed);
    pool->threads.store(threads, std::memory_order_relaxed);
    for (int run = 0; run < threads; run++)
        pool->runs[run].claimed.store(0, std::memory_order_relaxed);
    pool->processor.store(sched_getcpu(), std::memory_order_relaxed);
    pool->generation.fetch_add(1);
    if (wake && pool->asleep.load()) {
        {
            std::lock_guard<std::mutex> lock(pool->mutex);
        }  // no helper is between its last look and its sleep
        pool->woken.notify_all();
    }
    do_parts(0);
    pool->generation.fetch_add(1);
    for (unsigned turns = 1; pool->working.load(); turns++) {
        pause();
        // Yield: a helper that was descheduled may need this processor.
        if (turns % 1024 == 0) std::this_thread::yield();
    }
    pool->ended.store(Clock::now(), std::memory_order_relaxed);
    pool->taken.store(false, std::memory_order_release);
}

bool is_in_use() { return Clock::now() < pool->ended.load(std::memory_order_relaxed) + SPIN; }

}  // namespace pool
