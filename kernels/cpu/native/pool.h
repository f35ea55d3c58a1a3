/* A worker's threads. The caller is thread 0; helpers are pinned one to a core while there are cores enough.
 *
 * A region runs one function on all threads; inside it they meet at barriers. Whoever waits spins for some microseconds,
 * then offers its core to others, then sleeps: several workers may share a core, and between regions helpers sleep.
 */
#ifndef PDK_POOL_H
#define PDK_POOL_H

#include <stdatomic.h>
#include <stdint.h>

#include "abi.h"

typedef void region_function(void *argument, int64_t thread);

int64_t pool_thread_count(const struct pdk_pool *pool);

/* Run `body` on all threads and return when all are through. */
void pool_run(struct pdk_pool *pool, region_function *body, void *argument);

/* Wait inside a region until all threads are here. */
void pool_barrier(struct pdk_pool *pool);

/* Memory of a thread's own, at least `bytes`, aligned to a page; its content does not last. NULL: there is none. Called
 * outside of regions. */
void *pool_scratch(struct pdk_pool *pool, int64_t thread, int64_t bytes);

/* The equal share of `count` that is a thread's: [*first, *end). */
static inline void share_of(int64_t count, int64_t thread, int64_t threads, int64_t *first, int64_t *end)
{
    *first = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

#endif
