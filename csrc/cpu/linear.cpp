#include "linear.h"

#include <algorithm>
#include <cmath>

namespace octavo {

enum Activation : int32_t { NO_ACTIVATION = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4 };

constexpr int MAX_SHARDS = 4;
// Tokens whose rounded activations stay in the second-level cache while the weights pass by.
constexpr int64_t TOKEN_BLOCK = 96;

// residual + scale * activation(norm(x) @ W.T + bias); W is its shards one below the other. With an activation the first
// shard is the gate and the second what it gates.
struct LinearArgs {
    const float* x;
    int64_t x_stride;
    int64_t tokens;
    int64_t cols;
    PackedWeight shards[MAX_SHARDS];
    int32_t num_shards;
    int32_t activation;
    const float* bias;         // over all shards' rows, or null
    const float* norm_weight;  // or null
    float eps;
    float scale;
    const float* residual;  // or null
    int64_t residual_stride;
    float* out;
    int64_t out_stride;
    uint8_t* workspace;  // quant_row_bytes(cols) times the larger of tokens and threads
};

void quantize_row(const float* x, int64_t cols, const float* gamma, float eps, uint8_t* out) {
    const int64_t blocks = cols / ACTIVATION_BLOCK;
    int8_t* quants = (int8_t*)out;
    float* scales = (float*)(out + cols);
    float *scaled32 = scales + blocks, *scaled16 = scales + 2 * blocks;
    int32_t *sums32 = (int32_t*)(scales + 4 * blocks), *sums16 = sums32 + blocks;
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
    constexpr int PARTS = ACTIVATION_BLOCK / LANES;
    for (int64_t block = 0; block < blocks; block++) {
        F32 v[PARTS], largest{};
        UNROLL
        for (int i = 0; i < PARTS; i++) {
            const int64_t at = block * ACTIVATION_BLOCK + i * LANES;
            v[i] = load_floats(x + at);
            if (gamma != nullptr) v[i] = v[i] * inverse_rms * load_floats(gamma + at);
            largest = maximum(largest, maximum(v[i], -v[i]));
        }
        const float top = max_lanes(largest);
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        F32 sum[2] = {};
        I32 q[PARTS];
        UNROLL
        for (int i = 0; i < PARTS; i++) {
            const F32 rounded = round_even(v[i] * inverse);
            q[i] = __builtin_convertvector(rounded, I32);
            sum[i * LANES / 16] += rounded;  // whole numbers: exact
        }
        store_bytes(quants + block * ACTIVATION_BLOCK, q);
        const float scale = top / 127.0f, first = sum_lanes(sum[0]), second = sum_lanes(sum[1]);
        scales[block] = scale;
        sums16[2 * block] = int32_t(first);
        sums16[2 * block + 1] = int32_t(second);
        sums32[block] = int32_t(first + second);
        scaled16[2 * block] = scale * first;
        scaled16[2 * block + 1] = scale * second;
        scaled32[block] = scale * (first + second);
    }
}

TileKernel tile_kernel(const PackedWeight& w, int num_rows, int num_tiles) {
    switch (w.kind) {
        case KIND_U4:
            return tile_kernel_u4(w, num_rows, num_tiles);
        case KIND_U5:
            return tile_kernel_u5(w, num_rows, num_tiles);
        default:
            return tile_kernel_s8(w, num_rows, num_tiles);
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

struct Block {
    const uint8_t* rows;  // rounded activations
    int64_t row_bytes;
    int64_t first;  // token of the first row
    int64_t count;
};

typedef F32 Sums[MAX_TILES][TOKEN_BLOCK];

// A few tiles of a shard for all tokens of a block: sums[t][i] for token i, gain and bias applied.
static void tile_sums(const LinearArgs& a, const Block& block, const PackedWeight& w, int64_t tile, int tiles,
                      int64_t row_offset, Sums sums) {
    const uint8_t* data = w.data + tile * tile_bytes(w, LANES);
    QuantRow rows[MAX_ROWS];
    for (int64_t i = 0; i < block.count; i += MAX_ROWS) {
        const int count = int(std::min<int64_t>(MAX_ROWS, block.count - i));
        for (int r = 0; r < count; r++) rows[r] = quant_row(block.rows + (i + r) * block.row_bytes, a.cols);
        tile_kernel(w, count, tiles)(w, data, rows, &sums[0][i], TOKEN_BLOCK);
    }
    for (int t = 0; t < tiles; t++) {
        const int64_t row = (tile + t) * LANES;
        F32 bias{};
        if (a.bias != nullptr) bias = load_bias(a.bias + row_offset + row, w.rows - row);
        for (int64_t i = 0; i < block.count; i++) sums[t][i] = sums[t][i] * w.gain + bias;
    }
}

static void multiply_block(const LinearArgs& a, const Block& block, const Team& team) {
    Sums sums, gated;
    int64_t first, last;
    if (a.activation != NO_ACTIVATION) {
        const PackedWeight &gate = a.shards[0], &up = a.shards[1];
        team.share((gate.rows + LANES - 1) / LANES, first, last);
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
    int64_t total = 0;
    for (int s = 0; s < a.num_shards; s++) total += (a.shards[s].rows + LANES - 1) / LANES;
    team.share(total, first, last);
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
    const int64_t row_bytes = quant_row_bytes(a.cols);
    if (a.tokens == 1) {
        // Rounding one row is cheaper than meeting at a barrier for it: every thread does it for itself.
        uint8_t* own = a.workspace + team.index * row_bytes;
        quantize_row(a.x, a.cols, a.norm_weight, a.eps, own);
        multiply_block(a, {own, row_bytes, 0, 1}, team);
        return;
    }
    int64_t first, last;
    team.share(a.tokens, first, last);
    for (int64_t t = first; t < last; t++)
        quantize_row(a.x + t * a.x_stride, a.cols, a.norm_weight, a.eps, a.workspace + t * row_bytes);
    team.sync();
    for (int64_t t = 0; t < a.tokens; t += TOKEN_BLOCK)
        multiply_block(a, {a.workspace + t * row_bytes, row_bytes, t, std::min(TOKEN_BLOCK, a.tokens - t)}, team);
}

// Rows of a packed table: out[t] = scale * table[ids[t]].
struct EmbeddingArgs {
    const int64_t* ids;
    int64_t tokens;
    PackedWeight table;
    float scale;
    float* out;  // [tokens, cols]
};

static void unpack_row(const PackedWeight& w, int64_t row, float scale, float* out) {
    const int lane = int(row % LANES);
    const int64_t bytes = group_bytes(w, LANES), header = 2 * LANES * (1 + w.has_min);
    const uint8_t* group = w.data + row / LANES * tile_bytes(w, LANES);
    const int half = w.group / 2;
    for (int64_t col = 0; col < w.cols; col += w.group, group += bytes, out += w.group) {
        const float d = half_to_float(((const Half*)group)[lane]) * w.gain * scale;
        const float m = w.has_min ? half_to_float(((const Half*)group)[LANES + lane]) * w.gain * scale : 0.0f;
        const uint8_t* words = group + header + 4 * lane;
        for (int i = 0; i < (w.kind == KIND_U4 ? half : w.group); i++) {
            const uint8_t byte = words[i / 4 * 4 * LANES + i % 4];
            if (w.kind == KIND_U4) {
                out[i] = d * float(int(byte & 15) - w.zero) + m;
                out[i + half] = d * float(int(byte >> 4) - w.zero) + m;
            } else {
                const int quant = w.kind == KIND_S8 && SIGNED_OFFSET == 0 ? int(int8_t(byte)) : int(byte);
                out[i] = d * float(quant - w.zero) + m;
            }
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
int64_t octavo_linear_workspace(int64_t tokens, int64_t cols, int threads) {
    return octavo::quant_row_bytes(cols) * (tokens > threads ? tokens : threads);
}
}
