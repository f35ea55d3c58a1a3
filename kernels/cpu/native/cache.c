/* The paged KV cache: writing and reading slots in canonical order (token, head, dimension), gathering tiles. */
#include "cache.h"

#include <string.h>

/* Where an element of a slot lies in its tile, in elements. */
static inline int64_t key_place(const struct pdk_cache *cache, int64_t lane, int64_t d)
{
    const int64_t panel = lane / PANEL * rounded_up(cache->head_dim, K_PAD) * PANEL;
    if (cache->dtype == PDK_BFLOAT16)
        return panel + d / 2 * (2 * PANEL) + lane % PANEL * 2 + d % 2;
    return panel + d * PANEL + lane % PANEL;
}

static inline int64_t value_place(const struct pdk_cache *cache, int64_t lane, int64_t d)
{
    const int64_t panel = d / PANEL * (TILE_TOKENS * PANEL);
    if (cache->dtype == PDK_BFLOAT16)
        return panel + lane / 2 * (2 * PANEL) + d % PANEL * 2 + lane % 2;
    return panel + lane * PANEL + d % PANEL;
}

struct slot_tiles {
    char *key;
    char *value;
    int64_t lane;
};

static struct slot_tiles tiles_of(const struct pdk_cache *cache, int64_t layer, int64_t slot, int64_t kv_head)
{
    char *tile = cache_tile(cache, layer, slot / TILE_TOKENS, kv_head);
    return (struct slot_tiles){tile, tile + key_tile_bytes(cache->head_dim, cache->dtype), slot % TILE_TOKENS};
}

