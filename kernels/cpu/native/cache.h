/* Where K and V lie in the paged cache, and how a tile of them is got at.
 *
 * The memory is [layer][tile of TILE_TOKENS slots][kv head] of a K tile followed by a V tile:
 *
 *   K tile   [2 panels of 16 tokens][key_dim as the panels' K]      key_dim: head_dim up to a multiple of K_PAD
 *   V tile   [panels of 16 dimensions][32 tokens as the panels' K]  value_dim: head_dim up to a multiple of PANEL
 *
 * What pads the dimensions is never written and stays zero. Slots know nothing of blocks: where a block is a multiple of
 * TILE_TOKENS, a sequence's tiles are read in place; otherwise they are gathered token by token. Quantised KV would come
 * in here: key_tile and value_tile would widen a tile into the scratch that they are given already.
 */
#ifndef PDK_CACHE_H
#define PDK_CACHE_H

#include "path.h"

/* A tile of query rows of one sequence and one kv head: its tokens' rows times the heads of the group. */
struct attention_task {
    const struct pdk_cache *cache;
    const int32_t *blocks; /* the sequence's block table */
    int64_t layer;
    int64_t kv_head;
    int64_t group; /* query heads that share the kv head */
    int64_t first_position;
    int64_t token_count;
    int64_t first_segment; /* of those to reduce: [first_segment, segment_end) */
    int64_t segment_end;
    const float *q; /* the first token's first head of the group */
    int64_t q_stride; /* from token to token, in elements */
    float factor;     /* scale of the scores, in powers of two */
    bool out_is_operand;
    void *out; /* as q, float32 or an operand of the next product */
    int64_t out_stride;
    float *partial; /* not NULL: leave the rows' states here instead */
};

static inline int64_t key_tile_bytes(int64_t head_dim, int64_t dtype)
{
    return rounded_up(head_dim, K_PAD) * TILE_TOKENS * dtype_bytes(dtype);
}

static inline int64_t value_tile_bytes(int64_t head_dim, int64_t dtype)
{
    return rounded_up(head_dim, PANEL) * TILE_TOKENS * dtype_bytes(dtype);
}

static inline char *cache_tile(const struct pdk_cache *cache, int64_t layer, int64_t tile, int64_t kv_head)
{
    const int64_t tiles = rounded_up(cache->slot_count, TILE_TOKENS) / TILE_TOKENS;
    const int64_t bytes = key_tile_bytes(cache->head_dim, cache->dtype) + value_tile_bytes(cache->head_dim, cache->dtype);
    return (char *)cache->memory + ((layer * tiles + tile) * cache->kv_heads + kv_head) * bytes;
}

static inline int64_t slot_of(const struct pdk_cache *cache, const int32_t *blocks, int64_t position)
{
    return blocks[position / cache->block_tokens] * cache->block_tokens + position % cache->block_tokens;
}

/* Write K and V rows of float32 into a slot, rounded to the cache's dtype. */
void write_slot(const struct pdk_cache *cache, int64_t layer, int64_t slot, int64_t kv_head, const float *k,
                const float *v);

/* The K tile of tokens [first, first + tokens) of the task's sequence, in place or gathered into `copy`. What lies
 * beyond the last token may be anything. */
const char *key_tile(const struct attention_task *task, int64_t first, int64_t tokens, char *copy);

/* The same for V, but zeros beyond the last token: a weight of zero does not silence what is not a number. */
const char *value_tile(const struct attention_task *task, int64_t first, int64_t tokens, char *copy);

/* How many of a segment's tokens [first, first + count) the tile's query token sees. */
static inline int64_t tokens_seen(const struct attention_task *task, int64_t token, int64_t first, int64_t count)
{
#ifdef PDK_MUTANT_UNMASKED
    return count;
#endif
    int64_t seen = task->first_position + token + 1 - first;
#ifdef PDK_MUTANT_BLOCK_EDGE
    seen -= (task->first_position + token + 1) % task->cache->block_tokens == 0;
#endif
    return max_of(0, min_of(count, seen));
}

#endif
