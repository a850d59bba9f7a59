// The kernels without Python. Prints a digest of the results of each dtype, norm and rounding, by
// the instruction set that is named; with "threads", calls them from several threads at once, and
// says whether a bit differs.
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "jobs.h"
#include "memory.h"

namespace {

struct Random {
    uint64_t state = 88172645463325252u;
    uint64_t operator()() {  // xorshift: Marsaglia, J. Stat. Softw. 8 (2003) 14
        state ^= state << 13;
        state ^= state >> 7;
        return state ^= state << 17;
    }
    double signed_unit() { return (double)(int64_t)(*this)() * 0x1p-63; }
};

using Bytes = std::vector<uint8_t>;

// Bytes before the elements of an array: NumPy's arrays need not be aligned.
constexpr Index SHIFT = 1;

// Draws elements: of any size, tiny, huge, with an offset, near one another; for float16 any finite
// bits.
Bytes elements(Random& random, Index count, Type type, int scale) {
    Bytes drawn((size_t)(count * BYTES[type] + SHIFT));
    for (Index i = 0; i < count; i++) {
        double v = random.signed_unit();
        if (scale == 1) v = v * 1e-38;
        if (scale == 2) v = v * 3e4;
        if (scale == 3) v = v + 100;
        if (scale == 4) v = v * 1e-6 + 1;
        float single = (float)v;
        uint32_t bits;
        memcpy(&bits, &single, 4);
        if (type == BF16) bits >>= 16;
        if (type == F16)
            bits = (uint32_t)(scale < 3 ? random() % 0x7c00 : 0x3c00 + random() % 64) |
                   (uint32_t)(random() & 0x8000);
        const void* from = type == F64 ? (const void*)&v : &bits;
        memcpy(drawn.data() + SHIFT + i * BYTES[type], from, (size_t)BYTES[type]);
    }
    return drawn;
}

Rows rows_of(Bytes& data, Type type, Index n) {
    return {(char*)data.data() + SHIFT, type, n * BYTES[type]};
}

// The same rows with their elements apart, in Fortran order; and back.
Bytes turned(const Bytes& from, Index rows, Index n, Index bytes) {
    Bytes to(from.size());
    for (Index i = 0; i < rows; i++)
        for (Index j = 0; j < n; j++)
            memcpy(to.data() + SHIFT + (j * rows + i) * bytes,
                from.data() + SHIFT + (i * n + j) * bytes, (size_t)bytes);
    return to;
}
Rows turned_rows_of(Bytes& data, Type type, Index rows) {
    return {(char*)data.data() + SHIFT, type, BYTES[type], rows, 0, rows * BYTES[type]};
}

void add_to(uint64_t& digest, const void* data, size_t bytes) {  // FNV-1a
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ ((const uint8_t*)data)[i]) * 1099511628211u;
}

