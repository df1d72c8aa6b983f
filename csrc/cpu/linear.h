// Products with packed weights: activations rounded to int8 in blocks of 32, integer dot products, float32 sums.
#pragma once

#include "packed.h"
#include "pool.h"
#include "simd.h"

namespace octavo {

constexpr int ACTIVATION_BLOCK = 32;

// One row of activations after rounding, cut out of the workspace:
//     quants [cols] int8 | scales [cols / 32] | scale * sum of quants, by 32 columns | by 16
struct QuantRow {
    const int8_t* quants;
    const float* scales;
    const float* sums[2];  // [0] by 16 columns, [1] by 32
};

inline int64_t quant_row_bytes(int64_t cols) {
    return (cols + cols / ACTIVATION_BLOCK * 4 * int64_t(sizeof(float)) + 63) / 64 * 64;
}

inline QuantRow quant_row(const uint8_t* row, int64_t cols) {
    const int64_t blocks = cols / ACTIVATION_BLOCK;
    const float* floats = (const float*)(row + cols);
    return {(const int8_t*)row, floats, {floats + 2 * blocks, floats + blocks}};
}

// Rows and tiles computed at a time: each weight loaded serves all the rows, each activation all the tiles. As many as
// the registers hold; an instruction that repeats an activation by itself gains nothing from a second tile.
#if defined(OCTAVO_AVX512)
constexpr int MAX_ROWS = 8, MAX_TILES = 1;
#else
constexpr int MAX_ROWS = 4, MAX_TILES = 2;
#endif

// One kind of weight: kernels for products straight from its packed tiles, for few rows, and from tiles that `unpack` has
// spread out, for many: what unpacking costs is then shared by all the rows.
struct TileKernels {
    // sums[t * sums_stride + r] = the LANES outputs of tile t for row r, without the weight's gain.
    typedef void (*Multiply)(const PackedWeight& w, const uint8_t* tiles, const QuantRow* rows, F32* sums,
                             int64_t sums_stride);
    Multiply packed[MAX_TILES][4];  // [tiles - 1]: 1, 2, 4, 8 rows
    Multiply unpacked[MAX_TILES];   // MAX_ROWS rows
    void (*unpack)(const PackedWeight& w, const uint8_t* tile, uint8_t* out);
    int64_t unpacked_group_bytes;  // of a tile
};

const TileKernels& tile_kernels(const PackedWeight& w);
const TileKernels& tile_kernels_u4(const PackedWeight& w);
const TileKernels& tile_kernels_n4(const PackedWeight& w);
const TileKernels& tile_kernels_u5(const PackedWeight& w);
const TileKernels& tile_kernels_u6(const PackedWeight& w);
const TileKernels& tile_kernels_s8(const PackedWeight& w);

template <int KIND>
constexpr int QUANT_LIMIT = KIND == KIND_U4 ? 15 : KIND == KIND_U5 ? 31 : KIND == KIND_U6 ? 63 : 128;
constexpr int WORD = LANES * 4;  // bytes of a quant word of a whole tile

// A group of a packed tile.
template <int KIND_, int GROUP_, bool HAS_MIN>
struct Packed {
    static constexpr int KIND = KIND_, GROUP = GROUP_;
    static constexpr bool IN_MEMORY = true;
    static constexpr int HEADER = LANES * (HAS_MIN ? 4 : 2);
    static constexpr int BYTES = HEADER + quant_bytes(KIND, GROUP) * LANES;
    // Without minima in the file, one follows from the quant that stands for zero.
    static constexpr bool ADDS_MIN = HAS_MIN || !is_signed(KIND) || SIGNED_OFFSET != 0;

    // The quants of columns 4 * step … 4 * step + 3.
    static inline U8 word(const uint8_t* group, int step) {
        const uint8_t* quants = group + HEADER;
        if constexpr (KIND == KIND_S8) return load<U8>(quants + step * WORD);
        constexpr int HALF = GROUP / 8;
        const U8 both = load<U8>(quants + step % HALF * WORD);
        const U8 nibble = (step < HALF ? both : (U8)((I16)both >> 4)) & 15;
        if constexpr (KIND == KIND_U4) return nibble;
        if constexpr (KIND == KIND_N4) return look_up(NONLINEAR, nibble) + uint8_t(SIGNED_OFFSET);
        // Whole 16-bit lanes are shifted; what crosses into a neighbouring byte is masked away.
        constexpr int BITS = KIND == KIND_U5 ? 1 : 2;
        constexpr uint8_t MASK = KIND == KIND_U5 ? 0x10 : 0x30;
        const I16 plane = (I16)load<U8>(quants + HALF * WORD);
        const int up = 4 - BITS * step;
        return nibble | ((U8)(up >= 0 ? plane << (up & 15) : plane >> (-up & 15)) & MASK);
    }
    static inline F32 scale(const uint8_t* group) { return load_floats((const Half*)group); }
    static inline F32 minimum(const uint8_t* group, F32 scale, float zero) {
        if constexpr (HAS_MIN) return load_floats((const Half*)group + LANES);
        return scale * -zero;
    }
};

// A group spread out: scales [LANES] float | minima [LANES] float | a byte for each quant.
template <typename From>
struct Unpacked {
    static constexpr int KIND = From::KIND, GROUP = From::GROUP;
    static constexpr bool IN_MEMORY = false;  // but in a cache
    static constexpr int HEADER = 2 * LANES * int(sizeof(float));
    static constexpr int BYTES = HEADER + GROUP * LANES;
    static constexpr bool ADDS_MIN = From::ADDS_MIN;

