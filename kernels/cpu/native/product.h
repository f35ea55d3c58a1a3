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

#include "compact.h"
#include "path.h"
#include "simd.h"

enum {
    PANEL_VECTORS = PANEL / LANES,
    MOST_ROWS = NARROW_ROWS > WIDE_ROWS ? NARROW_ROWS : WIDE_ROWS,
    PREFETCH_BYTES = 2048,
};

enum kind {
    PLAIN,    /* float32 operand and panels */
    EXPANDED, /* bfloat16 panels widened in registers, operand float32 that holds bfloat16 values */
    COMPACT,  /* the same with compact panels */
    DOTTED,   /* bfloat16 pairs on both sides, two products an instruction */
};

/* A line is what the inner loop takes of a panel in one step, one or two values of K: how many lines a turn takes, the
 * values of K of one, and its bytes. */
INLINE int turn_lines(const enum kind kind)
{
    return kind == PLAIN ? 2 * TURN : kind == COMPACT ? COMPACT_LINES : TURN;
}
INLINE int line_values(const enum kind kind) { return kind == PLAIN ? 1 : 2; }
INLINE int line_bytes(const enum kind kind) { return kind == COMPACT ? COMPACT_UNIT / COMPACT_LINES : LINE; }

/* Where the operand's rows are. Each has a pointer, and one offset goes on for all of them: an address is a sum that an
 * instruction makes on its way, and a turn takes one addition. Where there are too few registers for that, a pointer
 * stands for two rows and goes on itself. The compiler must not see what they have in common, or it adds instructions
 * of its own. */
enum { POINTER_ROWS = MOST_ROWS > 6 ? 2 : 1, POINTERS = (MOST_ROWS + POINTER_ROWS - 1) / POINTER_ROWS };

struct row_places {
    const char *at[POINTERS];
    int64_t stride; /* bytes */
    int64_t offset;
};

INLINE struct row_places places_of(const int rows, const char *operand, int64_t stride)
{
    struct row_places places = {.stride = stride};
#pragma GCC unroll 8
    for (int i = 0; i * POINTER_ROWS < rows && i < POINTERS; i++) {
        places.at[i] = operand + i * POINTER_ROWS * stride;
        __asm__("" : "+r"(places.at[i]));
    }
    return places;
}

INLINE const char *place_of(const struct row_places *places, const int row)
{
    return places->at[row / POINTER_ROWS] + row % POINTER_ROWS * places->stride + places->offset;
}

/* On to the next turn. */
INLINE void advance(const int rows, const int bytes, struct row_places *places)
{
    if (POINTER_ROWS == 1) {
        places->offset += bytes;
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i * POINTER_ROWS < rows && i < POINTERS; i++) {
        places->at[i] += bytes;
        __asm__("" : "+r"(places->at[i]));
    }
}

/* The bfloat16 pairs of a line of a compact unit. */
INLINE void load_compact(const char *unit, const int line, const uint8_t *high_bytes, vu *pairs)
{
#if LANES == 8 && defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high_bytes));
    const __m256i low = (__m256i)vu_load(unit + line * COMPACT_PART);
    const __m256i codes = (__m256i)(vu_load(unit + COMPACT_LINES * COMPACT_PART) >> line * 4);
    const __m256i high = _mm256_shuffle_epi8(table, codes & _mm256_set1_epi8(15));
    pairs[0] = (vu)_mm256_unpacklo_epi8(low, high);
    pairs[1] = (vu)_mm256_unpackhi_epi8(low, high);
#else
    const char *codes = unit + COMPACT_LINES * COMPACT_PART;
    uint16_t values[2 * PANEL];
    for (int i = 0; i < 2 * PANEL; i++) {
        const int64_t place = compact_place(i / 2, i % 2);
        const uint8_t low = (uint8_t)unit[line * COMPACT_PART + place], code = (uint8_t)codes[place] >> line * 4 & 15;
        values[i] = (uint16_t)(high_bytes[code] << 8 | low);
    }
    memcpy(pairs, values, sizeof values);
#endif
}

/* Line `line` of a turn's of the panels: float32 of one k, or bfloat16 pairs of two. */
INLINE void load_line(const enum kind kind, const int vectors, const int line, const char *panel, int64_t panel_bytes,
                      const uint8_t *high_bytes, vu *loaded)
{
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        const char *at = panel + v / PANEL_VECTORS * panel_bytes;
        if (kind != COMPACT)
            loaded[v] = vu_load(at + line * LINE + v % PANEL_VECTORS * (LANES * 4));
        else if (v % PANEL_VECTORS == 0)
            load_compact(at, line, high_bytes, loaded + v);
    }
}

