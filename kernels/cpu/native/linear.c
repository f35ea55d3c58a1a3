/* Packing weights into panels, and the blocking of a linear around the caches.
 *
 * A piece of the phase is a run of panels. A thread goes through them for one block of rows at a time, and through K in
 * blocks whose float32 sums are stored and taken up again: that changes the order of no sum. The sums of a block stay in a
 * scratch that the nearest cache holds until they are complete, and leave it once, with bias, residual or gate applied.
 */
#include "linear.h"

#include <string.h>

enum {
    GROUP = 2,        /* panels that go through a block of rows together */
    ROW_BLOCK = 120,  /* rows whose operand the second cache holds: 120 rows x 512 x 4 bytes */
    K_BLOCK = 288,    /* of K: a panel of it in float32 fits the nearest cache beside the operand's rows */
    BLOCKED_ROWS = 4, /* fewer have a small operand and wait for panels, which stream in one go */
};

int64_t pdk_packed_bytes(int64_t out_features, int64_t in_features, int64_t dtype)
{
    return rounded_up(out_features, PANEL) * rounded_up(in_features, K_PAD) * dtype_bytes(dtype);
}

void pdk_pack(const void *weight, int64_t out_features, int64_t in_features, int64_t dtype, void *panels)
{
    const int64_t k_size = rounded_up(in_features, K_PAD), outputs = rounded_up(out_features, PANEL);
    for (int64_t output = 0; output < outputs; output++) {
        const int64_t panel = output / PANEL * k_size * PANEL, lane = output % PANEL;
        const int64_t known = output < out_features ? in_features : 0;
        if (dtype == PDK_BFLOAT16) {
            const uint16_t *from = (const uint16_t *)weight + output * in_features;
            uint16_t *to = (uint16_t *)panels + panel + lane * 2;
            for (int64_t k = 0; k < k_size; k++)
                to[k / 2 * (2 * PANEL) + k % 2] = k < known ? from[k] : 0;
        } else {
            const float *from = (const float *)weight + output * in_features;
            float *to = (float *)panels + panel + lane;
            for (int64_t k = 0; k < k_size; k++)
                to[k * PANEL] = k < known ? from[k] : 0.0f;
        }
    }
}

enum {
    SUM_FLOATS = (ROW_BLOCK + ROW_PAD) * GROUP * PANEL,
    KEPT_FLOATS = K_BLOCK * PANEL,
    PIECE_BYTES = 96 * 1024, /* of weights: some microseconds. Of many rows fewer bytes take as long */
};

static int64_t unit_count(const struct pdk_linear *linear)
{
    return (linear->out_features + GROUP * PANEL - 1) / (GROUP * PANEL);
}

static int64_t pieces_a_thread(const struct pdk_linear *linear, int64_t rows, int64_t threads)
{
    const int64_t bytes = pdk_packed_bytes(linear->out_features, linear->in_features, linear->dtype) / threads;
    const int64_t most = rows > FEW_ROWS ? PIECES_A_THREAD : min_of(PIECES_A_THREAD, bytes / PIECE_BYTES);
    return threads == 1 ? 1 : max_of(1, min_of(most, unit_count(linear) / threads));
}

static bool stages(int64_t rows, int64_t threads) { return rows <= FEW_ROWS && threads > 1; }

int64_t linear_scratch_bytes(const struct pdk_linear *linear, int64_t rows, int64_t threads)
{
    const int64_t units = unit_count(linear), pieces = pieces_a_thread(linear, rows, threads) * threads;
    const int64_t staged = stages(rows, threads) ? (units + pieces - 1) / pieces * rows * GROUP * PANEL : 0;
    return (SUM_FLOATS + KEPT_FLOATS + staged) * 4;
}

void take_operand(const struct products *products, const float *x, int64_t rows, int64_t size, void *operand)
{
    const int64_t padding = operand_size(size) - size;
    char *to = operand;
    for (int64_t row = 0; row < rows; row++) {
        products->store_operand(x + row * size, size, to);
        memset(to + size * products->operand_bytes, 0, (size_t)(padding * products->operand_bytes));
        to += operand_size(size) * products->operand_bytes;
    }
}

