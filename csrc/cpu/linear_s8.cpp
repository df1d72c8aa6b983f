#include "linear.h"

namespace octavo {

TileKernel tile_kernel_s8(const PackedWeight& w, int num_rows) {
    return w.group == 32 ? choose_rows<KIND_S8, 32, false>(num_rows) : choose_rows<KIND_S8, 16, false>(num_rows);
}

}  // namespace octavo
