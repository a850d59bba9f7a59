// Tiles of rows, from memory to memory. Compiled once for each instruction set, which NAME names.
#include "close.h"
#include "pool.h"

namespace {

// ---- forward ----

// Repeats the marked rows of a tile in pairs: redo(call, rows, unsummed) computes a run of rows
// with the same mark.
template <class Redo> void do_again(const Call& c, Tile tile, Redo redo) {
    Call alone = c;
    alone.in_pairs = alone.staged = true;
    alone.step = c.step_in_pairs();
    alone.source.data = nullptr;
    alone.sums_out[0] = alone.sums_out[1] = nullptr;
    // Keep the statistics of the first attempt.
    alone.mean = alone.mean_lo = alone.rstd = alone.spread = nullptr;
    for (Index i = tile.first, stop; i < tile.stop; i = stop) {
        uint8_t mark = c.marks[i];
        for (stop = i + 1;
            stop < tile.stop && c.marks[stop] == mark && mark != (UNCERTIFIED | UNSUMMED);)
            stop++;
        if (!mark) continue;
        memset(c.marks + i, 0, (size_t)(stop - i));
        redo(alone, Tile{i, stop}, mark & UNSUMMED);
        for (Index k = i; k < stop; k++) c.marks[k] &= mark;
    }
}

template <class T, bool LAYER, bool NEAREST>
void forward(const Call& c, const Own& own, Tile tile) {
    Parameters parameters = {c.wide_gamma, c.wide_beta, c.sizes};
    double chain = chain_of(c.n, L, RUN);
    measure_tile<LAYER, T, Stats>(
        c, own, tile, [&](Index top, int count, const T* const* x, const Stats& of) {
            T* y[GROUP];
            auto m_of = [&](int r) { return std::fabs(of.mean[r]) * of.rstd[r]; };
            bool near = NEAREST && !is_far(m_of(0));
            Errors errors[GROUP];
            double bounds[GROUP];
            for (int r = 0; r < count; r++) {
                Index i = top + r;
                if (LAYER && c.mean_lo) {
                    c.mean[i] = of.mean[r];
                    c.mean_lo[i] = of.mean_lo[r];
                }
                if (c.rstd) c.rstd[i] = of.rstd[r];
                if (NEAREST) {
                    double spread = std::sqrt(of.square[r]) * of.rstd[r];
                    double d = of.d[r] * of.rstd[r];
                    // is_uncertified() centers x first, so its bound has no M term.
                    errors[r] = errors_of_xhat<LAYER>(spread, d * d, 0, chain);
                    bounds[r] = bound_of_y(errors[r], spread, c.n, near ? m_of(r) : 0);
                    c.marks[i] = errors[r].a < 1 ? 0 : UNCERTIFIED;
                    if (c.spread) c.spread[i] = spread;
                }
                y[r] = (T*)row_of(c.y, i);
            }
            using Far = Mode<LAYER, LAYER, NEAREST>;
            if constexpr (!NEAREST) {
                // y of another type than x.
                for (int r = 0; r < count && c.staged; r++) {
                    write_y<1, Far, false, T, double>(
                        x, &own.high, c.n, of, r, parameters, columns_ahead<T>(c, c.step));
                    finish_row(c, own, top + r, (char*)y[r], 0);
                }
                if (c.staged) return;
            }
            using Near = Mode<LAYER, LAYER && !NEAREST, NEAREST>;
            auto two =
                c.past ? write_y<ROWS_OF_Y, Far, true, T, T> : write_y<ROWS_OF_Y, Far, false, T, T>;
            auto one = c.past ? write_y<1, Far, true, T, T> : write_y<1, Far, false, T, T>;
            if (near)
                two = c.past ? write_y<ROWS_OF_Y, Near, true, T, T>
                             : write_y<ROWS_OF_Y, Near, false, T, T>;
            if (near) one = c.past ? write_y<1, Near, true, T, T> : write_y<1, Near, false, T, T>;
            Index ahead = columns_ahead<T>(c, c.step);
            Uncertified uncertified[ROWS_OF_Y] = {{(Index*)own.low, 0}, {(Index*)own.size, 0}};
            for (int r = 0; r < count; r += ROWS_OF_Y) {
                int together = r + ROWS_OF_Y <= count ? ROWS_OF_Y : 1;
                (together == 1 ? one : two)(
                    x, y + r, c.n, of, r, parameters, ahead, uncertified, bounds + r);
                for (int k = r; NEAREST && k < r + together; k++)
                    if (!c.marks[top + k] && uncertified[k - r].count &&
                        is_uncertified<LAYER>(
                            x[k], y[k], c.n, of, k, parameters, errors[k], uncertified[k - r]))
                        c.marks[top + k] = UNCERTIFIED;
            }
        });
    if (NEAREST)
        do_again(c, tile,
            [&](const Call& alone, Tile rows, bool) { pairs::forward<LAYER>(alone, own, rows); });
}

// ---- backward ----

// Does a row in pairs, and adds its terms to the float64 sums of a tile.
template <bool LAYER> void add_row_in_pairs(const Call& c, const Own& own, Tile row, double* sums) {
    constexpr int P = pairs::P;
    Index p = c.padded_n();
    pairs::Columns none = {nullptr, p, false};
    pairs::backward<LAYER, true>(c, own, row, none, nullptr);
    if (c.marks[row.first] & UNSUMMED) return;
    const double* dy = row_as<double>(c, c.dy, row.first, own.dy[0]);
    auto add = [&](Lanes<P> part, double* to) {
        for (int i = 0; i < Lanes<P>::REGISTERS_OF; i++)
            merge_columns((double*)&part.v[i], to + i * WIDEST, to + p + i * WIDEST, WIDEST);
    };
    each_columns<P>(0, c.n, [&](Index j, Index count) {
        Lanes<P> d = load<P>(dy + j, count);
        Lanes<P>* squares = (Lanes<P>*)(sums + 4 * p + j);
        Lanes<P>* ones = (Lanes<P>*)(sums + 5 * p + j);
        pairs::Pairs term = pairs::load_pair(own.xhat + j, p) * d;
        add(term.high, sums + j);
        add(term.low, sums + j);
        add(d, sums + 2 * p + j);
        // Bounds of the size of float64's, far above those of pairs.
        *squares = fma(d, d, *squares);
        *ones = *ones + broadcast<P>(1.0);
    });
}

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
    if (overflowed) __atomic_store_n(c.overflowed, true, __ATOMIC_RELAXED);
    c.marks[i] = overflowed && !is_finite(c.y.type, dx, c.n) && is_finite(c.y.type, dy, c.n) &&
                 is_finite(c.x.type, row_of(c.x, i), c.n);
    if (!c.marks[i]) memcpy(dy, dx, (size_t)(c.n * BYTES[c.y.type]));
}

