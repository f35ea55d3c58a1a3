/* Attention of a tile of query rows over a sequence's cached K and V. Included once for each dtype of the cache.
 *
 * Set before including, beside rows.h and a product:
 *   ATTEND(name)   the names of what is defined here
 *   PRODUCT        the product_function for the cache's panels
 *   KV_DTYPE       enum pdk_dtype of the cache
 *   OPERAND_BYTES  of one element of the product's left operand
 *   K_STEP         what the product's k must be a multiple of
 *   STORE_QUERY    rounds a row of q into an operand
 *   STORE_WEIGHTS  (vf[PART_VECTORS], void *) writes 16 softmax weights into an operand
 *
 * A sequence's tokens are reduced in segments of SEGMENT_TOKENS from position 0. A segment has a maximum, a sum and a
 * weighted V of its own, and segments are merged in order; so it does not matter who computes a segment, nor when, and a
 * row's result is the same for prefill and decode. Within a segment lanes are tokens for the scores (each a sum over the
 * head's dimensions in order) and dimensions for the weighted V (each a sum over the tokens in order): K's tile is a pair
 * of panels of tokens and V's a row of panels of dimensions, so that both products are those of a linear. Tokens after a
 * row's own weigh exactly 0.
 */

#define STATE_STRIDE(value_dim) (ROW_PAD + (value_dim)) /* a row's state: maximum, sum, padding, weighted V */

/* Turn a row's scores [0, valid) into weights and write them as an operand, zeros up to `padded`. */
INLINE void ATTEND(weigh)(const float *scores, int64_t valid, int64_t padded, float factor, char *weights, float *state)
{
    vf top[PART_VECTORS], sum[PART_VECTORS], weight[PART_VECTORS];
    for (int v = 0; v < PART_VECTORS; v++) {
        top[v] = vf_set(MASKED);
        sum[v] = vf_set(0.0f);
    }
    const int64_t whole = valid / PARTS * PARTS;
    for (int64_t token = 0; token < whole; token += PARTS)
        for (int v = 0; v < PART_VECTORS; v++)
            top[v] = vf_max(vf_load(scores + token + v * LANES), top[v]);
    for (int v = 0; v < PART_VECTORS; v++) {
        const vi seen = vi_below(valid - whole - v * LANES);
        if (whole < valid)
            top[v] = vf_max(vf_choose(seen, vf_load(scores + whole + v * LANES), vf_set(MASKED)), top[v]);
    }
    const float maximum = largest_part(top);
    const vf high = vf_set(maximum), scale = vf_set(factor), zero = vf_set(0.0f);
    int64_t token = 0;
    for (; token < whole; token += PARTS) {
        for (int v = 0; v < PART_VECTORS; v++) {
            weight[v] = vf_exp2((vf_load(scores + token + v * LANES) - high) * scale);
            sum[v] += weight[v];
        }
        STORE_WEIGHTS(weight, weights + token * OPERAND_BYTES);
    }
    for (; token < padded; token += PARTS) {
        for (int v = 0; v < PART_VECTORS; v++) {
            const vi seen = vi_below(valid - token - v * LANES);
            weight[v] = vf_choose(seen, vf_exp2((vf_load(scores + token + v * LANES) - high) * scale), zero);
            sum[v] += weight[v];
        }
        STORE_WEIGHTS(weight, weights + token * OPERAND_BYTES);
    }
    state[0] = maximum;
    state[1] = sum_of_parts(sum);
}

/* Add the state of the following segment to a row's. */
INLINE void ATTEND(merge_row)(float *state, const float *next, int64_t value_dim, float factor)
{
    const float maximum = next[0] > state[0] ? next[0] : state[0];
    const vf kept = vf_exp2(vf_set((state[0] - maximum) * factor));
    const vf added = vf_exp2(vf_set((next[0] - maximum) * factor));
    state[0] = maximum;
    state[1] = state[1] * kept[0] + next[1] * added[0];
    for (int64_t d = ROW_PAD; d < ROW_PAD + value_dim; d += LANES)
        vf_store(state + d, vf_load(state + d) * kept + vf_load(next + d) * added);
}

