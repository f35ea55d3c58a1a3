/* Tasks of attention: (sequence, kv head, tile of rows), or segments of those where there are too few for the threads.
 * Who computes what shows in no bit: a segment's state is its own, and states are merged in order. */
#include "attention_plan.h"

#include <stdlib.h>
#include <string.h>

enum {
    TASKS_A_THREAD = 4,  /* fewer: segments are computed apart */
    TILES_A_THREAD = 16, /* fewer: one thread would wait for another's last tile; smaller tiles then */
    LEAST_TILE_ROWS = 96,
};

static int64_t group_of(const struct attention_job *job) { return job->heads / job->cache->kv_heads; }

static int64_t count_items(const struct attention_job *job, int64_t tile_tokens)
{
    int64_t count = 0;
    for (int64_t s = 0; s < job->batch->sequence_count; s++)
        count += (job->batch->sequences[s].count + tile_tokens - 1) / tile_tokens * job->cache->kv_heads;
    return count;
}

/* Large tiles, as each gets the K and V that it reads ready for itself, but enough of them for all threads. */
static int64_t choose_tile_tokens(const struct attention_job *job, int64_t threads)
{
    const int64_t group = group_of(job);
    int64_t tokens = max_of(1, job->products->query_rows / group);
    while (threads > 1 && tokens / 2 * group >= LEAST_TILE_ROWS && count_items(job, tokens) < TILES_A_THREAD * threads)
        tokens /= 2;
    return tokens;
}

/* Late positions first: they take longest, and the short tasks then fill the gaps. */
static void list_items(struct attention_plan *plan, const struct attention_job *job)
{
    const int64_t tokens = plan->tile_tokens;
    struct attention_item *item = plan->items;
    plan->task_count = 0;
    for (int64_t s = 0; s < job->batch->sequence_count; s++) {
        const struct pdk_sequence *sequence = &job->batch->sequences[s];
        for (int64_t tile = (sequence->count + tokens - 1) / tokens - 1; tile >= 0; tile--)
            for (int64_t head = 0; head < job->cache->kv_heads; head++, item++) {
                const int64_t first = tile * tokens, count = min_of(tokens, sequence->count - first);
                const int64_t segments = (sequence->start + first + count + SEGMENT_TOKENS - 1) / SEGMENT_TOKENS;
                *item = (struct attention_item){sequence, first, count, head, segments, plan->task_count};
                plan->task_count += segments;
            }
    }
}

bool attention_plan_make(struct attention_plan *plan, const struct attention_job *job, int64_t threads)
{
    const int64_t group = group_of(job), value_dim = rounded_up(job->cache->head_dim, PANEL);
    *plan = (struct attention_plan){.tile_tokens = choose_tile_tokens(job, threads)};
    plan->item_count = count_items(job, plan->tile_tokens);
    plan->items = malloc((size_t)max_of(1, plan->item_count) * sizeof *plan->items);
    if (!plan->items)
        return false;
    list_items(plan, job);
    plan->split = threads > 1 && plan->item_count < TASKS_A_THREAD * threads && plan->task_count > plan->item_count;
    if (!plan->split) {
        plan->task_count = plan->item_count;
        return true;
    }
    const int64_t rows = rounded_up(plan->tile_tokens * group, ROW_PAD);
    plan->partial_floats = rows * (ROW_PAD + value_dim);
    plan->partials = aligned_alloc(LINE, (size_t)rounded_up(plan->task_count * plan->partial_floats * 4, LINE));
    plan->item_of_task = malloc((size_t)plan->task_count * sizeof *plan->item_of_task);
    if (!plan->partials || !plan->item_of_task)
        return false;
    for (int64_t i = 0; i < plan->item_count; i++)
        for (int64_t segment = 0; segment < plan->items[i].segments; segment++)
            plan->item_of_task[plan->items[i].first_partial + segment] = i;
    return true;
}

void attention_plan_free(struct attention_plan *plan)
{
    free(plan->items);
    free(plan->item_of_task);
    free(plan->partials);
}