template <int R, class M, class T>
Index backward_groups(
    const Call& c, const Own& own, Tile part, Index top, const Sums& sums, Errors& worst) {
    Back<T> rows[2][R];
    double chain = chain_of(c.n, L, RUN);
    auto begin = [&](Index i, int which) {
        for (int r = 0; r < R; r++) {
            const T* dy = (const T*)row_of(c.dy, i + r);
            const T* x = (const T*)row_of(c.x, i + r);
            double* kept = own.kept + (which * R + r) * 2 * c.padded_n();
            Back<T>& of = rows[which][r];
            of = {dy, x, M::LAYER ? c.mean[i + r] : 0, M::LAYER ? c.mean_lo[i + r] : 0,
                c.rstd[i + r], M::LAYER ? pivot(dy, c.wide_gamma, c.n) : 0, kept,
                kept + c.padded_n()};
            if (!M::NEAREST) continue;
            of.errors = errors_again<M::LAYER>(
                c, i + r, M::CENTER ? 0 : std::fabs(of.mean) * of.rstd, chain);
            of.spread = c.spread[i + r];
            if (__builtin_expect(of.errors.a < HARD && of.errors.b < HARD, 1)) {
                worst = {larger(worst.a, of.errors.a), larger(worst.b, of.errors.b)};
                continue;
            }
            // A hard row: zeros take its place in the sums.
            memset(own.zeros, 0, (size_t)c.n * sizeof(T));
            c.marks[i + r] = UNCERTIFIED | UNSUMMED;
            of = {(const T*)own.zeros, (const T*)own.zeros, 0, 0, 0, 0, kept, kept + c.padded_n()};
        }
        auto pull_rows = i % c.tile_rows == 0 ? pull<true, R, M, T> : pull<false, R, M, T>;
        pull_rows(rows[which], c.n, c.wide_gamma, sums);
    };
    bool early = c.n <= (KEPT<T> ? EARLY_KEPT : EARLY);
    if (early && top + R <= part.stop) begin(top, 0);
    for (int now = 0; top + R <= part.stop; top += R, now = early - now) {
        if (!early)
            begin(top, now);
        else if (top + 2 * R <= part.stop)
            begin(top + R, 1 - now);
        for (int r = 0; r < R && c.y.data; r++) {
            const Back<T>& of = rows[now][r];
            if (M::NEAREST && c.marks[top + r]) continue;
            char* place = row_of(c.y, top + r);
            char* to = c.over ? (char*)own.low : place;
            if (c.staged) {
                write_dx<Mode<M::LAYER, M::CENTER, false>, false>(
                    of, own.high, c.n, c.wide_gamma, 0);
                finish_row(c, own, top + r, to, 0);
                if (c.over) put_over_dy(c, top + r, to);
                continue;
            }
            if constexpr (sizeof(T) < 8) {
                auto write = c.past && !c.over ? write_dx<M, true, T, T> : write_dx<M, false, T, T>;
                T* dx = (T*)to;
                bool bounded = of.errors.a < 1 && of.rms_g < __builtin_inf();
                if (M::NEAREST && bounded && of.rms_g == 0) {  // all of g - m is 0, and so is dx
                    memset(dx, 0, (size_t)c.n * sizeof(T));
                    continue;
                }
                Uncertified uncertified = {(Index*)own.size, 0};
                write(of, dx, c.n, c.wide_gamma, columns_ahead<T>(c, R), &uncertified);
                if (c.over) put_over_dy(c, top + r, to);
                if (!M::NEAREST) continue;
                if (!bounded || (uncertified.count &&
                                    is_uncertified<M>(of, dx, c.n, c.wide_gamma, uncertified)))
                    c.marks[top + r] = UNCERTIFIED;
            }
        }
    }
    return top;
}

