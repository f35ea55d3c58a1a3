/* Packing weights into panels, and the blocking of a linear around the caches.
 *
 * A thread owns a run of panels. It goes through them for one block of rows at a time, and through K in blocks whose
 * float32 sums are stored and taken up again: that changes the order of no sum. The sums of a block stay in a scratch that
 * the nearest cache holds until they are complete, and leave it once, with bias, residual or gate applied.
 */
#include "linear.h"

#include <string.h>

enum {
    GROUP = 2,        /* panels that go through a block of rows together */
    ROW_BLOCK = 120,  /* rows whose operand the second cache holds: 120 rows x 512 x 4 bytes */
    FEW_ROWS = 12,    /* up to here K is not cut: the operand is small, and panels stream in one go */
    K_BLOCK = 512,    /* of K: a panel of it fits the nearest cache beside the operand's rows */
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

int64_t linear_scratch_bytes(void) { return (ROW_BLOCK + ROW_PAD) * GROUP * PANEL * 4; }

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

/* Sums of `rows` rows from `first_row` on for panels at `panels`, `panel_bytes` apart, into [rows][GROUP * PANEL]. */
static void sum_products(const struct linear_job *job, int64_t first_row, int64_t rows, const char *panels,
                         int64_t panel_bytes, int64_t panel_count, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const struct products *products = &job->path->products[linear->dtype];
    const int64_t k_size = operand_size(linear->in_features), k_bytes = PANEL * dtype_bytes(linear->dtype);
    const int64_t blocks = rows <= FEW_ROWS ? 1 : (k_size + K_BLOCK - 1) / K_BLOCK;
    const char *operand = (const char *)job->operand + first_row * k_size * products->operand_bytes;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t k = k_size / K_PAD * block / blocks * K_PAD;
        const int64_t k_end = k_size / K_PAD * (block + 1) / blocks * K_PAD;
        const char *chunk = panels + k * k_bytes;
        const struct panels part = {&chunk, k_end - k, k_end - k, panel_bytes, panel_count};
        products->product(operand + k * products->operand_bytes, k_size, rows, &part, sums, GROUP * PANEL, block > 0);
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

/* A block of rows through the thread's panels [first, end), or through pairs of panels, gate and up. */
static void pass_rows(const struct linear_job *job, int64_t first_row, int64_t rows, int64_t first, int64_t end,
                      int64_t threads, float *sums)
{
    const struct pdk_linear *linear = job->linear;
    const int64_t bytes = operand_size(linear->in_features) * PANEL * dtype_bytes(linear->dtype);
    const int64_t half = linear->out_features / (2 * PANEL);
    const bool gates = job->end == GATE;
    for (int64_t panel = first; panel < end; panel += gates ? 1 : GROUP) {
        const int64_t count = gates ? 2 : min_of(GROUP, end - panel);
        const char *panels = (const char *)linear->panels + panel * bytes;
        const int64_t stride = gates ? half * bytes : bytes;
#ifdef PDK_MUTANT_SPLIT_REDUCTION
        sum_split_products(job, first_row, rows, panels, stride, count, threads, sums);
#else
        (void)threads;
        sum_products(job, first_row, rows, panels, stride, count, sums);
#endif
        const int64_t output = panel * PANEL;
        if (gates)
            hand_out_gated(job, first_row, rows, output, sums);
        else
            hand_out(job, first_row, rows, output, min_of(count * PANEL, linear->out_features - output), sums);
    }
}

void linear_share(const struct linear_job *job, int64_t thread, int64_t threads, void *scratch)
{
    const int64_t panels = rounded_up(job->linear->out_features, PANEL) / PANEL / (job->end == GATE ? 2 : 1);
    const int64_t first = panels * thread / threads, end = panels * (thread + 1) / threads;
    const int64_t blocks = (job->rows + ROW_BLOCK - 1) / ROW_BLOCK;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t row = job->rows * block / blocks, row_end = job->rows * (block + 1) / blocks;
        pass_rows(job, row, row_end - row, first, end, threads, scratch);
    }
}
