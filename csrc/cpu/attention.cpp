// Attention over the paged KV cache in float32, with an online softmax, and what stands before it: head norms, rotary
// embedding, the write of this step's keys and values.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace octavo {

enum KVKind : int32_t { KV_FLOAT32 = 0, KV_FLOAT16 = 1, KV_BFLOAT16 = 2 };

constexpr int64_t KEY_CHUNK = 64;     // keys whose scores are computed together in a prefill
constexpr int64_t DECODE_CHUNK = 32;  // in a decode, where their floats must stay in the first-level cache
constexpr int64_t QUERY_TOKENS = 32;  // query tokens of one unit of work in a prefill
constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t MAX_GROUP = 16;  // query heads that share a key head

// kv_cache [blocks, 2, block_size, num_kv_heads, head_dim], blocks block_stride elements apart.
struct Cache {
    void* data;
    int64_t block_stride;
    int32_t kind;
    int32_t block_size;
    int32_t num_kv_heads;
    int32_t head_dim;
};

struct RopeArgs {
    const float* qkv;  // [tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    int64_t qkv_stride;
    Count tokens;
    const int64_t* positions;
    const float* cos_sin;  // [positions, rotary_dim], or null
    int64_t rotary_dim;
    Cache cache;
    const int64_t* slots;
    int32_t num_heads;
    int32_t interleaved;
    const float* q_norm;  // [head_dim], or null
    const float* k_norm;
    float eps;
    int32_t reserved;
    float* q;  // [tokens, num_heads, head_dim]
};

struct AttentionArgs {
    const float* q;  // [tokens, num_heads, head_dim]
    Cache cache;
    const int32_t* block_table;
    int64_t table_stride;
    const int32_t* query_start;  // [requests + 1]; null: one token each
    const int32_t* seq_lens;
    Count requests;
    int32_t num_heads;
    float scale;
    int32_t window;  // 0: none
    float softcap;   // 0: none
    const float* sinks;
    const float* bias;       // null: none; [num_heads, num_distances]
    int32_t num_distances;   // 1: slopes, by distance; more: a number for each distance, the last for all beyond
    float* out;      // [tokens, num_heads, head_dim]
    float* workspace;  // octavo_attention_workspace bytes
};

template <typename T>
static T* cache_row(const Cache& c, int64_t block, int64_t which, int64_t offset, int64_t head) {
    return (T*)c.data + block * c.block_stride + ((which * c.block_size + offset) * c.num_kv_heads + head) * c.head_dim;
}

static void normalize_head(const float* x, int64_t dim, const float* gamma, float eps, float* out) {
    float squares = 0;
    for (int64_t i = 0; i < dim; i++) squares += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(squares / float(dim) + eps);
    for (int64_t i = 0; i < dim; i++) out[i] = x[i] * inverse * gamma[i];
}

static void rotate(const RopeArgs& a, int64_t token, float* x) {
    const int64_t half = a.rotary_dim / 2;
    const float *cosine = a.cos_sin + a.positions[token] * a.rotary_dim, *sine = cosine + half;
    if (a.interleaved) {
        for (int64_t i = 0; i < half; i++) {
            const float first = x[2 * i], second = x[2 * i + 1];
            x[2 * i] = first * cosine[i] - second * sine[i];
            x[2 * i + 1] = second * cosine[i] + first * sine[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + half] = second * cosine[i] + first * sine[i];
    }
}

// The head ready for use: normalised and rotated, in `out`.
static void prepare_head(const RopeArgs& a, int64_t token, const float* x, const float* gamma, float* out) {
    const int64_t dim = a.cache.head_dim;
    if (gamma != nullptr)
        normalize_head(x, dim, gamma, a.eps, out);
    else
        std::memcpy(out, x, size_t(dim) * sizeof(float));
    if (a.cos_sin != nullptr) rotate(a, token, out);
}

template <typename T>
static void write_row(T* to, const float* from, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) store_floats(to + i, load_floats(from + i));
}

static void write_cache(const Cache& c, int64_t slot, int64_t which, int64_t head, const float* from) {
    const int64_t block = slot / c.block_size, offset = slot % c.block_size;
    switch (c.kind) {
        case KV_FLOAT32:
            return write_row(cache_row<float>(c, block, which, offset, head), from, c.head_dim);
        case KV_FLOAT16:
            return write_row(cache_row<Half>(c, block, which, offset, head), from, c.head_dim);
        default:
            return write_row(cache_row<BFloat16>(c, block, which, offset, head), from, c.head_dim);
    }
}

