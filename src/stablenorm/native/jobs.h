// A call from its arrays to its results, and which kernels do it.
#pragma once
#include "call.h"

namespace jobs {

enum State { DONE, DECLINED, NO_MEMORY };

// Plans a call: tiles, ways and what its results need. By the shape and dtypes alone.
void plan(Call& c);

// Does it; DECLINED, and nothing written, if gamma, beta or eps is of extreme size. With `samples`, that many
// calls whose arrays are so many bytes apart, each as a thread alone would do it.
struct Samples {
    Index count = 0;
    Index x = 0, y = 0, dy = 0, source = 0, plus = 0, gamma = 0, beta = 0, statistics = 0, marks = 0;
    Index sums[2] = {0, 0}, old[2] = {0, 0}, undecided[2] = {0, 0};
};
State run(Call& c, const Samples& samples, int threads);

// The kernels that this processor can run, the best first, then null; and those in use.
const Kernels* const* available();
extern const Kernels* kernels;

}  // namespace jobs
