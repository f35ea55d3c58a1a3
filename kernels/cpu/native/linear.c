/* The blocking of a linear around the caches.
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
    BLOCKED_ROWS = 6, /* fewer have a small operand and wait for panels, which stream in one go */
};

_Static_assert(ROW_BLOCK <= LINEAR_BLOCK_ROWS && GROUP == 2, "a block's sums have room, and linear_block its panels");

enum {
    SUM_FLOATS = (LINEAR_BLOCK_ROWS + ROW_PAD) * GROUP * PANEL,
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
    const int64_t padding = product_k(size) - size;
    char *to = operand;
    for (int64_t row = 0; row < rows; row++) {
        products->store_operand(x + row * size, size, to);
        memset(to + size * products->operand_bytes, 0, (size_t)(padding * products->operand_bytes));
        to += operand_stride(size) * products->operand_bytes;
    }
}

/* Sums of `rows` rows from `first_row` on for panels at `panels`, `panel_bytes` apart, into [rows][GROUP * PANEL]; the
 * scratch goes on after them. */
static void sum_products(const struct linear_job *job, int64_t first_row, int64_t rows, const char *panels,
                         int64_t panel_bytes, int64_t panel_count, const char *next, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const struct products *products = &job->path->products[linear->dtype];
    const uint8_t *high_bytes = linear->compact ? linear->compact->high_bytes : NULL;
    const int64_t k_size = product_k(linear->in_features), stride = operand_stride(linear->in_features);
    const int64_t blocks = rows < BLOCKED_ROWS ? 1 : (k_size + K_BLOCK - 1) / K_BLOCK;
    const char *operand = (const char *)job->operand + first_row * stride * products->operand_bytes;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t k = k_size / K_PAD * block / blocks * K_PAD;
        const int64_t k_end = k_size / K_PAD * (block + 1) / blocks * K_PAD;
        const char *chunk = panels + bytes_of_panel(k, linear->dtype), *at = operand + k * products->operand_bytes;
        const struct panels part = {&chunk, k_end - k, k_end - k, panel_bytes, panel_count, high_bytes};
        if (products->block_product && rows >= BLOCKED_ROWS)
            products->block_product(at, stride, rows, &part,
                                    block + 1 < blocks ? panels + bytes_of_panel(k_end, linear->dtype) : next,
                                    sums + SUM_FLOATS, sums, GROUP * PANEL, block > 0);
        else
            products->product(at, stride, rows, &part, sums, GROUP * PANEL, block > 0);
    }
}