/* Divide by the sums and hand the rows out. Adding zero makes -0 +0: whether masked tokens were added must not show. */
static void ATTEND(finish)(const struct attention_task *task, float *states, float *row)
{
    const int64_t head_dim = task->cache->head_dim;
    const int64_t value_dim = rounded_up(head_dim, PANEL), stride = STATE_STRIDE(value_dim);
    for (int64_t token = 0; token < task->token_count; token++)
        for (int64_t head = 0; head < task->group; head++) {
            const float *state = states + (token * task->group + head) * stride;
            for (int64_t d = 0; d < value_dim; d += LANES)
                vf_store(row + d, vf_load(state + ROW_PAD + d) / vf_set(state[1]) + vf_set(0.0f));
            const int64_t at = token * task->out_stride + head * head_dim;
            if (task->out_is_operand)
                STORE_QUERY(row, head_dim, (char *)task->out + at * OPERAND_BYTES);
            else
                memcpy((float *)task->out + at, row, (size_t)head_dim * 4);
        }
}

/* The scratch of one task, in the order of its parts. */
struct ATTEND(scratch) {
    char *query;   /* operand [rows][key_dim] */
    float *scores; /* [rows][SEGMENT_TOKENS] */
    char *weights; /* operand [rows][SEGMENT_TOKENS]; where that is float32, the scores' own memory */
    float *states; /* [rows][STATE_STRIDE] */
    float *next;   /* the same, of the segment that is merged */
    float *row;    /* [value_dim] */
    char *tiles;   /* [SEGMENT_TILES] copies of K or V tiles that cannot be read in place */
    int64_t bytes;
};

static struct ATTEND(scratch) ATTEND(divide)(char *memory, int64_t head_dim, int64_t group)
{
    const int64_t rows = max_of(QUERY_ROWS, group) + ROW_PAD;
    const int64_t key_dim = rounded_up(head_dim, K_PAD), value_dim = rounded_up(head_dim, PANEL);
    const int64_t score_bytes = rows * SEGMENT_TOKENS * 4, state_bytes = rows * STATE_STRIDE(value_dim) * 4;
    struct ATTEND(scratch) parts;
    int64_t used = 0;
    parts.query = memory + used, used += rounded_up(rows * key_dim * OPERAND_BYTES, LINE);
    parts.scores = (float *)(memory + used), used += score_bytes;
    parts.weights = OPERAND_BYTES == 4 ? (char *)parts.scores : memory + used;
    used += OPERAND_BYTES == 4 ? 0 : rows * SEGMENT_TOKENS * OPERAND_BYTES;
    parts.states = (float *)(memory + used), used += state_bytes;
    parts.next = (float *)(memory + used), used += state_bytes;
    parts.row = (float *)(memory + used), used += value_dim * 4;
    parts.tiles = memory + used, used += SEGMENT_TILES * max_of(key_tile_bytes(head_dim, KV_DTYPE), value_tile_bytes(head_dim, KV_DTYPE));
    parts.bytes = used;
    return parts;
}

static int64_t ATTEND(attend_scratch)(int64_t head_dim, int64_t group)
{
    return ATTEND(divide)(NULL, head_dim, group).bytes;
}

static void ATTEND(take_queries)(const struct attention_task *task, char *query)
{
    const int64_t head_dim = task->cache->head_dim, key_dim = rounded_up(head_dim, K_PAD);
    for (int64_t token = 0; token < task->token_count; token++)
        for (int64_t head = 0; head < task->group; head++) {
            STORE_QUERY(task->q + token * task->q_stride + head * head_dim, head_dim, query);
            memset(query + head_dim * OPERAND_BYTES, 0, (size_t)((key_dim - head_dim) * OPERAND_BYTES));
            query += key_dim * OPERAND_BYTES;
        }
}

