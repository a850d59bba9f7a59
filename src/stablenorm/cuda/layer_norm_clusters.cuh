// Clusters of layer_norm.cu: blocks that share a row, each its own columns of it.
//
// The blocks of a cluster run at the same time, on neighbouring multiprocessors, and each can store
// into the shared memory of the others. Nothing else passes between them: what is summed over the
// columns of a row.

// Which of the clusters, and which block of it. Clusters are runs of neighbours in the grid, whose
// size is a multiple of theirs.
LN_INLINE unsigned team() { return blockIdx.x / CLUSTER; }
LN_INLINE unsigned teams() { return gridDim.x / CLUSTER; }
LN_INLINE int rank() { return CLUSTER == 1 ? 0 : (int)(blockIdx.x % CLUSTER); }

// The columns of this block begin here.
LN_INLINE int first_column() { return rank() * COLUMNS; }

#if LN_CLUSTER > 1

static_assert(SLOTS == 1 && RESIDENT, "a cluster has one row in hand, and in registers");

#ifdef __CUDA_ARCH__
// Release and acquire: what the threads of a cluster stored before it, in whatever block, all of
// them see after it. It is a barrier of each block as well.
LN_INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// The address that `slot`, in the own shared memory, has in that of a block of the cluster.
LN_INLINE unsigned address_in(int block, const void* slot) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address) : "r"((unsigned)__cvta_generic_to_shared(slot)), "r"(block));
    return address;
}

LN_INLINE void store_in(int block, double* slot, double v) {
    asm volatile("st.shared::cluster.f64 [%0], %1;"
                 :: "r"(address_in(block, slot)), "d"(v) : "memory");
}
LN_INLINE void store_in(int block, Pair* slot, Pair v) {
#if LN_ARITHMETIC == 2
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                 :: "r"(address_in(block, slot)), "f"(v.hi), "f"(v.lo) : "memory");
#else
    asm volatile("st.shared::cluster.v2.f64 [%0], {%1, %2};"
                 :: "r"(address_in(block, slot)), "d"(v.hi), "d"(v.lo) : "memory");
#endif
}
#else
LN_INLINE void cluster_barrier() { __cluster_sync(); }
LN_INLINE void store_in(int block, Number* slot, Number v) {
    *static_cast<Number*>(__cluster_map_shared_rank(slot, block)) = v;
}
#endif

// The numbers of all blocks, in the order of their ranks, one behind the other for each of
// `count`; every thread of the cluster must call it. `slots` is (count, CLUSTER) in shared memory
// and must not be that of the last call: a block may store for the next sum while another still
// reads this one, but not for the one after, which takes the barrier of the next. No block can
// leave while one stores into it: it waits at the barrier that follows the stores.
template <int count>
LN_INLINE void gather(Number* slots, const Number (&v)[count]) {
    if (threadIdx.x < CLUSTER) {
#pragma unroll
        for (int i = 0; i < count; ++i)
            store_in((int)threadIdx.x, slots + i * CLUSTER + rank(), v[i]);
    }
    cluster_barrier();
}

// Before any block stores into another, all must have begun.
LN_INLINE void begin_cluster() { cluster_barrier(); }

#else

LN_INLINE void begin_cluster() {}

#endif
