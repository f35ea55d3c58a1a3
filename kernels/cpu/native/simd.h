/* Vectors of LANES floats, in GCC's and clang's vector language, with intrinsics where that language lacks the operation.
 *
 * The including file sets LANES. Every function works lane by lane, so a lane's result never depends on its place or on
 * what its neighbours hold, and is the same whatever LANES is: all of it is exactly rounded IEEE arithmetic, without
 * contraction (-ffp-contract=off) other than the fused multiply-add that is asked for by name.
 */
#ifndef PDK_SIMD_H
#define PDK_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* For the large functions that are called from several places: one copy of each. */
#if defined(__clang__)
#define ONE_COPY static __attribute__((noinline))
#else
#define ONE_COPY static __attribute__((noinline, noclone))
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));

#if LANES == 16 && defined(__AVX512F__)

INLINE vf vf_set(float value) { return (vf)_mm512_set1_ps(value); }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vf_choose(vi mask, vf yes, vf no)
{
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
}

#elif LANES == 8 && defined(__AVX2__) && defined(__FMA__)

INLINE vf vf_set(float value) { return (vf)_mm256_set1_ps(value); }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vf vf_max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vf_choose(vi mask, vf yes, vf no) { return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask); }

#else

INLINE vf vf_set(float value)
{
    vf result;
    for (int lane = 0; lane < LANES; lane++)
        result[lane] = value;
    return result;
}

INLINE vf vf_fma(vf a, vf b, vf c)
{
    vf result;
    for (int lane = 0; lane < LANES; lane++)
        result[lane] = fmaf(a[lane], b[lane], c[lane]);
    return result;
}

INLINE vf vf_choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

/* The larger one; `b` where either is not a number. */
INLINE vf vf_max(vf a, vf b) { return vf_choose((vi)(a > b), a, b); }

#endif

/* sum + a * b, in the sum's own register: compilers that choose for themselves move sums about, an instruction each. */
INLINE vf vf_add_product(vf sum, vf a, vf b)
{
#if LANES == 8 && defined(__AVX2__) && defined(__FMA__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
#else
    return vf_fma(a, b, sum);
#endif
}

INLINE vu vu_set(uint32_t value)
{
    vf as_float;
    float scalar;
    memcpy(&scalar, &value, 4);
    as_float = vf_set(scalar);
    return (vu)as_float;
}

INLINE vf vf_load(const float *from)
{
    vf result;
    memcpy(&result, from, sizeof result);
    return result;
}

INLINE void vf_store(float *to, vf value) { memcpy(to, &value, sizeof value); }

INLINE vu vu_load(const void *from)
{
    vu result;
    memcpy(&result, from, sizeof result);
    return result;
}

/* The first `count` floats, zeros after them. */
INLINE vf vf_load_some(const float *from, int64_t count)
{
    vf result = vf_set(0.0f);
    memcpy(&result, from, (size_t)count * 4);
    return result;
}

INLINE void vf_store_some(float *to, vf value, int64_t count) { memcpy(to, &value, (size_t)count * 4); }

/* True in the first `count` lanes. */
INLINE vi vi_below(int64_t count)
{
    vi lanes;
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = lane;
    return (vi)(lanes < (vi)vu_set((uint32_t)(int32_t)(count < -1 ? -1 : count > LANES ? LANES : count)));
}

/* The two values of K in a row of bfloat16 pairs: the even one is the lower half. */
INLINE vf pair_even(vu pairs) { return (vf)(pairs << 16); }
INLINE vf pair_odd(vu pairs) { return (vf)(pairs & vu_set(0xffff0000u)); }

/* Rounded to the nearest bfloat16, ties to even, as float32. What is not a number stays that. */
INLINE vf vf_round_bfloat16(vf value)
{
    vu bits = (vu)value;
    bits += vu_set(0x7fff) + ((bits >> 16) & vu_set(1));
    bits &= vu_set(0xffff0000u);
    return vf_choose((vi)(value != value), (vf)vu_set(0x7fc00000u), (vf)bits);
}

/* 2 to the power of x: x is held within [-126, 127], and below -126 the result is 0. Exactly 1 at 0; relative error
 * below 1e-7. A minimax polynomial over [-1/2, 1/2] times a power of two made from bits. */
INLINE vf vf_exp2(vf x)
{
    const vf magic = vf_set(0x1.8p23f); /* adding it leaves the nearest integer in the lowest bits */
    const vf low = vf_set(-126.0f), high = vf_set(127.0f);
    const vi vanishes = (vi)(x < low);
    const vf held = vf_choose((vi)(x > high), high, vf_choose(vanishes, low, x));
    const vf shifted = held + magic;
    const vf fraction = held - (shifted - magic);
    const vf power = (vf)((((vi)shifted - (vi)magic) + (vi)vu_set(127)) << 23);
    vf result = vf_set(0x1.41fbbcp-13f);
    result = vf_fma(result, fraction, vf_set(0x1.5f3e54p-10f));
    result = vf_fma(result, fraction, vf_set(0x1.3b2d4cp-7f));
    result = vf_fma(result, fraction, vf_set(0x1.c6aee8p-5f));
    result = vf_fma(result, fraction, vf_set(0x1.ebfbdcp-3f));
    result = vf_fma(result, fraction, vf_set(0x1.62e43p-1f));
    result = vf_fma(result, fraction, vf_set(1.0f));
    return vf_choose(vanishes, vf_set(0.0f), result * power);
}

/* The same for `count` vectors of x <= 0, in place, in a third of the time: relative error below 2e-7, 0 below -126.5. What
 * is no number stays that. The magic number leaves the nearest integer plus 127 in the lowest bits, which moved up are that
 * power of two, and zero where x was held at -127. Step by step for all vectors, so that none waits for itself. */
INLINE void vf_exp2_falling(const int count, vf x[])
{
    static const float terms[] = {0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f};
    const vf magic = vf_set(0x1.8p23f + 127.0f), low = vf_set(-127.0f);
    vf power[4], result[4];
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        x[v] = vf_max(low, x[v]);
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        power[v] = x[v] + magic;
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        x[v] -= power[v] - magic;
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        result[v] = vf_set(0x1.5bba14p-10f);
#pragma GCC unroll 8
    for (int term = 0; term < 5; term++)
#pragma GCC unroll 4
        for (int v = 0; v < count; v++)
            result[v] = vf_fma(result[v], x[v], vf_set(terms[term]));
#pragma GCC unroll 4
    for (int v = 0; v < count; v++)
        x[v] = result[v] * (vf)((vu)power[v] << 23);
}

#endif
