// A grid on threads of the operating system, for ThreadSanitizer: one thread for each CUDA thread.
//
// What orders memory on the device orders it here, and nothing else does: __syncthreads and
// __syncwarp; a fence before an atomic releases, a fence after one acquires (ThreadSanitizer does
// not know fences, so the atomic beside a fence gets its order). Shuffles, votes and atomics alone
// order nothing: they go through relaxed atomics and the kernel's futex, which it does not see.
//
// A program of its own: `program JOB` reads the job that host_shim.py wrote, runs it and writes
// the memory back.
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda_shim.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim
#undef __shared__

using namespace shim;

// ThreadSanitizer's own.
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);

namespace {

// All threads of a group come, then all go on. What ThreadSanitizer learns of it is up to
// `ordered`: a shuffle does not order memory, whatever the host does to carry it out.
class Meeting {
  public:
    void wait(unsigned count, bool ordered) {
        if (!ordered) AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        const unsigned turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1) + 1 == count) {
            arrived_.store(0);
            turn_.store(turn + 1);
            futex(FUTEX_WAKE_PRIVATE, INT_MAX);
        } else {
            while (turn_.load() == turn) futex(FUTEX_WAIT_PRIVATE, int(turn));
        }
        if (!ordered) AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }

  private:
    void futex(int operation, int value) { syscall(SYS_futex, &turn_, operation, value, nullptr); }

    std::atomic<unsigned> arrived_{0}, turn_{0};
};

struct Warp {
    Meeting barrier, exchange;
    std::uint64_t given[32];
};

struct Cluster {
    Meeting barrier;
    struct Block* first;
    unsigned blocks;
};

struct Block {
    Meeting barrier;
    Cluster* cluster;
    std::vector<Warp> warps;
    std::vector<std::uint64_t> shared;
    std::mutex mutex;
    std::map<std::size_t, std::vector<std::uint64_t>> variables;
    unsigned threads = 0;
};

struct Thread {
    Place place;
    Block* block;
    Warp* warp;
    int lane;
    // The word of the last atomic, which a fence makes an acquire; and whether a fence has made
    // the next atomic a release.
    const void* last_atomic = nullptr;
    bool releases = false;
};

thread_local Thread* current;

// Release after a fence, and nothing otherwise.
int order() { return current->releases ? __ATOMIC_RELEASE : __ATOMIC_RELAXED; }

template <class T>
T change(T* word, Change kind, T value) {
    T old = __atomic_load_n(word, __ATOMIC_RELAXED), next;
    bool done = false;
    do {
        switch (kind) {
            case ADD: next = old + value; break;
            case INC: next = old >= value ? 0 : old + 1; break;
            case EXCH: next = value; break;
            case OR: next = old | value; break;
            default: next = old > value ? old : value; break;
        }
        done = __atomic_compare_exchange_n(word, &old, next, false, order(), __ATOMIC_RELAXED);
    } while (!done);
    current->releases = false;
    current->last_atomic = word;
    return old;
}

}  // namespace

namespace shim {
extern "C" {
std::uint64_t shim_flops[6];

const Place& shim_place() { return current->place; }

void shim_syncthreads(int) { current->block->barrier.wait(current->block->threads, true); }

void shim_cluster_barrier(int) {
    Cluster* cluster = current->block->cluster;
    cluster->barrier.wait(cluster->blocks * current->block->threads, true);
}

void* shim_in_block(void* own, unsigned rank) {
    const std::size_t at = std::size_t(static_cast<unsigned char*>(own) - shim_dynamic_shared());
    return reinterpret_cast<unsigned char*>(current->block->cluster->first[rank].shared.data()) + at;
}

void shim_syncwarp(unsigned mask, int) {
    current->warp->barrier.wait(unsigned(__builtin_popcount(mask)), true);
}

std::uint64_t shim_exchange(unsigned mask, std::uint64_t bits, int source_lane, int) {
    Warp* warp = current->warp;
    if (mask != 0xffffffffu) {
        // Parts of a warp would need a meeting each.
        std::fprintf(stderr, "threads.cpp: masks must be of whole warps, got %08x\n", mask);
        std::exit(3);
    }
    __atomic_store_n(&warp->given[current->lane], bits, __ATOMIC_RELAXED);
    warp->exchange.wait(32, false);
    const std::uint64_t got = __atomic_load_n(&warp->given[source_lane], __ATOMIC_RELAXED);
    // Until all have read, nobody may give again.
    warp->exchange.wait(32, false);
    return got;
}

unsigned shim_ballot(unsigned mask, bool bit, int line) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) votes |= unsigned(shim_exchange(mask, bit, lane, line)) << lane;
    return votes;
}

unsigned char* shim_dynamic_shared() {
    return reinterpret_cast<unsigned char*>(current->block->shared.data());
}

void* shim_static_shared(int site, std::size_t bytes) {
    std::lock_guard<std::mutex> lock(current->block->mutex);
    auto& variable = current->block->variables[std::size_t(site) << 32 | bytes];
    if (variable.empty()) variable.resize(bytes / 8 + 2);
    return variable.data();
}