// Runs a forward and its backward; adds the results to the digest. STRIDED: in Fortran order.
template <bool STRIDED>
void both_ways(Random& random, Type type, bool rms, bool nearest, Index rows, Index n, int scale,
    int threads, uint64_t& digest) {
    Call c;
    c.rms = rms;
    c.nearest = nearest;
    c.eps = 1e-5;
    c.rows = rows;
    c.n = n;
    Bytes x = elements(random, rows * n, type, scale);
    Bytes dy = elements(random, rows * n, type, scale % 3);
    auto place = [&](Bytes& data, bool filled) {
        if (STRIDED && filled) data = turned(data, rows, n, BYTES[type]);
        return STRIDED ? turned_rows_of(data, type, rows) : rows_of(data, type, n);
    };
    Bytes y(x.size());
    Bytes dx(x.size());
    Bytes gamma = elements(random, n, type, 0);
    Bytes beta = elements(random, n, type, 0);
    Bytes sums[2] = {gamma, beta};
    Bytes uncertified((size_t)(2 * n));
    std::vector<double> words((size_t)(6 * rows));
    Bytes marks((size_t)rows);
    bool has_pairs = nearest || type == F64;
    double** places[] = {&c.mean, &c.mean_lo, &c.rstd, &c.rstd_lo, &c.mean_tail, &c.spread};
    for (Index i = 0; i < 6; i++) {
        bool of_layer = i == 0 || i == 1 || i == 4;
        bool of_pairs = i == 3 || i == 4;
        if ((rms && of_layer) || (type != F64 && of_pairs) || (!has_pairs && i == 5)) continue;
        *places[i] = words.data() + i * rows;
    }
    if (has_pairs) c.marks = marks.data();
    c.x = place(x, true);
    c.y = place(y, false);
    c.gamma = (char*)gamma.data() + SHIFT;
    c.beta = (char*)beta.data() + SHIFT;
    c.gamma_type = c.beta_type = type;
    int state = jobs::run(c, threads) == jobs::DECLINED;
    for (uint8_t& mark : marks) mark = 0;
    c.backward = true;
    c.beta = nullptr;
    c.y = place(dx, false);
    c.dy = place(dy, true);
    for (int i = 0; i < 2; i++) {
        c.sums_out[i] = (char*)sums[i].data() + SHIFT;
        c.sums_type[i] = type;
    }
    for (int i = 0; i < 2; i++) c.uncertified[i] = uncertified.data() + i * n;
    state = 4 * state + (jobs::run(c, threads) == jobs::DECLINED);
    memory::give(c.partial[0]);
    if (STRIDED)
        for (Bytes* data : {&y, &dx}) *data = turned(*data, n, rows, BYTES[type]);
    for (Bytes* data : {&y, &dx, &sums[0], &sums[1]})
        add_to(digest, data->data() + SHIFT, data->size() - SHIFT);
    for (Bytes* data : {&uncertified, &marks}) add_to(digest, data->data(), data->size());
    add_to(digest, words.data(), words.size() * sizeof(double));
    add_to(digest, &state, sizeof state);
}

uint64_t digest_of(Type type, bool rms, bool nearest, int threads) {
    Random random;
    uint64_t digest = 14695981039346656037u;
    for (Index n : {1, 2, 3, 7, 8, 17, 31, 100, 257, 1025, 4099})
        for (int scale = 0; scale < 5; scale++) {
            Index rows = n > 31 ? 4100 / n + 1 : 140;
            uint64_t strided = digest;
            Random same = random;
            if (scale == 0)
                both_ways<true>(same, type, rms, nearest, rows, n, scale, threads, strided);
            both_ways<false>(random, type, rms, nearest, rows, n, scale, threads, digest);
            if (scale == 0 && strided != digest) return 0;
        }
    return digest;
}

int from_many_threads() {
    uint64_t expected[2] = {digest_of(F32, false, false, 1), digest_of(F64, true, false, 1)};
    bool differs[4] = {};
    std::vector<std::thread> callers;
    for (int k = 0; k < 4; k++)
        callers.emplace_back([&, k] {
            differs[k] = digest_of(k % 2 ? F64 : F32, k % 2, false, 3) != expected[k % 2];
        });
    for (std::thread& caller : callers) caller.join();
    return differs[0] || differs[1] || differs[2] || differs[3];
}

}  // namespace

int main(int count, char** words) {
    const char* names[] = {"float32", "bfloat16", "float16", "float64"};
    const char* asked = count > 1 ? words[1] : "";
    jobs::kernels = *jobs::available();
    if (!strcmp(asked, "threads")) return from_many_threads();
    for (auto kernels = jobs::available(); *kernels; kernels++)
        if (!strcmp((*kernels)->name, asked)) jobs::kernels = *kernels;
    for (Type type : {F32, BF16, F16, F64})
        for (bool rms : {false, true})
            for (bool nearest : {false, true})
                printf("%s %s %s %016llx\n", names[type], rms ? "rms" : "layer",
                    nearest ? "nearest" : "fast",
                    (unsigned long long)digest_of(type, rms, nearest, 2));
}