/* Sums of `rows` rows from `first_row` on for panels at `panels`, `panel_bytes` apart, into [rows][GROUP * PANEL]; the
 * scratch goes on after them. */
static void sum_products(const struct linear_job *job, int64_t first_row, int64_t rows, const char *panels,
                         int64_t panel_bytes, int64_t panel_count, const char *next, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const struct products *products = &job->path->products[linear->dtype];
    const int64_t k_size = operand_size(linear->in_features), k_bytes = PANEL * dtype_bytes(linear->dtype);
    const int64_t blocks = rows < BLOCKED_ROWS ? 1 : (k_size + K_BLOCK - 1) / K_BLOCK;
    const char *operand = (const char *)job->operand + first_row * k_size * products->operand_bytes;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t k = k_size / K_PAD * block / blocks * K_PAD;
        const int64_t k_end = k_size / K_PAD * (block + 1) / blocks * K_PAD;
        const char *chunk = panels + k * k_bytes, *at = operand + k * products->operand_bytes;
        const struct panels part = {&chunk, k_end - k, k_end - k, panel_bytes, panel_count};
        if (products->block_product && rows >= BLOCKED_ROWS)
            products->block_product(at, k_size, rows, &part, block + 1 < blocks ? panels + k_end * k_bytes : next,
                                    sums + SUM_FLOATS, sums, GROUP * PANEL, block > 0);
        else
            products->product(at, k_size, rows, &part, sums, GROUP * PANEL, block > 0);
    }
}

#ifdef PDK_MUTANT_SPLIT_REDUCTION
/* The fault that the tests must find: as many partial sums as there are threads. */
static void sum_split_products(const struct linear_job *job, int64_t first_row, int64_t rows, const char *panels,
                               int64_t panel_bytes, int64_t panel_count, int64_t threads, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const struct products *products = &job->path->products[linear->dtype];
    const int64_t k_size = operand_size(linear->in_features), k_bytes = PANEL * dtype_bytes(linear->dtype);
    const char *operand = (const char *)job->operand + first_row * k_size * products->operand_bytes;
    float part_sums[(ROW_BLOCK + ROW_PAD) * GROUP * PANEL];
    memset(sums, 0, (size_t)(rows * GROUP * PANEL * 4));
    for (int64_t part = 0; part < threads; part++) {
        const int64_t k = k_size / K_PAD * part / threads * K_PAD, k_end = k_size / K_PAD * (part + 1) / threads * K_PAD;
        const char *chunk = panels + k * k_bytes;
        const struct panels slice = {&chunk, k_end - k, k_end - k, panel_bytes, panel_count};
        products->product(operand + k * products->operand_bytes, k_size, rows, &slice, part_sums, GROUP * PANEL, false);
        for (int64_t i = 0; i < rows * GROUP * PANEL; i++)
            sums[i] += part_sums[i];
    }
}
#endif

/* Hand out the sums of `rows` rows for outputs [first, first + count). */
static void hand_out(const struct linear_job *job, int64_t first_row, int64_t rows, int64_t first, int64_t count,
                     const float *sums)
{
    const float *bias = job->linear->bias ? job->linear->bias + first : NULL;
    for (int64_t row = 0; row < rows; row++) {
        float *y = (float *)job->y + (first_row + row) * job->y_stride + first;
        const float *values = sums + row * GROUP * PANEL;
        if (job->end == ADD)
            job->path->add_row(values, bias, count, y);
        else if (bias)
            job->path->bias_row(values, bias, count, y);
        else
            memcpy(y, values, (size_t)count * 4);
    }
}