static void qkv_rope_write(const void* raw, const Team& team) {
    const RopeArgs& a = *(const RopeArgs*)raw;
    const int64_t dim = a.cache.head_dim, kv_heads = a.cache.num_kv_heads, heads = a.num_heads + 2 * kv_heads;
    float key[MAX_HEAD_DIM];
    int64_t first, last;
    team.share(a.tokens * heads, first, last);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t token = unit / heads, head = unit % heads;
        const float* x = a.qkv + token * a.qkv_stride + head * dim;
        if (head < a.num_heads) {
            prepare_head(a, token, x, a.q_norm, a.q + (token * a.num_heads + head) * dim);
            continue;
        }
        const int64_t slot = a.slots[token];
        if (slot < 0) continue;
        if (head < a.num_heads + kv_heads) {
            prepare_head(a, token, x, a.k_norm, key);
            write_cache(a.cache, slot, 0, head - a.num_heads, key);
        } else {
            write_cache(a.cache, slot, 1, head - a.num_heads - kv_heads, x);
        }
    }
}

// The running softmax of one query head: its largest score, the sum of exponentials, the weighted values.
struct Online {
    float largest;
    float sum;
};

static float bias_score(const AttentionArgs& a, int64_t head, float score, int64_t key, int64_t query) {
    if (a.softcap > 0) score = a.softcap * std::tanh(score / a.softcap);
    if (a.bias == nullptr) return score;
    if (a.num_distances == 1) return score + a.bias[head] * float(key - query);
    return score + a.bias[head * a.num_distances + std::min<int64_t>(query - key, a.num_distances - 1)];
}

// Exponentials of `count` scores against the running maximum, in place; rescales sum and values when it moves. Scores lie in
// whole vectors, of which those past `count` become zero.
static void update_softmax(float* scores, int64_t count, Online& state, float* values, int64_t dim) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < whole; i++) scores[i] = -INFINITY;
    F32 top = load_floats(scores);
    for (int64_t i = LANES; i < whole; i += LANES) top = maximum(load_floats(scores + i), top);
    const float largest = std::max(state.largest, max_lanes(top));
    if (largest == -INFINITY) {
        std::memset(scores, 0, size_t(whole) * sizeof(float));
        return;
    }
    if (largest > state.largest) {
        const float shrink = state.largest == -INFINITY ? 0.0f : std::exp(state.largest - largest);
        state.sum *= shrink;
        state.largest = largest;
        for (int64_t d = 0; d < dim; d += LANES) store_floats(values + d, load_floats(values + d) * shrink);
    }
    F32 sum{};
    for (int64_t i = 0; i < whole; i += LANES) {
        const F32 s = load_floats(scores + i) - largest;
        const F32 kept = s > splat(-87.0f) ? exponential(s) : F32{};
        store_floats(scores + i, kept);
        sum += kept;
    }
    state.sum += sum_lanes(sum);
}

static void begin_softmax(const AttentionArgs& a, int64_t head, bool with_sink, Online& state, float* values) {
    const bool sinks = with_sink && a.sinks != nullptr;
    state = {sinks ? a.sinks[head] : -INFINITY, sinks ? 1.0f : 0.0f};
    std::memset(values, 0, size_t(a.cache.head_dim) * sizeof(float));
}

static void end_softmax(const Online& state, float* values, int64_t dim, float* out) {
    const float inverse = state.sum > 0 ? 1.0f / state.sum : 0.0f;
    for (int64_t d = 0; d < dim; d += LANES) store_floats(out + d, load_floats(values + d) * inverse);
}

// Where `count` tokens from `start` on lie for one key head: as floats, converted into `buffer` unless they are floats in one
// piece already. Returns the first token's row and sets the distance between rows.
template <typename T>
static const float* gather_rows(const Cache& c, const int32_t* table, int64_t which, int64_t kv_head, int64_t start,
                                int64_t count, float* buffer, int64_t& stride) {
    const int64_t dim = c.head_dim, step = int64_t(c.num_kv_heads) * dim;
    stride = dim;
    for (int64_t done = 0; done < count;) {
        const int64_t at = start + done, offset = at % c.block_size;
        const int64_t run = std::min(count - done, c.block_size - offset);
        const T* from = cache_row<T>(c, table[at / c.block_size], which, offset, kv_head);
        if constexpr (std::is_same<T, float>::value) {
            if (run == count) {
                stride = step;
                return from;
            }
        }
        for (int64_t i = 0; i < run; i++)
            for (int64_t d = 0; d < dim; d += LANES)
                store_floats(buffer + (done + i) * dim + d, load_floats(from + i * step + d));
        done += run;
    }
    return buffer;
}

