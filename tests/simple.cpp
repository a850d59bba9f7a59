// For test_simple.py: rows by simple.h.
#include "simple.h"

namespace {

template <class T>
void rows(const T* x, const T* dy, Index count, Index n, const double* parameters, T* y, T* dx,
    double* sums, double* statistics) {
    for (Index i = 0; i < count; i++, x += n, dy += n, y += n, dx += n, statistics += 2) {
        simple::Statistics s = simple::measure(x, n, 1e-5);
        simple::Parameters of = {n, parameters, parameters + n};
        simple::forward(x, of, s, y);
        simple::backward(dy, x, of, s, simple::Gradients<T>{dx, sums, sums + n});
        statistics[0] = s.mean;
        statistics[1] = s.rstd;
    }
}

}  // namespace

extern "C" {

void of_float32(const f32* x, const f32* dy, Index count, Index n, const double* parameters, f32* y,
    f32* dx, double* sums, double* statistics) {
    rows(x, dy, count, n, parameters, y, dx, sums, statistics);
}
void of_bfloat16(const bf16* x, const bf16* dy, Index count, Index n, const double* parameters,
    bf16* y, bf16* dx, double* sums, double* statistics) {
    rows(x, dy, count, n, parameters, y, dx, sums, statistics);
}
void of_float16(const f16* x, const f16* dy, Index count, Index n, const double* parameters, f16* y,
    f16* dx, double* sums, double* statistics) {
    rows(x, dy, count, n, parameters, y, dx, sums, statistics);
}
}
