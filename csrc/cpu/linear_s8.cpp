#include "linear.h"

namespace octavo {

const TileKernels& tile_kernels_s8(const PackedWeight& w) {
    return w.group == 32 ? make_kernels<KIND_S8, 32, false>() : make_kernels<KIND_S8, 16, false>();
}

}  // namespace octavo