// Fetch ahead what gather_rows will read: a decode comes by each key once, in rows too short for the hardware to see coming.
template <typename T>
static void prefetch_rows(const Cache& c, const int32_t* table, int64_t which, int64_t kv_head, int64_t start,
                          int64_t count) {
    for (int64_t at = start; at < start + count; at++) {
        const char* row = (const char*)cache_row<T>(c, table[at / c.block_size], which, at % c.block_size, kv_head);
        for (int64_t byte = 0; byte < c.head_dim * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
    }
}

// scores[i] = query · row i, for WIDTH vectors of head dimension at a time.
template <int WIDTH>
static void score_rows(const float* query, const float* rows, int64_t stride, int64_t count, int64_t dim, float* scores) {
    for (int64_t d = 0; d < dim; d += WIDTH * LANES) {
        F32 q[WIDTH];
        UNROLL
        for (int v = 0; v < WIDTH; v++) q[v] = load_floats(query + d + v * LANES);
        for (int64_t i = 0; i < count; i++) {
            const float* row = rows + i * stride + d;
            F32 even{}, odd{};
            UNROLL
            for (int v = 0; v < WIDTH; v += 2) even += q[v] * load_floats(row + v * LANES);
            UNROLL
            for (int v = 1; v < WIDTH; v += 2) odd += q[v] * load_floats(row + v * LANES);
            const float sum = sum_lanes(even + odd);
            scores[i] = d == 0 ? sum : scores[i] + sum;
        }
    }
}

// values += sum over i of weights[i] * row i.
template <int WIDTH>
static void add_rows(const float* weights, const float* rows, int64_t stride, int64_t count, int64_t dim, float* values) {
    for (int64_t d = 0; d < dim; d += WIDTH * LANES) {
        F32 sum[WIDTH];
        UNROLL
        for (int v = 0; v < WIDTH; v++) sum[v] = load_floats(values + d + v * LANES);
        for (int64_t i = 0; i < count; i++) {
            const float* row = rows + i * stride + d;
            UNROLL
            for (int v = 0; v < WIDTH; v++) sum[v] += load_floats(row + v * LANES) * weights[i];
        }
        UNROLL
        for (int v = 0; v < WIDTH; v++) store_floats(values + d + v * LANES, sum[v]);
    }
}

// One query token, the heads of one key head, the keys [from, to): states[g] and values[g * dim] must have been begun.
template <typename T>
static void attend_one(const AttentionArgs& a, int64_t request, int64_t token, int64_t kv_head, int64_t from, int64_t to,
                       int64_t query_pos, Online* states, float* values) {
    const Cache& c = a.cache;
    const int64_t dim = c.head_dim, group = a.num_heads / c.num_kv_heads;
    const int32_t* table = a.block_table + request * a.table_stride;
    const float* q = a.q + (token * a.num_heads + kv_head * group) * dim;
    // The widest pieces that the head dimension has and the registers hold.
    const auto score = dim % (8 * LANES) == 0 ? score_rows<8> : dim % (4 * LANES) == 0 ? score_rows<4> : score_rows<1>;
    const auto add = dim % (8 * LANES) == 0 ? add_rows<8> : dim % (4 * LANES) == 0 ? add_rows<4> : add_rows<1>;
    float scores[MAX_GROUP][DECODE_CHUNK], buffer[DECODE_CHUNK * MAX_HEAD_DIM];
    for (int64_t start = from; start < to; start += DECODE_CHUNK) {
        const int64_t count = std::min(DECODE_CHUNK, to - start);
        int64_t stride;
        prefetch_rows<T>(c, table, 1, kv_head, start, count);
        const float* keys = gather_rows<T>(c, table, 0, kv_head, start, count, buffer, stride);
        for (int64_t g = 0; g < group; g++) {
            score(q + g * dim, keys, stride, count, dim, scores[g]);
            for (int64_t i = 0; i < count; i++)
                scores[g][i] = bias_score(a, kv_head * group + g, scores[g][i] * a.scale, start + i, query_pos);
            update_softmax(scores[g], count, states[g], values + g * dim, dim);
        }
        if (start + count < to)
            prefetch_rows<T>(c, table, 0, kv_head, start + count, std::min(DECODE_CHUNK, to - start - count));
        const float* rows = gather_rows<T>(c, table, 1, kv_head, start, count, buffer, stride);
        for (int64_t g = 0; g < group; g++) add(scores[g], rows, stride, count, dim, values + g * dim);
    }
}

// R query rows against a chunk of keys or values laid out as floats: out[r][n] (+)= sum over k of left[r][k] * right[k][n].
template <int R>
static inline void product_rows(const float* left, int64_t left_stride, const float* right, int64_t right_stride,
                                int64_t depth, int64_t width, float* out, int64_t out_stride, bool accumulate) {
    for (int64_t n = 0; n < width; n += 2 * LANES) {
        F32 first[R], second[R];
        UNROLL
        for (int r = 0; r < R; r++) {
            first[r] = accumulate ? load_floats(out + r * out_stride + n) : F32{};
            second[r] = accumulate ? load_floats(out + r * out_stride + n + LANES) : F32{};
        }
        for (int64_t k = 0; k < depth; k++) {
            const F32 a = load_floats(right + k * right_stride + n), b = load_floats(right + k * right_stride + n + LANES);
            UNROLL
            for (int r = 0; r < R; r++) {
                const F32 x = splat(left[r * left_stride + k]);
                first[r] += x * a;
                second[r] += x * b;
            }
        }
        UNROLL
        for (int r = 0; r < R; r++) {
            store_floats(out + r * out_stride + n, first[r]);
            store_floats(out + r * out_stride + n + LANES, second[r]);
        }
    }
}

static void product(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t rows,
                    int64_t depth, int64_t width, float* out, int64_t out_stride, bool accumulate) {
    constexpr int R = 6;
    int64_t r = 0;
    for (; r + R <= rows; r += R)
        product_rows<R>(left + r * left_stride, left_stride, right, right_stride, depth, width, out + r * out_stride,
                        out_stride, accumulate);
    for (; r < rows; r++)
        product_rows<1>(left + r * left_stride, left_stride, right, right_stride, depth, width, out + r * out_stride,
                        out_stride, accumulate);
}

// A thread's scratch for a block of queries, in floats.
struct PrefillScratch {
    float* keys;    // [head_dim, KEY_CHUNK]: transposed
    float* values;  // [KEY_CHUNK, head_dim]
    float* scores;  // [rows, KEY_CHUNK]
    float* queries;  // [rows, head_dim]
    float* sums;    // [rows, head_dim]
};

static int64_t padded_dim(int64_t dim) { return (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES); }

static int64_t prefill_floats(int64_t dim, int64_t group) {
    const int64_t rows = QUERY_TOKENS * group, wide = padded_dim(dim);
    return KEY_CHUNK * (dim + wide) + rows * (KEY_CHUNK + dim + wide);
}

// Keys, transposed, and values of `count` tokens from `start` on; what lies past them up to a whole vector is zero.
template <typename T>
static void gather_chunk(const Cache& c, const int32_t* table, int64_t kv_head, int64_t start, int64_t count,
                         const PrefillScratch& s) {
    const int64_t dim = c.head_dim, wide = padded_dim(dim);
    const T* keys[LANES];
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t some = std::min<int64_t>(LANES, count - i);
        for (int64_t j = 0; j < some; j++) {
            const int64_t at = start + i + j, block = table[at / c.block_size], offset = at % c.block_size;
            keys[j] = cache_row<T>(c, block, 0, offset, kv_head);
            const T* values = cache_row<T>(c, block, 1, offset, kv_head);
            for (int64_t d = 0; d < dim; d += LANES)
                store_floats(s.values + (i + j) * wide + d, load_floats(values + d));
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            F32 rows[LANES];
            for (int64_t j = 0; j < LANES; j++) rows[j] = j < some ? load_floats(keys[j] + d) : F32{};
            transpose(rows);
            for (int64_t j = 0; j < LANES; j++) store_floats(s.keys + (d + j) * KEY_CHUNK + i, rows[j]);
        }
    }
}

