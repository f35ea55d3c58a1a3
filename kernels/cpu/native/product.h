/* Matrix products in vectors: tiles of a few rows times one or two panels, accumulators in registers along all of K.
 *
 * Set before including, beside what simd.h wants: NARROW_ROWS, the rows of a tile of one panel, and WIDE_ROWS, those of
 * a tile of two (fewer: both hold their accumulators in the registers there are).
 */
#ifndef PDK_PRODUCT_H
#define PDK_PRODUCT_H

#include "path.h"
#include "simd.h"

enum {
    PANEL_VECTORS = PANEL / LANES,
    MOST_ROWS = NARROW_ROWS > WIDE_ROWS ? NARROW_ROWS : WIDE_ROWS,
    PREFETCH_BYTES = 2048,
    WHOLE_TILE = 0, /* beside numbers of rows */
};

enum kind {
    PLAIN,    /* float32 operand and panels */
    EXPANDED, /* bfloat16 panels widened in registers, operand float32 that holds bfloat16 values */
    DOTTED,   /* bfloat16 pairs on both sides, two products an instruction */
};

/* acc += one row of the panels (one k, or a pair of them) times the operand's. */
INLINE void add_products(const enum kind kind, const int rows, const int vectors, const char *panel,
                         int64_t panel_bytes, const char *operand, int64_t operand_stride_bytes,
                         vf acc[MOST_ROWS][2 * PANEL_VECTORS])
{
    vu weights[2 * PANEL_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
        weights[v] = vu_load(panel + v / PANEL_VECTORS * panel_bytes + v % PANEL_VECTORS * (LANES * 4));
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
        const char *at = operand + row * operand_stride_bytes;
        if (kind == DOTTED) {
#ifdef HAS_DOT
            const vu pair = vu_broadcast(at);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                acc[row][v] = vf_dot(acc[row][v], pair, weights[v]);
#endif
        } else {
            const vf first = vf_set(*(const float *)at);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                acc[row][v] = vf_fma(kind == PLAIN ? (vf)weights[v] : pair_even(weights[v]), first, acc[row][v]);
        }
    }
    if (kind != EXPANDED)
        return;
    /* Loaded again rather than kept: the accumulators want the registers. */
    __asm__("" : "+r"(panel));
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++)
        weights[v] = vu_load(panel + v / PANEL_VECTORS * panel_bytes + v % PANEL_VECTORS * (LANES * 4));
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
        const vf second = vf_set(*(const float *)(operand + row * operand_stride_bytes + 4));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[row][v] = vf_fma(pair_odd(weights[v]), second, acc[row][v]);
    }
}