static struct attention_task task_of(const struct attention_job *job, const struct attention_item *item, int64_t layer)
{
    const int64_t group = group_of(job), head_dim = job->cache->head_dim;
    const int64_t row = item->sequence->row + item->first_token, column = item->kv_head * group * head_dim;
    const int64_t out_bytes = job->out_is_operand ? job->products->operand_bytes : 4;
    return (struct attention_task){
        .cache = job->cache,
        .blocks = job->batch->blocks + item->sequence->first_block,
        .layer = layer,
        .kv_head = item->kv_head,
        .group = group,
        .first_position = item->sequence->start + item->first_token,
        .token_count = item->token_count,
        .first_segment = 0,
        .segment_end = item->segments,
        .q = job->q + row * job->q_stride + column,
        .q_stride = job->q_stride,
        .factor = job->factor,
        .out_is_operand = job->out_is_operand,
        .out = (char *)job->out + (row * job->out_stride + column) * out_bytes,
        .out_stride = job->out_stride,
    };
}

static int64_t staged_bytes(const struct products *products, int64_t head_dim, int64_t group)
{
    const int64_t rows = rounded_up(max_of(products->query_rows, group), ROW_PAD);
    return rows * (ROW_PAD + rounded_up(head_dim, PANEL)) * 4;
}

int64_t attention_scratch_bytes(const struct products *products, int64_t head_dim, int64_t group)
{
    return staged_bytes(products, head_dim, group) + products->attend_scratch(head_dim, group);
}

struct attention_phase {
    const struct attention_plan *plan;
    const struct attention_job *job;
    int64_t layer;
};

static void copy_rows(const struct attention_task *from, const struct attention_task *to, int64_t row_bytes,
                      int64_t to_stride_bytes)
{
    for (int64_t token = 0; token < from->token_count; token++)
        memcpy((char *)to->out + token * to_stride_bytes, (const char *)from->out + token * row_bytes,
               (size_t)row_bytes);
}

/* Compute a task into the thread's own memory first: it may turn out that another thread has done so. */
static void attend_staged(const struct attention_phase *phase, const struct attention_task *task, struct piece *piece,
                          char *scratch)
{
    const struct attention_job *job = phase->job;
    const int64_t head_dim = job->cache->head_dim, row = task->group * head_dim;
    const int64_t bytes = job->out_is_operand ? job->products->operand_bytes : 4;
    struct attention_task staged = *task;
    if (task->partial) {
        staged.partial = (float *)scratch;
    } else {
        staged.out = scratch;
        staged.out_stride = row;
    }
    job->products->attend(&staged, scratch + staged_bytes(job->products, head_dim, task->group));
    if (!pool_settle(piece))
        return;
    if (task->partial)
        memcpy(task->partial, staged.partial, (size_t)phase->plan->partial_floats * 4);
    else
        copy_rows(&staged, task, row * bytes, job->out_stride * bytes);
}

/* Every count-th task from the piece's index on: late and early positions are spread over all pieces. */
static void attend_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct attention_phase *phase = argument;
    const struct attention_plan *plan = phase->plan;
    const bool alone = plan->task_count <= piece->count; /* one task a piece at most */
    char *scratch = phase->job->scratch[thread];
    for (int64_t index = piece->index; index < plan->task_count; index += piece->count) {
        const struct attention_item *item = &plan->items[plan->split ? plan->item_of_task[index] : index];
        struct attention_task task = task_of(phase->job, item, phase->layer);
        if (plan->split) {
            task.first_segment = index - item->first_partial;
            task.segment_end = task.first_segment + 1;
            task.partial = plan->partials + index * plan->partial_floats;
        }
        if (alone)
            attend_staged(phase, &task, piece, scratch);
        else if (pool_settle(piece))
            phase->job->products->attend(&task, scratch);
    }
}

static void merge_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct attention_phase *phase = argument;
    const struct attention_plan *plan = phase->plan;
    if (!pool_settle(piece))
        return;
    for (int64_t index = piece->index; index < plan->item_count; index += piece->count) {
        const struct attention_item *item = &plan->items[index];
        const struct attention_task task = task_of(phase->job, item, phase->layer);
        phase->job->products->merge(&task, plan->partials + item->first_partial * plan->partial_floats,
                                    plan->partial_floats, phase->job->scratch[thread]);
    }
}

void attention_run(const struct attention_plan *plan, const struct attention_job *job, int64_t layer,
                   struct pool_member *self)
{
    struct attention_phase phase = {plan, job, layer};
    const int64_t threads = pool_thread_count(self->pool);
    pool_phase(self, pieces_for(plan->task_count, threads), attend_piece, &phase);
    if (plan->split)
        pool_phase(self, pieces_for(plan->item_count, threads), merge_piece, &phase);
}