// Query tokens [first, first + count) of a request (indices within its chunk), the heads of one key head.
template <typename T>
static void attend_block(const AttentionArgs& a, int64_t request, int64_t token_start, int64_t chunk_len, int64_t first,
                         int64_t count, int64_t kv_head, float* scratch) {
    const Cache& c = a.cache;
    const int64_t dim = c.head_dim, wide = padded_dim(dim), group = a.num_heads / c.num_kv_heads, rows = count * group;
    const int32_t* table = a.block_table + request * a.table_stride;
    const int64_t first_pos = a.seq_lens[request] - chunk_len + first, last_pos = first_pos + count - 1;
    PrefillScratch s;
    s.keys = scratch;
    s.values = s.keys + dim * KEY_CHUNK;
    s.scores = s.values + KEY_CHUNK * wide;
    s.queries = s.scores + QUERY_TOKENS * group * KEY_CHUNK;
    s.sums = s.queries + QUERY_TOKENS * group * dim;
    Online states[QUERY_TOKENS * MAX_GROUP];
    for (int64_t r = 0; r < rows; r++) {  // row = token within the block * group + head within the group
        const int64_t head = kv_head * group + r % group;
        const float* q = a.q + ((token_start + first + r / group) * a.num_heads + head) * dim;
        for (int64_t d = 0; d < dim; d += LANES) store_floats(s.queries + r * dim + d, load_floats(q + d) * a.scale);
        begin_softmax(a, head, true, states[r], s.sums + r * wide);
    }
    const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, first_pos - a.window + 1) : 0;
    for (int64_t start = oldest / KEY_CHUNK * KEY_CHUNK; start <= last_pos; start += KEY_CHUNK) {
        const int64_t keys = std::min(KEY_CHUNK, last_pos + 1 - start);
        gather_chunk<T>(c, table, kv_head, start, keys, s);
        const int64_t key_width = (keys + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
        product(s.queries, dim, s.keys, KEY_CHUNK, rows, dim, key_width, s.scores, KEY_CHUNK, false);
        const bool plain = a.softcap <= 0 && a.bias == nullptr;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t pos = first_pos + r / group;
            float* scores = s.scores + r * KEY_CHUNK;
            const int64_t begin = a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1 - start) : 0;
            const int64_t end = std::min(keys, pos + 1 - start);
            for (int64_t i = 0; i < std::min(begin, keys); i++) scores[i] = -INFINITY;
            for (int64_t i = std::max<int64_t>(end, 0); i < keys; i++) scores[i] = -INFINITY;
            if (!plain)
                for (int64_t i = begin; i < end; i++)
                    scores[i] = bias_score(a, kv_head * group + r % group, scores[i], start + i, pos);
            update_softmax(scores, keys, states[r], s.sums + r * wide, wide);
        }
        product(s.scores, KEY_CHUNK, s.values, wide, rows, keys, wide, s.sums, wide, true);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t token = token_start + first + r / group, head = kv_head * group + r % group;
        end_softmax(states[r], s.sums + r * wide, dim, a.out + (token * a.num_heads + head) * dim);
    }
}

