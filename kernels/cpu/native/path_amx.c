/* AMX-BF16: tiles of 16 rows by 16 outputs and 32 of K, the rest in AVX-512. Run natively on Sapphire Rapids; elsewhere
 * tested through emulation.
 *
 * A product goes by 2 x 2 tiles: two of rows and two panels share each load. Rows are computed in whole tiles; what the
 * last one reads beyond the rows' end goes into results that nobody looks at.
 */
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
#include "amx.h"

#include "path.h"
#include "simd.h"

enum { TILE_ROWS = 16, TILE_K = 32, PAIR_K_STEP = TILE_K };
enum { QUERY_ROWS = 192, BLOCK_ROWS = 48, DIAGONAL_ROWS = BLOCK_ROWS };

/* Accumulators are tiles 0 to 3 (row tile times two plus panel), operands 4 and 5, panels 6 and 7. */
INLINE void multiply_tiles(const int row_tiles, const int panel_tiles, const char *operand, int64_t operand_bytes,
                           const struct panels *panels, int64_t first_panel, float *result, int64_t result_stride,
                           bool accumulate)
{
    const int64_t stride = result_stride * 4;
    float *below = result + TILE_ROWS * result_stride;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    if (accumulate) {
        tile_loadd(0, result, stride);
        if (panel_tiles > 1)
            tile_loadd(1, result + PANEL, stride);
        if (row_tiles > 1)
            tile_loadd(2, below, stride);
        if (row_tiles > 1 && panel_tiles > 1)
            tile_loadd(3, below + PANEL, stride);
    }
    const char *panel = NULL;
    for (int64_t k = 0, left = 0, chunk = 0; k < panels->k; k += TILE_K, left -= TILE_K, panel += TILE_K / 2 * LINE) {
        if (left <= 0) {
            panel = panels->chunks[chunk++] + first_panel * panels->panel_bytes;
            left = panels->chunk_k;
        }
        tile_loadd(4, operand + k * 2, operand_bytes);
        tile_loadd(6, panel, LINE);
        tile_dpbf16ps(0, 4, 6);
        if (panel_tiles > 1) {
            tile_loadd(7, panel + panels->panel_bytes, LINE);
            tile_dpbf16ps(1, 4, 7);
        }
        if (row_tiles > 1) {
            tile_loadd(5, operand + TILE_ROWS * operand_bytes + k * 2, operand_bytes);
            tile_dpbf16ps(2, 5, 6);
        }
        if (row_tiles > 1 && panel_tiles > 1)
            tile_dpbf16ps(3, 5, 7);
    }
    tile_stored(0, result, stride);
    if (panel_tiles > 1)
        tile_stored(1, result + PANEL, stride);
    if (row_tiles > 1)
        tile_stored(2, below, stride);
    if (row_tiles > 1 && panel_tiles > 1)
        tile_stored(3, below + PANEL, stride);
}

ONE_COPY void multiply_bfloat16(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                               float *result, int64_t result_stride, bool accumulate)
{
    const int64_t bytes = operand_stride * 2;
    for (int64_t panel = 0; panel < panels->panel_count; panel += 2)
        for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
            const char *at = (const char *)operand + row * bytes;
            float *to = result + row * result_stride + panel * PANEL;
            const bool two_panels = panel + 1 < panels->panel_count, two_rows = row + TILE_ROWS < rows;
            if (two_rows && two_panels)
                multiply_tiles(2, 2, at, bytes, panels, panel, to, result_stride, accumulate);
            else if (two_panels)
                multiply_tiles(1, 2, at, bytes, panels, panel, to, result_stride, accumulate);
            else if (two_rows)
                multiply_tiles(2, 1, at, bytes, panels, panel, to, result_stride, accumulate);
            else
                multiply_tiles(1, 1, at, bytes, panels, panel, to, result_stride, accumulate);
        }
}

#include "amx_linear.h"
#include "amx_scores.h"

#define SCORE_PANELS score_panels
#include "path_dot.h"

const struct pdk_path amx_path = {
    .name = "amx",
    .available = amx_available,
    .begin = amx_begin,
    .end = amx_end,
    .products =
        {
            [PDK_FLOAT32] = {multiply_float32, 4, QUERY_ROWS, NULL, store_float32,
                             attend_scratch_float32, attend_float32, merge_float32},
            [PDK_BFLOAT16] = {multiply_bfloat16, 2, QUERY_ROWS, NULL, store_bfloat16,
                              attend_scratch_bfloat16, attend_bfloat16, merge_bfloat16, NULL,
                              multiply_linear_block},
        },
    .rms_norm = rms_norm_row,
    .silu_mul = silu_mul_row,
    .rotary = rotary_row,
    .bias_row = bias_row,
    .add_row = add_row,
};
