// Vectors of LANES numbers and the few operations that need an instruction set's own name.
//
// Arithmetic uses the compiler's vector extensions (GCC and Clang), so the same kernels serve AVX-512, AVX2, NEON and
// plain C++. Everything that differs is in this file: the integer dot product, half precision, rounding.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define OCTAVO_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OCTAVO_AVX2 1
#if defined(__AVXVNNI__)
#define OCTAVO_AVXVNNI 1
#endif
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define OCTAVO_NEON 1
#include <arm_neon.h>
#endif

// The compiler's own half precision; GCC before 13 knows only ARM's name of it on ARM.
#if defined(__ARM_FP16_FORMAT_IEEE)
#define OCTAVO_HALF __fp16
#elif defined(__FLT16_MANT_DIG__)
#define OCTAVO_HALF _Float16
#endif

// The compiler would rather keep small loops than keep their arrays in registers.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace octavo {

// Also the height of a tile of packed weights: one lane computes one output row.
#if defined(OCTAVO_AVX512)
constexpr int LANES = 16;
constexpr const char* INSTRUCTION_SET = "avx512-vnni";
#elif defined(OCTAVO_AVXVNNI)
constexpr int LANES = 8;
constexpr const char* INSTRUCTION_SET = "avx2-vnni";
#elif defined(OCTAVO_AVX2)
constexpr int LANES = 8;
constexpr const char* INSTRUCTION_SET = "avx2";
#elif defined(OCTAVO_NEON)
constexpr int LANES = 8;
constexpr const char* INSTRUCTION_SET = "neon-dotprod";
#else
constexpr int LANES = 8;
constexpr const char* INSTRUCTION_SET = "portable";
#endif

typedef float F32 __attribute__((vector_size(LANES * 4)));
typedef int32_t I32 __attribute__((vector_size(LANES * 4)));
typedef uint64_t U64 __attribute__((vector_size(LANES * 4)));
typedef int16_t I16 __attribute__((vector_size(LANES * 4)));
typedef int8_t I8 __attribute__((vector_size(LANES * 4)));
typedef uint8_t U8 __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half;  // IEEE half precision by its bits
struct BFloat16 {
    uint16_t bits;
};

template <typename V, typename T>
inline V load(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof(V));
    return v;
}
template <typename V, typename T>
inline void store(T* p, V v) {
    std::memcpy(p, &v, sizeof(V));
}
inline F32 splat(float x) {
#if defined(OCTAVO_AVX512)
    return (F32)_mm512_set1_ps(x);
#elif defined(OCTAVO_AVX2)
    return (F32)_mm256_set1_ps(x);
#else
    return F32{} + x;
#endif
}
inline I32 splat(int32_t x) { return I32{} + x; }
inline F32 to_float(I32 v) { return __builtin_convertvector(v, F32); }
inline F32 maximum(F32 a, F32 b) { return a > b ? a : b; }
inline F32 minimum(F32 a, F32 b) { return a < b ? a : b; }
// a * b + c, rounded once wherever the machine can: the same in every kernel, however the compiler arranges it.
inline F32 multiply_add(F32 a, F32 b, F32 c) {
#if defined(OCTAVO_AVX512)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(OCTAVO_AVX2)
    return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Four bytes repeated in every lane.
inline U8 splat4(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return (U8)(I32{} + four);
}

// table[i] for every byte i of `indices`, all below 16.
inline U8 look_up(const int8_t (&table)[16], U8 indices) {
#if defined(OCTAVO_AVX512)
    const __m128i values = _mm_loadu_si128((const __m128i*)table);
    return (U8)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)indices);
#elif defined(OCTAVO_AVX2)
    const __m128i values = _mm_loadu_si128((const __m128i*)table);
    return (U8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)indices);
#elif defined(OCTAVO_NEON)
    const int8x16_t values = vld1q_s8(table);
    uint8x16_t halves[2];
    std::memcpy(halves, &indices, 32);
    const int8x16_t found[2] = {vqtbl1q_s8(values, halves[0]), vqtbl1q_s8(values, halves[1])};
    return load<U8>(found);
#else
    U8 found;
    for (int i = 0; i < 4 * LANES; i++) found[i] = uint8_t(table[indices[i]]);
    return found;
#endif
}

