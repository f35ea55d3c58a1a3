/* A linear's panels times many rows on tiles. What counted when it was measured (Sapphire Rapids):
 *
 *   - Two panels of up to BLOCK_STEPS steps of K fill less than the nearest cache and stay there while all rows of the
 *     block pass. Rows come from the second cache by loads that say so (TILELOADDT1): loaded otherwise they push the
 *     panels out, and the rate falls by a quarter.
 *   - Rows lie an odd number of lines apart (operand_stride), so that a tile's sixteen fall into as many sets.
 *   - What is done to complete sums (bias, residual, gate, rounding, the way to memory) is handed out over the steps of
 *     the next 32 rows: the core does it while the tiles multiply.
 *   - The panels that follow are fetched into the second cache evenly over all steps. In bursts, or with the results'
 *     lines fetched too, they hold up the rows' own loads.
 *
 * The sums have the order of multiply_tiles: a block of K takes up what the one before has left.
 */
#ifndef PDK_AMX_LINEAR_H
#define PDK_AMX_LINEAR_H

#include "amx.h"
#include "path.h"
#include "rows.h"

enum {
    BLOCK_STEPS = 20, /* of TILE_K, at most */
    TILE_FLOATS = TILE_ROWS * PANEL,
    PAIR_ROWS = 2 * TILE_ROWS, /* two tiles of rows go through two panels together */
    PAIR_FLOATS = 4 * TILE_FLOATS,
};

_Static_assert(LINEAR_BLOCK_ROWS % PAIR_ROWS == 0, "the sums of a block's last pair have room");

/* Complete sums of up to PAIR_ROWS rows, in the form of four tiles, that wait to be handed out. */
struct waiting_sums {
    const float *sums;
    int64_t first_row;
    int64_t next; /* of the rows, counted from the first */
    int64_t rows;
};

/* Where the panels that follow are fetched from, and how much in a step. */
struct next_panels {
    const char *from[2];
    int64_t step_bytes;
};

INLINE void fetch_some(struct next_panels *next)
{
    for (int64_t at = 0; at < next->step_bytes; at += LINE) {
        __builtin_prefetch(next->from[0] + at, 0, 2);
        __builtin_prefetch(next->from[1] + at, 0, 2);
    }
    next->from[0] += next->step_bytes;
    next->from[1] += next->step_bytes;
}

/* One row's sums of both panels, on their way out. */
INLINE void hand_out_row(const enum linear_end end, const struct linear_block *block, int64_t row, const float *sums)
{
    vf first = vf_load(sums), second = vf_load(sums + TILE_FLOATS);
    if (block->bias[0]) {
        first = first + vf_load(block->bias[0]);
        second = second + vf_load(block->bias[1]);
    }
    if (end == GATE) {
        store_half_vector(silu_mul(first, second), (uint16_t *)block->y + row * block->y_stride);
        return;
    }
    float *y = (float *)block->y + row * block->y_stride;
    vf_store(y, end == ADD ? vf_load(y) + first : first);
    vf_store(y + PANEL, end == ADD ? vf_load(y + PANEL) + second : second);
}

INLINE void hand_out_some(const enum linear_end end, const struct linear_block *block, struct waiting_sums *waiting,
                          int64_t count)
{
    const int64_t last = min_of(waiting->next + count, waiting->rows);
    for (; waiting->next < last; waiting->next++) {
        const int64_t tile = waiting->next / TILE_ROWS, place = waiting->next % TILE_ROWS;
        hand_out_row(end, block, waiting->first_row + waiting->next,
                     waiting->sums + 2 * tile * TILE_FLOATS + place * PANEL);
    }
}

/* Add steps [first, end) of K to the sums of one or two tiles of rows. Accumulators, operands and panels are in the
 * tiles that multiply_tiles has them in. */
INLINE void sum_steps(const enum linear_end how, const int row_tiles, const struct linear_block *block, int64_t row,
                      int64_t first, int64_t end, float *sums, struct waiting_sums *waiting, struct next_panels *next)
{
    const int64_t stride = block->operand_stride * 2, share = (PAIR_ROWS + end - first - 1) / (end - first);
    const char *above = (const char *)block->operand + row * stride, *below = above + TILE_ROWS * stride;
    if (first == 0) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    } else {
        tile_loadd(0, sums, LINE);
        tile_loadd(1, sums + TILE_FLOATS, LINE);
        if (row_tiles > 1) {
            tile_loadd(2, sums + 2 * TILE_FLOATS, LINE);
            tile_loadd(3, sums + 3 * TILE_FLOATS, LINE);
        }
    }
    for (int64_t step = first; step < end; step++) {
        tile_stream_loadd(4, above + step * LINE, stride);
        tile_loadd(6, block->panels[0] + step * (TILE_K / 2 * LINE), LINE);
        tile_dpbf16ps(0, 4, 6);
        tile_loadd(7, block->panels[1] + step * (TILE_K / 2 * LINE), LINE);
        tile_dpbf16ps(1, 4, 7);
        if (row_tiles > 1) {
            tile_stream_loadd(5, below + step * LINE, stride);
            tile_dpbf16ps(2, 5, 6);
            tile_dpbf16ps(3, 5, 7);
        }
        fetch_some(next);
        hand_out_some(how, block, waiting, share);
    }
    tile_stored(0, sums, LINE);
    tile_stored(1, sums + TILE_FLOATS, LINE);
    if (row_tiles > 1) {
        tile_stored(2, sums + 2 * TILE_FLOATS, LINE);
        tile_stored(3, sums + 3 * TILE_FLOATS, LINE);
    }
}

INLINE void run_block(const enum linear_end how, const struct linear_block *block)
{
    const int64_t steps = block->k / TILE_K, k_blocks = (steps + BLOCK_STEPS - 1) / BLOCK_STEPS;
    const int64_t pairs = (block->rows + PAIR_ROWS - 1) / PAIR_ROWS, panel_bytes = bytes_of_panel(block->k, PDK_BFLOAT16);
    struct waiting_sums waiting = {0};
    struct next_panels next = {{block->next[0], block->next[1]},
                               rounded_up((panel_bytes + steps * pairs - 1) / (steps * pairs), LINE)};
    for (int64_t k_block = 0; k_block < k_blocks; k_block++) {
        const int64_t first = steps * k_block / k_blocks, end = steps * (k_block + 1) / k_blocks;
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int64_t row = pair * PAIR_ROWS, rows = min_of(PAIR_ROWS, block->rows - row);
            /* Sums that are taken up again have their place; others take turns with those that wait. */
            float *sums = block->sums + (k_blocks > 1 ? pair : pair % 2) * PAIR_FLOATS;
            if (rows > TILE_ROWS)
                sum_steps(how, 2, block, row, first, end, sums, &waiting, &next);
            else
                sum_steps(how, 1, block, row, first, end, sums, &waiting, &next);
            if (k_block + 1 == k_blocks)
                waiting = (struct waiting_sums){sums, row, 0, rows};
        }
    }
    hand_out_some(how, block, &waiting, PAIR_ROWS);
}

static void multiply_linear_block(const struct linear_block *block)
{
    switch (block->end) {
    case STORE:
        run_block(STORE, block);
        break;
    case ADD:
        run_block(ADD, block);
        break;
    case GATE:
        run_block(GATE, block);
        break;
    }
}

#endif
