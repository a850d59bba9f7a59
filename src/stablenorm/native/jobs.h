// A call from its arrays to its results, and the choice of kernels.
#pragma once
#include "pool.h"

namespace jobs {

enum State { DONE, DECLINED, NO_MEMORY, OVERFLOWED };

// Plans a call by its shape and dtypes alone: tiles, arithmetic, stores.
void plan(Call& c);

// Rows of a tile of a backward. Blocks of a call end where tiles end, so that the sums keep their bits.
Index backward_rows(Index rows, Index n, bool nearest);

// Whether float64 dy beside narrower data has products beyond float64's range: such rows go to pairs, and to integers.
bool has_huge_dy(const Call& c);

// Runs a call. OVERFLOWED: done, but an operation overflowed. DECLINED, and nothing written: gamma, beta or eps is out of range,
// or y may overflow that takes the place of x.
State run(Call& c, int threads);

// The kernels that this processor can run, the best first, then null; and those in use.
const Kernels* const* available();
extern const Kernels* kernels;

}  // namespace jobs