/* acc += a line of the panels times the operand's one or two values of K. `kept`, if not NULL: where the turn's weights
 * are stored as float32. */
INLINE void add_products(const enum kind kind, const int rows, const int vectors, const int line, const char *panel,
                         int64_t panel_bytes, const uint8_t *high_bytes, const struct row_places *operand,
                         int64_t offset, float *kept, vf acc[MOST_ROWS][2 * PANEL_VECTORS])
{
    const bool widens = kind == EXPANDED || kind == COMPACT;
    vu loaded[2 * PANEL_VECTORS];
#pragma GCC unroll 2
    for (int odd = 0; odd < (widens ? 2 : 1); odd++) {
        vf weights[2 * PANEL_VECTORS];
        if (odd && kind == EXPANDED) /* loaded again rather than kept: the accumulators want the registers */
            __asm__("" : "+r"(panel));
        if (!odd || kind == EXPANDED)
            load_line(kind, vectors, line, panel, panel_bytes, high_bytes, loaded);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            weights[v] = !widens ? (vf)loaded[v] : odd ? pair_odd(loaded[v]) : pair_even(loaded[v]);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            if (kept)
                vf_store(kept + (2 * line + odd) * PANEL + v * LANES, weights[v]);
#pragma GCC unroll 16
        for (int row = 0; row < rows && row < MOST_ROWS; row++) {
            const char *at = place_of(operand, row) + offset + odd * 4;
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

/* `rows` rows times `panel_count` panels from `first_panel` on; both constants where it is called. Where the rows are
 * so few that it may wait for memory, it fetches the panels some way ahead. */
INLINE void multiply_tile(const enum kind kind, const int rows, const int panel_count, const char *operand,
                          int64_t operand_stride, const struct panels *panels, int64_t first_panel, float *result,
                          int64_t result_stride, bool accumulate)
{
    const int vectors = panel_count * PANEL_VECTORS;
    const int turn = turn_lines(kind), turn_k = turn * line_values(kind), bytes = line_bytes(kind);
    const int operand_step = kind == PLAIN || kind == DOTTED ? 4 : 8; /* bytes a line */
    const bool streams = rows <= WIDE_ROWS;
    const int64_t panel_bytes = panels->panel_bytes;
    vf acc[MOST_ROWS][2 * PANEL_VECTORS];
    struct row_places places = places_of(rows, operand, operand_stride * (kind == DOTTED ? 2 : 4));
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[row][v] = accumulate ? vf_load(result + row * result_stride + v * LANES) : vf_set(0.0f);
    int64_t left = panels->k;
    for (int64_t chunk = 0; left > 0; chunk++, left -= panels->chunk_k) {
        const char *panel = panels->chunks[chunk] + first_panel * panel_bytes;
        const char *end = panel + min_of(left, panels->chunk_k) / turn_k * turn * bytes;
        const char *jump = end - PREFETCH_BYTES; /* from here on the next panels, not the neighbour's rest */
        while (panel < end) {
            const int64_t ahead = PREFETCH_BYTES + (panel < jump ? 0 : (panel_count - 1) * panel_bytes);
#pragma GCC unroll 8
            for (int line = 0; line < turn; line++) {
#pragma GCC unroll 2
                for (int p = 0; p < panel_count; p++)
                    if (streams)
                        __builtin_prefetch(panel + line * bytes + p * panel_bytes + ahead);
                add_products(kind, rows, vectors, line, panel, panel_bytes, NULL, &places, line * operand_step, NULL,
                             acc);
            }
            panel += turn * bytes;
            advance(rows, turn * operand_step, &places);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            vf_store(result + row * result_stride + v * LANES, acc[row][v]);
}

/* What a whole tile fetches on the way. */
enum fetching {
    NOTHING,
    ALONG,     /* a line each turn */
    STREAMING, /* the panels' own bytes some way ahead: rows are so few that it waits for memory */
};

/* From `from` on, by `step` where it fetches along; streaming until `end` and from `then` on afterwards. */
struct ahead {
    const char *from;
    int64_t step;
    const char *end;
    const char *then;
};

/* A tile of one or two panels in one chunk; `k` is above zero. In a function of its own, whose loop runs at least once,
 * the compiler leaves the accumulators in their registers from beginning to end. `keeps`: the panel goes to `kept` in
 * float32. */
INLINE void multiply_whole(const enum kind kind, const int rows, const int panel_count, const enum fetching fetching,
                           const bool keeps, const char *operand, int64_t operand_stride, const char *panel,
                           int64_t panel_bytes, int64_t k, const uint8_t *high_bytes, struct ahead ahead, float *kept,
                           float *result, int64_t result_stride, bool accumulate)
{
    const int vectors = panel_count * PANEL_VECTORS, lines = turn_lines(kind), line_k = line_values(kind);
    const int turn_bytes = lines * line_bytes(kind);
    const char *end = panel + k / (lines * line_k) * turn_bytes;
    vf acc[MOST_ROWS][2 * PANEL_VECTORS];
    struct row_places places = places_of(rows, operand, operand_stride * 4);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            acc[row][v] = accumulate ? vf_load(result + row * result_stride + v * LANES) : vf_set(0.0f);
    do {
        if (fetching == STREAMING) {
#pragma GCC unroll 2
            for (int p = 0; p < panel_count; p++) {
                __builtin_prefetch(ahead.from + p * panel_bytes);
                __builtin_prefetch(ahead.from + p * panel_bytes + turn_bytes / 2);
            }
            ahead.from += turn_bytes;
            if (ahead.from == ahead.end)
                ahead.from = ahead.then;
        }
        if (fetching == ALONG) {
            __builtin_prefetch(ahead.from);
            ahead.from += ahead.step;
        }
        if (kind == COMPACT)
            __asm__("" : "+r"(high_bytes)); /* or the table stays in a register that accumulators want */
#pragma GCC unroll 8
        for (int line = 0; line < lines; line++)
            add_products(kind, rows, vectors, line, panel, panel_bytes, high_bytes, &places, line * line_k * 4,
                         keeps ? kept : NULL, acc);
        panel += turn_bytes;
        kept += keeps ? lines * line_k * PANEL : 0;
        advance(rows, lines * line_k * 4, &places);
    } while (panel < end);
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            vf_store(result + row * result_stride + v * LANES, acc[row][v]);
}

/* What attention's products are made of. */
ONE_COPY void multiply_whole_tile(const char *operand, int64_t operand_stride, const char *panel, int64_t k,
                                  float *result, int64_t result_stride, bool accumulate)
{
    const struct ahead nothing = {0};
    multiply_whole(PLAIN, NARROW_ROWS, 1, NOTHING, false, operand, operand_stride, panel, 0, k, NULL, nothing, NULL,
                   result, result_stride, accumulate);
}

/* One of the sizes that tiles of up to `tile_rows` rows have; others are left out when this is compiled. */
#define TILE_CASE(size)                                                                                               \
    case size:                                                                                                        \
        if (size <= tile_rows)                                                                                        \
            multiply_tile(kind, size <= tile_rows ? size : 1, panel_count, operand, operand_stride, panels,           \
                          first_panel, result, result_stride, accumulate);                                            \
        break;

/* A tile of up to `tile_rows` rows. */
INLINE void multiply_rows(const enum kind kind, const int tile_rows, const int panel_count, int64_t rows,
                          const char *operand, int64_t operand_stride, const struct panels *panels, int64_t first_panel,
                          float *result, int64_t result_stride, bool accumulate)
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
INLINE void multiply_panels(const enum kind kind, const int tile_rows, const int panel_count, const char *operand,
                            int64_t operand_stride, int64_t row_count, const struct panels *panels, int64_t first_panel,
                            float *result, int64_t result_stride, bool accumulate)
{
    const int64_t row_bytes = operand_stride * (kind == DOTTED ? 2 : 4);
    const bool whole = kind == PLAIN && tile_rows == NARROW_ROWS && panel_count == 1 && panels->k <= panels->chunk_k;
    result += first_panel * PANEL;
    for (int64_t tiles = (row_count + tile_rows - 1) / tile_rows; tiles > 0; tiles--) {
        const int64_t rows = rows_of_tile(row_count, tiles, tile_rows);
        if (whole && rows == NARROW_ROWS)
            multiply_whole_tile(operand, operand_stride, panels->chunks[0] + first_panel * panels->panel_bytes,
                                panels->k, result, result_stride, accumulate);
        else
            multiply_rows(kind, tile_rows, panel_count, rows, operand, operand_stride, panels, first_panel, result,
                          result_stride, accumulate);
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
    for (int64_t panel = 0; panel < paired; panel += 2)
        multiply_panels(kind, wide_rows, 2, operand, operand_stride, rows, panels, panel, result, result_stride,
                        accumulate);
    for (int64_t panel = paired; panel < panels->panel_count; panel++)
        multiply_panels(kind, narrow_rows, 1, operand, operand_stride, rows, panels, panel, result, result_stride,
                        accumulate);
}

#endif
