/* What is done to a row between the products: norm, gate, rotation, residual, rounding. Needs simd.h's LANES.
 *
 * A row's sum is over 16 interleaved parts, added up by halving, whatever the vector's width. */
#ifndef PDK_ROWS_H
#define PDK_ROWS_H

#include "path.h"
#include "simd.h"

enum { PARTS = 16, PART_VECTORS = PARTS / LANES }; /* one vector or two */

/* Finite, so that nothing that is no number can arise from it, and a power of two, so that comparing it is exact. */
#define MASKED (-0x1p100f)

/* The sum of 16 parts, by halving. */
INLINE float sum_of_parts(const vf parts[PART_VECTORS])
{
#if LANES == 16 && defined(__AVX512F__)
    const __m512 all = (__m512)parts[0];
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    const vf halves = PART_VECTORS > 1 ? parts[0] + parts[PART_VECTORS - 1] : parts[0];
    float values[LANES];
    memcpy(values, &halves, sizeof values);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            values[i] += values[i + width];
    return values[0];
#endif
}

INLINE float largest_part(const vf parts[PART_VECTORS])
{
#if LANES == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)parts[0]);
#else
    const vf halves = vf_max(parts[0], parts[PART_VECTORS - 1]);
    float values[LANES];
    memcpy(values, &halves, sizeof values);
    float largest = values[0];
    for (int i = 1; i < LANES; i++)
        largest = values[i] > largest ? values[i] : largest;
    return largest;
#endif
}

static void rms_norm_row(const float *x, int64_t size, const float *weight, float eps, float *y)
{
    vf parts[PART_VECTORS];
    for (int v = 0; v < PART_VECTORS; v++)
        parts[v] = vf_set(0.0f);
    for (int64_t i = 0; i < size; i += PARTS)
        for (int v = 0; v < PART_VECTORS; v++) {
            const int64_t at = i + v * LANES;
            const vf values = at + LANES <= size ? vf_load(x + at) : vf_load_some(x + at, max_of(size - at, 0));
            parts[v] = vf_fma(values, values, parts[v]);
        }
    const vf factor = vf_set(1.0f / sqrtf(sum_of_parts(parts) / (float)size + eps));
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        vf_store(y + i, vf_load(x + i) * factor * vf_load(weight + i));
    if (i < size)
        vf_store_some(y + i, vf_load_some(x + i, size - i) * factor * vf_load_some(weight + i, size - i), size - i);
}

INLINE vf silu_mul(vf gate, vf up)
{
    const vf one = vf_set(1.0f);
    return gate / (one + vf_exp2(gate * vf_set(-0x1.715476p+0f))) * up;
}

static void silu_mul_row(const float *gate, const float *up, int64_t size, float *y)
{
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        vf_store(y + i, silu_mul(vf_load(gate + i), vf_load(up + i)));
    if (i < size)
        vf_store_some(y + i, silu_mul(vf_load_some(gate + i, size - i), vf_load_some(up + i, size - i)), size - i);
}

/* One head: dimension i turns together with dimension i + head_dim / 2. Here for `count` of them. */
INLINE void rotate_some(const float *x, int64_t half, const float *cos, const float *sin, int64_t count, float *y)
{
    const vf first = vf_load_some(x, count), second = vf_load_some(x + half, count);
    const vf c = vf_load_some(cos, count), s = vf_load_some(sin, count);
    vf_store_some(y, first * c - second * s, count);
    vf_store_some(y + half, second * c + first * s, count);
}

static void rotary_row(const float *x, int64_t head_dim, const float *cos, const float *sin, float *y)
{
    const int64_t half = head_dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES)
        rotate_some(x + i, half, cos + i, sin + i, LANES, y + i);
    if (i < half)
        rotate_some(x + i, half, cos + i, sin + i, half - i, y + i);
}

static void bias_row(const float *values, const float *bias, int64_t count, float *y)
{
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(y + i, vf_load(values + i) + vf_load(bias + i));
    for (; i < count; i++)
        y[i] = values[i] + bias[i];
}

static void add_row(const float *values, const float *bias, int64_t count, float *y)
{
    int64_t i = 0;
    if (bias)
        for (; i + LANES <= count; i += LANES)
            vf_store(y + i, vf_load(y + i) + (vf_load(values + i) + vf_load(bias + i)));
    else
        for (; i + LANES <= count; i += LANES)
            vf_store(y + i, vf_load(y + i) + vf_load(values + i));
    for (; i < count; i++)
        y[i] += bias ? values[i] + bias[i] : values[i];
}

static void store_float32(const float *row, int64_t count, void *out) { memcpy(out, row, (size_t)count * 4); }

/* float32 that holds bfloat16 values */
static inline void store_rounded(const float *row, int64_t count, void *out)
{
    float *to = out;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vf_store(to + i, vf_round_bfloat16(vf_load(row + i)));
    if (i < count)
        vf_store_some(to + i, vf_round_bfloat16(vf_load_some(row + i, count - i)), count - i);
}

typedef uint16_t vh __attribute__((vector_size(LANES * 2)));

INLINE void store_half_vector(vf value, uint16_t *out)
{
#if LANES == 16 && defined(__AVX512BF16__)
    /* What is below float32's normal range becomes zero, for which the products take it anyway. */
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)value);
#else
    const vh halves = __builtin_convertvector((vu)vf_round_bfloat16(value) >> 16, vh);
#endif
    memcpy(out, &halves, sizeof halves);
}

static inline void store_bfloat16(const float *row, int64_t count, void *out)
{
    uint16_t *to = out;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store_half_vector(vf_load(row + i), to + i);
    if (i < count) {
        uint16_t rest[LANES];
        store_half_vector(vf_load_some(row + i, count - i), rest);
        memcpy(to + i, rest, (size_t)(count - i) * 2);
    }
}

#endif