inline float half_to_float(Half h) {
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
    return _cvtsh_ss(h);
#elif defined(OCTAVO_HALF)
    OCTAVO_HALF x;
    std::memcpy(&x, &h, 2);
    return float(x);
#else
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
    if (exponent == 0) {
        float tiny = float(mantissa) * 5.9604644775390625e-08f;  // 2^-24
        return sign ? -tiny : tiny;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
#endif
}

inline Half float_to_half(float x) {
#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
    return _cvtss_sh(x, 0);
#elif defined(OCTAVO_HALF)
    OCTAVO_HALF y = OCTAVO_HALF(x);
    Half h;
    std::memcpy(&h, &y, 2);
    return h;
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000) return Half(sign | 0x7c00 | (magnitude > 0x7f800000 ? 0x200 : 0));
    if (magnitude >= 0x477ff000) return Half(sign | 0x7c00);  // rounds to infinity
    if (magnitude < 0x38800000) {                             // subnormal: round on a grid of 2^-24
        float scaled;
        std::memcpy(&scaled, &magnitude, 4);
        scaled = scaled * 16777216.0f + 8388608.0f;
        uint32_t rounded;
        std::memcpy(&rounded, &scaled, 4);
        return Half(sign | (rounded - 0x4b000000));
    }
    uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
    return Half(sign | ((rounded - 0x38000000) >> 13));
#endif
}

inline F32 load_floats(const float* p) { return load<F32>(p); }
inline F32 load_floats(const Half* p) {
#if defined(OCTAVO_AVX512)
    return (F32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(OCTAVO_AVX2)
    return (F32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(OCTAVO_NEON)
    const float32x4_t both[2] = {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))),
                                 vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4)))};
    return load<F32>(both);
#else
    F32 v;
    for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}
