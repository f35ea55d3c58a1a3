/* The whole of a path whose products are fused multiply-adds of float32, for either dtype. */
#include "cache.h"
#include "linear_tiles.h"
#include "path.h"
#include "product.h"
#include "rows.h"

#define JOINED(a, b) a##b
#define JOIN(a, b) JOINED(a, b)

ONE_COPY void multiply_float32(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                               float *result, int64_t result_stride, bool accumulate)
{
    multiply(PLAIN, operand, operand_stride, rows, panels, result, result_stride, accumulate);
}

ONE_COPY void multiply_bfloat16(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                               float *result, int64_t result_stride, bool accumulate)
{
    multiply(EXPANDED, operand, operand_stride, rows, panels, result, result_stride, accumulate);
}

ONE_COPY void multiply_compact(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                               float *result, int64_t result_stride, bool accumulate)
{
    multiply_compact_panels(operand, operand_stride, rows, panels, result, result_stride, accumulate);
}

ONE_COPY void multiply_block_float32(const void *operand, int64_t operand_stride, int64_t rows,
                                     const struct panels *panels, const char *next, float *kept, float *result,
                                     int64_t result_stride, bool accumulate)
{
    multiply_block(PLAIN, operand, operand_stride, rows, panels, next, kept, result, result_stride, accumulate);
}

ONE_COPY void multiply_block_bfloat16(const void *operand, int64_t operand_stride, int64_t rows,
                                      const struct panels *panels, const char *next, float *kept, float *result,
                                      int64_t result_stride, bool accumulate)
{
    multiply_block(EXPANDED, operand, operand_stride, rows, panels, next, kept, result, result_stride, accumulate);
}

ONE_COPY void multiply_block_compact(const void *operand, int64_t operand_stride, int64_t rows,
                                     const struct panels *panels, const char *next, float *kept, float *result,
                                     int64_t result_stride, bool accumulate)
{
    multiply_block(COMPACT, operand, operand_stride, rows, panels, next, kept, result, result_stride, accumulate);
}

static void add_exceptions(const struct pdk_exception *exceptions, int64_t count, const void *operand,
                           int64_t operand_stride, int64_t rows, float *sums, int64_t sums_stride)
{
    for (const struct pdk_exception *each = exceptions; each < exceptions + count; each++) {
        const float *value = (const float *)operand + each->place / PANEL;
        float *sum = sums + each->place % PANEL;
        for (int64_t row = 0; row < rows; row++, value += operand_stride, sum += sums_stride)
            *sum = fmaf(each->weight, *value, *sum);
    }
}

/* bfloat16 panels as float32 ones: `bytes` of whole panel rows. */
static void widen(const char *panels, int64_t bytes, float *to)
{
    for (const char *from = panels; from < panels + bytes; from += LINE, to += 2 * PANEL) {
        __builtin_prefetch(from + PREFETCH_BYTES);
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const vu pairs = vu_load(from + v * (LANES * 4));
            vf_store(to + v * LANES, pair_even(pairs));
            vf_store(to + PANEL + v * LANES, pair_odd(pairs));
        }
    }
}

INLINE void store_weights(const vf weights[PART_VECTORS], void *out)
{
    for (int v = 0; v < PART_VECTORS; v++)
        vf_store((float *)out + v * LANES, weights[v]);
}

enum { QUERY_ROWS = 384, BLOCK_ROWS = 48, DIAGONAL_ROWS = 24, WIDEN_ROWS = 12, K_STEP = 2 * TURN };

#define OPERAND_BYTES 4
#define STORE_WEIGHTS store_weights

#define ATTEND(name) name##_float32
#define PRODUCT multiply_float32
#define KV_DTYPE PDK_FLOAT32
#define STORE_QUERY store_float32
#include "attention.h"
#undef ATTEND
#undef PRODUCT
#undef KV_DTYPE
#undef STORE_QUERY

#define ATTEND(name) name##_bfloat16
#define PRODUCT multiply_bfloat16
#define KV_DTYPE PDK_BFLOAT16
#define STORE_QUERY store_rounded
#define WIDE_PRODUCT multiply_float32
#include "attention.h"

static bool JOIN(PATH_NAME, _available)(void);
static void nothing(void) {}

#define STRING(name) #name
#define NAME_OF(name) STRING(name)

const struct pdk_path JOIN(PATH_NAME, _path) = {
    .name = NAME_OF(PATH_NAME),
    .available = JOIN(PATH_NAME, _available),
    .begin = nothing,
    .end = nothing,
    .products =
        {
            [PDK_FLOAT32] = {multiply_float32, 4, QUERY_ROWS, multiply_block_float32, store_float32,
                             attend_scratch_float32, attend_float32, merge_float32},
            [PDK_BFLOAT16] = {multiply_bfloat16, 4, QUERY_ROWS, multiply_block_bfloat16, store_rounded,
                              attend_scratch_bfloat16, attend_bfloat16, merge_bfloat16},
            [PDK_COMPACT] = {.product = multiply_compact,
                             .operand_bytes = 4,
                             .block_product = multiply_block_compact,
                             .store_operand = store_rounded,
                             .add_exceptions = add_exceptions},
        },
    .rms_norm = rms_norm_row,
    .silu_mul = silu_mul_row,
    .rotary = rotary_row,
    .bias_row = bias_row,
    .add_row = add_row,
};
