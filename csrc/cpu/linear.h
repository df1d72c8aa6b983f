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

// Rows computed at a time against a tile, so that each weight loaded serves all of them.
#if defined(OCTAVO_AVX512)
constexpr int MAX_ROWS = 8;
#else
constexpr int MAX_ROWS = 4;
#endif

// sums[r] = the tile's LANES outputs for row r, without the weight's gain.
typedef void (*TileKernel)(const PackedWeight& w, const uint8_t* tile, const QuantRow* rows, F32* sums);

// The kernel for a weight and a number of rows in 1 … MAX_ROWS.
TileKernel tile_kernel(const PackedWeight& w, int num_rows);
TileKernel tile_kernel_u4(const PackedWeight& w, int num_rows);
TileKernel tile_kernel_u5(const PackedWeight& w, int num_rows);
TileKernel tile_kernel_s8(const PackedWeight& w, int num_rows);

template <int KIND>
inline void dot(Sum& sum, U8 w, U8 a) {
    if constexpr (KIND == KIND_U4)
        dot_small(sum, w, a);
    else if constexpr (KIND == KIND_U5)
        dot_medium(sum, w, a);
    else
        dot_signed(sum, w, a);
}

template <int KIND, int GROUP, bool HAS_MIN, int ROWS>
void multiply_tile(const PackedWeight& w, const uint8_t* tile, const QuantRow* rows, F32* sums) {
    constexpr int WORD = LANES * 4;       // bytes of a quant word of the whole tile
    constexpr int STEPS = GROUP / 4;      // dot products of a group
    constexpr int SUMS = GROUP == 32;     // index into QuantRow's two kinds of sums
    constexpr int HEADER = LANES * (HAS_MIN ? 4 : 2);
    constexpr int GROUP_BYTES = HEADER + (KIND == KIND_U4 ? STEPS / 2 : STEPS) * WORD;
    const int64_t num_groups = w.cols / GROUP;
    const int32_t zero = w.zero;
    F32 acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = F32{};
    for (int64_t g = 0; g < num_groups; g++, tile += GROUP_BYTES) {
        const uint8_t* words = tile + HEADER;
#if defined(__GNUC__)
        __builtin_prefetch(tile + 8 * GROUP_BYTES);
        if constexpr (GROUP_BYTES > 128) __builtin_prefetch(tile + 8 * GROUP_BYTES + 64);
        if constexpr (GROUP_BYTES > 128) __builtin_prefetch(tile + 8 * GROUP_BYTES + 128);
#endif
        Sum sum[ROWS];
        if constexpr (KIND == KIND_U4) {
            for (int i = 0; i < STEPS / 2; i++) {
                const U8 both = load<U8>(words + i * WORD);
                const U8 low = both & 15;
                const U8 high = (U8)((I16)both >> 4) & 15;
                for (int r = 0; r < ROWS; r++) {
                    dot<KIND>(sum[r], low, splat4(rows[r].quants + g * GROUP + 4 * i));
                    dot<KIND>(sum[r], high, splat4(rows[r].quants + g * GROUP + 4 * (i + STEPS / 2)));
                }
            }
        } else {
            for (int i = 0; i < STEPS; i++) {
                const U8 word = load<U8>(words + i * WORD);
                for (int r = 0; r < ROWS; r++) dot<KIND>(sum[r], word, splat4(rows[r].quants + g * GROUP + 4 * i));
            }
        }
        const F32 scale = load_floats((const Half*)tile);
        F32 minimum{};
        if constexpr (HAS_MIN) minimum = load_floats((const Half*)tile + LANES);
        for (int r = 0; r < ROWS; r++) {
            I32 whole = total(sum[r]);
            if constexpr (!HAS_MIN) whole -= zero * rows[r].sums[SUMS][g];
            acc[r] += to_float(whole) * (scale * rows[r].scales[g * GROUP / ACTIVATION_BLOCK]);
            if constexpr (HAS_MIN) acc[r] += minimum * rows[r].scaled_sums[SUMS][g];
        }
    }
    for (int r = 0; r < ROWS; r++) sums[r] = acc[r];
}

template <int KIND, int GROUP, bool HAS_MIN>
TileKernel choose_rows(int num_rows) {
    switch (num_rows) {
        case 1:
            return multiply_tile<KIND, GROUP, HAS_MIN, 1>;
        case 2:
            return multiply_tile<KIND, GROUP, HAS_MIN, 2>;
        case 3:
            return multiply_tile<KIND, GROUP, HAS_MIN, 3>;
        case 4:
            return multiply_tile<KIND, GROUP, HAS_MIN, 4>;
#if defined(OCTAVO_AVX512)
        case 5:
            return multiply_tile<KIND, GROUP, HAS_MIN, 5>;
        case 6:
            return multiply_tile<KIND, GROUP, HAS_MIN, 6>;
        case 7:
            return multiply_tile<KIND, GROUP, HAS_MIN, 7>;
        case 8:
            return multiply_tile<KIND, GROUP, HAS_MIN, 8>;
#endif
    }
    return nullptr;
}

}  // namespace octavo
