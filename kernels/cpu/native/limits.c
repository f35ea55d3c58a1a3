/* What the machine can do at best, to measure the kernels against: reading, and multiplying out of the nearest cache. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "path.h"
#include "pool.h"

enum { PREFETCH_BYTES = 2048, PRODUCT_ROWS = 48, PRODUCT_K = 256, PRODUCT_PANELS = 2, PRODUCT_ROUNDS = 25 };

static double seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

struct reading {
    struct pdk_pool *pool;
    const char *memory;
    int64_t bytes;
    uint64_t sums[256][8]; /* by thread; so that no read can be left out */
};

typedef uint64_t wide __attribute__((vector_size(32)));

static void read_piece(void *argument, int64_t thread, struct piece *piece)
{
    struct reading *reading = argument;
    int64_t first, end;
    if (!pool_settle(piece))
        return;
    share_of(reading->bytes / LINE, piece->index, piece->count, &first, &end);
    wide sums[4] = {{0}};
    for (int64_t line = first; line + 1 < end; line += 2) {
        const char *from = reading->memory + line * LINE;
        __builtin_prefetch(from + PREFETCH_BYTES);
        __builtin_prefetch(from + PREFETCH_BYTES + LINE);
        for (int i = 0; i < 4; i++) {
            wide value;
            memcpy(&value, from + i * sizeof value, sizeof value);
            sums[i] ^= value;
        }
    }
    sums[0] ^= sums[1] ^ sums[2] ^ sums[3];
    memcpy(reading->sums[thread % 256], sums, sizeof sums[0]);
}

static void read_all(void *argument, struct pool_member *self)
{
    pool_phase(self, PIECES_A_THREAD, read_piece, argument);
}

double pdk_read_rate(struct pdk_pool *pool, const void *memory, int64_t bytes, int64_t repeats)
{
    struct reading reading = {.pool = pool, .memory = memory, .bytes = bytes};
    double best = 0.0;
    for (int64_t i = 0; i < repeats; i++) {
        const double began = seconds();
        pool_run(pool, read_all, &reading);
        const double rate = (double)bytes / (seconds() - began);
        best = rate > best ? rate : best;
    }
    return best;
}

struct multiplying {
    const struct pdk_path *path;
    const struct products *products;
    struct pdk_pool *pool;
    char *panels;
    char *operand;
    float *results; /* one block a thread */
};

static void multiply_piece(void *argument, int64_t thread, struct piece *piece)
{
    const struct multiplying *work = argument;
    /* Where bfloat16 is widened, float32's products are the limit. */
    const bool halves = work->products->operand_bytes == 2;
    product_function *product = halves ? work->products->product : work->path->products[PDK_FLOAT32].product;
    const int64_t panel_bytes = PRODUCT_K * PANEL * (halves ? 2 : 4);
    const char *chunk = work->panels;
    const struct panels panels = {&chunk, PRODUCT_K, PRODUCT_K, panel_bytes, PRODUCT_PANELS, NULL};
    float *result = work->results + thread * PRODUCT_ROWS * PRODUCT_PANELS * PANEL;
    for (int64_t round = 0; pool_settle(piece) && round < PRODUCT_ROUNDS; round++)
        product(work->operand, PRODUCT_K, PRODUCT_ROWS, &panels, result, PRODUCT_PANELS * PANEL, false);
}

static void multiply_all(void *argument, struct pool_member *self)
{
    const struct multiplying *work = argument;
    work->path->begin();
    pool_phase(self, PIECES_A_THREAD, multiply_piece, argument);
    work->path->end();
}

double pdk_product_rate(const struct pdk_path *path, struct pdk_pool *pool, int64_t dtype, int64_t repeats)
{
    const int64_t threads = pool_thread_count(pool);
    struct multiplying work = {.path = path, .products = &path->products[dtype], .pool = pool};
    work.panels = aligned_alloc(LINE, PRODUCT_K * PRODUCT_PANELS * PANEL * 4);
    work.operand = aligned_alloc(LINE, PRODUCT_ROWS * PRODUCT_K * 4);
    work.results = aligned_alloc(LINE, (size_t)threads * PRODUCT_ROWS * PRODUCT_PANELS * PANEL * 4);
    double best = 0.0;
    if (work.panels && work.operand && work.results) {
        memset(work.panels, 0, PRODUCT_K * PRODUCT_PANELS * PANEL * 4);
        memset(work.operand, 0, PRODUCT_ROWS * PRODUCT_K * 4);
        for (int64_t i = 0; i < repeats; i++) {
            const double began = seconds();
            pool_run(pool, multiply_all, &work);
            const double count = 2.0 * PRODUCT_ROWS * PRODUCT_K * PRODUCT_PANELS * PANEL
                                 * PRODUCT_ROUNDS * PIECES_A_THREAD * (double)threads;
            const double rate = count / (seconds() - began);
            best = rate > best ? rate : best;
        }
    }
    free(work.panels);
    free(work.operand);
    free(work.results);
    return best;
}
