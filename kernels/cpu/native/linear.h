/* A linear over all threads, with what is done to its results on the way out. */
#ifndef PDK_LINEAR_H
#define PDK_LINEAR_H

#include "path.h"
#include "pool.h"

struct linear_job {
    const struct pdk_path *path;
    const struct pdk_linear *linear;
    enum linear_end end;
    const void *operand; /* [rows + ROW_PAD][operand_stride(in_features)] */
    int64_t rows;
    void *y;
    int64_t y_stride; /* in elements */
    void *const *scratch; /* [threads] */
};

/* K of a linear's product. What pads an operand's rows up to here must be zero. */
static inline int64_t product_k(int64_t in_features) { return rounded_up(in_features, K_PAD); }

/* Elements from row to row of an operand: an odd multiple of K_PAD, so that rows do not fall on each other in the nearest
 * cache. */
static inline int64_t operand_stride(int64_t in_features)
{
    const int64_t k = product_k(in_features);
    return k / K_PAD % 2 ? k : k + K_PAD;
}

/* Whether GATE can be had: both halves begin on a panel. */
static inline bool can_gate(const struct pdk_linear *linear) { return linear->out_features % (2 * PANEL) == 0; }

/* Up to here a step has few rows: its phases are short, and so a thread computes into memory of its own first and writes
 * when it has settled the piece. */
enum { FEW_ROWS = 12 };

/* Bytes of each thread's scratch for a linear with as many rows. */
int64_t linear_scratch_bytes(const struct pdk_linear *linear, int64_t rows, int64_t threads);

/* The phase of a region that does the job. */
void linear_run(const struct linear_job *job, struct pool_member *self);

/* Round rows of float32 into an operand, its padding zeroed. */
void take_operand(const struct products *products, const float *x, int64_t rows, int64_t size, void *operand);

#endif