static uint16_t bfloat16_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float float_of(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

int64_t pdk_cache_bytes(const struct pdk_cache *cache)
{
    const struct pdk_cache empty = {NULL, cache->layer_count, cache->slot_count, cache->block_tokens,
                                    cache->kv_heads, cache->head_dim, cache->dtype};
    return cache_tile(&empty, cache->layer_count, 0, 0) - (char *)NULL;
}

/* Between bfloat16 rows in canonical order and a slot of a bfloat16 cache, which is what transfers do all day: the places
 * are key_place's and value_place's, reached by steps. K lies in pairs, a line apart; V in every second element of a line. */
static void store_rows(const struct pdk_cache *cache, struct slot_tiles to, const uint16_t *k, const uint16_t *v)
{
    const int64_t size = cache->head_dim;
    uint16_t *key = (uint16_t *)to.key + key_place(cache, to.lane, 0);
    uint16_t *value = (uint16_t *)to.value + value_place(cache, to.lane, 0);
    int64_t d = 0;
    for (; d + 1 < size; d += 2, key += 2 * PANEL)
        memcpy(key, k + d, 2 * sizeof *key);
    if (d < size)
        *key = k[d];
    for (d = 0; d + PANEL <= size; d += PANEL, value += TILE_TOKENS * PANEL)
        for (int64_t i = 0; i < PANEL; i++)
            value[2 * i] = v[d + i];
    for (int64_t i = 0; d + i < size; i++)
        value[2 * i] = v[d + i];
}

static void load_rows(const struct pdk_cache *cache, struct slot_tiles from, uint16_t *k, uint16_t *v)
{
    const int64_t size = cache->head_dim;
    const uint16_t *key = (const uint16_t *)from.key + key_place(cache, from.lane, 0);
    const uint16_t *value = (const uint16_t *)from.value + value_place(cache, from.lane, 0);
    int64_t d = 0;
    for (; d + 1 < size; d += 2, key += 2 * PANEL)
        memcpy(k + d, key, 2 * sizeof *k);
    if (d < size)
        k[d] = *key;
    for (d = 0; d + PANEL <= size; d += PANEL, value += TILE_TOKENS * PANEL)
        for (int64_t i = 0; i < PANEL; i++) /* so often that the compiler can do them at once */
            v[d + i] = value[2 * i];
    for (int64_t i = 0; d + i < size; i++)
        v[d + i] = value[2 * i];
}

void write_slot(const struct pdk_cache *cache, int64_t layer, int64_t slot, int64_t kv_head, const float *k,
                const float *v)
{
    const struct slot_tiles to = tiles_of(cache, layer, slot, kv_head);
    if (cache->dtype == PDK_BFLOAT16) {
        uint16_t keys[cache->head_dim], values[cache->head_dim];
        for (int64_t d = 0; d < cache->head_dim; d++) {
            keys[d] = bfloat16_of(k[d]);
            values[d] = bfloat16_of(v[d]);
        }
        store_rows(cache, to, keys, values);
        return;
    }
    float *keys = (float *)to.key, *values = (float *)to.value;
    for (int64_t d = 0; d < cache->head_dim; d++) {
        keys[key_place(cache, to.lane, d)] = k[d];
        values[value_place(cache, to.lane, d)] = v[d];
    }
}

/* As write_slot, of bfloat16 rows. */
static void write_slot_bfloat16(const struct pdk_cache *cache, int64_t layer, int64_t slot, int64_t kv_head,
                                const uint16_t *k, const uint16_t *v)
{
    const struct slot_tiles to = tiles_of(cache, layer, slot, kv_head);
    if (cache->dtype == PDK_BFLOAT16) {
        store_rows(cache, to, k, v);
        return;
    }
    for (int64_t d = 0; d < cache->head_dim; d++) {
        ((float *)to.key)[key_place(cache, to.lane, d)] = float_of(k[d]);
        ((float *)to.value)[value_place(cache, to.lane, d)] = float_of(v[d]);
    }
}

void pdk_write_kv(const struct pdk_cache *cache, int64_t layer, const int64_t *slots, int64_t count, const void *k,
                  const void *v, int64_t dtype)
{
    for (int64_t token = 0; token < count; token++)
        for (int64_t head = 0; head < cache->kv_heads; head++) {
            const int64_t at = (token * cache->kv_heads + head) * cache->head_dim;
            if (dtype == PDK_BFLOAT16)
                write_slot_bfloat16(cache, layer, slots[token], head, (const uint16_t *)k + at, (const uint16_t *)v + at);
            else
                write_slot(cache, layer, slots[token], head, (const float *)k + at, (const float *)v + at);
        }
}

void pdk_read_kv(const struct pdk_cache *cache, int64_t layer, const int64_t *slots, int64_t count, void *kv)
{
    const int64_t v_offset = count * cache->kv_heads * cache->head_dim;
    for (int64_t token = 0; token < count; token++)
        for (int64_t head = 0; head < cache->kv_heads; head++) {
            const struct slot_tiles from = tiles_of(cache, layer, slots[token], head);
            const int64_t at = (token * cache->kv_heads + head) * cache->head_dim;
            if (cache->dtype == PDK_BFLOAT16) {
                load_rows(cache, from, (uint16_t *)kv + at, (uint16_t *)kv + v_offset + at);
                continue;
            }
            for (int64_t d = 0; d < cache->head_dim; d++) {
                ((float *)kv)[at + d] = ((const float *)from.key)[key_place(cache, from.lane, d)];
                ((float *)kv)[v_offset + at + d] = ((const float *)from.value)[value_place(cache, from.lane, d)];
            }
        }
}

static void copy_element(int64_t dtype, char *to, int64_t to_place, const char *from, int64_t from_place)
{
    if (dtype == PDK_BFLOAT16)
        ((uint16_t *)to)[to_place] = ((const uint16_t *)from)[from_place];
    else
        ((float *)to)[to_place] = ((const float *)from)[from_place];
}

static bool lies_in_place(const struct pdk_cache *cache) { return cache->block_tokens % TILE_TOKENS == 0; }

static struct slot_tiles tiles_at(const struct attention_task *task, int64_t position)
{
    return tiles_of(task->cache, task->layer, slot_of(task->cache, task->blocks, position), task->kv_head);
}

const char *key_tile(const struct attention_task *task, int64_t first, int64_t tokens, char *copy)
{
    const struct pdk_cache *cache = task->cache;
    if (lies_in_place(cache))
        return tiles_at(task, first).key;
    memset(copy, 0, (size_t)key_tile_bytes(cache->head_dim, cache->dtype));
    for (int64_t lane = 0; lane < tokens; lane++) {
        const struct slot_tiles from = tiles_at(task, first + lane);
        for (int64_t d = 0; d < cache->head_dim; d++)
            copy_element(cache->dtype, copy, key_place(cache, lane, d), from.key, key_place(cache, from.lane, d));
    }
    return copy;
}

/* The whole rows of V's panels of the first tokens, zeros after them. */
static void copy_first_values(const struct pdk_cache *cache, const char *from, int64_t tokens, char *copy)
{
    const int64_t panels = rounded_up(cache->head_dim, PANEL) / PANEL;
    const int64_t tokens_a_row = cache->dtype == PDK_BFLOAT16 ? 2 : 1, rows = TILE_TOKENS / tokens_a_row;
    const int64_t whole = tokens / tokens_a_row;
    for (int64_t panel = 0; panel < panels; panel++) {
        memcpy(copy, from, (size_t)(whole * LINE));
        memset(copy + whole * LINE, 0, (size_t)((rows - whole) * LINE));
        if (tokens % tokens_a_row)
            for (int64_t d = 0; d < PANEL; d++)
                ((uint16_t *)(copy + whole * LINE))[2 * d] = ((const uint16_t *)(from + whole * LINE))[2 * d];
        copy += rows * LINE;
        from += rows * LINE;
    }
}

const char *value_tile(const struct attention_task *task, int64_t first, int64_t tokens, char *copy)
{
    const struct pdk_cache *cache = task->cache;
    if (lies_in_place(cache)) {
        const char *tile = tiles_at(task, first).value;
        if (tokens == TILE_TOKENS)
            return tile;
        copy_first_values(cache, tile, tokens, copy);
        return copy;
    }
    memset(copy, 0, (size_t)value_tile_bytes(cache->head_dim, cache->dtype));
    for (int64_t lane = 0; lane < tokens; lane++) {
        const struct slot_tiles from = tiles_at(task, first + lane);
        for (int64_t d = 0; d < cache->head_dim; d++)
            copy_element(cache->dtype, copy, value_place(cache, lane, d), from.value, value_place(cache, from.lane, d));
    }
    return copy;
}
