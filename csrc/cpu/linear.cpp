#include "linear.h"

#include <algorithm>
#include <cmath>

namespace octavo {

enum Activation : int32_t { NO_ACTIVATION = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4 };

constexpr int MAX_SHARDS = 4;
// Rounded activations that stay in the second-level cache while the weights pass by.
constexpr int64_t TOKEN_BLOCK_BYTES = 192 * 1024;
// Pieces of work a thread: enough that none waits long for another, few enough that dealing them out costs nothing.
constexpr int64_t PIECES = 8;

// residual + scale * activation(norm(x) @ W.T + bias); W is its shards one below the other. With an activation the first
// shard is the gate and the second what it gates.
struct LinearArgs {
    const float* x;
    int64_t x_stride;
    Count tokens;
    int64_t cols;
    PackedWeight shards[MAX_SHARDS];
    int32_t num_shards;
    int32_t activation;
    int32_t terms;  // 1, or 2: what rounding an activation leaves is rounded again, and both are multiplied
    int32_t reserved;
    const float* bias;         // over all shards' rows, or null
    const float* norm_weight;  // or null
    float eps;
    float scale;
    const float* residual;  // or null
    int64_t residual_stride;
    float* out;
    int64_t out_stride;
    uint8_t* workspace;  // octavo_linear_workspace bytes
};

// Bytes of the widest tiles, unpacked.
static int64_t unpacked_bytes(int64_t cols) { return MAX_TILES * cols / 16 * (2 * sizeof(float) + 16) * LANES; }

// Places of a rounded row to write to.
struct QuantRowOut {
    int8_t* quants;
    float *scales, *sums32, *sums16;

