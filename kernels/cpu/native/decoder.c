/* A whole decoder pass in one region of the pool. It calls what the table's operations call, in the same order, so its
 * bits are theirs; what it saves is passes over memory, waiting at the interpreter and one entry per operation.
 *
 * A layer, with barriers between the lines:
 *   norm        rows       x -> operand
 *   qkv         outputs    operand -> qkv
 *   rotate      rows       qkv -> q in place, K and V into the cache; then the caller's callback
 *   attend      tasks      qkv, cache -> operand
 *   o           outputs    x += operand
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
    atomic_llong *next_attend; /* a counter a layer */
    atomic_llong *next_merge;
    int64_t qkv_size;
    int64_t *positions;  /* [rows] */
    int32_t *sequences;  /* [rows], each row's index into the batch's sequences */
    float *x;            /* [rows][hidden] */
    float *qkv;          /* [rows][qkv_size] */
    float *gate_up;      /* [rows][2 * intermediate], where the gate cannot be taken on the way */
    char *operand;       /* of norms and attention */
    char *gated;         /* operand of down */
    float *normed;       /* [threads][a row of norms] */
    void **scratch;      /* [threads] */
    bool ended;
};

static void *room(size_t bytes)
{
    void *memory = aligned_alloc(4096, (size_t)rounded_up((int64_t)bytes + 1, 4096));
    return memory;
}

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
    free(pass->next_attend);
    free(pass->next_merge);
    free(pass->positions);
    free(pass->sequences);
    free(pass->x);
    free(pass->qkv);
    free(pass->gate_up);
    free(pass->operand);
    free(pass->gated);
    free(pass->normed);
    free(pass->scratch);
}

static bool make_buffers(struct pass *pass)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const size_t rows = (size_t)(max_of(pass->batch->row_count, pass->batch->logit_count) + ROW_PAD);
    const size_t layers = (size_t)decoder->layer_count, bytes = (size_t)pass->products->operand_bytes;
    const int64_t attended = decoder->heads * decoder->head_dim;
    const size_t widest = (size_t)operand_size(max_of(decoder->hidden_size, attended));
    pass->next_attend = calloc(layers, sizeof *pass->next_attend);
    pass->next_merge = calloc(layers, sizeof *pass->next_merge);
    pass->positions = malloc(rows * sizeof *pass->positions);
    pass->sequences = malloc(rows * sizeof *pass->sequences);
    pass->x = room(rows * (size_t)decoder->hidden_size * 4);
    pass->qkv = room(rows * (size_t)pass->qkv_size * 4);
    pass->operand = room(rows * widest * bytes);
    pass->gated = room(rows * (size_t)operand_size(decoder->intermediate_size) * bytes);
    pass->gate_up = can_gate(&decoder->layers[0].gate_up) ? NULL : room(rows * (size_t)decoder->intermediate_size * 8);
    pass->normed = room((size_t)pass->threads * widest * 4);
    pass->scratch = malloc((size_t)pass->threads * sizeof *pass->scratch);
    return pass->next_attend && pass->next_merge && pass->positions && pass->sequences && pass->x && pass->qkv &&
           pass->operand && pass->gated && pass->normed && pass->scratch &&
           (pass->gate_up || can_gate(&decoder->layers[0].gate_up));
}

static bool make_scratch(struct pass *pass)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const int64_t attend = pass->products->attend_scratch(decoder->head_dim, decoder->heads / decoder->kv_heads);
    const int64_t bytes = max_of(linear_scratch_bytes(), attend);
    for (int64_t thread = 0; thread < pass->threads; thread++)
        if (!(pass->scratch[thread] = pool_scratch(pass->pool, thread, bytes)))
            return false;
    return true;
}

static float *normed_of(struct pass *pass, int64_t thread)
{
    const struct pdk_decoder *decoder = pass->decoder;
    return pass->normed + thread * operand_size(max_of(decoder->hidden_size, decoder->heads * decoder->head_dim));
}