/* `rows` rows times `panel_count` panels from `first_panel` on; both constants where it is called. */
INLINE void multiply_tile(const enum kind kind, const int rows, const int panel_count, const char *operand,
                          int64_t operand_stride, const struct panels *panels, int64_t first_panel, float *result,
                          int64_t result_stride, bool accumulate)
{
    const int vectors = panel_count * PANEL_VECTORS;
    const int k_row = kind == PLAIN ? 1 : 2; /* how much of K is in one row of a panel */
    const int element_bytes = kind == DOTTED ? 2 : 4;
    const int64_t panel_bytes = panels->panel_bytes;
    vf acc[MOST_ROWS][2 * PANEL_VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[row][v] = accumulate ? vf_load(result + row * result_stride + v * LANES) : vf_set(0.0f);
    int64_t left = panels->k;
    for (int64_t chunk = 0; left > 0; chunk++, left -= panels->chunk_k) {
        const char *panel = panels->chunks[chunk] + first_panel * panel_bytes;
        const char *end = panel + min_of(left, panels->chunk_k) / k_row * LINE;
        const char *jump = end - PREFETCH_BYTES; /* from here on the next panels are fetched, not the neighbour's rest */
        while (panel < end) {
            const int64_t ahead = PREFETCH_BYTES + (panel < jump ? 0 : (panel_count - 1) * panel_bytes);
#pragma GCC unroll 2
            for (int p = 0; p < panel_count && rows <= WIDE_ROWS; p++)
                __builtin_prefetch(panel + p * panel_bytes + ahead);
            add_products(kind, rows, vectors, panel, panel_bytes, operand, operand_stride * element_bytes, acc);
            panel += LINE;
            operand += k_row * element_bytes;
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            vf_store(result + row * result_stride + v * LANES, acc[row][v]);
}

/* What large products are made of: a whole tile of one float32 panel in one chunk. In a function of its own, whose loop
 * runs at least once, the compiler leaves the accumulators in their registers from beginning to end. */
ONE_COPY void multiply_whole_tile(const char *operand, int64_t operand_stride, const char *panel, int64_t k,
                                  float *result, int64_t result_stride, bool accumulate)
{
    const char *end = panel + k * LINE;
    vf acc[MOST_ROWS][2 * PANEL_VECTORS];
#pragma GCC unroll 16
    for (int row = 0; row < NARROW_ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            acc[row][v] = accumulate ? vf_load(result + row * result_stride + v * LANES) : vf_set(0.0f);
    do {
        add_products(PLAIN, NARROW_ROWS, PANEL_VECTORS, panel, 0, operand, operand_stride * 4, acc);
        add_products(PLAIN, NARROW_ROWS, PANEL_VECTORS, panel + LINE, 0, operand + 4, operand_stride * 4, acc);
        panel += 2 * LINE;
        operand += 2 * 4;
    } while (panel < end);
#pragma GCC unroll 16
    for (int row = 0; row < NARROW_ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            vf_store(result + row * result_stride + v * LANES, acc[row][v]);
}

/* One of the sizes that tiles of up to `tile_rows` rows have; others are left out when this is compiled. */
#define TILE_CASE(size)                                                                                               \
    case size:                                                                                                        \
        if (size <= tile_rows)                                                                                        \
            multiply_tile(kind, size, panel_count, operand, operand_stride, panels, first_panel, result,              \
                          result_stride, accumulate);                                                                 \
        break;

/* All rows times the panels from `first_panel` on, in tiles as equal as can be. */
INLINE void multiply_panels(const enum kind kind, const int tile_rows, const int panel_count, const char *operand,
                            int64_t operand_stride, int64_t row_count, const struct panels *panels,
                            int64_t first_panel, float *result, int64_t result_stride, bool accumulate)
{
    const bool whole = kind == PLAIN && tile_rows == NARROW_ROWS && panel_count == 1 && panels->k <= panels->chunk_k;
    const int64_t tiles = (row_count + tile_rows - 1) / tile_rows;
    const int64_t row_bytes = operand_stride * (kind == DOTTED ? 2 : 4);
    const int64_t least = tiles ? row_count / tiles : 0, larger = row_count - least * tiles;
    result += first_panel * PANEL;
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t rows = least + (tile < larger);
        switch (whole && rows == tile_rows ? WHOLE_TILE : rows) {
        case WHOLE_TILE:
            multiply_whole_tile(operand, operand_stride, panels->chunks[0] + first_panel * panels->panel_bytes,
                                panels->k, result, result_stride, accumulate);
            break;
            TILE_CASE(1)
            TILE_CASE(2)
            TILE_CASE(3)
            TILE_CASE(4)
            TILE_CASE(5)
            TILE_CASE(6)
            TILE_CASE(7)
            TILE_CASE(8)
            TILE_CASE(9)
            TILE_CASE(10)
            TILE_CASE(11)
            TILE_CASE(12)
        default:
            __builtin_unreachable();
        }
        operand += rows * row_bytes;
        result += rows * result_stride;
    }
}

INLINE void multiply(const enum kind kind, const void *operand, int64_t operand_stride, int64_t rows,
                     const struct panels *panels, float *result, int64_t result_stride, bool accumulate)
{
    const int wide_rows = kind == EXPANDED ? EXPANDED_WIDE_ROWS : WIDE_ROWS;
    const int narrow_rows = kind == EXPANDED ? EXPANDED_NARROW_ROWS : NARROW_ROWS;
    const int64_t paired = rows <= wide_rows || narrow_rows <= wide_rows ? panels->panel_count & ~(int64_t)1 : 0;
    for (int64_t panel = 0; panel < paired; panel += 2)
        multiply_panels(kind, wide_rows, 2, operand, operand_stride, rows, panels, panel, result, result_stride,
                        accumulate);
    for (int64_t panel = paired; panel < panels->panel_count; panel++)
        multiply_panels(kind, narrow_rows, 1, operand, operand_stride, rows, panels, panel, result, result_stride,
                        accumulate);
}

#endif