inline F32 load_floats(const BFloat16* p) {
    typedef uint16_t Narrow __attribute__((vector_size(LANES * 2)));
    typedef uint32_t Wide __attribute__((vector_size(LANES * 4)));
    return (F32)(__builtin_convertvector(load<Narrow>(p), Wide) << 16);
}
inline void store_floats(float* p, F32 v) { store(p, v); }
inline void store_floats(Half* p, F32 v) {
    // Saturate: an infinite key would poison every later token of its request.
    v = minimum(maximum(v, splat(-65504.0f)), splat(65504.0f));
#if defined(OCTAVO_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(OCTAVO_AVX2)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#else
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(v[i]);
#endif
}
inline void store_floats(BFloat16* p, F32 v) {
    for (int i = 0; i < LANES; i++) {
        uint32_t bits;
        float x = v[i];
        std::memcpy(&bits, &x, 4);
        p[i].bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

// To the nearest integer, ties to even; |x| < 2^22.
inline F32 round_even(F32 x) {
    const F32 magic = splat(12582912.0f);
    return (x + magic) - magic;  // not for -ffast-math, which would drop the pair
}

// 32 integers within ±127 as bytes.
inline void store_bytes(int8_t* p, const I32 (&v)[32 / LANES]) {
#if defined(OCTAVO_AVX512)
    for (int i = 0; i < 2; i++) _mm_storeu_si128((__m128i*)(p + 16 * i), _mm512_cvtepi32_epi8((__m512i)v[i]));
#elif defined(OCTAVO_AVX2)
    const __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
    // Packing works within halves: put the groups of four bytes back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
    for (int i = 0; i < 32; i++) p[i] = int8_t(v[i / LANES][i % LANES]);
#endif
}

// LANES rows become columns: halves of ever larger blocks change places.
inline void transpose(F32 (&v)[LANES]) {
#if defined(__clang__) || !defined(__GNUC__)
    float flat[LANES][LANES];
    for (int i = 0; i < LANES; i++) store(flat[i], v[i]);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) v[i][j] = flat[j][i];
#else
    UNROLL
    for (int width = 1; width < LANES; width *= 2) {
        I32 upper{}, lower{};
        UNROLL
        for (int lane = 0; lane < LANES; lane++) {
            upper[lane] = lane & width ? LANES + lane - width : lane;
            lower[lane] = lane & width ? LANES + lane : lane + width;
        }
        UNROLL
        for (int i = 0; i < LANES; i++) {
            if (i & width) continue;
            const F32 a = v[i], b = v[i + width];
            v[i] = __builtin_shuffle(a, b, upper);
            v[i + width] = __builtin_shuffle(a, b, lower);
        }
    }
#endif
}

inline float sum_lanes(F32 v) {
    float total = 0;
#if defined(OCTAVO_AVX512)
    total = _mm512_reduce_add_ps((__m512)v);
#elif defined(OCTAVO_AVX2)
    __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    total = _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
    for (int i = 0; i < LANES; i++) total += v[i];
#endif
    return total;
}
inline float max_lanes(F32 v) {
#if defined(OCTAVO_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(OCTAVO_AVX2)
    __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
    float largest = v[0];
    for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
#endif
}

// Whether a comparison holds in some lane.
inline bool any_lane(I32 mask) {
#if defined(OCTAVO_AVX512)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(OCTAVO_AVX2)
    return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any != 0;
#endif
}

// The lower 32 bits of every lane times b, all 64 bits of it.
inline U64 multiply_low(U64 a, uint32_t b) {
#if defined(OCTAVO_AVX512)
    return (U64)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(OCTAVO_AVX2)
    return (U64)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
    return (a & 0xffffffffu) * uint64_t(b);
#endif
}

// exp(x) to about 2 ulp; 0 below -87, and no infinity: x is clamped at 88.
inline F32 exponential(F32 x) {
    x = minimum(maximum(x, splat(-87.3f)), splat(88.0f));
    F32 n = round_even(x * 1.44269504f);
    F32 r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    F32 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I32 power = (__builtin_convertvector(n, I32) + 127) << 23;
    return p * (F32)power;
}

// --- integer dot products ---------------------------------------------------------------------------------------------
//
// A lane holds four weights of one row; `a` holds four activations, repeated in every lane. `Sum` gathers the products of
// the steps of one group (up to 32 columns); `total` gives one number a lane. LIMIT is the largest weight; signed weights
// have LIMIT 128 and are stored with SIGNED_OFFSET added.

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVXVNNI)
constexpr int SIGNED_OFFSET = 128;  // the instruction multiplies unsigned weights with signed activations
struct Sum {
    I32 lanes{};
};
template <int LIMIT>
inline void dot(Sum& s, U8 w, U8 a, int) {
#if defined(OCTAVO_AVX512)
    s.lanes = (I32)_mm512_dpbusd_epi32((__m512i)s.lanes, (__m512i)w, (__m512i)a);
#else
    s.lanes = (I32)_mm256_dpbusd_avx_epi32((__m256i)s.lanes, (__m256i)w, (__m256i)a);
#endif
}
template <int LIMIT>
inline I32 total(const Sum& s) { return s.lanes; }
#elif defined(OCTAVO_AVX2)
constexpr int SIGNED_OFFSET = 0;
struct Sum {
    I16 narrow{};
    I32 lanes{};
};
// The sums are taken in the order written: left free, the compiler gathers all products first and runs out of registers.
template <typename V>
inline void keep_order(V& sum) { asm("" : "+x"(sum)); }
inline I32 widen(I16 pairs) { return (I32)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
// Steps whose sums of two products fit 16 bits. They are widened after that many.
constexpr int narrow_steps(int limit) { return 32767 / (2 * 127 * limit); }

template <int LIMIT>
inline void dot(Sum& s, U8 w, U8 a, int step) {
    if constexpr (LIMIT == 128) {
        __m256i magnitude = _mm256_abs_epi8((__m256i)w), signed_a = _mm256_sign_epi8((__m256i)a, (__m256i)w);
        s.lanes += widen((I16)_mm256_maddubs_epi16(magnitude, signed_a));
        keep_order(s.lanes);
        return;
    }
    constexpr int STEPS = narrow_steps(LIMIT);
    const I16 products = (I16)_mm256_maddubs_epi16((__m256i)w, (__m256i)a);
    s.narrow = step % STEPS == 0 ? products : s.narrow + products;
    if (STEPS < 8 && step % STEPS == STEPS - 1) {
        s.lanes += widen(s.narrow);
        keep_order(s.lanes);
    } else {
        keep_order(s.narrow);
    }
}
template <int LIMIT>
inline I32 total(const Sum& s) { return LIMIT != 128 && narrow_steps(LIMIT) >= 8 ? widen(s.narrow) : s.lanes; }
#else
constexpr int SIGNED_OFFSET = 0;
struct Sum {
    I32 lanes{};
};
template <int LIMIT>
inline void dot(Sum& s, U8 w, U8 a, int) {
#if defined(OCTAVO_NEON)
    int8x16_t low, high, other;
    std::memcpy(&low, &w, 16);
    std::memcpy(&high, (const char*)&w + 16, 16);
    std::memcpy(&other, &a, 16);
    int32x4_t sums[2];
    std::memcpy(sums, &s.lanes, 32);
    sums[0] = vdotq_s32(sums[0], low, other);
    sums[1] = vdotq_s32(sums[1], high, other);
    std::memcpy(&s.lanes, sums, 32);
#else
    const int8_t* x = (const int8_t*)&w;
    const int8_t* y = (const int8_t*)&a;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) s.lanes[i] += int(x[4 * i + j]) * int(y[4 * i + j]);
#endif
}
template <int LIMIT>
inline I32 total(const Sum& s) { return s.lanes; }
#endif

}  // namespace octavo
