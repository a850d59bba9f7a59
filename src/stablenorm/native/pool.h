// A pool of threads that share the parts of one job.
#pragma once
#include "call.h"

namespace pool {

using Work = void (*)(void* data, Index part, int thread);

// Does parts 0 to count - 1 on at most `threads` threads, the calling one included, which is number 0. Without `wake`, only
// helpers that are awake take part. While one job has the helpers, other threads do their jobs alone.
void run(Index count, int threads, bool wake, Work work, void* data);

// Whether the last job has just ended, as in a loop of calls.
bool is_in_use();

constexpr int MOST = 64;  // threads

}  // namespace pool
