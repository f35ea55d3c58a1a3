/* A whole decoder pass in one region of the pool. It calls what the table's operations call, in the same order, so its
 * bits are theirs; what it saves is passes over memory, waiting at the interpreter and one entry per operation.
 *
 * A layer's phases:
 *   norm        rows       x -> operand; with few rows no phase: each thread makes the operand for itself
 *   qkv         outputs    operand -> qkv
 *   rotate      rows       qkv -> q in place, K and V into the cache; then the caller's callback
 *   attend      tasks      qkv, cache -> attended (operand)
 *   o           outputs    x += attended
 *   norm        rows       x -> operand
 *   gate_up     outputs    operand -> gated (operand)
 *   down        outputs    x += gated
 */
#include <stdlib.h>
#include <string.h>

#include "attention_plan.h"
#include "linear.h"
#include "pool.h"

enum { OUTCOME_DONE = 0, OUTCOME_ENDED = 1, OUTCOME_NO_MEMORY = 2 };

enum { PART_BYTES = 4096 }; /* what a buffer of a pass is a multiple of */

struct pass {
    const struct pdk_path *path;
    const struct products *products;
    struct pdk_pool *pool;
    int64_t threads;
    const struct pdk_decoder *decoder;
    const struct pdk_cache *cache;
    const struct pdk_batch *batch;
    pdk_layer_callback after_layer;
    float *logits;
    uint8_t *finite;
    struct attention_plan plan;
    struct attention_job attention;
    int64_t qkv_size;
    int64_t widest; /* elements of the widest operand that is normed */
    int64_t *positions;  /* [rows] */
    int32_t *sequences;  /* [rows], each row's index into the batch's sequences */
    float *x;            /* [rows][hidden] */
    float *qkv;          /* [rows][qkv_size] */
    float *gate_up;      /* [rows][2 * intermediate], where the gate cannot be taken on the way */
    char *operand;       /* of norms, where rows are many */
    char *attended;      /* operand of o */
    char *gated;         /* operand of down */
    char *own;           /* [threads][FEW_ROWS + ROW_PAD][widest], each thread's operand of norms */
    float *normed;       /* [threads][widest], a row between norm and rounding */
    float *turned;       /* [threads][qkv_size], a row while it is rotated */
    void **scratch;      /* [threads] */
    bool ended;
};

static void locate_rows(struct pass *pass)
{
    for (int64_t s = 0; s < pass->batch->sequence_count; s++) {
        const struct pdk_sequence *sequence = &pass->batch->sequences[s];
        for (int64_t i = 0; i < sequence->count; i++) {
            pass->positions[sequence->row + i] = sequence->start + i;
            pass->sequences[sequence->row + i] = (int32_t)s;
        }
    }
}

static void pass_free(struct pass *pass)
{
    attention_plan_free(&pass->plan);
    free(pass->scratch);
}

/* The next `bytes` of a pass's memory. */
static void *take(char *memory, int64_t *used, int64_t bytes)
{
    void *part = memory + *used;
    *used += rounded_up(bytes, PART_BYTES);
    return part;
}

/* Lay the buffers out from `memory` on; the bytes of all. */
static int64_t lay_out(struct pass *pass, char *memory)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const int64_t rows = max_of(pass->batch->row_count, pass->batch->logit_count) + ROW_PAD;
    const int64_t row_bytes = rows * pass->products->operand_bytes;
    int64_t used = 0;
    pass->positions = take(memory, &used, rows * (int64_t)sizeof *pass->positions);
    pass->sequences = take(memory, &used, rows * (int64_t)sizeof *pass->sequences);
    pass->x = take(memory, &used, rows * decoder->hidden_size * 4);
    pass->qkv = take(memory, &used, rows * pass->qkv_size * 4);
    pass->operand = take(memory, &used, row_bytes * operand_stride(decoder->hidden_size));
    pass->attended = take(memory, &used, row_bytes * operand_stride(decoder->heads * decoder->head_dim));
    pass->gated = take(memory, &used, row_bytes * operand_stride(decoder->intermediate_size));
    pass->own = take(memory, &used,
                     pass->threads * (FEW_ROWS + ROW_PAD) * pass->widest * pass->products->operand_bytes);
    pass->normed = take(memory, &used, pass->threads * pass->widest * 4);
    pass->turned = take(memory, &used, pass->threads * pass->qkv_size * 4);
    pass->gate_up = NULL;
    if (!can_gate(&decoder->layers[0].gate_up))
        pass->gate_up = take(memory, &used, rows * decoder->intermediate_size * 8);
    return used;
}

