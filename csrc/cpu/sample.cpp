// A token drawn for each row: ops.sampling.sample, its filters and its noise, number for number.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "pool.h"
#include "simd.h"

namespace octavo {

struct SampleArgs {
    const float* logits;  // [rows, vocab]
    int64_t stride;
    Count rows;
    int64_t vocab;
    const int32_t* row_ids;    // permanent rows; -1: padding
    const int32_t* positions;  // [rows]
    const float* temperature;  // these five by permanent row
    const float* top_p;
    const float* min_p;
    const int32_t* top_k;
    const int64_t* seeds;
    int32_t* token_ids;  // 0 where bad
    uint8_t* is_bad;
    float* workspace;  // [threads, vocab]
};

// --- noise ------------------------------------------------------------------------------------------------------------

constexpr int BLOCKS = LANES / 2;      // counters in a vector, 64 bits each
constexpr int CHAINS = 2;              // vectors of them, since each round waits for the one before
constexpr int TOKENS = 4 * BLOCKS * CHAINS;  // one counter gives four tokens their word
constexpr int VECTORS = TOKENS / LANES;
constexpr float MAX_NOISE = 22.9f;     // of the smallest u, 2^-33

// Philox4x32-10 for the counters (block + i, position, 0, 0): words[i] is token 4 * block + i's.
static inline void random_words(int64_t block, uint32_t position, uint64_t seed, uint32_t (&words)[TOKENS]) {
    U64 c0[CHAINS], c1[CHAINS], c2[CHAINS], c3[CHAINS];
    UNROLL
    for (int c = 0; c < CHAINS; c++) {
        UNROLL
        for (int i = 0; i < BLOCKS; i++) c0[c][i] = uint64_t(block + c * BLOCKS + i);
        c1[c] = U64{} + position, c2[c] = U64{}, c3[c] = U64{};
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    UNROLL
    for (int round = 0; round < 10; round++) {
        UNROLL
        for (int c = 0; c < CHAINS; c++) {
            const U64 product0 = multiply_low(c0[c], 0xD2511F53u), product1 = multiply_low(c2[c], 0xCD9E8D57u);
            c0[c] = (product1 >> 32) ^ c1[c] ^ k0;
            c2[c] = (product0 >> 32) ^ c3[c] ^ k1;
            c1[c] = product1, c3[c] = product0;  // their upper halves are rubbish that nothing reads
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    uint64_t pairs[2 * CHAINS * BLOCKS];
    const U64 low = U64{} + 0xffffffffu;
    UNROLL
    for (int c = 0; c < CHAINS; c++) {
        const U64 first = (c0[c] & low) | c1[c] << 32, second = (c2[c] & low) | c3[c] << 32;
        UNROLL
        for (int i = 0; i < BLOCKS; i++) {
            pairs[2 * (c * BLOCKS + i)] = first[i];
            pairs[2 * (c * BLOCKS + i) + 1] = second[i];
        }
    }
    std::memcpy(words, pairs, sizeof(words));
}

// log(x) for normal positive x, to about 1 ulp (the polynomial of Cephes' logf).
static inline F32 logarithm(F32 x) {
    const I32 bits = (I32)x;
    I32 exponent = (bits >> 23) - 126;
    F32 m = (F32)((bits & 0x7fffff) | 0x3f000000);  // [0.5, 1)
    const I32 is_small = m < 0.70710678f;
    exponent += is_small;
    m = is_small ? m + m - 1.0f : m - 1.0f;
    const F32 e = to_float(exponent), square = m * m;
    F32 p = splat(7.0376836292e-2f);
    for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                    2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        p = p * m + c;
    return m + (p * m * square - e * 2.12194440e-4f - 0.5f * square) + e * 0.693359375f;
}

// -log(-log(1 - u)) with u = (word + 1/2) / 2^32; see ops.sampling._gumbel.
static inline F32 gumbel(const uint32_t* words) {
    typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
    const Words w = load<Words>(words);
    // Halves are exact; their sum is rounded once, as a conversion of the whole would be.
    const F32 number = to_float((I32)(w >> 16)) * 65536.0f + to_float((I32)(w & 0xffff));
    const F32 u = minimum((number + 0.5f) * 2.3283064365386963e-10f, splat(1.0f - 5.9604644775390625e-08f));
    const F32 rest = 1.0f - u;
    // Where 1 - u has lost digits of u, the logarithm of what is left of them is stretched by the same factor.
    const F32 e = rest == 1.0f ? u : logarithm(rest) * u / (rest - 1.0f);
    return -logarithm(e);
}

// --- one row ----------------------------------------------------------------------------------------------------------

struct Row {
    const float* logits;
    int64_t vocab;
    float factor;     // 1 / temperature
    float largest;    // over temperature
    float threshold;  // tokens below are out

    F32 values(int64_t at) const { return load_floats(logits + at) * factor; }
    float value(int64_t at) const { return logits[at] * factor; }
};

// Values by how far they lie below the largest; what is further away than all bins is in the last one.
constexpr int BINS = 2048;
constexpr float BINS_PER_UNIT = 64.0f;

struct Histogram {
    int32_t counts[BINS];
    double masses[BINS];  // of exp(value - largest)
};

// Run use(values, bins, how many of them) over the whole row; not a number counts as out.
template <typename F>
static void each_vector(const Row& row, const F& use) {
    for (int64_t at = 0; at < row.vocab; at += LANES) {
        const int width = int(std::min<int64_t>(LANES, row.vocab - at));
        F32 v = splat(-INFINITY);
        if (width == LANES) {
            v = row.values(at);
        } else {
            for (int i = 0; i < width; i++) v[i] = row.value(at + i);
        }
        const F32 bins = (row.largest - v) * BINS_PER_UNIT;
        use(v, __builtin_convertvector(bins < float(BINS - 1) ? bins : splat(float(BINS - 1)), I32), width);
    }
}

static void fill(const Row& row, float floor, bool wants_mass, Histogram& h) {
    std::memset(&h, 0, sizeof(h));
    each_vector(row, [&](F32 v, I32 bins, int width) {
        const F32 mass = wants_mass ? exponential(v - row.largest) : F32{};
        for (int i = 0; i < width; i++) {
            if (v[i] < floor) continue;
            h.counts[bins[i]]++;
            h.masses[bins[i]] += mass[i];
        }
    });
}

// The values of one bin that are not below `floor`, in `out`; how many.
static int64_t collect(const Row& row, int bin, float floor, float* out) {
    int64_t count = 0;
    each_vector(row, [&](F32 v, I32 bins, int width) {
        const I32 found = (bins == bin) & (v >= floor);
        if (!any_lane(found)) return;
        for (int i = 0; i < width; i++)
            if (found[i]) out[count++] = v[i];
    });
    return count;
}

// The smallest value that survives min_p, top_k and top_p: sampling.survivor_threshold, by bins in place of a sort.
static float survivor_threshold(const Row& row, int64_t top_k, float top_p, float min_p, float* scratch) {
    float floor = min_p > 0 ? row.largest + std::log(min_p) : -INFINITY;
    Histogram h;
    if (top_k > 0 && top_k < row.vocab) {
        fill(row, -INFINITY, false, h);
        int bin = 0;
        int64_t ahead = 0;
        while (ahead + h.counts[bin] < top_k) ahead += h.counts[bin++];
        const int64_t count = collect(row, bin, -INFINITY, scratch), kth = top_k - ahead - 1;
        std::nth_element(scratch, scratch + kth, scratch + count, std::greater<float>());
        floor = std::max(floor, scratch[kth]);
    }
    if (top_p >= 1.0f) return floor;
    fill(row, floor, true, h);
    double total = 0, ahead = 0;
    for (double mass : h.masses) total += mass;
    const double wanted = double(top_p) * total;
    int bin = 0;
    while (bin < BINS - 1 && ahead + h.masses[bin] < wanted) ahead += h.masses[bin++];
    const int64_t count = collect(row, bin, floor, scratch);
    std::sort(scratch, scratch + count, std::greater<float>());
    float nucleus = row.largest;
    for (int64_t i = 0; i < count && ahead < wanted; i++) {
        nucleus = scratch[i];
        ahead += std::exp(nucleus - row.largest);
    }
    return std::max(floor, nucleus);
}

struct Winner {
    float noisy = -INFINITY;
    int64_t token = 0;
};

// Let the TOKENS tokens from `at` on compete; the vocabulary may end among them.
static void compete(const Row& row, int64_t at, uint64_t seed, uint32_t position, Winner& best) {
    float v[TOKENS];
    const int width = int(std::min<int64_t>(TOKENS, row.vocab - at));
    if (width == TOKENS) {
        F32 largest = splat(-INFINITY);
        UNROLL
        for (int p = 0; p < VECTORS; p++) {
            const F32 x = row.values(at + p * LANES);
            largest = maximum(x, largest);
            store_floats(v + p * LANES, x);
        }
        // Most tokens are out by the filters, or so unlikely that no noise can help them.
        const float bar = max_lanes(largest);
        if (bar < row.threshold || bar + MAX_NOISE < best.noisy) return;
    } else {
        for (int i = 0; i < TOKENS; i++) v[i] = i < width ? row.value(at + i) : -INFINITY;
    }
    uint32_t words[TOKENS];
    random_words(at / 4, position, seed, words);
    F32 highest = splat(-INFINITY);
    UNROLL
    for (int p = 0; p < VECTORS; p++) {
        F32 x = load_floats(v + p * LANES);
        x = x >= row.threshold ? x + gumbel(words + p * LANES) : splat(-INFINITY);
        store_floats(v + p * LANES, x);
        highest = maximum(x, highest);
    }
    if (max_lanes(highest) < best.noisy) return;
    for (int i = 0; i < width; i++)
        if (v[i] > best.noisy || (v[i] == best.noisy && at + i < best.token)) best = {v[i], at + i};
}

static void sample_row(const SampleArgs& a, int64_t index, float* scratch) {
    Row row{a.logits + index * a.stride, a.vocab, 1.0f, 0.0f, -INFINITY};
    int64_t likeliest = 0;
    bool has_nan = false;
    float largest = -INFINITY;
    for (int64_t at = 0; at < a.vocab; at += LANES) {
        const int width = int(std::min<int64_t>(LANES, a.vocab - at));
        if (width == LANES) {
            const F32 x = load_floats(row.logits + at);
            const I32 matters = (x > largest) | (x != x);
            if (!any_lane(matters)) continue;
        }
        for (int i = 0; i < width; i++) {
            const float x = row.logits[at + i];
            has_nan |= x != x;
            if (x > largest) largest = x, likeliest = at + i;
        }
    }
    a.is_bad[index] = has_nan || !std::isfinite(largest);
    a.token_ids[index] = a.is_bad[index] ? 0 : int32_t(likeliest);
    const int32_t id = a.row_ids[index];
    if (a.is_bad[index] || id < 0 || !(a.temperature[id] > 0)) return;

    row.factor = 1.0f / a.temperature[id];
    row.largest = largest * row.factor;
    row.threshold = survivor_threshold(row, a.top_k[id], a.top_p[id], a.min_p[id], scratch);
    const uint64_t seed = uint64_t(a.seeds[id]);
    const uint32_t position = uint32_t(a.positions[index]);
    Winner best;
    compete(row, likeliest / TOKENS * TOKENS, seed, position, best);  // first: it raises the bar for the others
    for (int64_t at = 0; at < a.vocab; at += TOKENS) compete(row, at, seed, position, best);
    a.token_ids[index] = int32_t(best.token);
}

static void sample(const void* raw, const Team& team) {
    const SampleArgs& a = *(const SampleArgs*)raw;
    team.each(a.rows, [&](int64_t row) { sample_row(a, row, a.workspace + team.index * a.vocab); });
}

}  // namespace octavo

extern "C" {
octavo::Kernel octavo_sample = octavo::sample;
}
