/* What the paths with products of bfloat16 pairs share: vectors of 16, operands in bfloat16. The including file defines
 * multiply_bfloat16, K_STEP for it, QUERY_ROWS, and SCORE_PANELS where it has a better way to make scores (attention.h). */
#include "cache.h"
#include "path.h"
#include "product.h"
#include "rows.h"

ONE_COPY void multiply_float32(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                               float *result, int64_t result_stride, bool accumulate)
{
    multiply(PLAIN, operand, operand_stride, rows, panels, result, result_stride, accumulate);
}

INLINE void store_weights_float32(const vf weights[PART_VECTORS], void *out) { vf_store(out, weights[0]); }

INLINE void store_weights_bfloat16(const vf weights[PART_VECTORS], void *out) { store_half_vector(weights[0], out); }

INLINE void store_weight_pair_bfloat16(const vf weights[2 * PART_VECTORS], void *out)
{
#if defined(__AVX512BF16__)
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    memcpy(out, &halves, sizeof halves);
#else
    store_weights_bfloat16(weights, out);
    store_weights_bfloat16(weights + 1, (char *)out + LANES * 2);
#endif
}

#define ATTEND(name) name##_float32
#define PRODUCT multiply_float32
#define KV_DTYPE PDK_FLOAT32
#define OPERAND_BYTES 4
#define K_STEP (2 * TURN)
#define STORE_QUERY store_float32
#define STORE_WEIGHTS store_weights_float32
#include "attention.h"
#undef ATTEND
#undef PRODUCT
#undef KV_DTYPE
#undef OPERAND_BYTES
#undef K_STEP
#undef STORE_QUERY
#undef STORE_WEIGHTS

#define ATTEND(name) name##_bfloat16
#define PRODUCT multiply_bfloat16
#define KV_DTYPE PDK_BFLOAT16
#define OPERAND_BYTES 2
#define K_STEP PAIR_K_STEP
#define STORE_QUERY store_bfloat16
#define STORE_WEIGHTS store_weights_bfloat16
#define STORE_WEIGHT_PAIR store_weight_pair_bfloat16
#ifdef SCORE_PANELS
#define SCORE SCORE_PANELS
#endif
#include "attention.h"