/* Zero what pads an operand's rows; nobody writes there. */
static void pad_operand(const struct pass *pass, char *operand, int64_t size)
{
    const int64_t rows = max_of(pass->batch->row_count, pass->batch->logit_count) + ROW_PAD;
    const int64_t bytes = pass->products->operand_bytes, padding = product_k(size) - size;
    for (int64_t row = 0; padding && row < rows; row++)
        memset(operand + (row * operand_stride(size) + size) * bytes, 0, (size_t)(padding * bytes));
}

static bool make_buffers(struct pass *pass)
{
    const struct pdk_decoder *decoder = pass->decoder;
    char *memory = pool_shared(pass->pool, lay_out(pass, NULL));
    if (!memory)
        return false;
    lay_out(pass, memory);
    pad_operand(pass, pass->operand, decoder->hidden_size);
    pad_operand(pass, pass->attended, decoder->heads * decoder->head_dim);
    pad_operand(pass, pass->gated, decoder->intermediate_size);
    return true;
}

static bool make_scratch(struct pass *pass)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const struct pdk_layer *layer = &decoder->layers[0];
    const struct pdk_linear *linears[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down, &decoder->head};
    int64_t bytes = attention_scratch_bytes(pass->products, decoder->head_dim, decoder->heads / decoder->kv_heads);
    for (size_t i = 0; i < sizeof linears / sizeof *linears; i++)
        bytes = max_of(bytes, linear_scratch_bytes(linears[i], linears[i] == &decoder->head ? pass->batch->logit_count
                                                                                          : pass->batch->row_count,
                                                   pass->threads));
    pass->scratch = malloc((size_t)pass->threads * sizeof *pass->scratch);
    for (int64_t thread = 0; pass->scratch && thread < pass->threads; thread++)
        if (!(pass->scratch[thread] = pool_scratch(pass->pool, thread, bytes)))
            return false;
    return pass->scratch != NULL;
}

static float *normed_of(const struct pass *pass, int64_t thread) { return pass->normed + thread * pass->widest; }

/* The rows of the embedding, widened. */
static void embed(struct pass *pass)
{
    const int64_t size = pass->decoder->hidden_size;
    for (int64_t row = 0; row < pass->batch->row_count; row++) {
        const int64_t token = pass->batch->token_ids[row];
        float *x = pass->x + row * size;
        if (pass->decoder->dtype == PDK_FLOAT32) {
            memcpy(x, (const float *)pass->decoder->embedding + token * size, (size_t)size * 4);
            continue;
        }
        const uint16_t *from = (const uint16_t *)pass->decoder->embedding + token * size;
        for (int64_t i = 0; i < size; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(x + i, &bits, 4);
        }
    }
}

/* Norm row `from` of x into row `to` of an operand. */
static void norm_row(const struct pass *pass, int64_t thread, int64_t from, int64_t to, const float *weight,
                     char *operand)
{
    const int64_t size = pass->decoder->hidden_size, bytes = operand_stride(size) * pass->products->operand_bytes;
    float *normed = normed_of(pass, thread);
    pass->path->rms_norm(pass->x + from * size, size, weight, (float)pass->decoder->rms_norm_eps, normed);
    take_operand(pass->products, normed, 1, size, operand + to * bytes);
}

/* Rows of x to be normed: the batch's, or those of which it wants logits. */
struct norm_phase {
    const struct pass *pass;
    const float *weight;
    const int32_t *row_of; /* NULL: all */
    int64_t rows;
};

static void norm_some(const struct norm_phase *phase, int64_t thread, int64_t first, int64_t end, char *operand)
{
    for (int64_t row = first; row < end; row++)
        norm_row(phase->pass, thread, phase->row_of ? phase->row_of[row] : row, row, phase->weight, operand);
}

static void norm_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct norm_phase *phase = argument;
    int64_t first, end;
    share_of(phase->rows, piece->index, piece->count, &first, &end);
    if (pool_settle(piece))
        norm_some(phase, thread, first, end, phase->pass->operand);
}

/* The normed rows as the operand of the next product: all rows for each thread itself where they are few, which takes less
 * time than to wait for another's. */
