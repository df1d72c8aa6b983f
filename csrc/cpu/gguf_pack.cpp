// From GGUF's blocks to packed tiles (packed.h): every integer and every scale is kept, nothing is rounded again except the
// product of a K format's two scales, to half precision. From plain numbers too, which are rounded here.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "packed.h"
#include "pool.h"
#include "simd.h"

namespace octavo {

// 256 columns of one row, decoded: quants, and the scale and minimum of each run of 16.
struct Decoded {
    uint8_t quants[256];  // S8 as its bits
    float scales[16];
    float minima[16];
};

struct Format {
    const char* name;
    int block_cols;
    int block_bytes;
    int kind;
    int group;
    int zero;
    int has_min;
    void (*decode)(const uint8_t* block, Decoded& out);
    void (*decode_scales)(const uint8_t* block, Decoded& out);  // none: they are half precision, and kept as they are
};

static float half_at(const uint8_t* p) {
    Half h;
    std::memcpy(&h, p, 2);
    return half_to_float(h);
}

// One scale for the 32 columns from `at` on.
static void set_scale32(Decoded& out, int at, float scale, float minimum) {
    for (int i = 0; i < 2; i++) {
        out.scales[at / 16 + i] = scale;
        out.minima[at / 16 + i] = minimum;
    }
}
static void nibbles32(const uint8_t* packed, uint8_t* out) {
    for (int i = 0; i < 16; i++) {
        out[i] = packed[i] & 15;
        out[i + 16] = packed[i] >> 4;
    }
}
static void fifth_bits(const uint8_t* bits, uint8_t* out) {
    uint32_t all;
    std::memcpy(&all, bits, 4);
    for (int i = 0; i < 32; i++) out[i] |= uint8_t(((all >> i) & 1) << 4);
}
static void q4_0(const uint8_t* b, Decoded& out) {
    nibbles32(b + 2, out.quants);
    set_scale32(out, 0, half_at(b), 0);
}
static void q4_1(const uint8_t* b, Decoded& out) {
    nibbles32(b + 4, out.quants);
    set_scale32(out, 0, half_at(b), half_at(b + 2));
}
static void q5_0(const uint8_t* b, Decoded& out) {
    nibbles32(b + 6, out.quants);
    fifth_bits(b + 2, out.quants);
    set_scale32(out, 0, half_at(b), 0);
}
static void q5_1(const uint8_t* b, Decoded& out) {
    nibbles32(b + 8, out.quants);
    fifth_bits(b + 4, out.quants);
    set_scale32(out, 0, half_at(b), half_at(b + 2));
}
static void q8_0(const uint8_t* b, Decoded& out) {
    std::memcpy(out.quants, b + 2, 32);
    set_scale32(out, 0, half_at(b), 0);
}
static void iq4_nl(const uint8_t* b, Decoded& out) {
    nibbles32(b + 2, out.quants);
    set_scale32(out, 0, half_at(b), 0);
}

// Q4_K and Q5_K: eight 6-bit scales and minima in 12 bytes.
static void scale_and_minimum(const uint8_t* packed, int i, int& scale, int& minimum) {
    if (i < 4) {
        scale = packed[i] & 63;
        minimum = packed[i + 4] & 63;
    } else {
        scale = (packed[i + 4] & 15) | ((packed[i - 4] >> 6) << 4);
        minimum = (packed[i + 4] >> 4) | ((packed[i] >> 6) << 4);
    }
}
static void k_scales(const uint8_t* b, Decoded& out) {
    float d = half_at(b), dmin = half_at(b + 2);
    for (int i = 0; i < 8; i++) {
        int scale, minimum;
        scale_and_minimum(b + 4, i, scale, minimum);
        set_scale32(out, 32 * i, d * float(scale), -dmin * float(minimum));
    }
}
static void q4_k(const uint8_t* b, Decoded& out) {
    k_scales(b, out);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 32; j++) {
            out.quants[64 * i + j] = b[16 + 32 * i + j] & 15;
            out.quants[64 * i + 32 + j] = b[16 + 32 * i + j] >> 4;
        }
}
static void q5_k(const uint8_t* b, Decoded& out) {
    k_scales(b, out);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 32; j++) {
            uint8_t high = b[16 + j], low = b[48 + 32 * i + j];
            out.quants[64 * i + j] = (low & 15) | (((high >> (2 * i)) & 1) << 4);
            out.quants[64 * i + 32 + j] = (low >> 4) | (((high >> (2 * i + 1)) & 1) << 4);
        }
}
static void q6_k_scales(const uint8_t* b, Decoded& out) {
    float d = half_at(b + 208);
    for (int i = 0; i < 16; i++) {
        out.scales[i] = d * float(int8_t(b[192 + i]));
        out.minima[i] = 0;
    }
}
static void q6_k(const uint8_t* b, Decoded& out) {
    q6_k_scales(b, out);
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 32; j++) {
            uint8_t high = b[128 + 32 * i + j], first = b[64 * i + j], second = b[64 * i + 32 + j];
            uint8_t* q = out.quants + 128 * i + j;
            q[0] = uint8_t((first & 15) | ((high & 3) << 4));
            q[32] = uint8_t((second & 15) | (((high >> 2) & 3) << 4));
            q[64] = uint8_t((first >> 4) | (((high >> 4) & 3) << 4));
            q[96] = uint8_t((second >> 4) | ((high >> 6) << 4));
        }
}
static void q2_k_scales(const uint8_t* b, Decoded& out) {
    float d = half_at(b + 80), dmin = half_at(b + 82);
    for (int i = 0; i < 16; i++) {
        out.scales[i] = d * float(b[i] & 15);
        out.minima[i] = -dmin * float(b[i] >> 4);
    }
}
static void q2_k(const uint8_t* b, Decoded& out) {
    q2_k_scales(b, out);
    for (int i = 0; i < 256; i++) out.quants[i] = (b[16 + i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32))) & 3;
}
static void q3_k_scales(const uint8_t* b, Decoded& out) {
    float d = half_at(b + 108);
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? b[96 + i] & 15 : b[96 + i - 8] >> 4;
        int high = (b[104 + i % 4] >> (2 * (i / 4))) & 3;
        out.scales[i] = d * float((low | (high << 4)) - 32);
        out.minima[i] = 0;
    }
}
static void q3_k(const uint8_t* b, Decoded& out) {
    q3_k_scales(b, out);
    for (int i = 0; i < 256; i++) {
        int low = (b[32 + i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32))) & 3;
        int high = (b[i % 32] >> (i / 32)) & 1;
        out.quants[i] = uint8_t(low | (high << 2));  // less 4, the zero
    }
}