    static inline U8 word(const uint8_t* group, int step) { return load<U8>(group + HEADER + step * WORD); }
    static inline F32 scale(const uint8_t* group) { return load_floats((const float*)group); }
    static inline F32 minimum(const uint8_t* group, F32, float) { return load_floats((const float*)group + LANES); }
};

template <typename From>
void unpack_tile(const PackedWeight& w, const uint8_t* tile, uint8_t* out) {
    for (int64_t g = 0; g < w.cols / From::GROUP; g++, tile += From::BYTES, out += Unpacked<From>::BYTES) {
        const F32 scale = From::scale(tile);
        store_floats((float*)out, scale);
        store_floats((float*)out + LANES, From::minimum(tile, scale, float(w.zero)));
        UNROLL
        for (int step = 0; step < From::GROUP / 4; step++)
            store(out + Unpacked<From>::HEADER + step * WORD, From::word(tile, step));
    }
}

template <typename Format, int ROWS, int TILES>
void multiply_tiles(const PackedWeight& w, const uint8_t* tile, const QuantRow* rows, F32* sums, int64_t sums_stride) {
    constexpr int GROUP = Format::GROUP, STEPS = GROUP / 4, LIMIT = QUANT_LIMIT<Format::KIND>;
    constexpr int SUMS = GROUP == 32;  // index into QuantRow's two kinds of sums
    const int64_t num_groups = w.cols / GROUP, next_tile = num_groups * Format::BYTES;
    const float zero = float(w.zero);
    F32 acc[TILES][ROWS];
    UNROLL
    for (int t = 0; t < TILES; t++)
        UNROLL
        for (int r = 0; r < ROWS; r++) acc[t][r] = F32{};
    const int8_t* quants[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) quants[r] = rows[r].quants;
    for (int64_t g = 0; g < num_groups; g++, tile += Format::BYTES) {
        if constexpr (Format::IN_MEMORY) {
            // The same place in the next tiles, which the hardware would not fetch ahead across this much work.
            UNROLL
            for (int t = 0; t < TILES; t++)
                for (int byte = 0; byte < Format::BYTES; byte += 64)
                    __builtin_prefetch(tile + (TILES + t) * next_tile + byte);
        }
        Sum sum[TILES][ROWS];
        UNROLL
        for (int i = 0; i < STEPS; i++) {
            // Words that share nibbles one after the other.
            const int step = i % 2 * (STEPS / 2) + i / 2;
            U8 word[TILES];
            UNROLL
            for (int t = 0; t < TILES; t++) word[t] = Format::word(tile + t * next_tile, step);
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                const U8 a = splat4(quants[r] + g * GROUP + 4 * step);
                UNROLL
                for (int t = 0; t < TILES; t++) dot<LIMIT>(sum[t][r], word[t], a, i);
            }
        }
        UNROLL
        for (int t = 0; t < TILES; t++) {
            const uint8_t* group = tile + t * next_tile;
            const F32 scale = Format::scale(group), minimum = Format::minimum(group, scale, zero);
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                const F32 both = scale * rows[r].scales[g * GROUP / ACTIVATION_BLOCK];
                acc[t][r] = multiply_add(to_float(total<LIMIT>(sum[t][r])), both, acc[t][r]);
                if constexpr (Format::ADDS_MIN)
                    acc[t][r] = multiply_add(minimum, splat(rows[r].sums[SUMS][g]), acc[t][r]);
            }
        }
    }
    UNROLL
    for (int t = 0; t < TILES; t++)
        UNROLL
        for (int r = 0; r < ROWS; r++) sums[t * sums_stride + r] = acc[t][r];
}

template <int KIND, int GROUP, bool HAS_MIN>
const TileKernels& make_kernels() {
    typedef Packed<KIND, GROUP, HAS_MIN> From;
    static const TileKernels made = [] {
        TileKernels k{};
        k.packed[0][0] = multiply_tiles<From, 1, 1>;
        k.packed[0][1] = multiply_tiles<From, 2, 1>;
        k.packed[0][2] = multiply_tiles<From, 4, 1>;
        k.unpacked[0] = multiply_tiles<Unpacked<From>, MAX_ROWS, 1>;
        if constexpr (MAX_TILES > 1) {
            k.packed[MAX_TILES - 1][0] = multiply_tiles<From, 1, MAX_TILES>;
            k.packed[MAX_TILES - 1][1] = multiply_tiles<From, 2, MAX_TILES>;
            k.packed[MAX_TILES - 1][2] = multiply_tiles<From, 4, MAX_TILES>;
            k.unpacked[MAX_TILES - 1] = multiply_tiles<Unpacked<From>, MAX_ROWS, MAX_TILES>;
        }
        if constexpr (MAX_ROWS == 8) k.packed[0][3] = multiply_tiles<From, 8, 1>;
        k.unpack = unpack_tile<From>;
        k.unpacked_group_bytes = Unpacked<From>::BYTES;
        return k;
    }();
    return made;
}

}  // namespace octavo