static const char *norm_rows(const struct pass *pass, struct pool_member *self, const float *weight,
                             const int32_t *row_of, int64_t rows)
{
    struct norm_phase phase = {pass, weight, row_of, rows};
    if (rows > FEW_ROWS) {
        pool_phase(self, pieces_for(rows, pass->threads), norm_piece, &phase);
        return pass->operand;
    }
    char *own = pass->own + self->thread * (FEW_ROWS + ROW_PAD) * pass->widest * pass->products->operand_bytes;
    norm_some(&phase, self->thread, 0, rows, own);
    return own;
}

static void linear(const struct pass *pass, struct pool_member *self, const struct pdk_linear *weights,
                   enum linear_end how, const void *operand, int64_t rows, void *y, int64_t y_stride)
{
    const struct linear_job job = {pass->path, weights, how, operand, rows, y, y_stride, pass->scratch};
    linear_run(&job, self);
}

/* Norm (where the family does) and rotate a head. */
static void turn_head(const struct pass *pass, const float *head, const float *norm, int64_t position, float *normed,
                      float *turned)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const int64_t size = decoder->head_dim, half = size / 2;
    const float *from = head;
    if (norm) {
        pass->path->rms_norm(head, size, norm, (float)decoder->rms_norm_eps, normed);
        from = normed;
    }
    pass->path->rotary(from, size, decoder->cos + position * half, decoder->sin + position * half, turned);
}

struct layer_phase {
    struct pass *pass;
    int64_t index; /* the layer's */
};

static void turn_row(const struct layer_phase *phase, int64_t row, float *normed, float *turned)
{
    const struct pass *pass = phase->pass;
    const struct pdk_decoder *decoder = pass->decoder;
    const struct pdk_layer *layer = &decoder->layers[phase->index];
    const float *from = pass->qkv + row * pass->qkv_size;
    for (int64_t head = 0; head < decoder->heads + decoder->kv_heads; head++)
        turn_head(pass, from + head * decoder->head_dim, head < decoder->heads ? layer->q_norm : layer->k_norm,
                  pass->positions[row], normed, turned + head * decoder->head_dim);
}

/* Put a turned row where attention looks for it. */
static void place_row(const struct layer_phase *phase, int64_t row, const float *turned)
{
    const struct pass *pass = phase->pass;
    const int64_t size = pass->decoder->head_dim, q_size = pass->decoder->heads * size;
    const struct pdk_sequence *sequence = &pass->batch->sequences[pass->sequences[row]];
    const int64_t slot = slot_of(pass->cache, pass->batch->blocks + sequence->first_block, pass->positions[row]);
    float *q = pass->qkv + row * pass->qkv_size;
    const float *v = q + q_size + pass->decoder->kv_heads * size;
    memcpy(q, turned, (size_t)q_size * 4);
    for (int64_t head = 0; head < pass->decoder->kv_heads; head++)
        write_slot(pass->cache, phase->index, slot, head, turned + q_size + head * size, v + head * size);
}

static void rotate_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct layer_phase *phase = argument;
    float *turned = phase->pass->turned + thread * phase->pass->qkv_size;
    int64_t first, end;
    share_of(phase->pass->batch->row_count, piece->index, piece->count, &first, &end);
    for (int64_t row = first; row < end; row++) {
        turn_row(phase, row, normed_of(phase->pass, thread), turned);
        if (!pool_settle(piece))
            return;
        place_row(phase, row, turned);
    }
}

static void announce(void *argument, int64_t thread, struct piece *piece)
{
    struct layer_phase *phase = argument;
    (void)thread;
    pool_settle(piece);
    phase->pass->path->end(); /* what the callback runs may use the core's state for itself */
    phase->pass->ended = phase->pass->after_layer(phase->index) != 0;
    phase->pass->path->begin();
}

/* Gates of whole rows, where panels do not hold a gate beside its other half. */
static void gate_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct pass *pass = argument;
    const int64_t size = pass->decoder->intermediate_size, bytes = operand_stride(size) * pass->products->operand_bytes;
    int64_t first, end;
    (void)thread;
    share_of(pass->batch->row_count, piece->index, piece->count, &first, &end);
    for (int64_t row = first; row < end && pool_settle(piece); row++) {
        float *gate = pass->gate_up + row * 2 * size;
        pass->path->silu_mul(gate, gate + size, size, gate);
        take_operand(pass->products, gate, 1, size, pass->gated + row * bytes);
    }
}

static void gate_up(struct pass *pass, struct pool_member *self, const struct pdk_layer *layer, const char *operand)
{
    const int64_t rows = pass->batch->row_count, size = pass->decoder->intermediate_size;
    if (pass->gate_up) {
        linear(pass, self, &layer->gate_up, STORE, operand, rows, pass->gate_up, 2 * size);
        pool_phase(self, pieces_for(rows, pass->threads), gate_piece, pass);
    } else {
        linear(pass, self, &layer->gate_up, GATE, operand, rows, pass->gated, operand_stride(size));
    }
}

