// A call from its arrays to its results, and which kernels do it.
#pragma once
#include "call.h"

namespace jobs {

enum State { DONE, DECLINED, NO_MEMORY };

// Plans a call: tiles, ways and what its results need. By the shape and dtypes alone.
void plan(Call& c);

// Rows of a tile of the backward of so many rows. Blocks of a call end where tiles end, so that the sums keep their bits.
Index backward_rows(Index rows, Index n, bool nearest);

// Whether float64 dy beside narrower data has products that float64 does not hold: pairs leave such rows.
bool has_huge_dy(const Call& c);

// Does it; DECLINED, and nothing written, if gamma, beta or eps is out of range.
State run(Call& c, int threads);

// The kernels that this processor can run, the best first, then null; and those in use.
const Kernels* const* available();
extern const Kernels* kernels;

}  // namespace jobs
