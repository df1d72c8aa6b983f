#include "linear.h"

namespace octavo {

TileKernel tile_kernel_u4(const PackedWeight& w, int num_rows) {
    if (w.group == 32)
        return w.has_min ? choose_rows<KIND_U4, 32, true>(num_rows) : choose_rows<KIND_U4, 32, false>(num_rows);
    return w.has_min ? choose_rows<KIND_U4, 16, true>(num_rows) : choose_rows<KIND_U4, 16, false>(num_rows);
}

}  // namespace octavo
