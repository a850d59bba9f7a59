// Keeps idle blocks in the order in which they came back. Capacities are 4, 5, 6 or 7 times a power
// of two: the next result of about that size finds a block, at most a quarter too large, in pages
// that nobody touches. Beyond HUGE they are 32 to 63 times one, since some systems limit addresses.
#include "memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace memory {
namespace {

// Smaller blocks are recycled by malloc.
constexpr size_t LEAST = 1 << 18;
constexpr size_t PAGE = 4096;
constexpr size_t LINE = 64;
constexpr size_t HUGE = 1 << 26;
// Blocks for the results and caches of a few layers; a longer list would take longer to search.
constexpr int BLOCKS = 64;

// The header in the cache line before the memory.
struct Block {
    void* base;
    size_t capacity;
};
Block idle[BLOCKS];
int count;
size_t idle_size;
size_t limit = 512 << 20;
std::mutex mutex;

#if !defined(_WIN32)
// Hold the lock across a fork: a child of another thread would otherwise wait for it for ever.
const int forks =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
#endif

Block& block_of(void* memory) { return ((Block*)memory)[-1]; }

size_t capacity_of(size_t bytes) {
    size_t part = LINE;
    while (part * (bytes < HUGE ? 7 : 63) < bytes) part *= 2;
    return (bytes + part - 1) / part * part;
}

Block remove(int i) {
    Block block = idle[i];
    idle_size -= block.capacity;
    for (count--; i < count; i++) idle[i] = idle[i + 1];
    return block;
}

// Finds an idle block, the latest first, which is the likeliest to be in the caches; without a base
// if there is none.
Block find(size_t capacity) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int i = count - 1; i >= 0; i--)
        if (idle[i].capacity == capacity) return remove(i);
    return {nullptr, capacity};
}

// Frees the longest idle blocks until `most` bytes are kept; the lock is held.
void release(size_t most) {
    while (count && (idle_size > most || count == BLOCKS)) free(remove(0).base);
}

}  // namespace

void* take(size_t bytes) {
    static size_t start;
    if (bytes > PTRDIFF_MAX) return nullptr;
    Block block{nullptr, capacity_of(bytes)};
    bool large = block.capacity >= LEAST;
    if (large) block = find(block.capacity);
    if (!block.base)
        block.base = malloc(block.capacity + LINE + sizeof(Block) + (large ? PAGE : 0));
    if (!block.base) return nullptr;
    uintptr_t place = ((uintptr_t)block.base + sizeof(Block) + LINE - 1) / LINE * LINE;
    if (large) {
        // Start blocks 25 lines apart within a page: a load waits for a recent store whose address
        // agrees in the last 12 bits. 25 is the golden section of 64 lines: few or many places are
        // spread evenly.
        size_t now = __atomic_add_fetch(&start, 25 * LINE, __ATOMIC_RELAXED);
        place += (now - place) % PAGE;
    }
    block_of((void*)place) = block;
    return (void*)place;
}

void* grow(void* old, size_t bytes) {
    if (!old) return take(bytes);
    size_t capacity = block_of(old).capacity;
    if (bytes <= capacity) return old;
    void* other = take(bytes);
    if (!other) return nullptr;
    memcpy(other, old, capacity);
    give(old);
    return other;
}

void give(void* memory) {
    if (!memory) return;
    Block block = block_of(memory);
    if (block.capacity < LEAST) return free(block.base);
    std::lock_guard<std::mutex> lock(mutex);
    if (block.capacity > limit) return free(block.base);
    release(limit - block.capacity);
    idle[count++] = block;
    idle_size += block.capacity;
}

size_t idle_bytes() {
    std::lock_guard<std::mutex> lock(mutex);
    return idle_size;
}

void set_limit(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    limit = bytes;
    release(limit);
}

}  // namespace memory
