/* The products of linears where they are fused multiply-adds of float32: few rows stream compact panels and wait for
 * memory (other panels go through product.h); more rows go by blocks of K, and fetch the next panel while they multiply
 * one.
 *
 * Beside what product.h wants: KEEPING_TILE, the rows of a tile that also stores the panel that it widens.
 */
#ifndef PDK_LINEAR_TILES_H
#define PDK_LINEAR_TILES_H

#include "product.h"

typedef void whole_tile(const char *operand, int64_t operand_stride, const char *panel, int64_t panel_bytes, int64_t k,
                        const uint8_t *high_bytes, struct ahead ahead, float *kept, float *result,
                        int64_t result_stride, bool accumulate);

#define WHOLE_TILE(name, kind, rows, panel_count, fetching, keeps)                                                    \
    ONE_COPY void name(const char *operand, int64_t operand_stride, const char *panel, int64_t panel_bytes,           \
                       int64_t k, const uint8_t *high_bytes, struct ahead ahead, float *kept, float *result,          \
                       int64_t result_stride, bool accumulate)                                                        \
    {                                                                                                                 \
        multiply_whole(kind, rows, panel_count, fetching, keeps, operand, operand_stride, panel, panel_bytes, k,      \
                       high_bytes, ahead, kept, result, result_stride, accumulate);                                   \
    }

/* Of compact panels, streaming them: two panels for one row, which has no other sums to add to meanwhile. */
#define COMPACT_TILE(rows)                                                                                            \
    WHOLE_TILE(multiply_compact_##rows, COMPACT, rows <= MOST_ROWS ? rows : 1, 1, STREAMING, false)
WHOLE_TILE(multiply_compact_pair, COMPACT, 1, 2, STREAMING, false)
COMPACT_TILE(1)
COMPACT_TILE(2)
COMPACT_TILE(3)
COMPACT_TILE(4)
COMPACT_TILE(5)
static whole_tile *const compact_tiles[] = {NULL, multiply_compact_1, multiply_compact_2, multiply_compact_3,
                                            multiply_compact_4, multiply_compact_5};
_Static_assert(NARROW_ROWS <= 6, "each size of a tile has a function here");
enum { COMPACT_ROWS = MOST_ROWS < 5 ? MOST_ROWS : 5, AHEAD_BYTES = PREFETCH_BYTES / COMPACT_UNIT * COMPACT_UNIT };

INLINE void multiply_compact_panels(const char *operand, int64_t operand_stride, int64_t row_count,
                                    const struct panels *panels, float *result, int64_t result_stride, bool accumulate)
{
    const int64_t bytes = panels->k / COMPACT_K * COMPACT_UNIT, apart = panels->panel_bytes;
    const int64_t count = row_count == 1 && panels->panel_count == 2 ? 2 : 1;
    for (int64_t panel = 0; panel < panels->panel_count; panel += count) {
        const char *at = panels->chunks[0] + panel * apart, *rows_at = operand;
        const bool last = panel + count == panels->panel_count;
        /* What follows the last panel: panels are neighbours, or those of a gate, each with its next one behind it. */
        const char *next = !last ? at + apart : apart == bytes ? at + count * bytes : panels->chunks[0] + bytes;
        const struct ahead ahead = {at + AHEAD_BYTES, 0, at + bytes, next};
        float *sums = result + panel * PANEL;
        for (int64_t left = row_count, tiles = (left + COMPACT_ROWS - 1) / COMPACT_ROWS; tiles > 0; tiles--) {
            const int64_t rows = left / tiles;
            whole_tile *const tile = count == 2 ? multiply_compact_pair : compact_tiles[rows];
            tile(rows_at, operand_stride, at, apart, panels->k, panels->high_bytes, ahead, NULL, sums, result_stride,
                 accumulate);
            left -= rows;
            rows_at += rows * operand_stride * 4;
            sums += rows * result_stride;
        }
    }
}

#define KEPT_TILE(rows) WHOLE_TILE(multiply_kept_##rows, PLAIN, rows <= MOST_ROWS ? rows : 1, 1, ALONG, false)
KEPT_TILE(1)
KEPT_TILE(2)
KEPT_TILE(3)
KEPT_TILE(4)
KEPT_TILE(5)
KEPT_TILE(6)
static whole_tile *const kept_tiles[] = {NULL, multiply_kept_1, multiply_kept_2, multiply_kept_3, multiply_kept_4,
                                         multiply_kept_5, multiply_kept_6};
WHOLE_TILE(multiply_keeping_compact, COMPACT, KEEPING_TILE, 1, ALONG, true)
WHOLE_TILE(multiply_keeping_expanded, EXPANDED, KEEPING_TILE, 1, ALONG, true)

/* As multiply, for panels out of memory and rows that do not wait for it alone. `next`: what follows the panels' last
 * one, as long as one. `kept`: room for a panel in float32. Of panels that are not float32 the first tile of rows,
 * small enough to have registers left, widens each for the others. */
INLINE void multiply_block(const enum kind kind, const char *operand, int64_t operand_stride, int64_t row_count,
                           const struct panels *panels, const char *next, float *kept, float *result,
                           int64_t result_stride, bool accumulate)
{
    const int64_t k = panels->k, cache_lines = k / line_values(kind) * line_bytes(kind) / LINE;
    const int first_rows = kind == PLAIN ? 0 : KEEPING_TILE;
    const int64_t tile_count = (kind != PLAIN) + (row_count - first_rows + NARROW_ROWS - 1) / NARROW_ROWS;
    whole_tile *const keeping = kind == COMPACT ? multiply_keeping_compact : multiply_keeping_expanded;
    for (int64_t panel = 0; panel < panels->panel_count; panel++) {
        const bool last = panel + 1 == panels->panel_count;
        const char *at = panels->chunks[0] + panel * panels->panel_bytes, *rows_at = operand;
        const char *fetched = last ? next : at + panels->panel_bytes;
        float *sums = result + panel * PANEL;
        int64_t left = row_count, lines = cache_lines;
        for (int64_t tiles = tile_count; tiles > 0; tiles--) {
            const bool keeps = kind != PLAIN && left == row_count;
            const int64_t rows = keeps ? first_rows : rows_of_tile(left, tiles, NARROW_ROWS), share = lines / tiles;
            const int64_t turns = k / (keeps ? line_values(kind) * turn_lines(kind) : 2 * TURN);
            const struct ahead ahead = {.from = fetched, .step = share * LINE / turns};
            whole_tile *const tile = keeps ? keeping : kept_tiles[rows];
            tile(rows_at, operand_stride, kind == PLAIN || keeps ? at : (const char *)kept, 0, k, panels->high_bytes,
                 ahead, kept, sums, result_stride, accumulate);
            fetched += share * LINE;
            lines -= share;
            left -= rows;
            rows_at += rows * operand_stride * 4;
            sums += rows * result_stride;
        }
    }
}

#endif
