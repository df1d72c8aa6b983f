// The ends of a decode step: inputs gathered from the permanent rows, the most likely token chosen and put back.

#include <cmath>
#include <cstring>

#include "pool.h"
#include "simd.h"

namespace octavo {

constexpr int MAX_GROUPS = 8;

// See ops.inputs.prepare_inputs; every request has one token here.
struct GatherArgs {
    const int32_t* rows;
    Count requests;
    int32_t* num_computed;
    int64_t scratch_row;
    const int32_t* token_ids;
    int64_t token_stride;
    int64_t* input_ids;
    int64_t* positions;
    int32_t* seq_lens;
    int32_t num_groups;
    int32_t reserved;
    struct {
        const int32_t* block_table;
        int64_t width;
        int64_t block_size;
        int64_t* slots;
        int32_t* step_table;
    } groups[MAX_GROUPS];
};

static void gather_decode(const void* raw, const Team& team) {
    const GatherArgs& a = *(const GatherArgs*)raw;
    if (team.index != 0) return;
    for (int64_t i = 0; i < a.requests; i++) {
        const int64_t row = a.rows[i];
        const bool valid = row < a.scratch_row;
        const int32_t position = a.num_computed[row];
        a.positions[i] = position;
        a.input_ids[i] = a.token_ids[row * a.token_stride + position];
        a.seq_lens[i] = valid ? position + 1 : 0;
        for (int g = 0; g < a.num_groups; g++) {
            const auto& group = a.groups[g];
            const int32_t* blocks = group.block_table + row * group.width;
            group.slots[i] = valid ? blocks[position / group.block_size] * group.block_size + position % group.block_size : -1;
            std::memcpy(group.step_table + i * group.width, blocks, size_t(group.width) * sizeof(int32_t));
        }
        a.num_computed[row] = a.seq_lens[i];
    }
}

struct ArgmaxArgs {
    const float* logits;
    int64_t stride;
    Count rows;
    int64_t vocab;
    int32_t* token_ids;  // 0 where bad
    uint8_t* is_bad;     // no finite maximum
    float* workspace;    // [threads * rows] of Best
};

struct Best {
    float value;
    int32_t token;
    int32_t has_nan;
    int32_t padding[13];
};

// The largest of [first, last), the lowest index among equals.
static Best find_best(const float* x, int64_t first, int64_t last) {
    Best best{-INFINITY, int32_t(first), 0, {}};
    constexpr int64_t RUN = 16 * LANES;
    for (int64_t start = first; start < last; start += RUN) {
        const int64_t end = start + RUN < last ? start + RUN : last;
        // Look for the place only in runs that hold something larger than what was found.
        if (end - start == RUN) {
            F32 largest = load_floats(x + start);
            I32 nan = largest != largest;
            for (int64_t i = start + LANES; i < end; i += LANES) {
                const F32 v = load_floats(x + i);
                largest = maximum(v, largest);
                nan |= v != v;
            }
            bool any_nan = false;
            for (int lane = 0; lane < LANES; lane++) any_nan |= nan[lane] != 0;
            best.has_nan |= any_nan;
            if (!any_nan && !(max_lanes(largest) > best.value)) continue;
        }
        for (int64_t i = start; i < end; i++) {
            best.has_nan |= x[i] != x[i];
            if (x[i] > best.value) {
                best.value = x[i];
                best.token = int32_t(i);
            }
        }
    }
    return best;
}

static void argmax(const void* raw, const Team& team) {
    const ArgmaxArgs& a = *(const ArgmaxArgs*)raw;
    Best* found = (Best*)a.workspace;
    int64_t first, last;
    team.share(a.vocab, first, last);
    for (int64_t r = 0; r < a.rows; r++) found[r * team.count + team.index] = find_best(a.logits + r * a.stride, first, last);
    team.sync();
    if (team.index != 0) return;
    for (int64_t r = 0; r < a.rows; r++) {
        Best best = found[r * team.count];
        for (int i = 1; i < team.count; i++) {
            const Best& other = found[r * team.count + i];
            best.has_nan |= other.has_nan;
            if (other.value > best.value) {
                best.value = other.value;
                best.token = other.token;
            }
        }
        a.is_bad[r] = best.has_nan || !std::isfinite(best.value);
        a.token_ids[r] = a.is_bad[r] ? 0 : best.token;
    }
}

// See ops.inputs.store_sampled.
struct StoreArgs {
    const int32_t* sampled;
    const int32_t* rows;
    const int32_t* seq_lens;
    Count count;
    int32_t* token_ids;
    int64_t max_len;
    int64_t scratch_row;
};

static void store_sampled(const void* raw, const Team& team) {
    const StoreArgs& a = *(const StoreArgs*)raw;
    if (team.index != 0) return;
    for (int64_t i = 0; i < a.count; i++) {
        const bool fits = a.seq_lens[i] < a.max_len;
        a.token_ids[(fits ? a.rows[i] : a.scratch_row) * a.max_len + (fits ? a.seq_lens[i] : 0)] = a.sampled[i];
    }
}

}  // namespace octavo

extern "C" {
octavo::Kernel octavo_gather_decode = octavo::gather_decode;
octavo::Kernel octavo_argmax = octavo::argmax;
octavo::Kernel octavo_store_sampled = octavo::store_sampled;
}
