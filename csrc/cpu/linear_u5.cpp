#include "linear.h"

namespace octavo {

const TileKernels& tile_kernels_u5(const PackedWeight& w) {
    return w.has_min ? make_kernels<KIND_U5, 32, true>() : make_kernels<KIND_U5, 32, false>();
}
const TileKernels& tile_kernels_u6(const PackedWeight&) { return make_kernels<KIND_U6, 16, false>(); }

}  // namespace octavo
