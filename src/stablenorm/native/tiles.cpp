// Tiles of rows, from memory to memory. Compiled once for each instruction set, which NAME names.
#include "columns.h"
#include "finish.h"

namespace {

template <class T> Index columns_ahead(const Call& c, Index rows) {
    Index least = LEAST_AHEAD / (Index)sizeof(T), some = 2 * rows * c.n;
    return !c.ahead ? 0 : some > least ? some : least;
}

Own own_of(const Call& c, int thread) {
    Arena arena{c.own + c.own_size * thread, 0};
    return Own(c, arena);
}

struct Tile {
    Index first, stop;
};
Tile tile_of(const Call& c, Index number) {
    Index first = number * c.tile_rows, stop = first + c.tile_rows;
    return {first, stop < c.rows ? stop : c.rows};
}

// Of rows of at most so many columns, the next are measured, or pulled, before these are written: their roots and
// divisions overlap with stores. Longer ones would drive one another out of the cache: n = 16384, 0.63 against 1.
constexpr Index EARLY = 4096;

INLINE Index at_most(Index a, Index most) { return a < most ? a : most; }

// The mark of a row that is left alone; of one that is not, but of which an element is undecided.
constexpr uint8_t EXTREME = 1, UNDECIDED = 2;

// Row i of x in `room`, after adding the residual.
template <class T> INLINE const T* x_row(const Call& c, const Own& own, Index i, double* room) {
    if (c.source.data) add_residual(c, own, i);
    return row_as<T>(c, c.x, i, room, own.raw);
}

// Measures the rows of a tile, some together, and calls write(first row, how many, their x, their statistics).
template <bool LAYER, class T, class Found, class Write> INLINE void measure_tile(const Call& c, const Own& own, Tile tile, Write write) {
    Found stats[2];
    const T* x[2][GROUP];
    auto count_from = [&](Index top) { return (int)at_most(tile.stop - top, c.step); };
    auto measure_from = [&](Index top, int which) {
        for (int r = 0; r < count_from(top); r++) x[which][r] = x_row<T>(c, own, top + r, own.x[which] + r * c.apart());
        statistics<LAYER>(x[which], c, count_from(top), stats[which]);
    };
    bool early = c.n <= EARLY;
    if (early) measure_from(tile.first, 0);
    int now = 0;
    for (Index top = tile.first; top < tile.stop; top += c.step, now = 1 - now) {
        if (!early) measure_from(top, now);
        else if (top + c.step < tile.stop) measure_from(top + c.step, 1 - now);
        write(top, count_from(top), x[now], stats[now]);
    }
}

// ---- in double-double ----

namespace pairs {

Parameters parameters_of(const Call& c) { return {c.wide_gamma, c.gamma_low, c.wide_beta}; }
Results results_of(const Own& own) { return {own.high, own.low, own.size}; }

template <bool LAYER> void forward(const Call& c, const Own& own, Tile tile) {
    Parameters given = parameters_of(c);
    double bound = row_bound(c.n);
    measure_tile<LAYER, double, Stats>(c, own, tile, [&](Index top, int count, const double* const* x, const Stats& of) {
        for (int r = 0; r < count; r++) {
            Index i = top + r;
            if (c.all_rows && c.y.data) clear_between(c, own, i);
            if (LAYER && c.rest) c.mean[i] = of.mean[r], c.rest[i] = of.rest[r];
            if (c.tail) c.tail[i] = of.tail[r];
            if (c.rstd) c.rstd[i] = of.rstd[r];
            if (c.rstd_low) c.rstd_low[i] = of.rstd_low[r];
            if (c.spread) c.spread[i] = of.spread[r];
            c.marks[i] = is_extreme(of, r, x[r], c.n, LAYER) ? EXTREME : 0;
            if (c.marks[i] || !c.y.data) continue;
            auto write = [&](auto out) {
                using Out = decltype(out);
                auto how = LAYER && of.far[r] != 0 ? write_y<LAYER, LAYER, Out> : write_y<LAYER, false, Out>;
                return how(x[r], out, c.n, of, r, given);
            };
            if (finish_pairs(c, own, i, bound, write)) c.marks[i] = UNDECIDED;
        }
    });
}

// Writes a row to where and as what it is wanted; tells whether an element is undecided.
template <class Write> bool finish_pairs(const Call& c, const Own& own, Index i, double bound, Write write) {
    if (!c.results_whole) return write(ToFloat64{(double*)row_of(c.y, i)}), false;
    bool certain = c.nearest && c.y.whole && c.y.type != F64 && !(c.backward && c.plus.data) && of_type(c.y.type, [&](auto* kind) {
        using To = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(To) == 8) return false;
        else return !any(write(ToNarrow<To>{(To*)row_of(c.y, i), bound}).open);
    });
    if (certain) return false;
    write(ToPairs{results_of(own)});
    return finish_row(c, own, i, bound);
}

// Adds a row's range of |dy| to that of a tile: the largest, and one over the last bit of the smallest.
INLINE void add_range(const Call& c, Pair<double> range, double* of_tile) {
    if (range.low == 0) return;
    double digits = c.dy.type == F64 ? 0x1p53 : c.dy.type == F32 ? 0x1p24 : 0x1p11;
    of_tile[0] = std::fmax(of_tile[0], range.low), of_tile[1] = std::fmax(of_tile[1], digits / range.high);
}

// ty of a row, given the tangent of xhat as pairs.
INLINE void push(const Call& c, const Own& own, const double* h) {
    const double *scale = c.tangents, *low = scale + c.n, *tgamma = low + c.n, *tbeta = tgamma + c.n;
    for (Index j = 0; j < c.n; j++) {
        Pair<double> moved = Pair<double>{own.high[j], own.low[j]} * Pair<double>{scale[j], low[j]};
        Pair<double> ty = moved + Pair<double>{h[j], h[c.apart() + j]} * tgamma[j] + tbeta[j];
        own.high[j] = ty.high, own.low[j] = ty.low;
    }
}


// The columns whose sums are wanted, if these are few.
struct Chosen {
    Index *columns, count = 0;
    Chosen(const Call& c, double* room) : columns((Index*)room) {
        for (Index j = 0; c.wanted && c.dy.whole && j < c.n; j++)
            if (c.wanted[j] | c.wanted[c.n + j]) columns[count++] = j;
        // One by one, an element takes as long as eight.
        if (count > c.n / 8) count = 0;
    }
    // Those of a row.
    const double* operator()(Type type, const char* row, double* room) const {
        for (Index k = 0; k < count; k++) lift_row(type, row + columns[k] * BYTES[type], room + k, 1);
        return room;
    }
};

// The row's words; false, and a mark, if it is extreme.
template <bool LAYER> bool begin_row(const Call& c, const Own& own, Index i, int r, const Chosen& chosen, double* of_tile, Back& of) {
    if (c.marks[i]) return false;
    Index apart = r * c.apart();
    double* room = own.dy[0] + apart;
    of.dy = chosen.count ? chosen(c.dy.type, row_of(c.dy, i), room) : row_as<double>(c, c.dy, i, room, own.raw);
    Pair<double> range = range_of(of.dy, chosen.count ? chosen.count : c.n);
    if (range.high < SMALLEST || !(range.low <= LARGEST)) return c.marks[i] = EXTREME, false;
    if (of_tile) add_range(c, range, of_tile);
    of.x = row_as<double>(c, c.x, i, own.x[0] + apart, own.raw), of.m = {0, 0};
    if (c.rstd_low) {
        of.rstd = {c.rstd[i], c.rstd_low[i]}, of.spread = c.spread ? c.spread[i] : 0;
        if (LAYER) of.mean = c.mean[i], of.rest = c.rest[i], of.tail = c.tail ? c.tail[i] : 0;
    } else {
        Stats found;
        statistics<LAYER>(&of.x, c, 1, found);
        if (is_extreme(found, 0, of.x, c.n, LAYER)) return c.marks[i] = EXTREME, false;
        of.rstd = {found.rstd[0], found.rstd_low[0]}, of.spread = found.spread[0];
        of.mean = found.mean[0], of.rest = found.rest[0], of.tail = found.tail[0];
    }
    if (chosen.count) of.x = chosen(F64, (const char*)of.x, own.x[1] + apart);
    else if (LAYER) of.m = pivot(of.dy, parameters_of(c), c.n);
    return true;
}

template <bool LAYER> void write_row(const Call& c, const Own& own, Index i, const Back& of, const double* h) {
    auto write = [&](auto out) {
        using Out = decltype(out);
        auto how = LAYER && of.m.high != 0 ? write_dx<LAYER, LAYER, Out> : write_dx<LAYER, false, Out>;
        out = how(of, out, c.n, parameters_of(c), h, c.apart());
        if (c.tangents) push(c, own, h);
        return out;
    };
    if (finish_pairs(c, own, i, row_bound(c.n) * of.rstd.high, write)) c.marks[i] = UNDECIDED;
}

template <bool LAYER, bool WHOLE> void backward(const Call& c, const Own& own, Tile tile, double* sums, double* range) {
    Index p = c.apart(), held = 0;
    Chosen chosen(c, own.size);
    Index n = chosen.count ? chosen.count : c.n;
    Columns over = {sums, p, c.nearest};
    if (over.at) memset(over.at, 0, (size_t)c.sums_per_tile() * sizeof(double)), range[0] = range[1] = 0;
    bool exact = true;
    for (Index j = 0; j < c.n; j++) exact = exact && c.gamma_low[j] == 0;
    pairs::Sums along = {};
    Back rows[GROUP] = {};
    for (Index top = tile.first; top < tile.stop; top += c.step) {
        Index at[GROUP];
        int count = 0;
        for (Index i = top; i < at_most(top + c.step, tile.stop); i++) {
            if (c.all_rows && c.y.data) clear_between(c, own, i);
            Back& of = rows[count];
            if (!begin_row<LAYER>(c, own, i, count, chosen, range, of)) continue;
            auto pull_row = LAYER && of.m.high != 0 ? pull<LAYER, LAYER, WHOLE> : pull<LAYER, false, WHOLE>;
            pull_row(of, n, parameters_of(c), along, count, own.xhat + 2 * count * p, over);
            at[count++] = i;
        }
        settle(along, c.n, rows, count, exact);
        for (int r = 0; r < count && c.y.data; r++) write_row<LAYER>(c, own, at[r], rows[r], own.xhat + 2 * r * p);
        if (over.at && ((held += count) > PART - c.step || top + c.step >= tile.stop)) settle_columns(over, n), held = 0;
    }
    // To their places, the last first.
    for (Index k = chosen.count - 1; k >= 0; k--)
        for (int which = 0; which < 6; which++) sums[which * p + chosen.columns[k]] = sums[which * p + k];
}

}  // namespace pairs