template <class M, class T>
void backward_rows(const Call& c, const Own& own, Tile part, const Sums& sums, Errors& worst) {
    Index top = part.first;
    if (!M::NEAREST || c.n <= LONG)
        top = backward_groups<ROWS_OF_DX<M::NEAREST>, M, T>(c, own, part, top, sums, worst);
    backward_groups<1, M, T>(c, own, part, top, sums, worst);
}

template <class M, class T> void backward(const Call& c, const Own& own, Index number) {
    constexpr Index most = PART_OF<M::NEAREST>;
    Tile tile = tile_of(c, number);
    Index p = c.padded_n();
    Errors worst = {0, 0};
    auto do_rows = [&](Tile part, const Sums& sums) {
        each_strip(c, own, part, [&](const Call& plain, Tile strip) {
            backward_rows<M, T>(plain, own, strip, sums, worst);
        });
    };
    double* sums = c.sums + c.sums_per_tile() * number;
    if (!c.summing()) {
        // Unwanted sums go to scratch memory: a loop without them would save too little for a
        // second version.
        do_rows(tile, {own.part, own.part + p, own.part + 2 * p, own.part + 3 * p});
    } else {
        // The first part sums into the tile's own vectors; the sums of others are added with
        // compensation.
        double* of_dbeta = sums + c.words() * p;
        Sums part = {sums, of_dbeta, sums + 4 * p, sums + 5 * p};
        for (double* high : {sums, of_dbeta})
            if (c.words() == 2) memset(high + p, 0, (size_t)p * sizeof(double));
        for (Index top = tile.first; top < tile.stop; top += most) {
            if (top > tile.first) {
                part.dgamma = own.part;
                part.dbeta = own.part + p;
                memset(own.part, 0, (size_t)(2 * p) * sizeof(double));
            }
            do_rows({top, at_most(top + most, tile.stop)}, part);
            if (top == tile.first) continue;
            merge_columns(part.dgamma, sums, sums + p, c.n);
            merge_columns(part.dbeta, of_dbeta, of_dbeta + p, c.n);
        }
        c.ranges[2 * number] = worst.a + (double)at_most(most, c.tile_rows) * U;
        c.ranges[2 * number + 1] = worst.b;
    }
    if (M::NEAREST)
        do_again(c, tile, [&](const Call& alone, Tile rows, bool unsummed) {
            each_strip(alone, own, rows, [&](const Call& plain, Tile strip) {
                pairs::Columns none = {nullptr, p, false};
                if (unsummed && c.summing())
                    add_row_in_pairs<M::LAYER>(plain, own, strip, sums);
                else
                    pairs::backward<M::LAYER, true>(plain, own, strip, none, nullptr);
            });
        });
}