// What every thread needs to know about how the requests are cut into units of work.
static int64_t query_start(const AttentionArgs& a, int64_t request) {
    return a.query_start == nullptr ? request : a.query_start[request];
}

// A part of one request's keys for one key head, computed beside the others: merged afterwards.
struct Partial {
    Online states[MAX_GROUP];
    float values[MAX_GROUP * MAX_HEAD_DIM];
};

// A single token's keys are cut into a part for every thread when there are too few (token, head) pairs to go round.
template <typename T>
static void attend_split(const AttentionArgs& a, const Team& team) {
    const Cache& c = a.cache;
    const int64_t dim = c.head_dim, group = a.num_heads / c.num_kv_heads, pairs = a.requests * c.num_kv_heads;
    Partial* partials = (Partial*)a.workspace;  // [pairs, threads]
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t request = pair / c.num_kv_heads, kv_head = pair % c.num_kv_heads, len = a.seq_lens[request];
        const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, len - a.window) : 0;
        Partial& own = partials[pair * team.count + team.index];
        for (int64_t g = 0; g < group; g++)
            begin_softmax(a, kv_head * group + g, team.index == 0, own.states[g], own.values + g * dim);
        int64_t first, last;
        team.share(std::max<int64_t>(len - oldest, 0), first, last);
        attend_one<T>(a, request, request, kv_head, oldest + first, oldest + last, len - 1, own.states, own.values);
    }
    team.sync();
    int64_t first, last;
    team.share(pairs * group, first, last);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t pair = unit / group, g = unit % group;
        const int64_t request = pair / c.num_kv_heads, head = pair % c.num_kv_heads * group + g;
        float largest = -INFINITY, sum = 0, merged[MAX_HEAD_DIM] = {};
        const Partial* parts = partials + pair * team.count;
        for (int i = 0; i < team.count; i++) largest = std::max(largest, parts[i].states[g].largest);
        for (int i = 0; i < team.count && largest > -INFINITY; i++) {
            const Online& state = parts[i].states[g];
            const float weight = state.largest == -INFINITY ? 0.0f : std::exp(state.largest - largest);
            sum += state.sum * weight;
            for (int64_t d = 0; d < dim; d += LANES)
                store_floats(merged + d, load_floats(merged + d) + load_floats(parts[i].values + g * dim + d) * weight);
        }
        end_softmax({largest, sum}, merged, dim, a.out + (request * a.num_heads + head) * dim);
    }
}