// ---- forward ----

// The rows of a tile that are left open one more time, as `once` does some in pairs.
template <class Once> void do_again(const Call& c, Tile tile, Once once) {
    Call alone = c;
    alone.wide = alone.results_whole = true, alone.all_rows = 0, alone.source.data = nullptr, alone.sums_out[0] = alone.sums_out[1] = nullptr;
    // The statistics stay.
    alone.mean = alone.rest = alone.rstd = alone.spread = nullptr;
    for (Index i = tile.first, stop; i < tile.stop; i = stop + 1) {
        for (stop = i; stop < tile.stop && c.marks[stop]; stop++) c.marks[stop] = 0;
        if (i < stop) once(alone, Tile{i, stop});
        // What follows need not be kept apart: of the sums, all columns that such a row spoils are left open.
        for (Index k = i; k < stop && c.backward; k++) c.marks[k] = c.marks[k] ? UNDECIDED : 0;
    }
}

template <class T, bool LAYER, bool NEAREST> void forward(const Call& c, Index number, int thread) {
    Own own = own_of(c, thread);
    Tile tile = tile_of(c, number);
    Parameters given = {c.wide_gamma, c.wide_beta, c.sizes};
    measure_tile<LAYER, T, Stats>(c, own, tile, [&](Index top, int count, const T* const* x, const Stats& of) {
        T* y[GROUP];
        Errors errors[GROUP];
        double bounds[GROUP];
        for (int r = 0; r < count; r++) {
            Index i = top + r;
            if (LAYER && c.rest) c.mean[i] = of.mean[r], c.rest[i] = of.rest[r];
            if (c.rstd) c.rstd[i] = of.rstd[r];
            if (NEAREST) {
                double size = std::sqrt(of.square[r]) * of.rstd[r];
                errors[r] = errors_of_xhat<LAYER>(size, std::fabs(of.d[r]) * of.rstd[r], chain_of(c.n, c.block, L));
                bounds[r] = bound_of_y(errors[r], size, c.n);
                c.marks[i] = errors[r].a < 1 ? 0 : UNDECIDED;
                if (c.spread) c.spread[i] = size;
            }
            if (!c.y.data) continue;  // the statistics alone are wanted
            if (c.all_rows) clear_between(c, own, i);
            y[r] = (T*)row_of(c.y, i);
            if (!c.results_whole) continue;
            write_y<1, LAYER, false, false>(x, &own.high, c.n, of, r, given, 0);
            finish_row(c, own, i, 0);
        }
        if (!c.y.data || c.results_whole) return;
        auto some = c.past ? write_y<ROWS_OF_Y, LAYER, true, NEAREST, T, T> : write_y<ROWS_OF_Y, LAYER, false, NEAREST, T, T>;
        auto one = c.past ? write_y<1, LAYER, true, NEAREST, T, T> : write_y<1, LAYER, false, NEAREST, T, T>;
        Index ahead = columns_ahead<T>(c, c.step);
        Doubts doubts[ROWS_OF_Y] = {{(Index*)own.low, 0}, {(Index*)own.size, 0}};
        for (int r = 0; r < count; r += ROWS_OF_Y) {
            int together = r + ROWS_OF_Y <= count ? ROWS_OF_Y : 1;
            (together == 1 ? one : some)(x, y + r, c.n, of, r, given, ahead, doubts, bounds + r);
            for (int k = r; NEAREST && k < r + together; k++)
                if (!c.marks[top + k] && is_open<LAYER>(x[k], y[k], c.n, of, k, given, errors[k], doubts[k - r])) c.marks[top + k] = UNDECIDED;
        }
    });
    if (NEAREST) do_again(c, tile, [&](const Call& alone, Tile row) { pairs::forward<LAYER>(alone, own, row); });
}