// Plain numbers, rounded 32 at a time.
template <typename T>
static void read32(const uint8_t* block, float (&x)[32]) {
    T stored[32];
    std::memcpy(stored, block, sizeof(stored));
    for (int i = 0; i < 32; i += LANES) store_floats(x + i, load_floats(stored + i));
}
static float as_half(float x) { return half_to_float(float_to_half(x)); }
template <typename T>
static void int8(const uint8_t* block, Decoded& out) {
    float x[32], largest = 0;
    read32<T>(block, x);
    for (float v : x) largest = std::fmax(largest, std::fabs(v));
    const float scale = as_half(largest / 127.0f), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (int i = 0; i < 32; i++)
        out.quants[i] = uint8_t(int8_t(std::fmax(-127.0f, std::fmin(127.0f, std::nearbyint(x[i] * inverse)))));
    set_scale32(out, 0, scale, 0);
}
// Of a few ranges, from all the numbers to somewhat less, the one with the smallest error.
template <typename T>
static void int4(const uint8_t* block, Decoded& out) {
    float x[32], low = INFINITY, high = -INFINITY, best = INFINITY;
    read32<T>(block, x);
    for (float v : x) low = std::fmin(low, v), high = std::fmax(high, v);
    for (float part : {1.0f, 0.95f, 0.9f, 0.85f, 0.8f}) {
        const float cut = (high - low) * (1 - part) / 2, minimum = as_half(low + cut);
        const float scale = as_half((high - low) * part / 15.0f), inverse = scale > 0 ? 1.0f / scale : 0.0f;
        uint8_t quants[32];
        float error = 0;
        for (int i = 0; i < 32; i++) {
            const float q = std::fmax(0.0f, std::fmin(15.0f, std::nearbyint((x[i] - minimum) * inverse)));
            const float difference = q * scale + minimum - x[i];
            quants[i] = uint8_t(q);
            error += difference * difference;
        }
        if (!(error < best)) continue;
        best = error;
        std::memcpy(out.quants, quants, 32);
        set_scale32(out, 0, scale, minimum);
    }
}

