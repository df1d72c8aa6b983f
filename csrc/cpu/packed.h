// Quantised weights as the kernels read them.
//
// Rows are cut into tiles of LANES, columns into groups of 16 or 32 that share a scale. A tile is one stream of groups:
//
//     scales [LANES] half | minima [LANES] half, if there are any | quants
//
// A quant word holds four neighbouring columns of one row in one lane. The low four bits of two words share one: columns of
// the first half of the group in the low nibbles, of the second half in the high ones. Further bits of a whole group fill
// one more word: byte b of a lane holds those of columns b, 4 + b, 8 + b … from its lowest bit on. A row's weight is
//
//     gain * (scale * (quant - zero) + minimum)
//
// Rows that fill up the last tile are zero.
#pragma once

#include <cstdint>

namespace octavo {

enum QuantKind : int32_t {
    KIND_U4 = 0,  // 0 … 15
    KIND_U5 = 1,  // 0 … 31, groups of 32: nibbles and a word of fifth bits
    KIND_U6 = 2,  // 0 … 63, groups of 16: nibbles and a word of pairs of bits
    KIND_S8 = 3,  // a byte, -128 … 127, kept with SIGNED_OFFSET added
    KIND_N4 = 4,  // 4 bits that stand for one of NONLINEAR
};

struct PackedWeight {
    const uint8_t* data;
    int64_t rows;
    int64_t cols;
    int32_t kind;
    int32_t group;    // 16 or 32 columns
    int32_t zero;     // SIGNED_OFFSET included, for signed kinds
    int32_t has_min;  // 0 or 1
    float gain;       // a power of two that keeps scales within half precision
    int32_t reserved;
};

// The values of IQ4_NL.
constexpr int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr bool is_signed(int kind) { return kind == KIND_S8 || kind == KIND_N4; }
// Bytes of a row's quants in one group.
constexpr int quant_bytes(int kind, int group) {
    return kind == KIND_S8 ? group : group / 2 + (kind == KIND_U5 || kind == KIND_U6 ? 4 : 0);
}
inline int64_t group_bytes(const PackedWeight& w, int lanes) {
    return lanes * (2 + 2 * w.has_min + quant_bytes(w.kind, w.group));
}
inline int64_t tile_bytes(const PackedWeight& w, int lanes) { return w.cols / w.group * group_bytes(w, lanes); }

}  // namespace octavo
