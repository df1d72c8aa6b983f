#include "linear.h"

namespace octavo {

TileKernel tile_kernel_u5(const PackedWeight& w, int num_rows, int num_tiles) {
    return w.has_min ? choose<KIND_U5, 32, true>(num_rows, num_tiles) : choose<KIND_U5, 32, false>(num_rows, num_tiles);
}

}  // namespace octavo
