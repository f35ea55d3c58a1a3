/* A worker's threads. The caller is thread 0; helpers are pinned one to a core, none to the caller's, while there are cores
 * enough.
 *
 * A region runs one function on the caller and on whatever helpers come while it runs. All of them go through the same
 * phases, and a phase is cut into pieces that are taken one by one: a thread's own first, then those that the others
 * have not come to. So a thread that the machine keeps from its core costs what it would have computed, not a wait: what
 * it had begun is computed again by another one after some microseconds, and whoever settles a piece first writes it.
 *
 * A thread may therefore be phases behind the others. It then reads what they are overwriting, and nobody sees what it
 * makes of that, as it can no longer settle. Whoever waits spins, then offers its core to others, then sleeps: several
 * workers may share a core, and between regions helpers sleep.
 */
#ifndef PDK_POOL_H
#define PDK_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"

enum { PIECES_A_THREAD = 16 }; /* at most */

/* One thread in a region. */
struct pool_member {
    struct pdk_pool *pool;
    int64_t thread;
    uint64_t phase; /* how many it has begun, over all regions */
};

/* A piece of a phase: the `index`th of `count`. */
struct piece {
    int64_t index;
    int64_t count;
    atomic_ullong *state; /* NULL: there is nobody else */
    uint64_t claimed;
    bool settled;
};

typedef void region_function(void *argument, struct pool_member *self);
typedef void piece_function(void *argument, int64_t thread, struct piece *piece);

int64_t pool_thread_count(const struct pdk_pool *pool);

/* Run `body` on all threads that come, and return when all who came are through. */
void pool_run(struct pdk_pool *pool, region_function *body, void *argument);

/* The region's next phase, in `pieces_a_thread` pieces for each thread; all of them are complete on return. `body` must
 * settle a piece before it writes anything that others see. Once settled, a piece is waited for, however long. */
void pool_phase(struct pool_member *self, int64_t pieces_a_thread, piece_function *body, void *argument);

/* A phase of one piece that only the caller's thread may do. */
void pool_solo(struct pool_member *self, piece_function *body, void *argument);

/* Whether the piece is still to be written. False: another thread has done so; leave it. */
bool pool_settle(struct piece *piece);

/* Memory of a thread's own, at least `bytes`, aligned to a page; its content does not last. NULL: there is none. Called
 * outside of regions. */
void *pool_scratch(struct pdk_pool *pool, int64_t thread, int64_t bytes);

/* The same for all threads together: memory of the call that is running. New pages at each call would take as long as a
 * small product. */
void *pool_shared(struct pdk_pool *pool, int64_t bytes);

/* Share `index` of `count` things that are divided into `shares` equal ones: [*first, *end). */
static inline void share_of(int64_t count, int64_t index, int64_t shares, int64_t *first, int64_t *end)
{
    *first = count * index / shares;
    *end = count * (index + 1) / shares;
}

/* As many pieces a thread as give each piece one of `count` things, as far as that goes. */
static inline int64_t pieces_for(int64_t count, int64_t threads)
{
    const int64_t wanted = (count + threads - 1) / threads;
    return threads == 1 || wanted < 1 ? 1 : wanted < PIECES_A_THREAD ? wanted : PIECES_A_THREAD;
}

#endif
