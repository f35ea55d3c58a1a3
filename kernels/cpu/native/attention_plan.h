/* Cuts a step's attention into tasks that threads take as they come. */
#ifndef PDK_ATTENTION_PLAN_H
#define PDK_ATTENTION_PLAN_H

#include "cache.h"
#include "path.h"
#include "pool.h"

/* A tile of query rows of one sequence, for one kv head. */
struct attention_item {
    const struct pdk_sequence *sequence;
    int64_t first_token; /* within the sequence's rows */
    int64_t token_count;
    int64_t kv_head;
    int64_t segments;
    int64_t first_partial; /* where its segments' states begin, where they are computed apart */
};

struct attention_plan {
    int64_t tile_tokens;
    struct attention_item *items;
    int64_t item_count;
    int64_t task_count; /* items, or segments where `split` */
    int64_t *item_of_task;
    bool split;
    int64_t partial_floats; /* of one segment's state */
    float *partials;
};

/* What the same layer after layer. */
struct attention_job {
    const struct products *products;
    const struct pdk_cache *cache;
    const struct pdk_batch *batch;
    int64_t heads;
    float factor;
    const float *q; /* [rows][q_stride] */
    int64_t q_stride;
    bool out_is_operand;
    void *out; /* [rows][out_stride] */
    int64_t out_stride;
    void *const *scratch; /* [threads] */
};

/* Plan for a batch and a number of threads. False: no memory. Free it in either case. */
bool attention_plan_make(struct attention_plan *plan, const struct attention_job *job, int64_t threads);
void attention_plan_free(struct attention_plan *plan);

/* Bytes of each thread's scratch. */
int64_t attention_scratch_bytes(const struct products *products, int64_t head_dim, int64_t group);

/* The phases of a region that do the job for a layer. */
void attention_run(const struct attention_plan *plan, const struct attention_job *job, int64_t layer,
                   struct pool_member *self);

#endif
