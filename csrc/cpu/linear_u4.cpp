#include "linear.h"

namespace octavo {

TileKernel tile_kernel_u4(const PackedWeight& w, int num_rows, int num_tiles) {
    if (w.group == 32)
        return w.has_min ? choose<KIND_U4, 32, true>(num_rows, num_tiles) : choose<KIND_U4, 32, false>(num_rows, num_tiles);
    return w.has_min ? choose<KIND_U4, 16, true>(num_rows, num_tiles) : choose<KIND_U4, 16, false>(num_rows, num_tiles);
}

}  // namespace octavo
