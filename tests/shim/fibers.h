// What fibers.cpp and accesses.h share: tensors, threads, blocks, the launch in progress.
#pragma once

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include <ucontext.h>

#include "cuda_shim.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#undef __shared__

using namespace shim;
using Address = std::uintptr_t;

namespace {

// A kernel's frame with its tiles is a few KiB; calls that are not inlined a few more.
constexpr std::size_t STACK = 1 << 18;
// Beyond these many looks at memory in a row without a change anywhere, nobody will change it.
constexpr long PATIENCE = 200000;

// ---- tensors ----

enum { READ = 1, WRITE = 2, UNWRITTEN = 4 };
// Filled by the driver; `writes` counts the stores to each byte, if it is there.
struct Region {
    Address begin;
    std::uint64_t bytes;
    std::uint64_t rights;
    std::uint8_t* writes;
    std::uint64_t loaded, stored;
};
Region* regions;
std::size_t region_count;
Region* last_hit;

// ---- blocks, warps, threads ----

// Who touched a byte of shared memory last, and how many barriers ago.
struct Touch {
    std::int16_t thread = -1;
    std::int16_t warp = -1;
    std::int16_t rank = 0;
    std::uint32_t cluster_epoch = 0, block_epoch = 0, warp_epoch = 0;
};
constexpr std::int16_t MANY = -2;
struct Shadow {
    Touch write, read;
};

enum Wait { NOTHING, CLUSTER, BLOCK, WARP, EXCHANGE, BALLOT };
const char* const WAITS[] = {"", "a barrier of the cluster", "__syncthreads", "__syncwarp",
                             "a shuffle", "a vote"};

struct Block;
struct Fiber {
    jmp_buf context;
    ucontext_t start;
    unsigned char* stack = nullptr;
    bool begun = false, done = false;
    // At the top of the stack, which the thread may read.
    Place* place = nullptr;
    Block* block = nullptr;
    int thread = 0, lane = 0, warp = 0;
    Wait wait = NOTHING;
    int line = 0, source = 0;
    unsigned mask = 0;
    std::uint64_t bits = 0;
    std::uint32_t cluster_epoch = 0, block_epoch = 0, warp_epoch = 0;
};

struct Cluster;
struct Block {
    std::vector<Fiber*> fibers;
    std::size_t alive = 0, waiting = 0;
    // Whether a thread of it has run.
    bool begun = false;
    Cluster* cluster = nullptr;
    int rank = 0;
    // Its part of the memory of the cluster.
    unsigned char* shared = nullptr;
    Shadow* shadow = nullptr;
    std::size_t dynamic = 0;
    // Of each shared variable: where it begins and ends in `shared`.
    std::map<std::size_t, std::pair<std::size_t, std::size_t>> variables;
};

// Blocks that run at the same time and reach one another's shared memory; most often one.
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    // Threads at the barrier of the cluster, blocks that have not returned, bytes of each.
    std::size_t waiting = 0, alive = 0, each = 0;
    std::vector<unsigned char> shared;
    std::vector<Shadow> shadow;
};

struct Launch {
    void (*call)(const unsigned char*);
    dim3 grid, size;
    std::size_t shared_bytes;
    unsigned cluster;
    std::uint64_t seed, random;
    long idle;
    bool failed;
    char message[1024];
};

// Room for the variables declared in the kernel, after the dynamic part.
constexpr std::size_t VARIABLES = 1024;

Launch launch;
// What a device allows at most.
unsigned char parameters[4096];
jmp_buf scheduler;
Fiber* current;
std::deque<Fiber*> runnable;
// Blocks whose threads begin when no other can run: those of a cluster need not begin together.
std::vector<Block*> late;
std::vector<std::unique_ptr<Fiber>> pool;
std::vector<Fiber*> free_fibers;

// Where the libraries of the kernel and of this file lie: constants, and the bytes above.
struct Module {
    Address begin, end;
};
Module modules[2];

std::uint64_t draw() {
    // xorshift64: any sequence will do, as long as the seed decides it.
    launch.random ^= launch.random << 13;
    launch.random ^= launch.random >> 7;
    launch.random ^= launch.random << 17;
    return launch.random;
}

[[noreturn]] void fail(const char* format, ...) {
    int used = 0;
    if (current)
        used = std::snprintf(launch.message, sizeof launch.message, "block %u, thread %d: ",
                             current->place->block.x, current->thread);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(launch.message + used, sizeof launch.message - std::size_t(used), format,
                   arguments);
    va_end(arguments);
    launch.failed = true;
    _longjmp(scheduler, 1);
}

}  // namespace
