#include "linear.h"

namespace octavo {

const TileKernels& tile_kernels_u4(const PackedWeight& w) {
    if (w.group == 32) return w.has_min ? make_kernels<KIND_U4, 32, true>() : make_kernels<KIND_U4, 32, false>();
    return w.has_min ? make_kernels<KIND_U4, 16, true>() : make_kernels<KIND_U4, 16, false>();
}

const TileKernels& tile_kernels_n4(const PackedWeight&) { return make_kernels<KIND_N4, 32, false>(); }

}  // namespace octavo
