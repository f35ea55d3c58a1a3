/* Attention's scores on tiles: the queries of one or two tiles of rows stay in their tiles while all keys pass. */
#ifndef PDK_AMX_SCORES_H
#define PDK_AMX_SCORES_H

#include "amx.h"
#include "path.h"
#include "simd.h"

enum { SCORE_STEPS = 4 /* of TILE_K, at most: as many tiles are for queries */ };

/* Queries are tiles 4 to 7 (a second tile of rows has 6 and 7, so it can have two steps), keys 2 and 3, sums 0 and 1. The
 * sums have the order of multiply_tiles. */
INLINE void score_tiles(const int row_tiles, const int steps, const char *query, const char *const *keys,
                        int64_t panel_bytes, int64_t panel_count, float *scores, int64_t scores_stride)
{
    const int64_t query_bytes = steps * LINE, stride = scores_stride * 4, key_bytes = TILE_K / 2 * LINE;
    const char *below = query + TILE_ROWS * query_bytes;
    tile_loadd(4, query, query_bytes);
    if (steps > 1)
        tile_loadd(5, query + LINE, query_bytes);
    if (steps > 2)
        tile_loadd(6, query + 2 * LINE, query_bytes);
    if (steps > 3)
        tile_loadd(7, query + 3 * LINE, query_bytes);
    if (row_tiles > 1)
        tile_loadd(6, below, query_bytes);
    if (row_tiles > 1 && steps > 1)
        tile_loadd(7, below + LINE, query_bytes);
    for (int64_t panel = 0; panel < panel_count; panel++, scores += PANEL) {
        const char *key = keys[panel / 2] + panel % 2 * panel_bytes;
        tile_zero(0);
        tile_zero(1);
        tile_loadd(2, key, LINE);
        tile_dpbf16ps(0, 4, 2);
        if (row_tiles > 1)
            tile_dpbf16ps(1, 6, 2);
        if (steps > 1) {
            tile_loadd(3, key + key_bytes, LINE);
            tile_dpbf16ps(0, 5, 3);
        }
        if (row_tiles > 1 && steps > 1)
            tile_dpbf16ps(1, 7, 3);
        if (steps > 2) {
            tile_loadd(2, key + 2 * key_bytes, LINE);
            tile_dpbf16ps(0, 6, 2);
        }
        if (steps > 3) {
            tile_loadd(3, key + 3 * key_bytes, LINE);
            tile_dpbf16ps(0, 7, 3);
        }
        tile_stored(0, scores, stride);
        if (row_tiles > 1)
            tile_stored(1, scores + TILE_ROWS * scores_stride, stride);
    }
}

INLINE void score_rows(const int steps, const char *query, int64_t rows, const char *const *keys, int64_t panel_bytes,
                       int64_t panel_count, float *scores, int64_t scores_stride)
{
    const int most_tiles = steps > SCORE_STEPS / 2 ? 1 : 2;
    for (int64_t row = 0; row < rows; row += most_tiles * TILE_ROWS) {
        const char *at = query + row * steps * LINE;
        float *to = scores + row * scores_stride;
        if (most_tiles > 1 && row + TILE_ROWS < rows)
            score_tiles(2, steps, at, keys, panel_bytes, panel_count, to, scores_stride);
        else
            score_tiles(1, steps, at, keys, panel_bytes, panel_count, to, scores_stride);
    }
}

/* The scores of rows of `key_dim` bfloat16 for `panel_count` panels of keys, two to a tile of the cache. False: the head
 * is too large. */
static bool score_panels(const char *query, int64_t key_dim, int64_t rows, const char *const *keys, int64_t panel_bytes,
                         int64_t panel_count, float *scores, int64_t scores_stride)
{
    switch (key_dim / TILE_K) {
    case 1:
        score_rows(1, query, rows, keys, panel_bytes, panel_count, scores, scores_stride);
        return true;
    case 2:
        score_rows(2, query, rows, keys, panel_bytes, panel_count, scores, scores_stride);
        return true;
    case 3:
        score_rows(3, query, rows, keys, panel_bytes, panel_count, scores, scores_stride);
        return true;
    case 4:
        score_rows(4, query, rows, keys, panel_bytes, panel_count, scores, scores_stride);
        return true;
    default:
        return false;
    }
}

#endif