#ifdef PDK_MUTANT_SPLIT_REDUCTION
/* The fault that the tests must find: as many partial sums as there are threads. */
static void sum_split_products(const struct linear_job *job, int64_t first_row, int64_t rows, const char *panels,
                               int64_t panel_bytes, int64_t panel_count, int64_t threads, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const struct products *products = &job->path->products[linear->dtype];
    const uint8_t *high_bytes = linear->compact ? linear->compact->high_bytes : NULL;
    const int64_t k_size = product_k(linear->in_features), stride = operand_stride(linear->in_features);
    const char *operand = (const char *)job->operand + first_row * stride * products->operand_bytes;
    float part_sums[(ROW_BLOCK + ROW_PAD) * GROUP * PANEL];
    memset(sums, 0, (size_t)(rows * GROUP * PANEL * 4));
    for (int64_t part = 0; part < threads; part++) {
        const int64_t k = k_size / K_PAD * part / threads * K_PAD, k_end = k_size / K_PAD * (part + 1) / threads * K_PAD;
        if (k == k_end)
            continue;
        const char *chunk = panels + bytes_of_panel(k, linear->dtype);
        const struct panels slice = {&chunk, k_end - k, k_end - k, panel_bytes, panel_count, high_bytes};
        products->product(operand + k * products->operand_bytes, stride, rows, &slice, part_sums, GROUP * PANEL, false);
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

/* What does not fit into a compact panel, to its sums. */
static void add_exceptions(const struct linear_job *job, int64_t panel, int64_t first_row, int64_t rows, float *sums)
{
    const struct products *products = &job->path->products[PDK_COMPACT];
    const struct pdk_compact *compact = job->linear->compact;
    const int64_t stride = operand_stride(job->linear->in_features), first = compact->panel_exceptions[panel];
    const char *operand = (const char *)job->operand + first_row * stride * products->operand_bytes;
    products->add_exceptions(compact->exceptions + first, compact->panel_exceptions[panel + 1] - first, operand, stride,
                             rows, sums, GROUP * PANEL);
}

/* Sums of a unit for rows from `first_row` on, into the thread's scratch. */
static void sum_unit(const struct linear_job *job, int64_t unit, int64_t first_row, int64_t rows, int64_t threads,
                     float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const int64_t bytes = bytes_of_panel(product_k(linear->in_features), linear->dtype);
    const bool gates = job->end == GATE;
    const int64_t panel = gates ? unit : unit * GROUP, all = rounded_up(linear->out_features, PANEL) / PANEL;
    const int64_t count = min_of(GROUP, all - panel), between = gates ? linear->out_features / (2 * PANEL) : 1;
    const int64_t stride = between * bytes;
    const char *panels = (const char *)linear->panels + panel * bytes;
#ifdef PDK_MUTANT_SPLIT_REDUCTION
    sum_split_products(job, first_row, rows, panels, stride, count, threads, sums);
#else
    (void)threads;
    sum_products(job, first_row, rows, panels, stride, count, panels + (gates ? 1 : count) * bytes, sums);
#endif
    if (linear->compact)
        for (int64_t i = 0; i < count; i++)
            add_exceptions(job, panel + i * between, first_row, rows, sums + i * PANEL);
}

static void hand_out_unit(const struct linear_job *job, int64_t unit, int64_t first_row, int64_t rows, const float *sums)
{
    const int64_t first = unit * GROUP * PANEL;
    if (job->end == GATE)
        hand_out_gated(job, first_row, rows, unit * PANEL, sums);
    else
        hand_out(job, first_row, rows, first, min_of(GROUP * PANEL, job->linear->out_features - first), sums);
}

/* Whether the path has a way of its own for so many rows: fewer wait for memory. */
static bool has_blocks(const struct linear_job *job)
{
#ifdef PDK_MUTANT_SPLIT_REDUCTION
    (void)job;
    return false;
#else
    return job->rows > FEW_ROWS && job->path->products[job->linear->dtype].linear_block;
#endif
}

/* A unit's two panels for a block of rows; `after` is the unit that will be wanted then. */
static void run_block(const struct linear_job *job, int64_t unit, int64_t after, int64_t row, int64_t rows, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const struct products *products = &job->path->products[linear->dtype];
    const bool gates = job->end == GATE;
    const int64_t k = product_k(linear->in_features), stride = operand_stride(linear->in_features);
    const int64_t bytes = bytes_of_panel(k, linear->dtype), unit_panels = gates ? 1 : GROUP;
    const int64_t between = gates ? linear->out_features / (2 * PANEL) : 1; /* panels */
    const int64_t output = unit * unit_panels * PANEL, y_bytes = gates ? products->operand_bytes : 4;
    const char *panels = (const char *)linear->panels + unit * unit_panels * bytes;
    const char *next = (const char *)linear->panels + after * unit_panels * bytes;
    const float *bias = linear->bias ? linear->bias + output : NULL;
    const struct linear_block block = {
        .operand = (const char *)job->operand + row * stride * products->operand_bytes,
        .operand_stride = stride,
        .rows = rows,
        .k = k,
        .panels = {panels, panels + between * bytes},
        .next = {next, next + between * bytes},
        .end = job->end,
        .bias = {bias, bias ? bias + between * PANEL : NULL},
        .y = (char *)job->y + (row * job->y_stride + output) * y_bytes,
        .y_stride = job->y_stride,
        .sums = sums,
    };
    products->linear_block(&block);
}

/* Units [first, end) in the path's own way, but for a linear's last one where that has less than two whole panels. */
static void run_blocks(const struct linear_job *job, int64_t first, int64_t end, float *sums)
{
    const int64_t whole = job->end == GATE ? end : min_of(end, job->linear->out_features / (GROUP * PANEL));
    const int64_t blocks = (job->rows + LINEAR_BLOCK_ROWS - 1) / LINEAR_BLOCK_ROWS;
    const int64_t block_rows = rounded_up((job->rows + blocks - 1) / blocks, 2 * ROW_PAD);
    for (int64_t row = 0; row < job->rows; row += block_rows) {
        const int64_t rows = min_of(block_rows, job->rows - row);
        for (int64_t unit = first; unit < whole; unit++)
            run_block(job, unit, unit + 1 < whole ? unit + 1 : first, row, rows, sums);
        for (int64_t unit = max_of(first, whole); unit < end; unit++) {
            sum_unit(job, unit, row, rows, 1, sums);
            hand_out_unit(job, unit, row, rows, sums);
        }
    }
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
    else if (!pool_settle(piece))
        return;
    else if (has_blocks(job))
        run_blocks(job, first, end, job->scratch[thread]);
    else
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