/* Rows [first, end) of the embedding, widened. */
static void embed(struct pass *pass, int64_t first, int64_t end)
{
    const int64_t size = pass->decoder->hidden_size;
    for (int64_t row = first; row < end; row++) {
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

/* Norm row `from` of x into row `to` of the operand. */
static void norm_row(struct pass *pass, int64_t from, int64_t to, const float *weight, float *normed)
{
    const int64_t size = pass->decoder->hidden_size, bytes = operand_size(size) * pass->products->operand_bytes;
    pass->path->rms_norm(pass->x + from * size, size, weight, (float)pass->decoder->rms_norm_eps, normed);
    take_operand(pass->products, normed, 1, size, pass->operand + to * bytes);
}

static void norm_rows(struct pass *pass, int64_t thread, const float *weight)
{
    int64_t first, end;
    share_of(pass->batch->row_count, thread, pass->threads, &first, &end);
    for (int64_t row = first; row < end; row++)
        norm_row(pass, row, row, weight, normed_of(pass, thread));
}

static void linear(struct pass *pass, int64_t thread, const struct pdk_linear *weights, enum linear_end how,
                   const void *operand, int64_t rows, void *y, int64_t y_stride)
{
    const struct linear_job job = {pass->path, weights, how, operand, rows, y, y_stride};
    linear_share(&job, thread, pass->threads, pass->scratch[thread]);
}

/* Norm (where the family does) and rotate a head in place. */
static void turn_head(struct pass *pass, float *head, const float *norm, int64_t position, float *normed)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const int64_t size = decoder->head_dim, half = size / 2;
    const float *from = head;
    if (norm) {
        pass->path->rms_norm(head, size, norm, (float)decoder->rms_norm_eps, normed);
        from = normed;
    }
    pass->path->rotary(from, size, decoder->cos + position * half, decoder->sin + position * half, head);
}

static void rotate_and_write(struct pass *pass, int64_t thread, int64_t index)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const struct pdk_layer *layer = &decoder->layers[index];
    int64_t first, end;
    share_of(pass->batch->row_count, thread, pass->threads, &first, &end);
    for (int64_t row = first; row < end; row++) {
        float *q = pass->qkv + row * pass->qkv_size, *normed = normed_of(pass, thread);
        float *k = q + decoder->heads * decoder->head_dim, *v = k + decoder->kv_heads * decoder->head_dim;
        const struct pdk_sequence *sequence = &pass->batch->sequences[pass->sequences[row]];
        const int64_t slot = slot_of(pass->cache, pass->batch->blocks + sequence->first_block, pass->positions[row]);
        for (int64_t head = 0; head < decoder->heads; head++)
            turn_head(pass, q + head * decoder->head_dim, layer->q_norm, pass->positions[row], normed);
        for (int64_t head = 0; head < decoder->kv_heads; head++) {
            turn_head(pass, k + head * decoder->head_dim, layer->k_norm, pass->positions[row], normed);
            write_slot(pass->cache, index, slot, head, k + head * decoder->head_dim, v + head * decoder->head_dim);
        }
    }
}

/* Zero what pads the thread's share of an operand's rows, where whole rows are not written at once. */
static void pad_rows(struct pass *pass, int64_t thread, int64_t size, char *operand)
{
    const int64_t stride = operand_size(size), bytes = pass->products->operand_bytes;
    int64_t first, end;
    share_of(pass->batch->row_count, thread, pass->threads, &first, &end);
    for (int64_t row = first; row < end && stride > size; row++)
        memset(operand + (row * stride + size) * bytes, 0, (size_t)((stride - size) * bytes));
}

static void attend(struct pass *pass, int64_t thread, int64_t index)
{
    pad_rows(pass, thread, pass->decoder->heads * pass->decoder->head_dim, pass->operand);
    attention_attend(&pass->plan, &pass->attention, index, &pass->next_attend[index], pass->scratch[thread]);
    pool_barrier(pass->pool);
    if (!pass->plan.split)
        return;
    attention_merge(&pass->plan, &pass->attention, index, &pass->next_merge[index], pass->scratch[thread]);
    pool_barrier(pass->pool);
}

static void announce(struct pass *pass, int64_t thread, int64_t index)
{
    if (!pass->after_layer)
        return;
    if (thread == 0) {
        pass->path->end(); /* what the callback runs may use the core's state for itself */
        pass->ended = pass->after_layer(index) != 0;
        pass->path->begin();
    }
    pool_barrier(pass->pool);
}

