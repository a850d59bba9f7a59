// Rows that are not plain, sixteen at a time: gathered into plain rows of scratch memory, where the
// kernels do them, and scattered. Neighbouring rows whose elements lie far apart go through
// transposes of K x K elements.
#pragma once
#include <utility>

#include "scratch.h"
#include "rows.h"

namespace {

// Elements of a register of a transpose; they are moved, never computed with.
template <class U> constexpr size_t K_OF = (WIDEST < 4 || sizeof(U) == 2 ? 16 : 32) / sizeof(U);

// One step of a transpose: exchanges the second half of every 2 D lanes of a with the first half
// of those of b.
template <size_t D, class U, class V, size_t... I>
INLINE void exchange(V& a, V& b, std::index_sequence<I...>) {
    constexpr size_t K = sizeof...(I);
    V before = a;
#if defined(__clang__)
    a = __builtin_shufflevector(before, b, (I & D ? I - D + K : I)...);
    b = __builtin_shufflevector(before, b, (I & D ? I + K : I + D)...);
#else
    using Lane = Register<U, K>;
    a = __builtin_shuffle(before, b, Lane{(U)(I & D ? I - D + K : I)...});
    b = __builtin_shuffle(before, b, Lane{(U)(I & D ? I + K : I + D)...});
#endif
}
template <class U, size_t D, size_t K> INLINE void transpose(Register<U, K> (&a)[K]) {
#pragma GCC unroll 8
    for (size_t i = 0; i < K; i++)
        if (!(i & D)) exchange<D, U>(a[i], a[i + D], std::make_index_sequence<K>{});
    if constexpr (D > 1) transpose<U, D / 2, K>(a);
}

// Moves the transpose of K x K elements; the rows of either lie so many bytes apart.
template <class U>
INLINE void move_block(const char* from, Index from_stride, char* to, Index to_stride) {
    constexpr size_t K = K_OF<U>;
    Register<U, K> a[K];
#pragma GCC unroll 8
    for (size_t i = 0; i < K; i++) a[i] = read<Register<U, K>>(from + (Index)i * from_stride);
    transpose<U, K / 2, K>(a);
#pragma GCC unroll 8
    for (size_t i = 0; i < K; i++) write(to + (Index)i * to_stride, a[i]);
}

// Rows that lie `stride` bytes apart, and their elements `apart`.
struct Grid {
    char* at;
    Index stride;
    Index apart;
};

// Moves rows of n elements to or from plain rows.
template <bool GATHER, class U>
NOINLINE void move_rows(Grid grid, Grid plain, Index rows, Index n) {
    constexpr Index K = (Index)K_OF<U>;
    constexpr Index SIZE = sizeof(U);
    if (grid.stride == -SIZE) {
        grid.at -= (rows - 1) * SIZE;
        grid.stride = SIZE;
        plain.at += (rows - 1) * plain.stride;
        plain.stride = -plain.stride;
    }
    auto move = [&](Index r, Index j, auto f) {
        char* here = grid.at + r * grid.stride + j * grid.apart;
        char* there = plain.at + r * plain.stride + j * SIZE;
        GATHER ? f(here, grid.apart, there, plain.stride)
               : f(there, plain.stride, here, grid.apart);
    };
    if (grid.stride != SIZE || rows < K || n < K) {
        auto one = [](char* from, Index, char* to, Index) { write(to, read<U>(from)); };
        for (Index r = 0; r < rows; r++)
            for (Index j = 0; j < n; j++) move(r, j, one);
        return;
    }
    auto block = [](const char* from, Index from_stride, char* to, Index to_stride)
                     INLINE_LAMBDA { move_block<U>(from, from_stride, to, to_stride); };
    Index width = rows * SIZE;
    for (Index top = 0; top < n; top += K) {
        // The last blocks lie over those before.
        Index j = at_most(top, n - K);
        // The lines of as many more rows, into the second-level cache: (16, 512, 768) over axis 1,
        // forward 0.9 ns an element; those of columns to come, into the first, 1.05.
        for (Index ahead = width; ahead > 0; ahead -= 64)
            for (Index k = 0; k < K; k++)
                __builtin_prefetch(
                    grid.at + (j + k) * grid.apart + width + ahead - 1, !GATHER, SECOND_LEVEL);
        for (Index start = 0; start < rows; start += K) move(at_most(start, rows - K), j, block);
    }
}

inline char* place_of(const Rows& a, Index i) {
    return a.data + i / a.run * a.outer + i % a.run * a.stride;
}

// Rows from `first` to `stop`.
struct Tile {
    Index first, stop;
};

// Whether the rows of a strip are plain where they lie.
inline bool is_plain(const Rows& a, Tile strip) {
    return !a.run || (a.apart == BYTES[a.type] && strip.first / a.run == (strip.stop - 1) / a.run);
}

// Moves a strip between an array and plain rows.
template <bool GATHER> void move_strip(const Rows& a, Index n, Tile strip, const Rows& plain) {
    auto move = BYTES[a.type] == 2   ? move_rows<GATHER, uint16_t>
                : BYTES[a.type] == 4 ? move_rows<GATHER, uint32_t>
                                     : move_rows<GATHER, uint64_t>;
    for (Index i = strip.first, count; i < strip.stop; i += count) {
        count = at_most(strip.stop - i, a.run - i % a.run);
        move({place_of(a, i), a.stride, a.apart}, {row_of(plain, i), plain.stride, 0}, count, n);
    }
}

// Calls f(call, rows) for the rows of a tile: at once, or strip by strip, with a call whose rows
// are plain.
template <class F> void each_strip(const Call& c, const Own& own, Tile tile, F f) {
    if (!c.plan.strided) return f(c, tile);
    Call plain = c;
    for (Index first = tile.first; first < tile.stop; first += STRIP) {
        Tile strip = {first, at_most(first + STRIP, tile.stop)};
        for (int k = 0; k < ARRAY_COUNT; k++) {
            const Rows& from = c.*ARRAYS[k];
            Rows& to = plain.*ARRAYS[k];
            if (!from.run) continue;
            bool lies_plain = is_plain(from, strip);
            Index stride = lies_plain ? from.stride : strip_stride(c, from.type);
            char* data = lies_plain ? place_of(from, first) : (char*)own.strips[k];
            to = {data - first * stride, from.type, stride};
            bool is_result = &to == &plain.y || (&to == &plain.x && c.source.data);
            if (!lies_plain && !is_result) move_strip<true>(from, c.n, strip, to);
        }
        // Rows that are marked instead of written leave their input.
        if (c.over) plain.y = c.backward ? plain.dy : plain.x;
        f(plain, strip);
        if (c.source.data && !is_plain(c.x, strip)) move_strip<false>(c.x, c.n, strip, plain.x);
        if (!is_plain(c.y, strip)) move_strip<false>(c.y, c.n, strip, plain.y);
    }
}

}  // namespace