static void run_layer(struct pass *pass, struct pool_member *self, int64_t index)
{
    const struct pdk_layer *layer = &pass->decoder->layers[index];
    const int64_t rows = pass->batch->row_count, hidden = pass->decoder->hidden_size;
    struct layer_phase phase = {pass, index};
    const char *operand = norm_rows(pass, self, layer->input_norm, NULL, rows);
    linear(pass, self, &layer->qkv, STORE, operand, rows, pass->qkv, pass->qkv_size);
    pool_phase(self, pieces_for(rows, pass->threads), rotate_piece, &phase);
    if (pass->after_layer)
        pool_solo(self, announce, &phase);
    if (pass->ended)
        return;
    attention_run(&pass->plan, &pass->attention, index, self);
    linear(pass, self, &layer->o, ADD, pass->attended, rows, pass->x, hidden);
    operand = norm_rows(pass, self, layer->post_attention_norm, NULL, rows);
    gate_up(pass, self, layer, operand);
    linear(pass, self, &layer->down, ADD, pass->gated, rows, pass->x, hidden);
}

/* No float32 is finite whose exponent bits are all set. */
static bool all_finite(const float *values, int64_t count)
{
    uint32_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        seen |= ((bits >> 23) & 0xff) == 0xff;
    }
    return !seen;
}

static void check_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct pass *pass = argument;
    const int64_t vocabulary = pass->decoder->head.out_features;
    int64_t first, end;
    (void)thread;
    share_of(pass->batch->logit_count, piece->index, piece->count, &first, &end);
    for (int64_t row = first; row < end && pool_settle(piece); row++)
        pass->finite[row] = all_finite(pass->logits + row * vocabulary, vocabulary);
}

static void run_head(struct pass *pass, struct pool_member *self)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const int64_t rows = pass->batch->logit_count;
    const char *operand = norm_rows(pass, self, decoder->final_norm, pass->batch->logit_rows, rows);
    linear(pass, self, &decoder->head, STORE, operand, rows, pass->logits, decoder->head.out_features);
    pool_phase(self, pieces_for(rows, pass->threads), check_piece, pass);
}

static void run_pass(void *argument, struct pool_member *self)
{
    struct pass *pass = argument;
    pass->path->begin();
    for (int64_t index = 0; index < pass->decoder->layer_count && !pass->ended; index++)
        run_layer(pass, self, index);
    if (!pass->ended && pass->batch->logit_count)
        run_head(pass, self);
    pass->path->end();
}

static void set_attention(struct pass *pass)
{
    const struct pdk_decoder *decoder = pass->decoder;
    pass->attention = (struct attention_job){
        .products = pass->products,
        .cache = pass->cache,
        .batch = pass->batch,
        .heads = decoder->heads,
        .factor = (float)decoder->scale * 0x1.715476p+0f,
        .q = pass->qkv,
        .q_stride = pass->qkv_size,
        .out_is_operand = true,
        .out = pass->attended,
        .out_stride = operand_stride(decoder->heads * decoder->head_dim),
        .scratch = pass->scratch,
    };
}

int pdk_forward(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_decoder *decoder,
                const struct pdk_cache *cache, const struct pdk_batch *batch, pdk_layer_callback after_layer,
                float *logits, uint8_t *finite)
{
    struct pass pass = {
        .path = path,
        .products = &path->products[decoder->dtype],
        .pool = pool,
        .threads = pool_thread_count(pool),
        .decoder = decoder,
        .cache = cache,
        .batch = batch,
        .after_layer = after_layer,
        .logits = logits,
        .finite = finite,
        .qkv_size = (decoder->heads + 2 * decoder->kv_heads) * decoder->head_dim,
        .widest = operand_stride(max_of(decoder->hidden_size, decoder->head_dim)),
    };
    int outcome = OUTCOME_NO_MEMORY;
    if (make_buffers(&pass) && make_scratch(&pass)) {
        set_attention(&pass);
        if (attention_plan_make(&pass.plan, &pass.attention, pass.threads)) {
            locate_rows(&pass);
            embed(&pass);
            pool_run(pool, run_pass, &pass);
            outcome = pass.ended ? OUTCOME_ENDED : OUTCOME_DONE;
        }
    }
    pass_free(&pass);
    return outcome;
}