void shim_fence() {
    if (current->last_atomic) {
        // Of a byte: the word may be one of 32 or of 64 bits.
        (void)__atomic_load_n(static_cast<const std::uint32_t*>(current->last_atomic),
                              __ATOMIC_ACQUIRE);
        current->last_atomic = nullptr;
    }
    current->releases = true;
}

void shim_sleep() { std::this_thread::yield(); }

std::uint32_t shim_load32(const std::uint32_t* word, bool acquire) {
    std::this_thread::yield();
    current->last_atomic = word;
    return __atomic_load_n(word, acquire ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED);
}

void shim_store32(std::uint32_t* word, std::uint32_t value, bool release) {
    __atomic_store_n(word, value, release ? __ATOMIC_RELEASE : order());
    current->releases = false;
}

std::uint32_t shim_atomic32(std::uint32_t* word, Change kind, std::uint32_t value) {
    return change(word, kind, value);
}
std::uint64_t shim_atomic64(std::uint64_t* word, Change kind, std::uint64_t value) {
    return change(word, kind, value);
}

std::uint32_t shim_cas32(std::uint32_t* word, std::uint32_t compare, std::uint32_t value) {
    __atomic_compare_exchange_n(word, &compare, value, false, order(), __ATOMIC_RELAXED);
    current->releases = false;
    current->last_atomic = word;
    return compare;
}
}
}  // namespace shim

// ---- the job ----

namespace {

struct Header {
    char entry[64];
    std::uint32_t grid[3], size[3], cluster, unused;
    std::uint64_t shared_bytes, launches, parameter_bytes, buffer_count, pointer_count;
};

void read_all(std::FILE* file, void* to, std::size_t bytes) {
    if (bytes && std::fread(to, 1, bytes, file) != bytes) {
        std::fprintf(stderr, "threads.cpp: the job is too short\n");
        std::exit(3);
    }
}

void run_grid(void (*call)(const unsigned char*), const Header& job, const unsigned char* bytes) {
    const std::uint32_t blocks = job.grid[0], threads = job.size[0];
    std::vector<Block> all(blocks);
    std::vector<Cluster> clusters(blocks / job.cluster);
    std::vector<Thread> states(std::size_t(blocks) * threads);
    std::vector<std::thread> running;
    for (std::uint32_t b = 0; b < blocks; ++b) {
        all[b].threads = threads;
        all[b].cluster = &clusters[b / job.cluster];
        if (b % job.cluster == 0) all[b].cluster->first = &all[b];
        all[b].cluster->blocks = job.cluster;
        all[b].warps = std::vector<Warp>((threads + 31) / 32);
        all[b].shared.assign(job.shared_bytes / 8 + 2, ~std::uint64_t(0));
        for (std::uint32_t t = 0; t < threads; ++t) {
            Thread& state = states[std::size_t(b) * threads + t];
            state.place = {{t, 0, 0}, {b, 0, 0}, {threads, 1, 1}, {blocks, 1, 1}};
            state.block = &all[b];
            state.warp = &all[b].warps[t / 32];
            state.lane = int(t % 32);
        }
    }
    for (Thread& state : states)
        running.emplace_back([&state, call, bytes] {
            current = &state;
            call(bytes);
        });
    for (std::thread& thread : running) thread.join();
}

}  // namespace

int main(int count, char** words) {
    if (count != 2) return 3;
    std::FILE* file = std::fopen(words[1], "rb");
    if (!file) return 3;
    Header job;
    read_all(file, &job, sizeof job);
    std::vector<unsigned char> parameters(job.parameter_bytes);
    read_all(file, parameters.data(), parameters.size());
    std::vector<std::vector<std::uint64_t>> buffers(job.buffer_count);
    std::vector<std::uint64_t> sizes(job.buffer_count);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
        read_all(file, &sizes[i], sizeof sizes[i]);
        buffers[i].resize(sizes[i] / 8 + 1);
        read_all(file, buffers[i].data(), sizes[i]);
    }
    for (std::size_t i = 0; i < job.pointer_count; ++i) {
        std::uint64_t pointer[3];  // where in the parameters, into which buffer, at which byte
        read_all(file, pointer, sizeof pointer);
        const std::uint64_t address = reinterpret_cast<std::uint64_t>(buffers[pointer[1]].data()) + pointer[2];
        std::memcpy(parameters.data() + pointer[0], &address, sizeof address);
    }
    std::fclose(file);
    void* call = dlsym(RTLD_DEFAULT, (std::string("shim_call_") + job.entry).c_str());
    if (!call) return 3;
    for (std::uint64_t i = 0; i < job.launches; ++i)
        run_grid(reinterpret_cast<void (*)(const unsigned char*)>(call), job, parameters.data());
    file = std::fopen(words[1], "wb");
    if (!file) return 3;
    for (std::size_t i = 0; i < buffers.size(); ++i)
        if (std::fwrite(buffers[i].data(), 1, sizes[i], file) != sizes[i]) return 3;
    return std::fclose(file) ? 3 : 0;
}