static void hand_out_gated(const struct linear_job *job, int64_t first_row, int64_t rows, int64_t first,
                           const float *sums)
{
    const struct products *products = &job->path->products[job->linear->dtype];
    const float *bias = job->linear->bias;
    const int64_t half = job->linear->out_features / 2;
    for (int64_t row = 0; row < rows; row++) {
        const float *values = sums + row * GROUP * PANEL;
        float gated[2 * PANEL], result[PANEL];
        if (bias) {
            job->path->bias_row(values, bias + first, PANEL, gated);
            job->path->bias_row(values + PANEL, bias + half + first, PANEL, gated + PANEL);
            values = gated;
        }
        job->path->silu_mul(values, values + PANEL, PANEL, result);
        const int64_t at = (first_row + row) * job->y_stride + first;
        products->store_operand(result, PANEL, (char *)job->y + at * products->operand_bytes);
    }
}

/* A unit is what goes through a block of rows together: GROUP panels, for a gate the two that belong together. */
static int64_t units_of(const struct linear_job *job)
{
    return job->end == GATE ? job->linear->out_features / (2 * PANEL) : unit_count(job->linear);
}

/* Sums of a unit for rows from `first_row` on, into the thread's scratch. */
static void sum_unit(const struct linear_job *job, int64_t unit, int64_t first_row, int64_t rows, int64_t threads,
                     float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const int64_t bytes = operand_size(linear->in_features) * PANEL * dtype_bytes(linear->dtype);
    const bool gates = job->end == GATE;
    const int64_t panel = gates ? unit : unit * GROUP, all = rounded_up(linear->out_features, PANEL) / PANEL;
    const int64_t count = min_of(GROUP, all - panel), stride = gates ? linear->out_features / (2 * PANEL) * bytes : bytes;
    const char *panels = (const char *)linear->panels + panel * bytes;
#ifdef PDK_MUTANT_SPLIT_REDUCTION
    sum_split_products(job, first_row, rows, panels, stride, count, threads, sums);
#else
    (void)threads;
    sum_products(job, first_row, rows, panels, stride, count, panels + (gates ? 1 : count) * bytes, sums);
#endif
}

static void hand_out_unit(const struct linear_job *job, int64_t unit, int64_t first_row, int64_t rows, const float *sums)
{
    const int64_t first = unit * GROUP * PANEL;
    if (job->end == GATE)
        hand_out_gated(job, first_row, rows, unit * PANEL, sums);
    else
        hand_out(job, first_row, rows, first, min_of(GROUP * PANEL, job->linear->out_features - first), sums);
}

struct linear_phase {
    const struct linear_job *job;
    int64_t threads;
};

/* Units [first, end) of few rows: all sums first, then, if nobody was faster, out with them. */
static void run_staged(const struct linear_phase *phase, int64_t first, int64_t end, struct piece *piece, float *sums)
{
    const struct linear_job *job = phase->job;
    const int64_t floats = job->rows * GROUP * PANEL;
    float *staged = sums + SUM_FLOATS + KEPT_FLOATS;
    for (int64_t unit = first; unit < end; unit++) {
        sum_unit(job, unit, 0, job->rows, phase->threads, sums);
        memcpy(staged + (unit - first) * floats, sums, (size_t)floats * 4);
    }
    if (pool_settle(piece))
        for (int64_t unit = first; unit < end; unit++)
            hand_out_unit(job, unit, 0, job->rows, staged + (unit - first) * floats);
}

static void run_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct linear_phase *phase = argument;
    const struct linear_job *job = phase->job;
    const int64_t blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t first, end;
    share_of(units_of(job), piece->index, piece->count, &first, &end);
    if (stages(job->rows, phase->threads))
        run_staged(phase, first, end, piece, job->scratch[thread]);
    else if (pool_settle(piece))
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t row = job->rows * block / blocks, rows = job->rows * (block + 1) / blocks - row;
            for (int64_t unit = first; unit < end; unit++) {
                sum_unit(job, unit, row, rows, phase->threads, job->scratch[thread]);
                hand_out_unit(job, unit, row, rows, job->scratch[thread]);
            }
        }
}

void linear_run(const struct linear_job *job, struct pool_member *self)
{
    struct linear_phase phase = {job, pool_thread_count(self->pool)};
    pool_phase(self, pieces_a_thread(job->linear, job->rows, phase.threads), run_piece, &phase);
}