// ---- backward, and the jvp, which is dx of the tangent of x without gamma ----

// ty of a row, given the tangent of xhat in own.high.
template <class T> void push(const Call& c, const Own& own, const Back<T>& of) {
    const double *scale = c.tangents, *tgamma = scale + 2 * c.n, *tbeta = tgamma + c.n;
    double rstd = of.rstd, s = -of.rest * rstd, mean = of.mean;
    double* x = own.size;
    lift(of.x, x, c.n);
    for (Index j = 0; j < c.n; j++) {
        double turned = fma(fma(x[j] - mean, rstd, s), tgamma[j], tbeta[j]);
        own.high[j] = fma(own.high[j], scale[j], turned);
    }
}

// The errors of xhat again, by what the forward kept: sqrt(q), and with it D.
template <bool LAYER> INLINE Errors errors_again(const Call& c, Index i) {
    double size = c.spread[i], rstd = c.rstd[i], square = size * size - 1 + c.eps * rstd * rstd;
    return errors_of_xhat<LAYER>(size, LAYER ? std::sqrt((square > 0 ? square : 0) + 0x1p-40) : 0, chain_of(c.n, c.block, L));
}

template <int R, class T, bool LAYER, bool NEAREST>
Index backward_groups(const Call& c, const Own& own, Tile part, Index top, const Sums& sums, Errors& worst) {
    Back<T> rows[2][R];
    double chain = chain_of(c.n, c.block, FEW<NEAREST>);
    auto begin = [&](Index i, int which) {
        for (int r = 0; r < R; r++) {
            Index apart = r * c.apart();
            const T* dy = row_as<T>(c, c.dy, i + r, own.dy[which] + apart, own.raw);
            const T* x = row_as<T>(c, c.x, i + r, own.x[which] + apart, own.raw);
            Back<T>& of = rows[which][r];
            of = {dy, x, LAYER ? c.mean[i + r] : 0, LAYER ? c.rest[i + r] : 0, c.rstd[i + r], LAYER ? pivot(dy, c.wide_gamma, c.n) : 0};
            if (!NEAREST) continue;
            of.errors = errors_again<LAYER>(c, i + r), of.spread = c.spread[i + r];
            worst = {std::fmax(worst.a, of.errors.a), std::fmax(worst.b, of.errors.b)};
        }
        pull<R, LAYER, NEAREST>(rows[which], c.n, c.wide_gamma, sums, c.block);
    };
    bool early = c.n <= EARLY;
    if (early && top + R <= part.stop) begin(top, 0);
    for (int now = 0; top + R <= part.stop; top += R, now = 1 - now) {
        if (!early) begin(top, now);
        else if (top + 2 * R <= part.stop) begin(top + R, 1 - now);
        for (int r = 0; r < R && c.y.data; r++) {
            const Back<T>& of = rows[now][r];
            if (c.all_rows) clear_between(c, own, top + r);
            if (c.results_whole) {
                write_dx<LAYER, false, false>(of, own.high, c.n, c.wide_gamma, 0);
                if (c.tangents) push(c, own, of);
                finish_row(c, own, top + r, 0);
                continue;
            }
            auto write = c.past ? write_dx<LAYER, true, NEAREST, T, T> : write_dx<LAYER, false, NEAREST, T, T>;
            T* dx = (T*)row_of(c.y, top + r);
            bool bounded = of.errors.a < 1 && of.size < __builtin_inf();
            if (NEAREST && bounded && of.size == 0) {  // all of g - m is 0, and so is dx
                memset(dx, 0, (size_t)c.n * sizeof(T)), c.marks[top + r] = 0;
                continue;
            }
            Doubts doubts = {(Index*)own.size, 0};
            write(of, dx, c.n, c.wide_gamma, columns_ahead<T>(c, R), &doubts, chain);
            if (!NEAREST) continue;
            bool open = !bounded || is_open<LAYER>(of, dx, c.n, c.wide_gamma, doubts, chain);
            c.marks[top + r] = open ? UNDECIDED : 0;
        }
    }
    return top;
}

