/* Matrix products in vectors: tiles of a few rows times one or two panels, accumulators in registers along all of K.
 *
 * Set before including, beside what simd.h wants: NARROW_ROWS, the rows of a tile of one panel, and WIDE_ROWS, those of
 * a tile of two (fewer: both hold their accumulators in the registers there are); EXPANDED_NARROW_ROWS and
 * EXPANDED_WIDE_ROWS for panels that are widened on the way; TURN, how many pairs of K a turn of the inner loop takes.
 *
 * A core that shares its front end with a busy neighbour is bound by the count of its instructions, not by the
 * multiply-adds among them: so the loop is unrolled, addresses need no instructions, and accumulators stay in their
 * registers.
 */
#ifndef PDK_PRODUCT_H
#define PDK_PRODUCT_H

#include "path.h"
#include "simd.h"

enum {
    PANEL_VECTORS = PANEL / LANES,
    MOST_ROWS = NARROW_ROWS > WIDE_ROWS ? NARROW_ROWS : WIDE_ROWS,
    ODD_STRIDES = (MOST_ROWS + 1) / 2,
    PREFETCH_BYTES = 2048,
};

enum kind {
    PLAIN,    /* float32 operand and panels */
    EXPANDED, /* bfloat16 panels widened in registers, operand float32 that holds bfloat16 values */
    KEPT,     /* the same, and what was widened is stored for the tiles that follow */
    DOTTED,   /* bfloat16 pairs on both sides, two products an instruction */
};

/* Lines that a product fetches on the way, evenly, for those that follow. `from` NULL: where its rows are so few that
 * it waits for memory, its own panels some way ahead. */
struct fetch {
    const char *from;
    int64_t lines;
};

/* Where a row of the operand begins. The stride's odd multiples are scaled by powers of two within the address. */
INLINE const char *row_at(const char *operand, const int row, const int64_t odd_strides[ODD_STRIDES])
{
    const int scale = row & -row;
    return row ? operand + odd_strides[row / scale / 2] * scale : operand;
}

/* A row of the panels: float32, or the even or odd k of bfloat16 pairs widened, or pairs as they are. */
INLINE void load_weights(const enum kind kind, const int odd, const int vectors, const char *panel, int64_t panel_bytes,
                         float *kept, vf weights[2 * PANEL_VECTORS])
{
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        const vu loaded = vu_load(panel + v / PANEL_VECTORS * panel_bytes + v % PANEL_VECTORS * (LANES * 4));
        if (kind == PLAIN || kind == DOTTED)
            weights[v] = (vf)loaded;
        else
            weights[v] = odd ? pair_odd(loaded) : pair_even(loaded);
        if (kind == KEPT)
            vf_store(kept + odd * PANEL + v * LANES, weights[v]);
    }
}

/* acc += one row of the panels (one k, or a pair of them) times the operand's. */
INLINE void add_products(const enum kind kind, const int rows, const int vectors, const char *panel,
                         int64_t panel_bytes, const char *operand, const int64_t odd_strides[ODD_STRIDES], float *kept,
                         vf acc[MOST_ROWS][2 * PANEL_VECTORS])
{
    const int halves = kind == EXPANDED || kind == KEPT ? 2 : 1;
#pragma GCC unroll 2
    for (int odd = 0; odd < halves; odd++) {
        vf weights[2 * PANEL_VECTORS];
        if (odd) /* loaded again rather than kept: the accumulators want the registers */
            __asm__("" : "+r"(panel));
        load_weights(kind, odd, vectors, panel, panel_bytes, kept, weights);
#pragma GCC unroll 16
        for (int row = 0; row < rows && row < MOST_ROWS; row++) {
            const char *at = row_at(operand, row, odd_strides) + odd * 4;
#ifdef HAS_DOT
            const vu pair = vu_broadcast(at);
#endif
            const vf value = vf_set(*(const float *)at);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
#ifdef HAS_DOT
                if (kind == DOTTED)
                    acc[row][v] = vf_dot(acc[row][v], pair, (vu)weights[v]);
                else
#endif
                    acc[row][v] = vf_add_product(acc[row][v], weights[v], value);
        }
    }
}

/* `rows` rows times `panel_count` panels from `first_panel` on; both constants where it is called, as is whether
 * there is something to fetch. KEPT: the panel goes to `kept`. */
