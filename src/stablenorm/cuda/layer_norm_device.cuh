// Primitives of the device for layer_norm.cu: copies that nobody waits for, and barriers in shared
// memory.
//
// These lines are the seam to the tests, whose shim has host versions of all of them and of
// half_to_double and double_to_half: a host that compiles layer_norm.cu (no __CUDA_ARCH__) supplies
// them.

#ifdef __CUDA_ARCH__

// The phases of a barrier are numbered from 0; each is over after as many arrivals as it was made
// for. A thread waits for a phase by its parity alone, so it must never be two phases away from it.
using Barrier = unsigned long long;

INLINE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copy `bytes` bytes to shared memory, and zeros up to 16; both addresses are multiples of 16.
INLINE void copy_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes)
        : "memory");
}
// Copy four bytes, both addresses multiples of four.
INLINE void copy_async4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
        : "memory");
}
// Close a group of this thread's copies.
INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most `left` groups of this thread are on their way.
template <int left> INLINE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

INLINE void barrier_init(Barrier* b, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count)
        : "memory");
}
INLINE void barrier_arrive(Barrier* b) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(shared_address(b))
        : "memory");
}

// Copies of a whole row, which devices have from 9.0 on.
constexpr bool HAS_BULK = __CUDA_ARCH__ >= 900;
// Arrive, and add `bytes` of copies to what the phase waits for.
INLINE void barrier_expect(Barrier* b, int bytes) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(
                     shared_address(b)),
        "r"(bytes)
        : "memory");
}
// Copy `bytes`, a multiple of 16 as both addresses are; the phase of `b` is not over before.
INLINE void copy_bulk(void* to, const void* from, int bytes, Barrier* b) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(b))
        : "memory");
}
// Show barriers that were just made to the unit that does bulk copies.
INLINE void show_barriers() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Words in global memory by which blocks talk while they run; no cache of a multiprocessor holds
// them.
INLINE void post(double* word, double v) {
    asm volatile("st.relaxed.gpu.global.f64 [%0], %1;" ::"l"(word), "d"(v) : "memory");
}
INLINE double peek(const double* word) {
    double v;
    asm volatile("ld.relaxed.gpu.global.f64 %0, [%1];" : "=d"(v) : "l"(word) : "memory");
    return v;
}

// try_wait lets a thread sleep, where the device can.
#if __CUDA_ARCH__ >= 900
#define LN_WAIT "try_wait"
#else
#define LN_WAIT "test_wait"
#endif
INLINE void barrier_wait(Barrier* b, int parity) {
    unsigned done;
    do {
        asm volatile("{ .reg .pred p; mbarrier." LN_WAIT
                     ".parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(b)), "r"(parity)
            : "memory");
    } while (!done);
}

#endif
