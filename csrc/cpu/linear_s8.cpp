#include "linear.h"

namespace octavo {

TileKernel tile_kernel_s8(const PackedWeight& w, int num_rows, int num_tiles) {
    return w.group == 32 ? choose<KIND_S8, 32, false>(num_rows, num_tiles) : choose<KIND_S8, 16, false>(num_rows, num_tiles);
}

}  // namespace octavo