template <class T, bool LAYER, bool NEAREST> void backward_rows(const Call& c, const Own& own, Tile part, const Sums& sums, Errors& worst) {
    Index top = backward_groups<2, T, LAYER, NEAREST>(c, own, part, part.first, sums, worst);
    backward_groups<1, T, LAYER, NEAREST>(c, own, part, top, sums, worst);
}

template <class T, bool LAYER, bool NEAREST> void backward(const Call& c, Index number, int thread) {
    constexpr Index most = PART_OF<NEAREST>;
    Own own = own_of(c, thread);
    Tile tile = tile_of(c, number);
    Index p = c.apart();
    Errors worst = {0, 0};
    if (!c.summing()) {
        // To sum where nobody wants the sums takes less than a second version of the loop is worth.
        memset(own.part, 0, (size_t)(4 * p) * sizeof(double));
        backward_rows<T, LAYER, NEAREST>(c, own, tile, {own.part, own.part + p, own.part + 2 * p, own.part + 3 * p}, worst);
    } else {
        // Of one part, the sums are the tile's own; of several, they are added to these with compensation.
        double* sums = c.sums + c.sums_per_tile() * number;
        bool deep = c.tile_rows > most;
        memset(sums, 0, (size_t)c.sums_per_tile() * sizeof(double));
        Sums part = deep ? Sums{own.part, own.part + p, sums + 4 * p, sums + 5 * p} : Sums{sums, sums + 2 * p, sums + 4 * p, sums + 5 * p};
        for (Index top = tile.first; top < tile.stop; top += most) {
            if (deep) memset(own.part, 0, (size_t)(2 * p) * sizeof(double));
            backward_rows<T, LAYER, NEAREST>(c, own, {top, at_most(top + most, tile.stop)}, part, worst);
            if (!deep) continue;
            merge_columns(part.dgamma, sums, sums + p, c.n);
            merge_columns(part.dbeta, sums + 2 * p, sums + 3 * p, c.n);
        }
        c.ranges[2 * number] = worst.a + (double)at_most(most, c.tile_rows) * U, c.ranges[2 * number + 1] = worst.b;
    }
    if (NEAREST && c.y.data) do_again(c, tile, [&](const Call& alone, Tile row) { pairs::backward<LAYER, true>(alone, own, row, nullptr, nullptr); });
}