    QuantRowOut(uint8_t* row, int64_t cols) {
        const int64_t blocks = cols / ACTIVATION_BLOCK;
        quants = (int8_t*)row;
        scales = (float*)(row + cols), sums32 = scales + blocks, sums16 = scales + 2 * blocks;
    }
};

constexpr int PARTS = ACTIVATION_BLOCK / LANES;

// Round one block; leaves in `v` what rounding took away.
static inline void quantize_block(F32 (&v)[PARTS], int64_t block, const QuantRowOut& out) {
    F32 largest{};
    UNROLL
    for (int i = 0; i < PARTS; i++) largest = maximum(largest, maximum(v[i], -v[i]));
    const float top = max_lanes(largest);
    const float inverse = top > 0 ? 127.0f / top : 0.0f, scale = top / 127.0f;
    F32 sum[2] = {};
    I32 q[PARTS];
    UNROLL
    for (int i = 0; i < PARTS; i++) {
        const F32 rounded = round_even(v[i] * inverse);
        q[i] = __builtin_convertvector(rounded, I32);
        sum[i * LANES / 16] += rounded;  // whole numbers: exact
        v[i] = multiply_add(rounded, splat(-scale), v[i]);
    }
    store_bytes(out.quants + block * ACTIVATION_BLOCK, q);
    const float first = sum_lanes(sum[0]), second = sum_lanes(sum[1]);
    out.scales[block] = scale;
    out.sums16[2 * block] = scale * first;
    out.sums16[2 * block + 1] = scale * second;
    out.sums32[block] = scale * (first + second);
}

// Round one row; `gamma` is an RMSNorm's weight to apply first, or null. `out` has quant_row_bytes(cols) for each term.
static void quantize_row(const float* x, int64_t cols, const float* gamma, float eps, int terms, uint8_t* out) {
    const QuantRowOut first(out, cols), second(out + quant_row_bytes(cols), cols);
    float inverse_rms = 1.0f;
    if (gamma != nullptr) {
        F32 squares{}, more{};
        for (int64_t i = 0; i < cols; i += 2 * LANES) {
            F32 a = load_floats(x + i), b = load_floats(x + i + LANES);
            squares += a * a;
            more += b * b;
        }
        inverse_rms = 1.0f / std::sqrt(sum_lanes(squares + more) / float(cols) + eps);
    }
    for (int64_t block = 0; block < cols / ACTIVATION_BLOCK; block++) {
        F32 v[PARTS];
        UNROLL
        for (int i = 0; i < PARTS; i++) {
            const int64_t at = block * ACTIVATION_BLOCK + i * LANES;
            v[i] = load_floats(x + at);
            if (gamma != nullptr) v[i] = v[i] * inverse_rms * load_floats(gamma + at);
        }
        quantize_block(v, block, first);
        if (terms == 2) quantize_block(v, block, second);
    }
}

const TileKernels& tile_kernels(const PackedWeight& w) {
    switch (w.kind) {
        case KIND_U4:
            return tile_kernels_u4(w);
        case KIND_N4:
            return tile_kernels_n4(w);
        case KIND_U5:
            return tile_kernels_u5(w);
        case KIND_U6:
            return tile_kernels_u6(w);
        default:
            return tile_kernels_s8(w);
    }
}

static inline F32 hyperbolic_tangent(F32 x) {
    const F32 e = exponential(x * 2.0f);
    return (e - 1.0f) / (e + 1.0f);
}

static inline F32 activate(int32_t activation, F32 x) {
    switch (activation) {
        case SILU:
            return x / (1.0f + exponential(-x));
        case GELU: {
            F32 y;
            for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
            return y;
        }
        case GELU_TANH:
            return x * 0.5f * (1.0f + hyperbolic_tangent((x + x * x * x * 0.044715f) * 0.79788456f));
        case RELU:
            return maximum(x, F32{});
    }
    return x;
}

// The LANES outputs from `column` on, of which only `width` exist.
static inline void finish(const LinearArgs& a, int64_t token, int64_t column, int64_t width, F32 y) {
    float* out = a.out + token * a.out_stride + column;
    const float* residual = a.residual == nullptr ? nullptr : a.residual + token * a.residual_stride + column;
    if (width >= LANES) {
        if (residual != nullptr) y = load_floats(residual) + y * a.scale;
        store_floats(out, y);
        return;
    }
    for (int i = 0; i < width; i++) out[i] = residual != nullptr ? residual[i] + a.scale * y[i] : y[i];
}

static inline F32 load_bias(const float* bias, int64_t width) {
    if (width >= LANES) return load_floats(bias);
    F32 v{};
    for (int i = 0; i < width; i++) v[i] = bias[i];
    return v;
}

// Products of MAX_ROWS rows that unpack for themselves; with more of them, unpacking once for all is cheaper.
constexpr int64_t UNPACKED_PRODUCTS = 4;
constexpr int64_t TOKEN_BLOCK = 96;  // at most; a multiple of MAX_ROWS
typedef F32 Sums[MAX_TILES][TOKEN_BLOCK];

struct Block {
    int64_t first;  // token of the first row
    int64_t count;  // of tokens
    int64_t num_rows;
    uint8_t* unpacked;  // this thread's, unpacked_bytes(cols)
    QuantRow rows[TOKEN_BLOCK + MAX_ROWS];  // the last one repeated MAX_ROWS times: kernels come for a few numbers of rows
};

// A few tiles of a shard for all tokens of a block: sums[t][i] for token i, gain and bias applied.
static void tile_sums(const LinearArgs& a, const Block& block, const PackedWeight& w, int64_t tile, int tiles,
                      int64_t row_offset, Sums sums) {
    const TileKernels& kernels = tile_kernels(w);
    const int64_t one_tile = tile_bytes(w, LANES);
    const uint8_t* data = w.data + tile * one_tile;
    if (block.num_rows > UNPACKED_PRODUCTS * MAX_ROWS) {
        const int64_t one_unpacked = w.cols / w.group * kernels.unpacked_group_bytes;
        for (int t = 0; t < tiles; t++) kernels.unpack(w, data + t * one_tile, block.unpacked + t * one_unpacked);
        for (int64_t i = 0; i < block.num_rows; i += MAX_ROWS)
            kernels.unpacked[tiles - 1](w, block.unpacked, block.rows + i, &sums[0][i], TOKEN_BLOCK);
    } else {
        for (int64_t i = 0; i < block.num_rows; i += MAX_ROWS) {
            int index = 0;
            while (1 << index < std::min<int64_t>(block.num_rows - i, MAX_ROWS)) index++;
            kernels.packed[tiles - 1][index](w, data, block.rows + i, &sums[0][i], TOKEN_BLOCK);
        }
    }
    if (a.terms == 2)
        for (int t = 0; t < tiles; t++)
            for (int64_t i = 0; i < block.count; i++) sums[t][i] = sums[t][2 * i] + sums[t][2 * i + 1];
    for (int t = 0; t < tiles; t++) {
        const int64_t row = (tile + t) * LANES;
        F32 bias{};
        if (a.bias != nullptr) bias = load_bias(a.bias + row_offset + row, w.rows - row);
        for (int64_t i = 0; i < block.count; i++) sums[t][i] = sums[t][i] * w.gain + bias;
    }
}

// Tiles [first, last) of all shards' (with an activation, of the gate and what it gates) for the tokens of a block.
static void multiply_block(const LinearArgs& a, const Block& block, int64_t first, int64_t last) {
    Sums sums, gated;
    if (a.activation != NO_ACTIVATION) {
        const PackedWeight &gate = a.shards[0], &up = a.shards[1];
        for (int64_t tile = first, tiles; tile < last; tile += tiles) {
            tiles = last - tile >= MAX_TILES ? MAX_TILES : 1;
            tile_sums(a, block, gate, tile, int(tiles), 0, sums);
            tile_sums(a, block, up, tile, int(tiles), gate.rows, gated);
            for (int64_t t = 0; t < tiles; t++)
                for (int64_t i = 0; i < block.count; i++)
                    finish(a, block.first + i, (tile + t) * LANES, gate.rows - (tile + t) * LANES,
                           activate(a.activation, sums[t][i]) * gated[t][i]);
        }
        return;
    }
    int64_t shard_start = 0, row_offset = 0;
    for (int s = 0; s < a.num_shards; s++) {
        const PackedWeight& w = a.shards[s];
        const int64_t all = (w.rows + LANES - 1) / LANES;
        const int64_t from = std::max(first - shard_start, int64_t(0)), to = std::min(last - shard_start, all);
        for (int64_t tile = from, tiles; tile < to; tile += tiles) {
            tiles = to - tile >= MAX_TILES ? MAX_TILES : 1;
            tile_sums(a, block, w, tile, int(tiles), row_offset, sums);
            for (int64_t t = 0; t < tiles; t++)
                for (int64_t i = 0; i < block.count; i++)
                    finish(a, block.first + i, row_offset + (tile + t) * LANES, w.rows - (tile + t) * LANES, sums[t][i]);
        }
        shard_start += all;
        row_offset += w.rows;
    }
}

static void linear(const void* raw, const Team& team) {
    const LinearArgs& a = *(const LinearArgs*)raw;
    const int64_t row_bytes = quant_row_bytes(a.cols), token_bytes = a.terms * row_bytes;
    uint8_t* rows = a.workspace;
    uint8_t* unpacked = rows + std::max<int64_t>(a.tokens, team.count) * token_bytes + team.index * unpacked_bytes(a.cols);
    if (a.tokens == 1) {
        // Rounding one row is cheaper than meeting at a barrier for it: every thread does it for itself.
        rows += team.index * token_bytes;
        quantize_row(a.x, a.cols, a.norm_weight, a.eps, a.terms, rows);
    } else {
        int64_t first, last;
        team.share(a.tokens, first, last);
        for (int64_t t = first; t < last; t++)
            quantize_row(a.x + t * a.x_stride, a.cols, a.norm_weight, a.eps, a.terms, rows + t * token_bytes);
        team.sync();
    }
    int64_t tiles = 0;
    for (int s = 0; s < (a.activation != NO_ACTIVATION ? 1 : a.num_shards); s++) tiles += (a.shards[s].rows + LANES - 1) / LANES;
    const int64_t fitting = TOKEN_BLOCK_BYTES / row_bytes / MAX_ROWS * MAX_ROWS;
    const int64_t block_tokens = std::max<int64_t>(MAX_ROWS, std::min(TOKEN_BLOCK, fitting)) / a.terms;
    const int64_t blocks = (a.tokens + block_tokens - 1) / block_tokens, pieces = PIECES * team.count;
    int64_t piece_tiles = std::max<int64_t>(1, tiles * blocks / pieces);
    piece_tiles = std::min(tiles, (piece_tiles + MAX_TILES - 1) / MAX_TILES * MAX_TILES);
    const int64_t block_pieces = (tiles + piece_tiles - 1) / piece_tiles;
    team.each(blocks * block_pieces, [&](int64_t unit) {
        const int64_t token = unit / block_pieces * block_tokens, tile = unit % block_pieces * piece_tiles;
        Block block;
        block.first = token;
        block.count = std::min(block_tokens, a.tokens - token);
        block.num_rows = block.count * a.terms;
        block.unpacked = unpacked;
        for (int64_t i = 0; i < block.num_rows + MAX_ROWS; i++)
            block.rows[i] = quant_row(rows + token * token_bytes + std::min(i, block.num_rows - 1) * row_bytes, a.cols);
        multiply_block(a, block, tile, std::min(tiles, tile + piece_tiles));
    });
}

// Rows of a packed table: out[t] = scale * table[ids[t]].
struct EmbeddingArgs {
    const int64_t* ids;
    Count tokens;
    PackedWeight table;
    float scale;
    float* out;  // [tokens, cols]
};

static void unpack_row(const PackedWeight& w, int64_t row, float scale, float* out) {
    const int lane = int(row % LANES), half = w.group / 2;
    const int64_t bytes = group_bytes(w, LANES), header = 2 * LANES * (1 + w.has_min);
    const uint8_t* group = w.data + row / LANES * tile_bytes(w, LANES);
    for (int64_t col = 0; col < w.cols; col += w.group, group += bytes, out += w.group) {
        const float d = half_to_float(((const Half*)group)[lane]) * w.gain * scale;
        const float m = w.has_min ? half_to_float(((const Half*)group)[LANES + lane]) * w.gain * scale : 0.0f;
        const uint8_t* words = group + header + 4 * lane;
        const uint8_t* plane = words + half / 4 * WORD;
        for (int i = 0; i < w.group; i++) {
            int quant;
            if (w.kind == KIND_S8) {
                const uint8_t byte = words[i / 4 * WORD + i % 4];
                quant = SIGNED_OFFSET == 0 ? int(int8_t(byte)) : int(byte);
            } else {
                quant = (words[i % half / 4 * WORD + i % 4] >> (i < half ? 0 : 4)) & 15;
                if (w.kind == KIND_N4) quant = NONLINEAR[quant] + SIGNED_OFFSET;
                if (w.kind == KIND_U5) quant |= ((plane[i % 4] >> (i / 4)) & 1) << 4;
                if (w.kind == KIND_U6) quant |= ((plane[i % 4] >> (i / 4 * 2)) & 3) << 4;
            }
            out[i] = d * float(quant - w.zero) + m;
        }
    }
}

static void embedding(const void* raw, const Team& team) {
    const EmbeddingArgs& a = *(const EmbeddingArgs*)raw;
    int64_t first, last;
    team.share(a.tokens, first, last);
    for (int64_t t = first; t < last; t++) unpack_row(a.table, a.ids[t], a.scale, a.out + t * a.table.cols);
}

}  // namespace octavo

extern "C" {
octavo::Kernel octavo_linear = octavo::linear;
octavo::Kernel octavo_embedding = octavo::embedding;
int64_t octavo_linear_workspace(int64_t tokens, int64_t cols, int terms, int threads) {
    return octavo::quant_row_bytes(cols) * terms * (tokens > threads ? tokens : threads) + threads * octavo::unpacked_bytes(cols);
}
}
