// The scratch memory of a call: what threads share, and what each has for itself.
#pragma once
#include "call.h"

// Hands out pieces of memory; without memory, counts the float64 that are needed.
struct Arena {
    double* memory = nullptr;
    Index used = 0;
    double* take(Index count) {
        Index start = used;
        // Whole lines of 64 bytes.
        used += (count + 7) / 8 * 8;
        return memory ? memory + start : nullptr;
    }
};

// Sets the vectors that threads share.
inline void lay_out(const Call& c, Arena& arena, Scratch& to) {
    Index p = padded(c.n);
    to.gamma = arena.take(p);
    to.beta = arena.take(c.backward ? 0 : p);
    to.sizes = c.nearest && !c.backward ? arena.take(p) : nullptr;
    if (c.is_summing()) {
        to.sums = arena.take(c.sums_per_tile() * c.plan.tiles);
        to.ranges = arena.take(2 * c.plan.tiles);
    }
}

// The plain rows of a strip in scratch memory.
inline Index strip_stride(const Call& c, Type type) {
    return padded((c.n * BYTES[type] + 7) / 8) * 8;
}

// Scratch memory of one thread.
struct Own {
    double* strips[ARRAY_COUNT] = {};  // a strip of each array that is not plain
    double* addend;                    // a row that is added
    double* part;                      // the sums of some rows
    // A row of results, as pairs with sizes of their errors; its first one also float64, its second
    // one dx that goes over dy.
    double* high;
    double* low;
    double* size;
    // The registers of two rows that failed the test of the first rung.
    Index* failed[2];
    // The float64 arithmetic. x - mean and g - m of types of 16 bits, for this group and the next;
    // a row of zeros, in the place of a hard row.
    double *kept, *zeros;
    // Pairs, mostly afterwards, in the same memory: rows that are lifted, for this group and the
    // next; xhat for each row of a group.
    double* x[2] = {};
    double* dy[2] = {};
    double* xhat;

    Own(const Call& c, Arena& arena) {
        Index p = padded(c.n);
        bool narrow = c.backward && !c.plan.in_pairs;
        Index strip = c.rows < STRIP ? c.rows : STRIP;
        for (int k = 0; k < ARRAY_COUNT && c.plan.strided; k++) {
            const Rows& of = c.*ARRAYS[k];
            strips[k] = arena.take(of.run ? strip * strip_stride(c, of.type) / 8 : 0);
        }
        addend = arena.take(c.plus.data ? p : 0);
        part = arena.take(!narrow                            ? 0
                          : !c.is_summing()                  ? 4 * p
                          : c.plan.tile_rows > PART_OF<true> ? 2 * p
                                                             : 0);
        bool staged = c.plan.staged || c.nearest;
        high = arena.take(staged || c.plan.in_pairs ? p : 0);
        low = arena.take(staged || c.over ? p : 0);
        size = arena.take(staged ? p : 0);
        for (Index*& of_row : failed)
            of_row = (Index*)arena.take(c.nearest && !c.plan.in_pairs ? c.n / 8 + 1 : 0);
        Index start = arena.used;
        Index sets = c.n <= EARLY_KEPT ? 2 : 1;
        Index rows = !c.nearest ? 2 : c.n <= LONG ? 4 : 1;
        kept = arena.take(narrow && BYTES[c.x.type] == 2 ? sets * rows * 2 * p : 0);
        zeros = arena.take(narrow && c.nearest ? p : 0);
        Index stop = arena.used;
        arena.used = start;
        sets = c.n <= EARLY ? 2 : 1;
        rows = c.together_in_pairs();
        Index of_x = c.has_pairs() && c.x.type != F64 ? p * rows : 0;
        Index of_dy = c.has_pairs() && c.backward && c.dy.type != F64 ? p * rows : 0;
        for (int i = 0; i < sets; i++) {
            x[i] = arena.take(of_x);
            dy[i] = arena.take(of_dy);
        }
        xhat = arena.take(c.has_pairs() && c.backward ? 2 * p * rows : 0);
        arena.used = arena.used > stop ? arena.used : stop;
    }
};
