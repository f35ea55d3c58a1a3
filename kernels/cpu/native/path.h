/* One instruction set's kernels as a table, and the form of the operands of its matrix products.
 *
 * Every product (a linear, Q K', P V) is rows times panels. A panel is PANEL outputs wide and runs along K, so that
 * lanes are outputs and each output has one float32 accumulator to which its products are added in the order of K:
 *
 *   bfloat16 panel   [K / 2][PANEL][2]    pairs of K side by side: what AMX and AVX512-BF16 want, and two shifts for AVX2
 *   float32 panel    [K][PANEL]
 *   compact panel    [K / 4][96 bytes]    bfloat16 in 12 bits each, see compact.h; the products of the few weights that
 *                                         do not fit are added after the others
 *
 * A row's result depends on that row and the panels alone, whatever the number of rows, panels or calls. K is padded to
 * K_PAD with zeros, on both sides. The left operand ("operand" below) is rows of float32 or bfloat16, as the path likes.
 */
#ifndef PDK_PATH_H
#define PDK_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

enum {
    PANEL = 16,        /* outputs a panel */
    K_PAD = 32,        /* K of every product is a multiple of this */
    ROW_PAD = 16,      /* operand and result buffers have room for as many rows more */
    TILE_TOKENS = 32,  /* tokens of a tile of the cache */
    SEGMENT_TILES = 8, /* tiles of a segment of attention */
    SEGMENT_TOKENS = TILE_TOKENS * SEGMENT_TILES,
    LINE = 64, /* bytes of a cache line, and of a panel's row */
};

static inline int64_t rounded_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t dtype_bytes(int64_t dtype) { return dtype == PDK_BFLOAT16 ? 2 : 4; }
static inline int64_t bytes_of_panel(int64_t k, int64_t dtype)
{
    return k * PANEL * (dtype == PDK_COMPACT ? 3 : 2 * dtype_bytes(dtype)) / 2;
}

/* Panels along K in chunks that may lie anywhere: chunk c holds k in [c * chunk_k, (c + 1) * chunk_k), panel p of it
 * begins at chunks[c] + p * panel_bytes. */
struct panels {
    const char *const *chunks;
    int64_t chunk_k;
    int64_t k; /* in all; of a linear's a multiple of K_PAD, above zero */
    int64_t panel_bytes;
    int64_t panel_count;
    const uint8_t *high_bytes; /* of compact panels */
};

/* result[rows][panel_count * PANEL] = operand x panels, or += where `accumulate`. Strides in elements. Compact panels,
 * which are a linear's, come in one chunk. */
typedef void product_function(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                              float *result, int64_t result_stride, bool accumulate);

/* The same for panels of one chunk that come from memory, and for a few rows or more: `next`, where panels go on, is
 * fetched meanwhile, as much as one panel of the chunk. `kept`: room for one panel in float32. */
typedef void block_function(const void *operand, int64_t operand_stride, int64_t rows, const struct panels *panels,
                            const char *next, float *kept, float *result, int64_t result_stride, bool accumulate);

enum linear_end {
    STORE, /* y = x W' + bias, float32 */
    ADD,   /* y += x W' + bias, float32 */
    GATE,  /* y = silu(first half) * second half, as an operand of the next product */
};

enum { LINEAR_BLOCK_ROWS = 256 }; /* of a linear_block at most: their operand fits the second cache */

/* Two panels of a linear times a block of rows, and all that is done to the sums on their way out. */
struct linear_block {
    const void *operand; /* the block's first row */
    int64_t operand_stride; /* in elements */
    int64_t rows;
    int64_t k; /* a multiple of K_PAD, above zero */
    const char *panels[2];
    const char *next[2]; /* what will be wanted after them, as long as they: fetched meanwhile */
    enum linear_end end;
    const float *bias[2]; /* of each panel's outputs; NULL: none */
    void *y;              /* the block's first row, the first panel's first output */
    int64_t y_stride;     /* in elements */
    float *sums;          /* scratch: [LINEAR_BLOCK_ROWS][2 * PANEL] */
};

typedef void linear_block_function(const struct linear_block *block);

/* sums[rows][.] += what the exceptions of a compact panel add to it. */
typedef void exceptions_function(const struct pdk_exception *exceptions, int64_t count, const void *operand,
                                 int64_t operand_stride, int64_t rows, float *sums, int64_t sums_stride);

struct attention_task; /* cache.h */

/* The kernels for one dtype of weights and KV; compact is of weights only. */
struct products {
    product_function *product;
    int64_t operand_bytes;                                             /* of one element */
    int64_t query_rows;                                                /* rows of a query tile that suit the product */
    block_function *block_product;      /* NULL: as product */
    void (*store_operand)(const float *row, int64_t count, void *out); /* rounds to the dtype */
    int64_t (*attend_scratch)(int64_t head_dim, int64_t group);        /* bytes */
    void (*attend)(const struct attention_task *task, void *scratch);
    /* Put a task together from states that were left by tasks of one segment each, `partial_floats` apart. */
    void (*merge)(const struct attention_task *task, float *partials, int64_t partial_floats, void *scratch);
    exceptions_function *add_exceptions; /* of compact panels */
    linear_block_function *linear_block; /* for more than one tile of rows; NULL: product, then function by function */
};

struct pdk_path {
    const char *name;
    bool (*available)(void);
    void (*begin)(void); /* around a thread's products: sets and releases state of the core */
    void (*end)(void);
    struct products products[3]; /* by enum pdk_dtype; no `product`: the path has none of these panels */
    void (*rms_norm)(const float *x, int64_t size, const float *weight, float eps, float *y);
    void (*silu_mul)(const float *gate, const float *up, int64_t size, float *y);
    void (*rotary)(const float *x, int64_t head_dim, const float *cos, const float *sin, float *y);
    void (*bias_row)(const float *values, const float *bias, int64_t count, float *y); /* y = values + bias */
    void (*add_row)(const float *values, const float *bias, int64_t count, float *y);  /* y += that; bias may be NULL */
};

extern const struct pdk_path portable_path;
extern const struct pdk_path avx2_path;
extern const struct pdk_path avx512_path;
extern const struct pdk_path amx_path;

#endif
