/* What Python sees of the library: plain structs and functions, mirrored in kernels/cpu/library.py.
 *
 * Sizes are int64_t everywhere so that both sides lay the structs out alike. All pointers stay the caller's. Functions
 * that take a pool are called from one thread at a time; pdk_write_kv and pdk_read_kv may run beside them on other slots.
 */
#ifndef PDK_ABI_H
#define PDK_ABI_H

#include <stdint.h>

#define PDK_EXPORT __attribute__((visibility("default")))

/* PDK_COMPACT: only a linear's, bfloat16 weights whose panels have 12 bits for each (compact.h). */
enum pdk_dtype { PDK_FLOAT32 = 0, PDK_BFLOAT16 = 1, PDK_COMPACT = 2 };

struct pdk_path; /* one instruction set's kernels */
struct pdk_pool; /* the threads */

/* A weight that does not fit into a compact panel. */
struct pdk_exception {
    float weight;
    int32_t place; /* within its panel: k * 16 + output */
};

/* What compact panels have beside them. Panel p's exceptions are those from panel_exceptions[p] up to
 * panel_exceptions[p + 1], of each output in the order of k. */
struct pdk_compact {
    uint8_t high_bytes[16];    /* what a code stands for */
    int32_t *panel_exceptions; /* [panels + 1] */
    struct pdk_exception *exceptions;
};

/* A linear's weight [out, in] as packed by pdk_pack, and its bias [out] or NULL. */
struct pdk_linear {
    const void *panels;
    const struct pdk_compact *compact; /* NULL unless they are that */
    const float *bias;
    int64_t out_features;
    int64_t in_features;
    int64_t dtype;
};

/* A paged cache: slots of all layers. `memory` holds pdk_cache_bytes, zero where nothing was written. */
struct pdk_cache {
    void *memory;
    int64_t layer_count;
    int64_t slot_count;
    int64_t block_tokens;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t dtype;
};

/* Rows [row, row + count) are a sequence's positions [start, start + count); its block table begins at
 * blocks[first_block]. */
struct pdk_sequence {
    int64_t row;
    int64_t count;
    int64_t start;
    int64_t first_block;
};

struct pdk_batch {
    int64_t row_count;
    int64_t sequence_count;
    int64_t logit_count;
    const int32_t *token_ids;
    const struct pdk_sequence *sequences;
    const int32_t *blocks;
    const int32_t *logit_rows;
};

struct pdk_layer {
    const float *input_norm;
    const float *q_norm; /* NULL where the family has none */
    const float *k_norm;
    const float *post_attention_norm;
    struct pdk_linear qkv;
    struct pdk_linear o;
    struct pdk_linear gate_up;
    struct pdk_linear down;
};

struct pdk_decoder {
    int64_t layer_count;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t dtype; /* of the embedding */
    double rms_norm_eps;
    double scale;
    const float *cos; /* [position, head_dim / 2] */
    const float *sin;
    const void *embedding; /* [vocabulary, hidden_size] */
    const float *final_norm;
    const struct pdk_layer *layers;
    struct pdk_linear head;
};

/* Told a layer's index when its K and V of all rows are in the cache. Returning non-zero ends the pass. */
typedef int (*pdk_layer_callback)(int64_t layer);

PDK_EXPORT const char *pdk_build(void); /* the compiler's version */
PDK_EXPORT const struct pdk_path *pdk_path(const char *name); /* NULL: not built in or not on this machine */
PDK_EXPORT int pdk_path_is_built(const char *name);

PDK_EXPORT struct pdk_pool *pdk_pool_create(int64_t thread_count); /* NULL: no memory or no threads */
PDK_EXPORT void pdk_pool_destroy(struct pdk_pool *pool);

PDK_EXPORT int64_t pdk_packed_bytes(int64_t out_features, int64_t in_features, int64_t dtype);
/* Chooses the codes for a bfloat16 weight; how many exceptions there are with them, or -1: the path has no compact
 * panels, or there are so many that they would not pay. */
PDK_EXPORT int64_t pdk_plan_compact(const struct pdk_path *path, const void *weight, int64_t out_features,
                                    int64_t in_features, struct pdk_compact *compact);
/* `compact`: planned before, its memory large enough; NULL for other dtypes. */
PDK_EXPORT void pdk_pack(const void *weight, int64_t out_features, int64_t in_features, int64_t dtype,
                         const struct pdk_compact *compact, void *panels);
PDK_EXPORT int64_t pdk_cache_bytes(const struct pdk_cache *cache);

/* The operations of the table. Rows are contiguous float32. Non-zero: no memory. */
PDK_EXPORT int pdk_linear(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_linear *linear,
                          const float *x, int64_t rows, float *y);
PDK_EXPORT void pdk_rms_norm(const struct pdk_path *path, const float *x, int64_t rows, int64_t size,
                             const float *weight, double eps, float *y);
PDK_EXPORT void pdk_silu_mul(const struct pdk_path *path, const float *gate_up, int64_t rows, int64_t size, float *y);
PDK_EXPORT void pdk_rotary(const struct pdk_path *path, const float *x, int64_t rows, int64_t heads, int64_t head_dim,
                           const int64_t *positions, const float *cos, const float *sin, float *y);
/* k and v [count, kv_heads, head_dim] of `dtype`, rounded to the cache's. */
PDK_EXPORT void pdk_write_kv(const struct pdk_cache *cache, int64_t layer, const int64_t *slots, int64_t count,
                             const void *k, const void *v, int64_t dtype);
/* kv [2, count, kv_heads, head_dim] of the cache's dtype. */
PDK_EXPORT void pdk_read_kv(const struct pdk_cache *cache, int64_t layer, const int64_t *slots, int64_t count, void *kv);
PDK_EXPORT int pdk_attention(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_cache *cache,
                             int64_t layer, const struct pdk_batch *batch, int64_t heads, double scale, const float *q,
                             float *out);

/* A whole pass: logits [logit_count, vocabulary], and for each of them whether all are finite. 0: done, 1: ended by
 * the callback, 2: no memory. */
PDK_EXPORT int pdk_forward(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_decoder *decoder,
                           const struct pdk_cache *cache, const struct pdk_batch *batch,
                           pdk_layer_callback after_layer, float *logits, uint8_t *finite);

/* The machine's limits, for the benchmarks: bytes read a second, and floating point operations a second of products
 * whose operands stay in the nearest cache. */
PDK_EXPORT double pdk_read_rate(struct pdk_pool *pool, const void *memory, int64_t bytes, int64_t repeats);
PDK_EXPORT double pdk_product_rate(const struct pdk_path *path, struct pdk_pool *pool, int64_t dtype, int64_t repeats);

#endif
