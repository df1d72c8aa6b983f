#include "linear.h"

namespace octavo {

TileKernel tile_kernel_u5(const PackedWeight& w, int num_rows) {
    return w.has_min ? choose_rows<KIND_U5, 32, true>(num_rows) : choose_rows<KIND_U5, 32, false>(num_rows);
}

}  // namespace octavo
