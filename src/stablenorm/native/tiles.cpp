// Tiles of rows, from memory to memory. Compiled once for each instruction set, which NAME names.
#include "close.h"
#include "pool.h"

namespace {

// ---- the ladder of rounding to nearest ----

// Each rung takes the rows that the one above could not certify. Float64 comes first and has marked
// the rows that it leaves; pairs do those one by one; integers, in Python, take the rows that are
// marked then. Exact cases are certified on the way: bounds of 0 in float64, rows about their
// center (`find_center`) in pairs, ties in integers.
template <class InPairs> void climb(const Call& c, Tile tile, InPairs certify_in_pairs) {
    auto row_in_float64 = [&](Index i) { return c.marks[i] == 0; };
    auto row_in_pairs = [&](Index i) {
        if (!certify_in_pairs(i)) return false;
        c.marks[i] = 0;
        return true;
    };
    auto mark = [&](Index i) { c.marks[i] |= UNCERTIFIED; };
    for (Index i = tile.first; i < tile.stop; i++) {
        if (row_in_float64(i)) continue;
        if (row_in_pairs(i)) continue;
        mark(i);
    }
}

// ---- forward ----

// Calls f(r, R) for some rows: R from row r on, two by two, then one by one; R is a constant's
// type.
template <class F> INLINE void each_two(int count, F f) {
    int r = 0;
    for (; r + ROWS_OF_Y <= count; r += ROWS_OF_Y) f(r, std::integral_constant<int, ROWS_OF_Y>{});
    for (; r < count; r++) f(r, std::integral_constant<int, 1>{});
}

template <int R, class To> void point_at(const Rows& a, Index i, To* (&to)[R]) {
    for (int r = 0; r < R; r++) to[r] = (To*)row_of(a, i + r);
}

template <class T> void keep_statistics(const Call& c, const Group<T, Stats>& group, int r) {
    Index i = group.top + r;
    put(c.mean, i, group.of.mean[r]);
    put(c.mean_lo, i, group.of.mean_lo[r]);
    put(c.rstd, i, group.of.rstd[r]);
}

template <bool LAYER, class T> void forward_fast(const Call& c, const Own& own, Tile tile) {
    using M = Fast<LAYER>;
    Columns columns = columns_of<T>(c, c.plan.together);
    auto measure = [&](Group<T, Stats>& group) {
        statistics<LAYER, false>(group.x, group.count, c.n, c.eps, group.of);
    };
    auto write = [&](const Group<T, Stats>& group) {
        for (int r = 0; r < group.count; r++) keep_statistics(c, group, r);
        // y of another type than x.
        for (int r = 0; r < group.count && c.plan.staged; r++) {
            Store<double, 1> sink = {{own.high}};
            write_y<M, 1>(group.x, group.of, r, columns, sink);
            round_row_of_float64(c, own, group.top + r, row_of(c.y, group.top + r));
        }
        if (c.plan.staged) return;
        each_two(group.count, [&](int r, auto rows) {
            constexpr int R = decltype(rows)::value;
            Store<T, R> sink;
            sink.past = c.plan.past;
            point_at(c.y, group.top + r, sink.to);
            write_y<M, R>(group.x, group.of, r, columns, sink);
        });
    };
    each_group<T, Stats>(c, own, tile, measure, write);
}

// Writes R rows, from row r of a group on, with the test of the first rung. Marks those that it
// does not certify.
template <bool LAYER, int R, class T>
void write_tested(const Call& c, const Own& own, const Group<T, Stats>& group, int r) {
    Columns columns = columns_of<T>(c, c.plan.together);
    const Stats& of = group.of;
    Errors errors[R];
    static_assert(R <= sizeof own.failed / sizeof *own.failed, "a row needs a list");
    Test<T, R> sink;
    sink.past = c.plan.past;
    point_at(c.y, group.top + r, sink.to);
    // Rows of a group are usually alike: let the first decide.
    bool near = !is_far(magnitude(of.mean[0]) * of.rstd[0]);
    for (int k = 0; k < R; k++) {
        double rstd = of.rstd[r + k];
        double spread = std::sqrt(of.second[r + k]) * rstd;
        double d = of.first[r + k] * rstd;
        put(c.spread, group.top + r + k, spread);
        // settle_y() centers x first, so its bound has no M term.
        errors[k] = errors_of_xhat<LAYER>(spread, d * d, 0, chain_of(c.n, LANES, RUN));
        double M = near ? magnitude(of.mean[r + k]) * rstd : 0;
        sink.bound[k] = bound_of_y(errors[k], spread, c.n, M);
        sink.failed[k] = {own.failed[k], 0};
    }
    if (near)
        write_y<Near<LAYER>, R>(group.x, of, r, columns, sink);
    else
        write_y<Far<LAYER>, R>(group.x, of, r, columns, sink);
    for (int k = 0; k < R; k++) {
        auto settle_row = [&] {
            ElementOfY<Far<LAYER>, T> element(of.mean[r + k], of.mean_lo[r + k], of.rstd[r + k]);
            return settle_y<LAYER>(group.x[r + k], element, columns, errors[k], sink.draft(k));
        };
        bool certain = errors[k].are_bounded() && (sink.failed[k].count == 0 || settle_row());
        c.marks[group.top + r + k] = certain ? 0 : UNCERTIFIED;
    }
}

template <bool LAYER, class T> void forward_nearest(const Call& c, const Own& own, Tile tile) {
    auto measure = [&](Group<T, Stats>& group) {
        statistics<LAYER, true>(group.x, group.count, c.n, c.eps, group.of);
    };
    auto write = [&](const Group<T, Stats>& group) {
        for (int r = 0; r < group.count; r++) keep_statistics(c, group, r);
        each_two(group.count, [&](int r, auto rows) {
            write_tested<LAYER, decltype(rows)::value>(c, own, group, r);
        });
    };
    each_group<T, Stats>(c, own, tile, measure, write);
    climb(c, tile, [&](Index i) { return pairs::row_of_y<LAYER>(c, own, i); });
}

// ---- backward ----

bool is_finite(Type type, const char* row, Index n) {
    bool finite = true;
    of_type(type, [&](auto* kind) {
        for (Index j = 0; j < n; j++)
            finite &= magnitude(number((decltype(kind))row + j)) < __builtin_inf();
    });
    return finite;
}

// Moves dx to the place of dy. If a row of finite inputs overflowed, marks it instead, since its dy
// is needed again.
void put_over_dy(const Call& c, Index i, const char* dx) {
    char* dy = row_of(c.y, i);
    bool overflowed = pool::has_overflowed();
    if (overflowed) __atomic_store_n(c.scratch.overflowed, true, __ATOMIC_RELAXED);
    c.marks[i] = overflowed && !is_finite(c.y.type, dx, c.n) && is_finite(c.y.type, dy, c.n) &&
                 is_finite(c.x.type, row_of(c.x, i), c.n);
    if (!c.marks[i]) memcpy(dy, dx, (size_t)(c.n * BYTES[c.y.type]));
}

// The sums over rows of a part of a tile, and the worst errors of xhat in the tile.
struct PartSums {
    OverRows over;
    Errors worst;
};

template <class M, class T>
INLINE void begin_row(const Call& c, Index i, double* kept, Back<T>& of) {
    of.dy = (const T*)row_of(c.dy, i);
    of.x = (const T*)row_of(c.x, i);
    of.centered = kept;
    of.g = kept + padded(c.n);
    of.rstd = c.rstd[i];
    if (M::LAYER) {
        of.mean = c.mean[i];
        of.mean_lo = c.mean_lo[i];
        of.pivot = pivot_of(of.dy, c.scratch.gamma, c.n);
    }
}

// Bounds the errors of a row. A hard row is marked, and zeros take its place in the sums.
template <class M, class T>
void bound_row(const Call& c, const Own& own, Index i, Back<T>& of, Errors& worst) {
    double m = M::CENTER ? 0 : magnitude(of.mean) * of.rstd;
    of.spread = c.spread[i];
    of.errors = errors_again<M::LAYER>(of.spread, of.rstd, c.eps, m, chain_of(c.n, LANES, RUN));
    if (__builtin_expect(!of.errors.are_hard(), 1)) {
        worst = {larger(worst.a, of.errors.a), larger(worst.b, of.errors.b)};
        return;
    }
    memset(own.zeros, 0, (size_t)c.n * sizeof(T));
    c.marks[i] = UNCERTIFIED | UNSUMMED;
    of = {(const T*)own.zeros, (const T*)own.zeros, of.centered, of.g};
}

template <class M, class T>
void write_fast(const Call& c, const Own& own, Index i, const Back<T>& of, const Columns& columns) {
    char* to = c.over ? (char*)own.low : row_of(c.y, i);
    if (c.plan.staged) {
        Store<double, 1> sink = {{own.high}};
        write_dx<M>(of, columns, sink);
        round_row_of_float64(c, own, i, to);
    } else {
        Store<T, 1> sink = {{(T*)to}, c.plan.past && !c.over};
        write_dx<M>(of, columns, sink);
    }
    if (c.over) put_over_dy(c, i, to);
}

// Writes dx with the test of the first rung; returns whether it is certain.
template <class M, class T>
bool write_nearest(
    const Call& c, const Own& own, Index i, const Back<T>& of, const Columns& columns) {
    T* dx = (T*)row_of(c.y, i);
    bool bounded = of.errors.are_bounded() && of.means.G < __builtin_inf();
    // All of g - m is 0, and so is dx.
    if (bounded && of.means.G == 0) {
        memset(dx, 0, (size_t)c.n * sizeof(T));
        return true;
    }
    Test<T, 1> sink = {{dx}, c.plan.past, {of.bound}, {{own.failed[0], 0}}};
    write_dx<M>(of, columns, sink);
    return bounded && (sink.failed[0].count == 0 || settle_dx<M>(of, columns, sink.draft(0)));
}

// Does R rows at a time from the first of `rest` on, while there are as many.
template <class M, int R, class T>
void backward_groups(const Call& c, const Own& own, Tile& rest, PartSums& sums) {
    Back<T> groups[2][R];
    Columns columns = columns_of<T>(c, R);
    auto begin = [&](Index top, int place) {
        for (int r = 0; r < R; r++) {
            Back<T>& of = groups[place][r];
            begin_row<M>(c, top + r, own.kept + (place * R + r) * 2 * padded(c.n), of);
            if constexpr (M::NEAREST) bound_row<M>(c, own, top + r, of, sums.worst);
        }
        pull<M, R>(groups[place], c.n, sums.over);
    };
    auto write = [&](Index i, const Back<T>& of) {
        if constexpr (!M::NEAREST)
            write_fast<M>(c, own, i, of, columns);
        else if (!c.marks[i] && !write_nearest<M>(c, own, i, of, columns))
            c.marks[i] = UNCERTIFIED;
    };
    bool early = c.n <= (KEPT<T> ? EARLY_KEPT : EARLY);
    Index& top = rest.first;
    if (early && top + R <= rest.stop) begin(top, 0);
    for (int now = 0; top + R <= rest.stop; top += R, now = early - now) {
        if (!early)
            begin(top, now);
        else if (top + 2 * R <= rest.stop)
            begin(top + R, 1 - now);
        for (int r = 0; r < R && c.y.data; r++) write(top + r, groups[now][r]);
    }
}

template <class M, class T>
void backward_part(const Call& c, const Own& own, Tile part, PartSums& sums) {
    each_strip(c, own, part, [&](const Call& plain, Tile rest) {
        if (!M::NEAREST || c.n <= LONG)
            backward_groups<M, ROWS_OF_DX<M::NEAREST>, T>(plain, own, rest, sums);
        backward_groups<M, 1, T>(plain, own, rest, sums);
    });
}

// Does the rows of a tile part by part: the sums of a part have short chains of additions, and are
// added to those of the tile with compensation. The first part sums into the tile's own vectors.
template <class M, class T>
void backward_parts(const Call& c, const Own& own, Tile tile, double* sums, Errors& worst) {
    constexpr Index most = PART_OF<M::NEAREST>;
    Index p = padded(c.n);
    double* of_dbeta = sums + c.words() * p;
    PartSums part = {{c.scratch.gamma, sums, of_dbeta, sums + 4 * p, sums + 5 * p}, {0, 0}};
    for (double* high : {sums, of_dbeta})
        if (c.words() == 2) memset(high + p, 0, (size_t)p * sizeof(double));
    for (Index top = tile.first; top < tile.stop; top += most) {
        if (top > tile.first) {
            part.over.dgamma = own.part;
            part.over.dbeta = own.part + p;
            memset(own.part, 0, (size_t)(2 * p) * sizeof(double));
        }
        backward_part<M, T>(c, own, {top, at_most(top + most, tile.stop)}, part);
        if (top == tile.first) continue;
        merge_columns(part.over.dgamma, sums, sums + p, c.n);
        merge_columns(part.over.dbeta, of_dbeta, of_dbeta + p, c.n);
    }
    worst = {part.worst.a + (double)at_most(most, c.plan.tile_rows) * U, part.worst.b};
}

// The second rung for a row, and its terms of the sums, which float64 may have left out. Returns
// whether the row is done.
template <bool LAYER>
bool row_of_dx_and_sums(const Call& c, const Own& own, Index i, double* sums) {
    pairs::Back of;
    bool certain = pairs::row_of_dx<LAYER>(c, own, i, of);
    if (!of.dy) return false;
    if (sums && c.marks[i] & UNSUMMED) pairs::add_row_to_sums(c, of, sums);
    c.marks[i] = UNCERTIFIED;
    return certain;
}

template <class M, class T> void backward(const Call& c, const Own& own, Index number) {
    Tile tile = tile_of(c, number);
    double* sums = c.is_summing() ? c.scratch.sums + c.sums_per_tile() * number : nullptr;
    if (sums) {
        Errors worst;
        backward_parts<M, T>(c, own, tile, sums, worst);
        c.scratch.ranges[2 * number] = worst.a;
        c.scratch.ranges[2 * number + 1] = worst.b;
    } else {
        // Nobody wants dgamma or dbeta. They are computed all the same, into scratch memory:
        // leaving them out would take a second version of the loop.
        Index p = padded(c.n);
        double* part = own.part;
        PartSums unwanted = {{c.scratch.gamma, part, part + p, part + 2 * p, part + 3 * p}, {0, 0}};
        backward_part<M, T>(c, own, tile, unwanted);
    }
    if constexpr (M::NEAREST)
        climb(c, tile, [&](Index i) {
            bool certain = false;
            each_strip(c, own, {i, i + 1}, [&](const Call& plain, Tile) {
                certain = row_of_dx_and_sums<M::LAYER>(plain, own, i, sums);
            });
            return certain;
        });
}

// ---- one instruction set ----

void backward_in_pairs(const Call& c, const Own& own, Index number) {
    pairs::OverRows over = {nullptr, padded(c.n), c.nearest};
    double* range = nullptr;
    if (c.is_summing()) {
        over.at = c.scratch.sums + c.sums_per_tile() * number;
        range = c.scratch.ranges + 2 * number;
        memset(over.at, 0, (size_t)c.sums_per_tile() * sizeof(double));
        range[0] = range[1] = 0;
    }
    auto back = c.rms ? pairs::backward<false, false> : pairs::backward<true, false>;
    if (c.plan.staged) back = c.rms ? pairs::backward<false, true> : pairs::backward<true, true>;
    each_strip(c, own, tile_of(c, number),
        [&](const Call& plain, Tile strip) { back(plain, own, strip, over, range); });
    if (over.at && over.held) pairs::settle_columns(over, c.n);
}

template <bool LAYER, class T>
void backward_in_float64(const Call& c, const Own& own, Index number) {
    if (!c.nearest) return backward<Fast<LAYER>, T>(c, own, number);
    // Rows of a tile are usually alike: let the first decide.
    Index first = tile_of(c, number).first;
    bool far = LAYER && is_far(magnitude(c.mean[first]) * c.rstd[first]);
    (far ? backward<Far<LAYER>, T> : backward<Near<LAYER>, T>)(c, own, number);
}

// Does a tile of rows of T, or, without T, in pairs.
template <bool LAYER, class T = void> void do_rows(const Call& c, const Own& own, Index number) {
    constexpr bool PAIRS = std::is_same_v<T, void>;
    if constexpr (PAIRS) {
        if (c.backward) return backward_in_pairs(c, own, number);
    } else {
        if (c.backward) return backward_in_float64<LAYER, T>(c, own, number);
    }
    each_strip(c, own, tile_of(c, number), [&](const Call& plain, Tile strip) {
        if constexpr (PAIRS)
            pairs::forward<LAYER>(plain, own, strip);
        else
            (c.nearest ? forward_nearest<LAYER, T> : forward_fast<LAYER, T>)(plain, own, strip);
    });
}

void do_tile(const Call& c, Index number, int thread) {
    Own own = own_of(c, thread);
    auto rows = c.rms ? do_rows<false> : do_rows<true>;
    of_type(c.x.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(T) < 8)
            if (!c.plan.in_pairs) rows = c.rms ? do_rows<false, T> : do_rows<true, T>;
    });
    rows(c, own, number);
    if (c.plan.past) __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace

// Without a NAME, as in the tests without Python, these are the only kernels.
#if !defined(NAME) && defined(__aarch64__)
#define NAME kernels_arm64
#define INSTRUCTIONS "arm64"
#elif !defined(NAME)
#define NAME kernels_x86_64_v3
#define INSTRUCTIONS "x86-64-v3"
#endif
extern const Kernels NAME = {INSTRUCTIONS, 16, prepare, do_tile, finish, close_tile, close_columns};