static const Format FORMATS[] = {
    {"int8 float32", 32, 128, KIND_S8, 32, 0, 0, int8<float>},
    {"int8 bfloat16", 32, 64, KIND_S8, 32, 0, 0, int8<BFloat16>},
    {"int8 float16", 32, 64, KIND_S8, 32, 0, 0, int8<Half>},
    {"int4 float32", 32, 128, KIND_U4, 32, 0, 1, int4<float>},
    {"int4 bfloat16", 32, 64, KIND_U4, 32, 0, 1, int4<BFloat16>},
    {"int4 float16", 32, 64, KIND_U4, 32, 0, 1, int4<Half>},
    {"Q4_0", 32, 18, KIND_U4, 32, 8, 0, q4_0},
    {"Q4_1", 32, 20, KIND_U4, 32, 0, 1, q4_1},
    {"Q5_0", 32, 22, KIND_U5, 32, 16, 0, q5_0},
    {"Q5_1", 32, 24, KIND_U5, 32, 0, 1, q5_1},
    {"Q8_0", 32, 34, KIND_S8, 32, 0, 0, q8_0},
    {"IQ4_NL", 32, 18, KIND_N4, 32, 0, 0, iq4_nl},
    {"Q2_K", 256, 84, KIND_U4, 16, 0, 1, q2_k, q2_k_scales},
    {"Q3_K", 256, 110, KIND_U4, 16, 4, 0, q3_k, q3_k_scales},
    {"Q4_K", 256, 144, KIND_U4, 32, 0, 1, q4_k, k_scales},
    {"Q5_K", 256, 176, KIND_U5, 32, 0, 1, q5_k, k_scales},
    {"Q6_K", 256, 210, KIND_U6, 16, 32, 0, q6_k, q6_k_scales},
};

static const Format* find_format(const char* name) {
    for (const Format& format : FORMATS)
        if (std::strcmp(format.name, name) == 0) return &format;
    return nullptr;
}

struct PackArgs {
    const uint8_t* blocks;  // [rows, cols / block_cols, block_bytes]
    uint8_t* data;
    const Format* format;
    PackedWeight* weight;
    float* largest;  // [threads]
};

// The power of two that brings the largest scale just below 2^15, so that none of the small ones is lost.
static float find_gain(const PackArgs& args, const Team& team) {
    const Format& f = *args.format;
    if (f.decode_scales == nullptr) return 1.0f;
    float largest = 0;
    Decoded decoded;
    int64_t first, last;
    team.share(args.weight->rows * args.weight->cols / 256, first, last);
    for (int64_t i = first; i < last; i++) {
        f.decode_scales(args.blocks + i * f.block_bytes, decoded);
        for (int j = 0; j < 16; j++) {
            largest = std::max(largest, std::fabs(decoded.scales[j]));
            largest = std::max(largest, std::fabs(decoded.minima[j]));
        }
    }
    args.largest[team.index] = largest;
    team.sync();
    for (int i = 0; i < team.count; i++) largest = std::max(largest, args.largest[i]);
    if (largest == 0 || !std::isfinite(largest)) return 1.0f;
    return std::exp2(float(std::ilogb(largest) - 14));
}

// One row's quants of a group, four columns a word; `words` points at the row's lane of the first word.
template <int KIND, int GROUP>
static void pack_quants(const uint8_t* quants, uint8_t* words) {
    constexpr int COUNT = GROUP / 4;
    uint32_t from[COUNT], to[COUNT / 2 + 1] = {};
    std::memcpy(from, quants, GROUP);
    if constexpr (KIND == KIND_S8) {
        for (int i = 0; i < GROUP; i++) words[i / 4 * 4 * LANES + i % 4] = uint8_t(quants[i] + SIGNED_OFFSET);
        return;
    }
    for (int i = 0; i < COUNT / 2; i++) to[i] = (from[i] & 0x0f0f0f0f) | (from[i + COUNT / 2] & 0x0f0f0f0f) << 4;
    constexpr bool HAS_MORE = KIND == KIND_U5 || KIND == KIND_U6;
    if constexpr (HAS_MORE) {
        constexpr int BITS = KIND == KIND_U5 ? 1 : 2;
        for (int i = 0; i < COUNT; i++) to[COUNT / 2] |= (from[i] >> 4 & 0x01010101u * ((1 << BITS) - 1)) << (i * BITS);
    }
    for (int i = 0; i < COUNT / 2 + HAS_MORE; i++) std::memcpy(words + i * 4 * LANES, to + i, 4);
}