// ---- one instruction set ----

void do_wide(const Call& c, Index number, int thread) {
    Own own = own_of(c, thread);
    double *sums = c.summing() ? c.sums + c.sums_per_tile() * number : nullptr, *range = sums ? c.ranges + 2 * number : nullptr;
    bool whole = c.results_whole;
    auto back = c.rms ? whole ? pairs::backward<false, true> : pairs::backward<false, false>
                      : whole ? pairs::backward<true, true> : pairs::backward<true, false>;
    if (c.backward) back(c, own, tile_of(c, number), sums, range);
    else (c.rms ? pairs::forward<false> : pairs::forward<true>)(c, own, tile_of(c, number));
}

template <class T, bool LAYER> void do_narrow(const Call& c, Index number, int thread) {
    auto back = c.nearest ? backward<T, LAYER, true> : backward<T, LAYER, false>;
    auto ahead = c.nearest ? forward<T, LAYER, true> : forward<T, LAYER, false>;
    (c.backward ? back : ahead)(c, number, thread);
}

void do_tile(const Call& c, Index tile, int thread) {
    // Rows of two types are lifted to float32.
    Type type = c.wide ? F64 : c.backward && c.dy.type != c.x.type ? F32 : c.x.type;
    of_type(type, [&](auto* kind) {
        using T = std::remove_pointer_t<decltype(kind)>;
        if constexpr (sizeof(T) == 8) do_wide(c, tile, thread);
        else (c.rms ? do_narrow<T, false> : do_narrow<T, true>)(c, tile, thread);
    });
    if (c.past) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (c.all_rows && c.y.data && tile == c.tiles - 1) clear_between(c, own_of(c, thread), c.rows);
}

}  // namespace

// By default the only ones, as in the tests without Python.
#if !defined(NAME) && defined(__aarch64__)
#define NAME kernels_arm64
#define INSTRUCTIONS "arm64"
#elif !defined(NAME)
#define NAME kernels_x86_64_v3
#define INSTRUCTIONS "x86-64-v3"
#endif
extern const Kernels NAME = {INSTRUCTIONS, 32, prepare, do_tile, finish};