// A request's only token, the heads of one key head; `values` is scratch for their sums.
template <typename T>
static void attend_single(const AttentionArgs& a, int64_t request, int64_t token, int64_t kv_head, float* values) {
    const int64_t dim = a.cache.head_dim, group = a.num_heads / a.cache.num_kv_heads, len = a.seq_lens[request];
    Online states[MAX_GROUP];
    for (int64_t g = 0; g < group; g++) begin_softmax(a, kv_head * group + g, true, states[g], values + g * dim);
    const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, len - a.window) : 0;
    attend_one<T>(a, request, token, kv_head, oldest, len, len - 1, states, values);
    for (int64_t g = 0; g < group; g++)
        end_softmax(states[g], values + g * dim, dim, a.out + (token * a.num_heads + kv_head * group + g) * dim);
}

template <typename T>
static void attend(const AttentionArgs& a, const Team& team) {
    const Cache& c = a.cache;
    const int64_t dim = c.head_dim, group = a.num_heads / c.num_kv_heads;
    const bool all_decode = a.query_start == nullptr;
    if (all_decode && a.requests * c.num_kv_heads < 4 * team.count) return attend_split<T>(a, team);
    float* scratch = a.workspace + team.index * prefill_floats(dim, group);
    int64_t units = 0;
    for (int64_t r = 0; r < a.requests; r++)
        units += (query_start(a, r + 1) - query_start(a, r) + QUERY_TOKENS - 1) / QUERY_TOKENS * c.num_kv_heads;
    int64_t request = a.requests, first_unit = units;  // units [first_unit, …) belong to `request` and those after it
    // From the last to the first: the later a block of queries, the more keys it reads, and long pieces go first.
    team.each(units, [&](int64_t index) {
        const int64_t unit = units - 1 - index;
        while (unit < first_unit) {
            request--;
            first_unit -= (query_start(a, request + 1) - query_start(a, request) + QUERY_TOKENS - 1) / QUERY_TOKENS *
                          c.num_kv_heads;
        }
        const int64_t start = query_start(a, request), len = query_start(a, request + 1) - start;
        const int64_t first = (unit - first_unit) / c.num_kv_heads * QUERY_TOKENS, kv_head = unit % c.num_kv_heads;
        if (len > 1)
            attend_block<T>(a, request, start, len, first, std::min(QUERY_TOKENS, len - first), kv_head, scratch);
        else
            attend_single<T>(a, request, start, kv_head, scratch);
    });
}

static void attention(const void* raw, const Team& team) {
    const AttentionArgs& a = *(const AttentionArgs*)raw;
    switch (a.cache.kind) {
        case KV_FLOAT32:
            return attend<float>(a, team);
        case KV_FLOAT16:
            return attend<Half>(a, team);
        default:
            return attend<BFloat16>(a, team);
    }
}

}  // namespace octavo

extern "C" {
octavo::Kernel octavo_qkv_rope_write = octavo::qkv_rope_write;
octavo::Kernel octavo_attention = octavo::attention;

// Bytes of AttentionArgs.workspace.
int64_t octavo_attention_workspace(int threads, int num_kv_heads, int group, int head_dim) {
    const int64_t prefill = threads * octavo::prefill_floats(head_dim, group) * int64_t(sizeof(float));
    const int64_t split = (4 * int64_t(threads) + num_kv_heads) * threads * int64_t(sizeof(octavo::Partial));
    return prefill > split ? prefill : split;
}
}
