// Products with packed weights: activations rounded to int8 in blocks of 32, integer dot products, float32 sums.
#pragma once

#include "packed.h"
#include "pool.h"
#include "simd.h"

namespace octavo {

constexpr int ACTIVATION_BLOCK = 32;

// One row of activations after rounding, cut out of the workspace:
//     quants [cols] int8 | scales [cols / 32] | scaled sums of 32 | of 16 | integer sums of 32 | of 16
struct QuantRow {
    const int8_t* quants;
    const float* scales;
    const float* scaled_sums[2];   // [0] by 16 columns, [1] by 32: scale * sum of quants
    const int32_t* sums[2];        // likewise
};

inline int64_t quant_row_bytes(int64_t cols) {
    int64_t blocks = cols / ACTIVATION_BLOCK;
    return (cols + blocks * 4 * 7 + 63) / 64 * 64;
}

inline QuantRow quant_row(const uint8_t* row, int64_t cols) {
    const int64_t blocks = cols / ACTIVATION_BLOCK;
    const float* floats = (const float*)(row + cols);
    const int32_t* ints = (const int32_t*)(floats + 4 * blocks);
    return {(const int8_t*)row, floats, {floats + 2 * blocks, floats + blocks}, {ints + blocks, ints}};
}

// Round one row; `gamma` is an RMSNorm's weight to apply first, or null. `out` has quant_row_bytes(cols).
void quantize_row(const float* x, int64_t cols, const float* gamma, float eps, uint8_t* out);

// Rows and tiles computed at a time: each weight loaded serves all the rows, each activation all the tiles. As many as
// the registers hold; an instruction that repeats an activation by itself gains nothing from a second tile.
#if defined(OCTAVO_AVX512)
constexpr int MAX_ROWS = 8, MAX_TILES = 1;
#else
constexpr int MAX_ROWS = 4, MAX_TILES = 2;
#endif

// sums[t * sums_stride + r] = the LANES outputs of tile t for row r, without the weight's gain.
typedef void (*TileKernel)(const PackedWeight& w, const uint8_t* tile, const QuantRow* rows, F32* sums,
                           int64_t sums_stride);

// The kernel for a weight, 1 … MAX_ROWS rows and 1 or MAX_TILES tiles.
TileKernel tile_kernel(const PackedWeight& w, int num_rows, int num_tiles);
TileKernel tile_kernel_u4(const PackedWeight& w, int num_rows, int num_tiles);
TileKernel tile_kernel_u5(const PackedWeight& w, int num_rows, int num_tiles);
TileKernel tile_kernel_s8(const PackedWeight& w, int num_rows, int num_tiles);

template <int KIND>
inline void dot(Sum& sum, U8 w, U8 a) {
    if constexpr (KIND == KIND_U4)
        dot_small(sum, w, a);
    else if constexpr (KIND == KIND_U5)
        dot_medium(sum, w, a);
    else
        dot_signed(sum, w, a);
}

template <int KIND, int GROUP, bool HAS_MIN, int ROWS, int TILES>
void multiply_tiles(const PackedWeight& w, const uint8_t* tile, const QuantRow* rows, F32* sums, int64_t sums_stride) {
    constexpr int WORD = LANES * 4;       // bytes of a quant word of the whole tile
    constexpr int STEPS = GROUP / 4;      // dot products of a group
    constexpr int SUMS = GROUP == 32;     // index into QuantRow's two kinds of sums
    constexpr int HEADER = LANES * (HAS_MIN ? 4 : 2);
    constexpr int GROUP_BYTES = HEADER + (KIND == KIND_U4 ? STEPS / 2 : STEPS) * WORD;
    const int64_t num_groups = w.cols / GROUP, next_tile = num_groups * GROUP_BYTES;
    const int32_t zero = w.zero;
    F32 acc[TILES][ROWS];
    UNROLL
    for (int t = 0; t < TILES; t++)
        UNROLL
        for (int r = 0; r < ROWS; r++) acc[t][r] = F32{};
    const int8_t* quants[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) quants[r] = rows[r].quants;
    for (int64_t g = 0; g < num_groups; g++, tile += GROUP_BYTES) {
        // The same place in the next tiles, which the hardware would not fetch ahead across this much work.
        UNROLL
        for (int t = 0; t < TILES; t++)
            for (int byte = 0; byte < GROUP_BYTES; byte += 64)
                __builtin_prefetch(tile + (TILES + t) * next_tile + byte);
        Sum sum[TILES][ROWS];
        if constexpr (KIND == KIND_U4) {
            UNROLL
            for (int i = 0; i < STEPS / 2; i++) {
                U8 low[TILES], high[TILES];
                UNROLL
                for (int t = 0; t < TILES; t++) {
                    const U8 both = load<U8>(tile + t * next_tile + HEADER + i * WORD);
                    low[t] = both & 15;
                    high[t] = (U8)((I16)both >> 4) & 15;
                }
                UNROLL
                for (int r = 0; r < ROWS; r++) {
                    const U8 a = splat4(quants[r] + g * GROUP + 4 * i);
                    UNROLL
                    for (int t = 0; t < TILES; t++) dot<KIND>(sum[t][r], low[t], a);
                    const U8 b = splat4(quants[r] + g * GROUP + 4 * (i + STEPS / 2));
                    UNROLL
                    for (int t = 0; t < TILES; t++) dot<KIND>(sum[t][r], high[t], b);
                }
            }
        } else {
            UNROLL
            for (int i = 0; i < STEPS; i++) {
                U8 word[TILES];
                UNROLL
                for (int t = 0; t < TILES; t++) word[t] = load<U8>(tile + t * next_tile + HEADER + i * WORD);
                UNROLL
                for (int r = 0; r < ROWS; r++) {
                    const U8 a = splat4(quants[r] + g * GROUP + 4 * i);
                    UNROLL
                    for (int t = 0; t < TILES; t++) dot<KIND>(sum[t][r], word[t], a);
                }
            }
        }
        UNROLL
        for (int t = 0; t < TILES; t++) {
            const Half* header = (const Half*)(tile + t * next_tile);
            const F32 scale = load_floats(header);
            F32 minimum{};
            if constexpr (HAS_MIN) minimum = load_floats(header + LANES);
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                I32 whole = total(sum[t][r]);
                if constexpr (!HAS_MIN) whole -= zero * rows[r].sums[SUMS][g];
                acc[t][r] += to_float(whole) * (scale * rows[r].scales[g * GROUP / ACTIVATION_BLOCK]);
                if constexpr (HAS_MIN) acc[t][r] += minimum * rows[r].scaled_sums[SUMS][g];
            }
        }
    }
    UNROLL
    for (int t = 0; t < TILES; t++)
        UNROLL
        for (int r = 0; r < ROWS; r++) sums[t * sums_stride + r] = acc[t][r];
}

template <int KIND, int GROUP, bool HAS_MIN, int TILES>
TileKernel choose_rows(int num_rows) {
    switch (num_rows) {
        case 1:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 1, TILES>;
        case 2:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 2, TILES>;
        case 3:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 3, TILES>;
        case 4:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 4, TILES>;
#if defined(OCTAVO_AVX512)
        case 5:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 5, TILES>;
        case 6:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 6, TILES>;
        case 7:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 7, TILES>;
        case 8:
            return multiply_tiles<KIND, GROUP, HAS_MIN, 8, TILES>;
#endif
    }
    return nullptr;
}

template <int KIND, int GROUP, bool HAS_MIN>
TileKernel choose(int num_rows, int num_tiles) {
    if (num_tiles == 1) return choose_rows<KIND, GROUP, HAS_MIN, 1>(num_rows);
    return choose_rows<KIND, GROUP, HAS_MIN, MAX_TILES>(num_rows);
}

}  // namespace octavo
