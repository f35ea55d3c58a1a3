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
 *   STORE_WEIGHT_PAIR   if at all: the same for 32 at once
 *   SCORE          if at all: (see amx_scores.h) all scores of some rows at once; false where it cannot
 *   WIDE_PRODUCT   if at all: a product with the same bits on panels that `widen` made float32. Tiles of many rows take it
 *
 * A sequence's tokens are reduced in segments of SEGMENT_TOKENS from position 0. A segment has a maximum, a sum and a
 * weighted V of its own, and segments are merged in order; so it does not matter who computes a segment, nor when, and a
 * row's result is the same for prefill and decode. Within a segment lanes are tokens for the scores (each a sum over the
 * head's dimensions in order) and dimensions for the weighted V (each a sum over the tokens in order): K's tile is a pair
 * of panels of tokens and V's a row of panels of dimensions, so that both products are those of a linear. Tokens after a
 * row's own weigh exactly 0.
 */

#define SCORE_STRIDE (SEGMENT_TOKENS + PANEL) /* no power of two: rows would fall on each other in the nearest cache */
#define WEIGHT_STRIDE (SEGMENT_TOKENS + LINE / OPERAND_BYTES) /* whole lines, and an odd number of them */
#define STATE_STRIDE(value_dim) (ROW_PAD + (value_dim)) /* a row's state: maximum, sum, padding, weighted V */

/* The largest of a row's scores [0, valid). */
INLINE float ATTEND(largest)(const float *scores, int64_t valid)
{
    vf top[PART_VECTORS];
    for (int v = 0; v < PART_VECTORS; v++)
        top[v] = vf_set(MASKED);
    const int64_t whole = valid / PARTS * PARTS;
    for (int64_t token = 0; token < whole; token += PARTS)
        for (int v = 0; v < PART_VECTORS; v++)
            top[v] = vf_max(vf_load(scores + token + v * LANES), top[v]);
    for (int v = 0; v < PART_VECTORS; v++) {
        const vi seen = vi_below(valid - whole - v * LANES);
        if (whole < valid)
            top[v] = vf_max(vf_choose(seen, vf_load(scores + whole + v * LANES), vf_set(MASKED)), top[v]);
    }
    return largest_part(top);
}

/* Turn a row's scores [0, valid) into weights and write them as an operand, zeros up to `padded`. Returns their sum. */
INLINE float ATTEND(weigh)(const float *scores, int64_t valid, int64_t padded, float maximum, float factor, char *weights)
{
    vf sum[PART_VECTORS], weight[2 * PART_VECTORS];
    for (int v = 0; v < PART_VECTORS; v++)
        sum[v] = vf_set(0.0f);
    const vf high = vf_set(maximum), scale = vf_set(factor), zero = vf_set(0.0f);
    int64_t token = 0;
    for (; token + 2 * PARTS <= valid; token += 2 * PARTS) {
        for (int v = 0; v < 2 * PART_VECTORS; v++)
            weight[v] = (vf_load(scores + token + v * LANES) - high) * scale;
        vf_exp2_falling(2 * PART_VECTORS, weight);
        for (int v = 0; v < 2 * PART_VECTORS; v++)
            sum[v % PART_VECTORS] += weight[v];
#ifdef STORE_WEIGHT_PAIR
        STORE_WEIGHT_PAIR(weight, weights + token * OPERAND_BYTES);
#else
        STORE_WEIGHTS(weight, weights + token * OPERAND_BYTES);
        STORE_WEIGHTS(weight + PART_VECTORS, weights + (token + PARTS) * OPERAND_BYTES);
#endif
    }
    for (; token < padded; token += PARTS) {
        for (int v = 0; v < PART_VECTORS; v++)
            weight[v] = (vf_load(scores + token + v * LANES) - high) * scale;
        vf_exp2_falling(PART_VECTORS, weight);
        for (int v = 0; v < PART_VECTORS; v++) {
            weight[v] = vf_choose(vi_below(valid - token - v * LANES), weight[v], zero);
            sum[v] += weight[v];
        }
        STORE_WEIGHTS(weight, weights + token * OPERAND_BYTES);
    }
    return sum_of_parts(sum);
}

/* Add the state of the following segment to a row's. */
INLINE void ATTEND(merge_row)(float *state, const float *next, int64_t value_dim, float factor)
{
    const float maximum = next[0] > state[0] ? next[0] : state[0];
    vf shares[2] = {vf_set((state[0] - maximum) * factor), vf_set((next[0] - maximum) * factor)};
    vf_exp2_falling(2, shares);
    state[0] = maximum;
    state[1] = state[1] * shares[0][0] + next[1] * shares[1][0];
    for (int64_t d = ROW_PAD; d < ROW_PAD + value_dim; d += LANES)
        vf_store(state + d, vf_load(state + d) * shares[0] + vf_load(next + d) * shares[1]);
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
    float *scores; /* [a block's rows][SCORE_STRIDE] */
    char *weights; /* operand [a block's rows][WEIGHT_STRIDE]; where that is float32, the scores' own memory */
    float *states; /* [rows][STATE_STRIDE] */
    float *next;   /* the same, of the segment that is merged */
    float *row;    /* [value_dim] */
    char *key_tiles;    /* [SEGMENT_TILES] copies of tiles that cannot be read in place */
    char *value_tiles;
    float *wide_keys;   /* [panels of tokens][key_dim][PANEL] */
    float *wide_values; /* [panels of dimensions][SEGMENT_TOKENS][PANEL] */
    int64_t bytes;
};

