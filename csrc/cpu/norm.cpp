// RMSNorm by itself, where no product follows it, with the addition of a residual.

#include <cmath>

#include "pool.h"
#include "simd.h"

namespace octavo {

struct NormArgs {
    const float* x;  // [rows, width]
    Count rows;
    int64_t width;
    const float* weight;
    const float* residual;  // [rows, width], or null
    float* out;
    float eps;
    int32_t reserved;
};

// out = residual + weight * x / sqrt(mean of squares + eps)
static void rms_norm(const void* raw, const Team& team) {
    const NormArgs& a = *(const NormArgs*)raw;
    int64_t first, last;
    team.share(a.rows, first, last);
    for (int64_t at = first * a.width; at < last * a.width; at += a.width) {
        const float* x = a.x + at;
        F32 squares{};
        for (int64_t i = 0; i < a.width; i += LANES) squares = multiply_add(load_floats(x + i), load_floats(x + i), squares);
        const float inverse = 1.0f / std::sqrt(sum_lanes(squares) / float(a.width) + a.eps);
        for (int64_t i = 0; i < a.width; i += LANES) {
            F32 y = load_floats(a.weight + i) * (load_floats(x + i) * inverse);
            if (a.residual != nullptr) y += load_floats(a.residual + at + i);
            store_floats(a.out + at + i, y);
        }
    }
}

}  // namespace octavo

extern "C" {
octavo::Kernel octavo_rms_norm = octavo::rms_norm;
}