INLINE void multiply_tile(const enum kind kind, const int rows, const int panel_count, const bool fetches,
                          const char *operand, int64_t operand_stride, const struct panels *panels, int64_t first_panel,
                          struct fetch fetch, float *kept, float *result, int64_t result_stride, bool accumulate)
{
    const int vectors = panel_count * PANEL_VECTORS;
    const int turn = kind == PLAIN ? 2 * TURN : TURN;                     /* lines of a panel */
    const int operand_step = kind == PLAIN || kind == DOTTED ? 4 : 8;    /* bytes a line */
    const int fetches_a_turn = !fetches ? 0 : kind == PLAIN ? 1 : TURN;
    const bool streams = !fetches && rows <= WIDE_ROWS;
    const int64_t panel_bytes = panels->panel_bytes, turns = panels->k / (2 * TURN);
    const int64_t fetch_step = fetches ? fetch.lines * LINE / (turns * fetches_a_turn) : 0;
    vf acc[MOST_ROWS][2 * PANEL_VECTORS];
    int64_t odd_strides[ODD_STRIDES];
#pragma GCC unroll 8
    for (int i = 0; i < ODD_STRIDES; i++)
        odd_strides[i] = (2 * i + 1) * operand_stride * (kind == DOTTED ? 2 : 4);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[row][v] = accumulate ? vf_load(result + row * result_stride + v * LANES) : vf_set(0.0f);
    int64_t left = panels->k;
    for (int64_t chunk = 0; left > 0; chunk++, left -= panels->chunk_k) {
        const char *panel = panels->chunks[chunk] + first_panel * panel_bytes;
        const char *end = panel + min_of(left, panels->chunk_k) / (2 * TURN) * turn * LINE;
        const char *jump = end - PREFETCH_BYTES; /* from here on the next panels, not the neighbour's rest */
        while (panel < end) {
            const int64_t ahead = PREFETCH_BYTES + (panel < jump ? 0 : (panel_count - 1) * panel_bytes);
#pragma GCC unroll 8
            for (int i = 0; i < fetches_a_turn; i++, fetch.from += fetch_step)
                __builtin_prefetch(fetch.from);
#pragma GCC unroll 8
            for (int i = 0; i < ODD_STRIDES; i++)
                if (2 * i + 1 < rows) /* else each offset of the turn is added to each of them, ahead of the loop */
                    __asm__("" : "+r"(odd_strides[i]));
#pragma GCC unroll 8
            for (int line = 0; line < turn; line++) {
                const char *at = panel + line * LINE;
#pragma GCC unroll 2
                for (int p = 0; p < panel_count; p++)
                    if (streams)
                        __builtin_prefetch(at + p * panel_bytes + ahead);
                add_products(kind, rows, vectors, at, panel_bytes, operand + line * operand_step, odd_strides,
                             kept + line * 2 * PANEL, acc);
            }
            panel += turn * LINE;
            operand += turn * operand_step;
            if (kind == KEPT)
                kept += turn * 2 * PANEL;
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            vf_store(result + row * result_stride + v * LANES, acc[row][v]);
}

/* What attention's products are made of: a whole tile of one float32 panel in one chunk. In a function of its own,
 * whose loop runs at least once, the compiler leaves the accumulators in their registers from beginning to end. */
ONE_COPY void multiply_whole_tile(const char *operand, int64_t operand_stride, const char *panel, int64_t k,
                                  float *result, int64_t result_stride, bool accumulate)
{
    const char *end = panel + k * LINE;
    vf acc[MOST_ROWS][2 * PANEL_VECTORS];
    int64_t odd_strides[ODD_STRIDES];
#pragma GCC unroll 8
    for (int i = 0; i < ODD_STRIDES; i++)
        odd_strides[i] = (2 * i + 1) * operand_stride * 4;
#pragma GCC unroll 16
    for (int row = 0; row < NARROW_ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++)
            acc[row][v] = accumulate ? vf_load(result + row * result_stride + v * LANES) : vf_set(0.0f);
    do {
#pragma GCC unroll 8
        for (int i = 0; i < ODD_STRIDES; i++)
            __asm__("" : "+r"(odd_strides[i]));
#pragma GCC unroll 8
        for (int line = 0; line < 2 * TURN; line++)
            add_products(PLAIN, NARROW_ROWS, PANEL_VECTORS, panel + line * LINE, 0, operand + line * 4, odd_strides,
                         NULL, acc);
        panel += 2 * TURN * LINE;
        operand += 2 * TURN * 4;
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
            multiply_tile(kind, size <= tile_rows ? size : 1, panel_count, fetches, operand, operand_stride, panels,  \
                          first_panel, fetch, kept, result, result_stride, accumulate);                               \
        break;

/* A tile of up to `tile_rows` rows. */
INLINE void multiply_rows(const enum kind kind, const int tile_rows, const int panel_count, const bool fetches,
                          int64_t rows, const char *operand, int64_t operand_stride, const struct panels *panels,
                          int64_t first_panel, struct fetch fetch, float *kept, float *result, int64_t result_stride,
                          bool accumulate)
{
    switch (rows) {
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
}

/* Rows of the next of `tiles` tiles for `rows` rows: as many as a tile has; the last ones two less each, or one where a
 * tile has an odd number. A core whose neighbour is busy does not like tiles of five between those of six. */
INLINE int64_t rows_of_tile(int64_t rows, int64_t tiles, const int tile_rows)
{
    const int64_t missing = tiles * tile_rows - rows, less = tile_rows % 2 ? 1 : 2;
    return tile_rows - max_of(0, missing - less * (tiles - 1));
}

/* All rows times the panels from `first_panel` on. */
INLINE void multiply_panels(const enum kind kind, const int tile_rows, const int panel_count, const bool fetches,
                            const char *operand, int64_t operand_stride, int64_t row_count, const struct panels *panels,
                            int64_t first_panel, struct fetch fetch, float *result, int64_t result_stride,
                            bool accumulate)
{
    const int64_t row_bytes = operand_stride * (kind == DOTTED ? 2 : 4);
    const bool whole = kind == PLAIN && tile_rows == NARROW_ROWS && panel_count == 1 && !fetches &&
                       panels->k <= panels->chunk_k;
    result += first_panel * PANEL;
    for (int64_t tiles = (row_count + tile_rows - 1) / tile_rows; tiles > 0; tiles--) {
        const int64_t rows = rows_of_tile(row_count, tiles, tile_rows);
        const struct fetch share = {fetch.from, fetch.lines / tiles};
        if (whole && rows == NARROW_ROWS)
            multiply_whole_tile(operand, operand_stride, panels->chunks[0] + first_panel * panels->panel_bytes,
                                panels->k, result, result_stride, accumulate);
        else
            multiply_rows(kind, tile_rows, panel_count, fetches, rows, operand, operand_stride, panels, first_panel,
                          share, NULL, result, result_stride, accumulate);
        fetch.from += share.lines * LINE;
        fetch.lines -= share.lines;
        row_count -= rows;
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
    const struct fetch nothing = {NULL, 0};
    for (int64_t panel = 0; panel < paired; panel += 2)
        multiply_panels(kind, wide_rows, 2, false, operand, operand_stride, rows, panels, panel, nothing, result,
                        result_stride, accumulate);
    for (int64_t panel = paired; panel < panels->panel_count; panel++)
        multiply_panels(kind, narrow_rows, 1, false, operand, operand_stride, rows, panels, panel, nothing, result,
                        result_stride, accumulate);
}

/* As multiply, for panels out of memory and rows that do not wait for it alone. `next`: what follows the panels' last
 * one, as long as one. `kept`: room for a panel in float32, which bfloat16 ones are widened into once where several
 * tiles of rows want them. */
INLINE void multiply_block(const enum kind kind, const char *operand, int64_t operand_stride, int64_t rows,
                           const struct panels *panels, const char *next, float *kept, float *result,
                           int64_t result_stride, bool accumulate)
{
    const int64_t lines = panels->k / (kind == PLAIN ? 1 : 2), tiles = (rows + NARROW_ROWS - 1) / NARROW_ROWS;
    const int64_t first = rows_of_tile(rows, tiles, NARROW_ROWS);
    const char *wide = (const char *)kept;
    const struct panels again = {&wide, panels->k, panels->k, 0, 1};
    for (int64_t panel = 0; panel < panels->panel_count; panel++, result += PANEL) {
        const bool last = panel + 1 == panels->panel_count;
        const struct fetch fetch = {last ? next : panels->chunks[0] + (panel + 1) * panels->panel_bytes, lines};
        const struct fetch share = {fetch.from, lines / tiles};
        const struct fetch rest = {fetch.from + share.lines * LINE, lines - share.lines};
        if (kind == PLAIN || rows < KEEPING_ROWS) {
            multiply_panels(kind, kind == PLAIN ? NARROW_ROWS : EXPANDED_NARROW_ROWS, 1, true, operand, operand_stride,
                            rows, panels, panel, fetch, result - panel * PANEL, result_stride, accumulate);
            continue;
        }
        multiply_rows(KEPT, NARROW_ROWS, 1, true, first, operand, operand_stride, panels, panel, share, kept, result,
                      result_stride, accumulate);
        multiply_panels(PLAIN, NARROW_ROWS, 1, true, operand + first * operand_stride * 4, operand_stride, rows - first,
                        &again, 0, rest, result + first * result_stride, result_stride, accumulate);
    }
}

#endif
