/* Products of bfloat16 pairs in vectors of 16: the instruction, or the same in plain C for machines without it. */
#ifndef PDK_DOT_H
#define PDK_DOT_H

#include "simd.h"

/* The two bfloat16 at `from` in every lane. */
INLINE vu vu_broadcast(const void *from)
{
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return vu_set(pair);
}

/* acc + a's even * b's even + a's odd * b's odd, lane by lane. */
INLINE vf vf_dot(vf acc, vu a, vu b)
{
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    return vf_fma(pair_even(a), pair_even(b), vf_fma(pair_odd(a), pair_odd(b), acc));
#endif
}

#endif