static void gate_up(struct pass *pass, int64_t thread, const struct pdk_layer *layer)
{
    const int64_t rows = pass->batch->row_count, size = pass->decoder->intermediate_size;
    const int64_t bytes = operand_size(size) * pass->products->operand_bytes;
    if (!pass->gate_up) {
        pad_rows(pass, thread, size, pass->gated);
        linear(pass, thread, &layer->gate_up, GATE, pass->operand, rows, pass->gated, operand_size(size));
        return;
    }
    linear(pass, thread, &layer->gate_up, STORE, pass->operand, rows, pass->gate_up, 2 * size);
    pool_barrier(pass->pool);
    int64_t first, end;
    share_of(rows, thread, pass->threads, &first, &end);
    for (int64_t row = first; row < end; row++) {
        float *gate = pass->gate_up + row * 2 * size;
        pass->path->silu_mul(gate, gate + size, size, gate);
        take_operand(pass->products, gate, 1, size, pass->gated + row * bytes);
    }
}

static void run_layer(struct pass *pass, int64_t thread, int64_t index)
{
    const struct pdk_layer *layer = &pass->decoder->layers[index];
    const int64_t rows = pass->batch->row_count, hidden = pass->decoder->hidden_size;
    norm_rows(pass, thread, layer->input_norm);
    pool_barrier(pass->pool);
    linear(pass, thread, &layer->qkv, STORE, pass->operand, rows, pass->qkv, pass->qkv_size);
    pool_barrier(pass->pool);
    rotate_and_write(pass, thread, index);
    pool_barrier(pass->pool);
    announce(pass, thread, index);
    if (pass->ended)
        return;
    attend(pass, thread, index);
    linear(pass, thread, &layer->o, ADD, pass->operand, rows, pass->x, hidden);
    pool_barrier(pass->pool);
    norm_rows(pass, thread, layer->post_attention_norm);
    pool_barrier(pass->pool);
    gate_up(pass, thread, layer);
    pool_barrier(pass->pool);
    linear(pass, thread, &layer->down, ADD, pass->gated, rows, pass->x, hidden);
    pool_barrier(pass->pool);
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

static void run_head(struct pass *pass, int64_t thread)
{
    const struct pdk_decoder *decoder = pass->decoder;
    const int64_t rows = pass->batch->logit_count, vocabulary = decoder->head.out_features;
    int64_t first, end;
    share_of(rows, thread, pass->threads, &first, &end);
    for (int64_t row = first; row < end; row++)
        norm_row(pass, pass->batch->logit_rows[row], row, decoder->final_norm, normed_of(pass, thread));
    pool_barrier(pass->pool);
    linear(pass, thread, &decoder->head, STORE, pass->operand, rows, pass->logits, vocabulary);
    pool_barrier(pass->pool);
    for (int64_t row = first; row < end; row++)
        pass->finite[row] = all_finite(pass->logits + row * vocabulary, vocabulary);
}

static void run_pass(void *argument, int64_t thread)
{
    struct pass *pass = argument;
    int64_t first, end;
    pass->path->begin();
    share_of(pass->batch->row_count, thread, pass->threads, &first, &end);
    embed(pass, first, end);
    for (int64_t index = 0; index < pass->decoder->layer_count && !pass->ended; index++)
        run_layer(pass, thread, index);
    if (!pass->ended && pass->batch->logit_count)
        run_head(pass, thread);
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
        .out = pass->operand,
        .out_stride = operand_size(decoder->heads * decoder->head_dim),
    };
}

int pdk_forward(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_decoder *decoder,
                const struct pdk_cache *cache, const struct pdk_batch *batch, pdk_layer_callback after_layer,
                float *logits, uint8_t *finite)
{
    struct pass pass = {
        .path = path,
        .products = &path->products[decoder->head.dtype],
        .pool = pool,
        .threads = pool_thread_count(pool),
        .decoder = decoder,
        .cache = cache,
        .batch = batch,
        .after_layer = after_layer,
        .logits = logits,
        .finite = finite,
        .qkv_size = (decoder->heads + 2 * decoder->kv_heads) * decoder->head_dim,
    };
    int outcome = OUTCOME_NO_MEMORY;
    if (make_buffers(&pass) && make_scratch(&pass)) {
        set_attention(&pass);
        if (attention_plan_make(&pass.plan, &pass.attention, pass.threads)) {
            locate_rows(&pass);
            pool_run(pool, run_pass, &pass);
            outcome = pass.ended ? OUTCOME_ENDED : OUTCOME_DONE;
        }
    }
    pass_free(&pass);
    return outcome;
}
