// Quantised weights as the kernels read them.
//
// Rows are cut into tiles of LANES, columns into groups of 16 or 32 that share a scale. A tile is one stream of groups:
//
//     scales [LANES] half | minima [LANES] half, if there are any | quants
//
// A quant word holds four neighbouring columns of one row in one lane; words of 4 bits hold columns c … c + 3 of the first
// half of the group in the low nibbles and of the second half in the high ones. A row's weight is
//
//     gain * (scale * (quant - zero) + minimum)
//
// Rows that fill up the last tile are zero.
#pragma once

#include <cstdint>

namespace octavo {

enum QuantKind : int32_t {
    KIND_U4 = 0,  // 4 bits, 0 … 15
    KIND_U5 = 1,  // a byte, 0 … 31
    KIND_S8 = 2,  // a byte, -128 … 127, kept with SIGNED_OFFSET added
};

struct PackedWeight {
    const uint8_t* data;
    int64_t rows;
    int64_t cols;
    int32_t kind;
    int32_t group;    // 16 or 32 columns
    int32_t zero;     // SIGNED_OFFSET included
    int32_t has_min;  // 0 or 1
    float gain;       // a power of two that keeps scales within half precision
    int32_t reserved;
};

inline int64_t group_bytes(const PackedWeight& w, int lanes) {
    return lanes * (2 + 2 * w.has_min + (w.kind == KIND_U4 ? w.group / 2 : w.group));
}
inline int64_t tile_bytes(const PackedWeight& w, int lanes) { return w.cols / w.group * group_bytes(w, lanes); }

}  // namespace octavo
