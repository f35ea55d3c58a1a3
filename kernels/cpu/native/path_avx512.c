/* AVX-512 with its bfloat16 dot product: vectors of 16, two products of a pair an instruction. Run natively on Sapphire
 * Rapids; elsewhere tested through emulation. */
#define LANES 16
#ifdef PDK_EMULATED /* few registers, and much less to compile */
#define NARROW_ROWS 3
#define WIDE_ROWS 3
#else
#define NARROW_ROWS 12
#define WIDE_ROWS 12
#endif
#define EXPANDED_NARROW_ROWS NARROW_ROWS
#define EXPANDED_WIDE_ROWS WIDE_ROWS
#define TURN 1
#define HAS_DOT
#include "dot.h"

#include "path.h"
#include "product.h"

ONE_COPY void multiply_bfloat16(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                               float *result, int64_t result_stride, bool accumulate)
{
    multiply(DOTTED, operand, operand_stride, rows, panels, result, result_stride, accumulate);
}

enum { QUERY_ROWS = 24, BLOCK_ROWS = QUERY_ROWS, DIAGONAL_ROWS = QUERY_ROWS, PAIR_K_STEP = 2 };

#include "path_dot.h"

static bool available(void)
{
#if defined(PDK_EMULATED)
    return true;
#elif defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

static void nothing(void) {}

const struct pdk_path avx512_path = {
    .name = "avx512",
    .available = available,
    .begin = nothing,
    .end = nothing,
    .products =
        {
            [PDK_FLOAT32] = {multiply_float32, 4, QUERY_ROWS, NULL, store_float32,
                             attend_scratch_float32, attend_float32, merge_float32},
            [PDK_BFLOAT16] = {multiply_bfloat16, 2, QUERY_ROWS, NULL, store_bfloat16,
                              attend_scratch_bfloat16, attend_bfloat16, merge_bfloat16},
        },
    .rms_norm = rms_norm_row,
    .silu_mul = silu_mul_row,
    .rotary = rotary_row,
    .bias_row = bias_row,
    .add_row = add_row,
};
