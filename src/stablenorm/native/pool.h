// A pool of threads that share the parts of one job.
#pragma once
#include "call.h"
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace pool {

// Sets rounding to nearest and keeps subnormals, whatever the calling thread is set to.
struct DefaultControl {
#if defined(__x86_64__) || defined(_M_X64)
    unsigned word = _mm_getcsr();
    DefaultControl() { _mm_setcsr(0x1f80); }
    ~DefaultControl() { _mm_setcsr(word); }
#elif defined(__aarch64__)
    uint64_t word;
    DefaultControl() { asm volatile("mrs %0, fpcr\n msr fpcr, xzr\n msr fpsr, xzr" : "=r"(word)); }
    ~DefaultControl() { asm volatile("msr fpcr, %0" : : "r"(word)); }
#endif
};

// Whether an operation of this thread has overflowed since its control word was set, or since this
// was asked.
static inline bool has_overflowed() {
#if defined(__x86_64__) || defined(_M_X64)
    constexpr unsigned OVERFLOWED = 8;
    unsigned flags = _mm_getcsr();
    if (flags & OVERFLOWED) _mm_setcsr(flags & ~OVERFLOWED);
#elif defined(__aarch64__)
    constexpr uint64_t OVERFLOWED = 4;
    uint64_t flags;
    asm volatile("mrs %0, fpsr" : "=r"(flags) : : "memory");
    if (flags & OVERFLOWED) asm volatile("msr fpsr, %0" : : "r"(flags & ~OVERFLOWED));
#endif
    return flags & OVERFLOWED;
}

using Work = void (*)(void* data, Index part, int thread);

// Does parts 0 to count - 1 on at most `threads` threads, the calling one included, which is number
// 0. Without `wake`, only helpers that are awake take part. While one job has the helpers, other
// threads do their jobs alone. Helpers have the default control word; the caller sets its own.
void run(Index count, int threads, bool wake, Work work, void* data);

// Whether the last job has just ended, as in a loop of calls.
bool is_in_use();

constexpr int MOST = 64;  // threads

}  // namespace pool