/* The state of one segment's tokens [first, first + count) for all rows. */
static void ATTEND(attend_segment)(const struct attention_task *task, struct ATTEND(scratch) scratch, int64_t first,
                                   int64_t count, float *states)
{
    const int64_t head_dim = task->cache->head_dim;
    const int64_t key_dim = rounded_up(head_dim, K_PAD), value_dim = rounded_up(head_dim, PANEL);
    const int64_t rows = task->token_count * task->group, stride = STATE_STRIDE(value_dim);
    const int64_t tiles = (count + TILE_TOKENS - 1) / TILE_TOKENS, padded = rounded_up(count, K_STEP);
    const char *chunks[SEGMENT_TILES];
    struct panels keys = {chunks, key_dim, key_dim, key_tile_bytes(head_dim, KV_DTYPE) / 2, 0};
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t tokens = min_of(TILE_TOKENS, count - tile * TILE_TOKENS);
        chunks[0] = key_tile(task, first + tile * TILE_TOKENS, tokens, scratch.tiles);
        keys.panel_count = (tokens + PANEL - 1) / PANEL;
        PRODUCT(scratch.query, key_dim, rows, &keys, scratch.scores + tile * TILE_TOKENS, SEGMENT_TOKENS, false);
    }
    for (int64_t row = 0; row < rows; row++)
        ATTEND(weigh)(scratch.scores + row * SEGMENT_TOKENS, tokens_seen(task, row / task->group, first, count),
                      rounded_up(padded, PARTS), task->factor, scratch.weights + row * SEGMENT_TOKENS * OPERAND_BYTES,
                      states + row * stride);
    for (int64_t tile = 0; tile < tiles; tile++)
        chunks[tile] = value_tile(task, first + tile * TILE_TOKENS, min_of(TILE_TOKENS, count - tile * TILE_TOKENS),
                                  scratch.tiles + tile * value_tile_bytes(head_dim, KV_DTYPE));
    const struct panels values = {chunks, TILE_TOKENS, padded, TILE_TOKENS * PANEL * dtype_bytes(KV_DTYPE),
                                  value_dim / PANEL};
    PRODUCT(scratch.weights, SEGMENT_TOKENS, rows, &values, states + ROW_PAD, stride, false);
}

static void ATTEND(attend)(const struct attention_task *task, void *memory)
{
    const struct ATTEND(scratch) scratch = ATTEND(divide)(memory, task->cache->head_dim, task->group);
    const int64_t value_dim = rounded_up(task->cache->head_dim, PANEL), stride = STATE_STRIDE(value_dim);
    const int64_t rows = task->token_count * task->group, end = task->first_position + task->token_count;
    float *states = task->partial ? task->partial : scratch.states;
    ATTEND(take_queries)(task, scratch.query);
    for (int64_t segment = task->first_segment; segment < task->segment_end; segment++) {
        const int64_t first = segment * SEGMENT_TOKENS;
        const bool merges = segment > task->first_segment;
        ATTEND(attend_segment)(task, scratch, first, min_of(SEGMENT_TOKENS, end - first), merges ? scratch.next : states);
        for (int64_t row = 0; merges && row < rows; row++)
            ATTEND(merge_row)(states + row * stride, scratch.next + row * stride, value_dim, task->factor);
    }
    if (!task->partial)
        ATTEND(finish)(task, states, scratch.row);
}

/* Put a task together whose segments were computed apart: `partials` holds their states in order. */
static void ATTEND(merge)(const struct attention_task *task, float *partials, int64_t partial_floats, void *memory)
{
    const struct ATTEND(scratch) scratch = ATTEND(divide)(memory, task->cache->head_dim, task->group);
    const int64_t value_dim = rounded_up(task->cache->head_dim, PANEL), stride = STATE_STRIDE(value_dim);
    const int64_t rows = task->token_count * task->group;
    for (int64_t segment = task->first_segment + 1; segment < task->segment_end; segment++)
        for (int64_t row = 0; row < rows; row++)
            ATTEND(merge_row)(partials + row * stride,
                              partials + (segment - task->first_segment) * partial_floats + row * stride, value_dim,
                              task->factor);
    ATTEND(finish)(task, partials, scratch.row);
}

#undef STATE_STRIDE