static struct ATTEND(scratch) ATTEND(divide)(char *memory, int64_t head_dim, int64_t group)
{
    const int64_t rows = max_of(QUERY_ROWS, group) + ROW_PAD, block_rows = max_of(BLOCK_ROWS, group) + ROW_PAD;
    const int64_t key_dim = rounded_up(head_dim, K_PAD), value_dim = rounded_up(head_dim, PANEL);
    const int64_t score_bytes = block_rows * SCORE_STRIDE * 4, state_bytes = rows * STATE_STRIDE(value_dim) * 4;
    struct ATTEND(scratch) parts;
    int64_t used = 0;
    parts.query = memory + used, used += rounded_up(rows * key_dim * OPERAND_BYTES, LINE);
    parts.scores = (float *)(memory + used), used += score_bytes;
    parts.weights = OPERAND_BYTES == 4 ? (char *)parts.scores : memory + used;
    used += OPERAND_BYTES == 4 ? 0 : block_rows * WEIGHT_STRIDE * OPERAND_BYTES;
    parts.states = (float *)(memory + used), used += state_bytes;
    parts.next = (float *)(memory + used), used += state_bytes;
    parts.row = (float *)(memory + used), used += value_dim * 4;
    parts.key_tiles = memory + used, used += SEGMENT_TILES * key_tile_bytes(head_dim, KV_DTYPE);
    parts.value_tiles = memory + used, used += SEGMENT_TILES * value_tile_bytes(head_dim, KV_DTYPE);
    parts.wide_keys = (float *)(memory + used), used += key_dim * SEGMENT_TOKENS * 4;
    parts.wide_values = (float *)(memory + used), used += value_dim * SEGMENT_TOKENS * 4;
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

/* Whether a task of so many rows widens K and V before it multiplies. */
static bool ATTEND(widens)(int64_t rows)
{
#ifdef WIDE_PRODUCT
    return rows >= WIDEN_ROWS;
#else
    (void)rows;
    return false;
#endif
}

static void ATTEND(project)(bool wide, const char *operand, int64_t operand_stride, int64_t rows,
                            const struct panels *panels, float *result, int64_t result_stride)
{
#ifdef WIDE_PRODUCT
    if (wide) {
        WIDE_PRODUCT(operand, operand_stride, rows, panels, result, result_stride, false);
        return;
    }
#endif
    (void)wide;
    PRODUCT(operand, operand_stride, rows, panels, result, result_stride, false);
}

static void ATTEND(widen_panels)(const char *panels, int64_t panel_bytes, int64_t count, float *to, int64_t stride)
{
#ifdef WIDE_PRODUCT
    for (int64_t panel = 0; panel < count; panel++)
        widen(panels + panel * panel_bytes, panel_bytes, to + panel * stride);
#else
    (void)panels, (void)panel_bytes, (void)count, (void)to, (void)stride;
#endif
}

/* A segment of K and V, got ready for the products of all of a task's rows. */
struct ATTEND(segment) {
    const char *keys[SEGMENT_TILES];
    const char *values[SEGMENT_TILES];
    int64_t first; /* token */
    int64_t count; /* of tokens */
    bool wide;     /* the first chunk of either is float32 and holds them all */
};

static void ATTEND(take_segment)(const struct attention_task *task, const struct ATTEND(scratch) *scratch,
                                 struct ATTEND(segment) *segment)
{
    const int64_t head_dim = task->cache->head_dim, panel_count = rounded_up(head_dim, PANEL) / PANEL;
    const int64_t key_bytes = key_tile_bytes(head_dim, KV_DTYPE), value_bytes = value_tile_bytes(head_dim, KV_DTYPE);
    const int64_t key_floats = rounded_up(head_dim, K_PAD) * PANEL;
    for (int64_t tile = 0; tile * TILE_TOKENS < segment->count; tile++) {
        const int64_t first = segment->first + tile * TILE_TOKENS;
        const int64_t tokens = min_of(TILE_TOKENS, segment->first + segment->count - first);
        segment->keys[tile] = key_tile(task, first, tokens, scratch->key_tiles + tile * key_bytes);
        segment->values[tile] = value_tile(task, first, tokens, scratch->value_tiles + tile * value_bytes);
        if (!segment->wide)
            continue;
        ATTEND(widen_panels)(segment->keys[tile], key_bytes / 2, 2, scratch->wide_keys + tile * 2 * key_floats,
                             key_floats);
        ATTEND(widen_panels)(segment->values[tile], value_bytes / panel_count, panel_count,
                             scratch->wide_values + tile * TILE_TOKENS * PANEL, SEGMENT_TOKENS * PANEL);
    }
    if (segment->wide) {
        segment->keys[0] = (const char *)scratch->wide_keys;
        segment->values[0] = (const char *)scratch->wide_values;
    }
}

/* Scores of a block of rows for the segment's tokens [0, seen). */
static void ATTEND(score)(const struct ATTEND(segment) *segment, int64_t head_dim, const char *query, int64_t rows,
                          int64_t seen, float *scores)
{
    const int64_t key_dim = rounded_up(head_dim, K_PAD), panel_bytes = key_tile_bytes(head_dim, KV_DTYPE) / 2;
    const int64_t panel_count = (seen + PANEL - 1) / PANEL;
    if (segment->wide) {
        const struct panels panels = {segment->keys, key_dim, key_dim, key_dim * PANEL * 4, panel_count, NULL};
        ATTEND(project)(true, query, key_dim, rows, &panels, scores, SCORE_STRIDE);
        return;
    }
#ifdef SCORE
    if (SCORE(query, key_dim, rows, segment->keys, panel_bytes, panel_count, scores, SCORE_STRIDE))
        return;
#endif
    for (int64_t panel = 0; panel < panel_count; panel += 2) {
        const struct panels panels = {&segment->keys[panel / 2], key_dim, key_dim, panel_bytes,
                                      min_of(2, panel_count - panel), NULL};
        ATTEND(project)(false, query, key_dim, rows, &panels, scores + panel * PANEL, SCORE_STRIDE);
    }
}

/* The states of the tile's query tokens [token, end) for one segment, of which the last sees `seen` tokens. */
static void ATTEND(attend_block)(const struct attention_task *task, const struct ATTEND(scratch) *scratch,
                                 const struct ATTEND(segment) *segment, int64_t token, int64_t end, int64_t seen,
                                 float *states)
{
    const int64_t head_dim = task->cache->head_dim, value_dim = rounded_up(head_dim, PANEL);
    const int64_t stride = STATE_STRIDE(value_dim), group = task->group, rows = (end - token) * group;
    const int64_t panel_bytes = TILE_TOKENS * PANEL * dtype_bytes(KV_DTYPE), k = rounded_up(max_of(1, seen), K_STEP);
    const char *query = scratch->query + token * group * rounded_up(head_dim, K_PAD) * OPERAND_BYTES;
    states += token * group * stride;
    ATTEND(score)(segment, head_dim, query, rows, seen, scratch->scores);
    for (int64_t row = 0; row < rows; row++)
        states[row * stride] = ATTEND(largest)(scratch->scores + row * SCORE_STRIDE,
                                               tokens_seen(task, token + row / group, segment->first, segment->count));
    for (int64_t row = 0; row < rows; row++)
        states[row * stride + 1] = ATTEND(weigh)(
            scratch->scores + row * SCORE_STRIDE, tokens_seen(task, token + row / group, segment->first, segment->count),
            rounded_up(k, PARTS), states[row * stride], task->factor,
            scratch->weights + row * WEIGHT_STRIDE * OPERAND_BYTES);
    const struct panels narrow = {segment->values, TILE_TOKENS, k, panel_bytes, value_dim / PANEL, NULL};
    const struct panels wide = {segment->values, SEGMENT_TOKENS, k, SEGMENT_TOKENS * PANEL * 4, value_dim / PANEL, NULL};
    ATTEND(project)(segment->wide, scratch->weights, WEIGHT_STRIDE, rows, segment->wide ? &wide : &narrow,
                    states + ROW_PAD, stride);
}

/* The state of one segment's tokens [first, first + count) for all rows: block by block, so that the nearest cache holds
 * what is multiplied, and smaller ones where a block's last token sees more than its first. */
static void ATTEND(attend_segment)(const struct attention_task *task, const struct ATTEND(scratch) *scratch,
                                   int64_t first, int64_t count, float *states)
{
    const bool diagonal = first + count > task->first_position + 1;
    const int64_t block = max_of(1, (diagonal ? DIAGONAL_ROWS : BLOCK_ROWS) / task->group);
    struct ATTEND(segment) segment = {.first = first, .count = count};
    segment.wide = ATTEND(widens)(task->token_count * task->group);
    ATTEND(take_segment)(task, scratch, &segment);
    for (int64_t token = 0; token < task->token_count; token += block) {
        const int64_t end = min_of(token + block, task->token_count);
        ATTEND(attend_block)(task, scratch, &segment, token, end, tokens_seen(task, end - 1, first, count), states);
    }
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
        ATTEND(attend_segment)(task, &scratch, first, min_of(SEGMENT_TOKENS, end - first), merges ? scratch.next : states);
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

#undef SCORE_STRIDE
#undef WEIGHT_STRIDE
#undef STATE_STRIDE