using PackQuants = void (*)(const uint8_t*, uint8_t*);
static PackQuants choose_packing(const PackedWeight& w) {
    switch (w.kind) {
        case KIND_U5: return pack_quants<KIND_U5, 32>;
        case KIND_U6: return pack_quants<KIND_U6, 16>;
        case KIND_S8: return pack_quants<KIND_S8, 32>;
    }
    return w.group == 16 ? pack_quants<KIND_U4, 16> : pack_quants<KIND_U4, 32>;
}

static void pack_tiles(const void* raw, const Team& team) {
    const PackArgs& args = *(const PackArgs*)raw;
    PackedWeight w = *args.weight;
    w.gain = find_gain(args, team);
    if (team.index == 0) args.weight->gain = w.gain;
    const Format& f = *args.format;
    const int64_t row_bytes = w.cols / f.block_cols * f.block_bytes, one_tile = tile_bytes(w, LANES);
    const int64_t one_group = group_bytes(w, LANES);
    const int span = f.block_cols == 256 ? 256 : 32;  // columns decoded at a time
    const PackQuants pack = choose_packing(w);
    const float inverse_gain = 1.0f / w.gain;  // exact: a power of two
    int64_t first, last;
    team.share((w.rows + LANES - 1) / LANES, first, last);
    Decoded decoded;
    for (int64_t tile = first; tile < last; tile++) {
        uint8_t* out = args.data + tile * one_tile;
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t row = tile * LANES + lane;
            for (int64_t col = 0; col < w.cols; col += span) {
                if (row < w.rows) {
                    f.decode(args.blocks + row * row_bytes + col / f.block_cols * f.block_bytes, decoded);
                } else {
                    std::memset(&decoded, 0, sizeof(decoded));
                }
                for (int c = 0; c < span; c += w.group) {
                    uint8_t* group = out + (col + c) / w.group * one_group;
                    Half scale = float_to_half(decoded.scales[c / 16] * inverse_gain);
                    std::memcpy(group + 2 * lane, &scale, 2);
                    if (w.has_min) {
                        Half minimum = float_to_half(decoded.minima[c / 16] * inverse_gain);
                        std::memcpy(group + 2 * LANES + 2 * lane, &minimum, 2);
                    }
                    pack(decoded.quants + c, group + 2 * LANES * (1 + w.has_min) + 4 * lane);
                }
            }
        }
    }
}

}  // namespace octavo

extern "C" {

// Columns of a row of so many bytes; -1 for an unknown type or a broken row.
int64_t octavo_gguf_columns(const char* type, int64_t row_bytes) {
    const octavo::Format* format = octavo::find_format(type);
    if (format == nullptr || row_bytes % format->block_bytes != 0) return -1;
    return row_bytes / format->block_bytes * format->block_cols;
}

// Describe a weight of this GGUF type in `weight`; returns the bytes it takes packed, -1 for an unknown type, -2 when the
// columns are not whole blocks.
int64_t octavo_gguf_describe(const char* type, int64_t rows, int64_t cols, octavo::PackedWeight* weight) {
    const octavo::Format* format = octavo::find_format(type);
    if (format == nullptr) return -1;
    if (cols % format->block_cols != 0) return -2;
    const int offset = octavo::is_signed(format->kind) ? octavo::SIGNED_OFFSET : 0;
    *weight = {nullptr, rows, cols, format->kind, format->group, format->zero + offset, format->has_min, 1.0f, 0};
    return (rows + octavo::LANES - 1) / octavo::LANES * octavo::tile_bytes(*weight, octavo::LANES);
}

// Pack blocks into `data`, which `octavo_gguf_describe` has sized; sets the weight's data and gain.
void octavo_gguf_pack(octavo::Pool* pool, const char* type, const uint8_t* blocks, uint8_t* data,
                      octavo::PackedWeight* weight) {
    weight->data = data;
    std::vector<float> largest(size_t(octavo_pool_threads(pool)));
    octavo::PackArgs args{blocks, data, octavo::find_format(type), weight, largest.data()};
    octavo::Step step{octavo::pack_tiles, &args};
    octavo_pool_run(pool, &step, 1);
}
}
