/* The operations of the table, one region each where they have threads. */
#include <stdlib.h>
#include <string.h>

#include "attention_plan.h"
#include "linear.h"
#include "pool.h"

struct linear_call {
    struct linear_job job;
    const float *x;
    char *operand;
};

static void round_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct linear_call *call = argument;
    const struct linear_job *job = &call->job;
    const struct products *products = &job->path->products[job->linear->dtype];
    const int64_t size = job->linear->in_features;
    int64_t first, end;
    (void)thread;
    share_of(job->rows, piece->index, piece->count, &first, &end);
    if (pool_settle(piece))
        take_operand(products, call->x + first * size, end - first, size,
                     call->operand + first * operand_stride(size) * products->operand_bytes);
}

static void run_linear(void *argument, struct pool_member *self)
{
    struct linear_call *call = argument;
    if (call->job.rows > FEW_ROWS)
        pool_phase(self, 1, round_piece, call);
    call->job.path->begin();
    linear_run(&call->job, self);
    call->job.path->end();
}

/* Each thread's scratch; NULL: no memory. */
static void **take_scratch(struct pdk_pool *pool, int64_t bytes)
{
    void **scratch = calloc((size_t)pool_thread_count(pool), sizeof *scratch);
    for (int64_t thread = 0; scratch && thread < pool_thread_count(pool); thread++)
        if (!(scratch[thread] = pool_scratch(pool, thread, bytes))) {
            free(scratch);
            return NULL;
        }
    return scratch;
}

int pdk_linear(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_linear *linear, const float *x,
               int64_t rows, float *y)
{
    const struct products *products = &path->products[linear->dtype];
    const int64_t bytes = operand_stride(linear->in_features) * products->operand_bytes;
    void **scratch = take_scratch(pool, linear_scratch_bytes(linear, rows, pool_thread_count(pool)));
    char *operand = pool_shared(pool, (rows + ROW_PAD) * bytes);
    const bool ready = scratch && operand;
    if (ready) {
        struct linear_call call = {
            .job = {path, linear, STORE, operand, rows, y, linear->out_features, scratch},
            .x = x,
            .operand = operand,
        };
        if (rows <= FEW_ROWS)
            take_operand(products, x, rows, linear->in_features, operand);
        pool_run(pool, run_linear, &call);
    }
    free(scratch);
    return ready ? 0 : 1;
}

void pdk_rms_norm(const struct pdk_path *path, const float *x, int64_t rows, int64_t size, const float *weight,
                  double eps, float *y)
{
    for (int64_t row = 0; row < rows; row++)
        path->rms_norm(x + row * size, size, weight, (float)eps, y + row * size);
}

void pdk_silu_mul(const struct pdk_path *path, const float *gate_up, int64_t rows, int64_t size, float *y)
{
    for (int64_t row = 0; row < rows; row++)
        path->silu_mul(gate_up + row * 2 * size, gate_up + (row * 2 + 1) * size, size, y + row * size);
}

void pdk_rotary(const struct pdk_path *path, const float *x, int64_t rows, int64_t heads, int64_t head_dim,
                const int64_t *positions, const float *cos, const float *sin, float *y)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = (row * heads + head) * head_dim, angles = positions[row] * (head_dim / 2);
            path->rotary(x + at, head_dim, cos + angles, sin + angles, y + at);
        }
}

struct attention_call {
    const struct pdk_path *path;
    struct attention_plan plan;
    struct attention_job job;
    int64_t layer;
};

static void run_attention(void *argument, struct pool_member *self)
{
    struct attention_call *call = argument;
    call->path->begin();
    attention_run(&call->plan, &call->job, call->layer, self);
    call->path->end();
}

int pdk_attention(const struct pdk_path *path, struct pdk_pool *pool, const struct pdk_cache *cache, int64_t layer,
                  const struct pdk_batch *batch, int64_t heads, double scale, const float *q, float *out)
{
    const struct products *products = &path->products[cache->dtype];
    const int64_t row = heads * cache->head_dim;
    void **scratch = take_scratch(pool, attention_scratch_bytes(products, cache->head_dim, heads / cache->kv_heads));
    struct attention_call call = {
        .path = path,
        .job = {products, cache, batch, heads, (float)scale * 0x1.715476p+0f, q, row, false, out, row, scratch},
        .layer = layer,
    };
    const bool ready = scratch && attention_plan_make(&call.plan, &call.job, pool_thread_count(pool));
    if (ready)
        pool_run(pool, run_attention, &call);
    attention_plan_free(&call.plan);
    free(scratch);
    return ready ? 0 : 1;
}