// ---- one instruction set ----

void forward_in_pairs(const Call& c, const Own& own, Tile tile) {
    (c.rms ? pairs::forward<false> : pairs::forward<true>)(c, own, tile);
}

void backward_in_pairs(const Call& c, const Own& own, Index number) {
    pairs::Columns over = {nullptr, c.padded_n(), c.nearest};
    double* range = nullptr;
    if (c.summing()) {
        over.at = c.sums + c.sums_per_tile() * number;
        range = c.ranges + 2 * number;
        memset(over.at, 0, (size_t)c.sums_per_tile() * sizeof(double));
        range[0] = range[1] = 0;
    }
    bool staged = c.staged;
    auto back = c.rms    ? staged ? pairs::backward<false, true> : pairs::backward<false, false>
                : staged ? pairs::backward<true, true>
                         : pairs::backward<true, false>;
    each_strip(c, own, tile_of(c, number),
        [&](const Call& plain, Tile strip) { back(plain, own, strip, over, range); });
    if (over.held) pairs::settle_columns(over, c.n);
}

template <class T, bool LAYER>
void backward_in_float64(const Call& c, const Own& own, Index number) {
    // Rows of a tile are usually alike: let the first decide.
    Index first = tile_of(c, number).first;
    if (!c.nearest)
        backward<Mode<LAYER, LAYER, false>, T>(c, own, number);
    else if (LAYER && !is_far(std::fabs(c.mean[first]) * c.rstd[first]))
        backward<Mode<LAYER, false, true>, T>(c, own, number);
    else
        backward<Mode<LAYER, LAYER, true>, T>(c, own, number);
}

void do_tile(const Call& c, Index number, int thread) {
    Own own = own_of(c, thread);
    auto forth = forward_in_pairs;
    auto back = backward_in_pairs;
    of_type(c.x.type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(T) < 8) {
            if (c.in_pairs) return;
            back = c.rms ? backward_in_float64<T, false> : backward_in_float64<T, true>;
            forth = c.rms       ? c.nearest ? forward<T, false, true> : forward<T, false, false>
                    : c.nearest ? forward<T, true, true>
                                : forward<T, true, false>;
        }
    });
    if (c.backward)
        back(c, own, number);
    else
        each_strip(c, own, tile_of(c, number),
            [&](const Call& plain, Tile strip) { forth(plain, own, strip); });
    if (c.past) __atomic_thread_fence(__ATOMIC_SEQ_CST);
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
