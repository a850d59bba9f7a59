// A call from its arrays to its results, and the choice of kernels.
#pragma once
#include "pool.h"

namespace jobs {

enum State { DONE, DECLINED, NO_MEMORY, OVERFLOWED };

// Plans and runs a call. OVERFLOWED: done, but an operation overflowed. DECLINED, and nothing
// written: gamma, beta or eps is out of range, or y may overflow that takes the place of x.
State run(Call& c, int threads);

// The kernels that this processor can run, the best first, then null; and those in use.
const Kernels* const* available();
extern const Kernels* kernels;

}  // namespace jobs
