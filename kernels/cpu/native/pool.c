/* Threads, regions, phases and their waiting. Linux: futexes and affinities. */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    PATIENCE_NS = 20000, /* how long a piece that another thread has begun is waited for before it is computed again */
    SPIN_NS = 20000,
    YIELD_NS = 50000,
    PAUSES = 32,
    LINE_BYTES = 64,
    PAGE_BYTES = 4096,
};


/* What a piece's state says of phase `p`: p * STATES, and one of these added. It only grows. */
enum { CLAIMED = 1, SETTLED = 2, DONE = 3, STATES = 4 };

#define OPEN (UINT64_C(1) << 63) /* in a gate's count: the region may be entered */

/* A counter that threads wait on until it leaves a value. */
struct signal {
    _Alignas(LINE_BYTES) atomic_uint value;
    atomic_uint sleepers;
};

struct helper {
    struct pdk_pool *pool;
    pthread_t thread;
    int64_t index;
    int core; /* that it is pinned to */
};

struct scratch {
    void *memory;
    int64_t bytes;
};

/* The states of a thread's pieces, in lines of their own. */
struct pieces {
    _Alignas(LINE_BYTES) atomic_ullong states[PIECES_A_THREAD];
};

struct pdk_pool {
    struct signal start;    /* counts regions */
    struct signal progress; /* leaves its value when somebody may be waiting */
    _Alignas(LINE_BYTES) atomic_ullong entered; /* how often helpers came into a region, and OPEN */
    atomic_ullong left;                         /* how often one went */
    int64_t threads;
    region_function *body;
    void *argument;
    uint64_t phase; /* of the last one, between regions */
    int caller_core; /* where the caller last was; -1: nobody is pinned */
    bool stopping;
    struct pieces *pieces; /* [threads] */
    struct scratch *scratch;  /* the one that all share, and each thread's own */
    int64_t scratch_count;
    struct helper *helpers; /* threads - 1 */
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void pause_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void signal_raise(struct signal *signal)
{
    atomic_fetch_add(&signal->value, 1);
    if (atomic_load(&signal->sleepers))
        syscall(SYS_futex, &signal->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* Wait until the signal leaves `seen`. */
static void signal_wait(struct signal *signal, unsigned seen)
{
    const int64_t began = now_ns();
    for (int64_t waited = 0; waited < YIELD_NS; waited = now_ns() - began) {
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load_explicit(&signal->value, memory_order_acquire) != seen)
                return;
            pause_core();
        }
        if (waited > SPIN_NS)
            sched_yield();
    }
    atomic_fetch_add(&signal->sleepers, 1);
    while (atomic_load(&signal->value) == seen)
        syscall(SYS_futex, &signal->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&signal->sleepers, 1);
}

/* Whether `counter` comes to `wanted` within `limit_ns`. */
static bool comes_to(atomic_ullong *counter, uint64_t wanted, int64_t limit_ns)
{
    const int64_t began = now_ns();
    for (int64_t waited = 0;; waited = now_ns() - began) {
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load_explicit(counter, memory_order_acquire) >= wanted)
                return true;
            pause_core();
        }
        if (waited >= limit_ns)
            return false;
        if (waited > SPIN_NS)
            sched_yield();
    }
}

/* Wait until `counter` comes to `wanted`. Whoever moves a counter calls `tell` after it. */
static void wait_for(struct pdk_pool *pool, atomic_ullong *counter, uint64_t wanted)
{
    if (comes_to(counter, wanted, YIELD_NS))
        return;
    struct signal *progress = &pool->progress;
    atomic_fetch_add(&progress->sleepers, 1);
    for (;;) {
        const unsigned seen = atomic_load(&progress->value);
        if (atomic_load(counter) >= wanted)
            break;
        syscall(SYS_futex, &progress->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    }
    atomic_fetch_sub(&progress->sleepers, 1);
}

static void tell(struct pdk_pool *pool)
{
    if (atomic_load(&pool->progress.sleepers))
        signal_raise(&pool->progress);
}

#ifdef PDK_STALLS
/* For tests: every fifth time a thread is kept from its core when it is about to settle, for phases on end. */
static void stall(void)
{
    static atomic_uint count;
    if (atomic_fetch_add(&count, 1) % 5 == 0)
        nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
}
#endif

bool pool_settle(struct piece *piece)
{
    unsigned long long claimed = piece->claimed;
    if (piece->settled || !piece->state)
        return true;
#ifdef PDK_STALLS
    stall();
#endif
    piece->settled = atomic_compare_exchange_strong(piece->state, &claimed, claimed - CLAIMED + SETTLED);
    return piece->settled;
}

/* Compute a piece that is claimed; by others as well, perhaps. */
static void compute(struct pool_member *self, struct piece piece, piece_function *body, void *argument)
{
    body(argument, self->thread, &piece);
    if (pool_settle(&piece)) {
        atomic_store(piece.state, piece.claimed - CLAIMED + DONE);
        tell(self->pool);
    }
}

static struct piece piece_of(struct pool_member *self, int64_t index, int64_t pieces_a_thread)
{
    struct pieces *owner = &self->pool->pieces[index / pieces_a_thread];
    return (struct piece){
        .index = index,
        .count = pieces_a_thread * self->pool->threads,
        .state = &owner->states[index % pieces_a_thread],
        .claimed = self->phase * STATES + CLAIMED,
    };
}

/* The piece, if nobody has begun it. */
static void take(struct pool_member *self, struct piece piece, piece_function *body, void *argument)
{
    unsigned long long state = atomic_load_explicit(piece.state, memory_order_acquire);
    if (state < piece.claimed && atomic_compare_exchange_strong(piece.state, &state, piece.claimed))
        compute(self, piece, body, argument);
}

/* What others have begun: wait for it a little, then compute it too. */
static void complete(struct pool_member *self, struct piece piece, piece_function *body, void *argument)
{
    const uint64_t done = piece.claimed - CLAIMED + DONE;
    if (comes_to(piece.state, done, PATIENCE_NS))
        return;
    if (atomic_load(piece.state) == piece.claimed)
        compute(self, piece, body, argument);
    wait_for(self->pool, piece.state, done);
}

void pool_phase(struct pool_member *self, int64_t pieces_a_thread, piece_function *body, void *argument)
{
    const int64_t count = pieces_a_thread * self->pool->threads, first = self->thread * pieces_a_thread;
    self->phase++;
    if (self->pool->threads == 1) {
        for (int64_t index = 0; index < count; index++)
            body(argument, 0, &(struct piece){.index = index, .count = count});
        return;
    }
    for (int64_t index = first; index < first + pieces_a_thread; index++)
        take(self, piece_of(self, index, pieces_a_thread), body, argument);
    for (int64_t index = first + count - 1; index >= first + pieces_a_thread; index--) /* from where their owners end */
        take(self, piece_of(self, index % count, pieces_a_thread), body, argument);
    for (int64_t index = 0; index < count; index++)
        complete(self, piece_of(self, index, pieces_a_thread), body, argument);
}

void pool_solo(struct pool_member *self, piece_function *body, void *argument)
{
    self->phase++;
    struct piece piece = piece_of(self, 0, 1);
    if (self->pool->threads == 1) {
        piece.state = NULL;
        body(argument, 0, &piece);
    } else if (self->thread == 0) {
        take(self, piece, body, argument);
    } else {
        wait_for(self->pool, piece.state, piece.claimed - CLAIMED + DONE);
    }
}

static void pin(struct helper *helper, int core)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    helper->core = core;
    pthread_setaffinity_np(helper->thread, sizeof one, &one);
}

/* The caller's thread is not ours to pin: the helper whose core it has come to changes to the one that it has left. */
static void leave_core_to_caller(struct pdk_pool *pool)
{
    const int here = sched_getcpu();
    if (pool->caller_core < 0 || here == pool->caller_core)
        return;
    for (int64_t index = 1; index < pool->threads; index++)
        if (pool->helpers[index - 1].core == here)
            pin(&pool->helpers[index - 1], pool->caller_core);
    pool->caller_core = here;
}

/* Pin helpers to the cores of their indices in the mask, while there are cores enough. */
static void pin_helpers(struct pdk_pool *pool)
{
    cpu_set_t allowed;
    int64_t index = 0;
    pool->caller_core = -1;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || pool->threads > CPU_COUNT(&allowed))
        return;
    for (int core = 0; core < CPU_SETSIZE && index < pool->threads; core++)
        if (CPU_ISSET(core, &allowed)) {
            if (index == 0)
                pool->caller_core = core;
            else
                pin(&pool->helpers[index - 1], core);
            index++;
        }
}

/* Come into the region that is open, if any. */
static bool enter(struct pdk_pool *pool)
{
    unsigned long long entered = atomic_load(&pool->entered);
    while (entered & OPEN)
        if (atomic_compare_exchange_weak(&pool->entered, &entered, entered + 1))
            return true;
    return false;
}

static void *help(void *argument)
{
    const struct helper *helper = argument;
    struct pdk_pool *pool = helper->pool;
    for (unsigned seen = 0;;) {
        signal_wait(&pool->start, seen);
        seen = atomic_load(&pool->start.value);
        if (pool->stopping)
            return NULL;
        if (!enter(pool))
            continue;
        struct pool_member self = {pool, helper->index, pool->phase};
        pool->body(pool->argument, &self);
        atomic_fetch_add(&pool->left, 1);
        tell(pool);
    }
}

void pool_run(struct pdk_pool *pool, region_function *body, void *argument)
{
    struct pool_member self = {pool, 0, pool->phase};
    if (pool->threads == 1) {
        body(argument, &self);
        return;
    }
    pool->body = body;
    pool->argument = argument;
    leave_core_to_caller(pool);
    atomic_fetch_or(&pool->entered, OPEN);
    signal_raise(&pool->start);
    body(argument, &self);
    const uint64_t entered = atomic_fetch_and(&pool->entered, ~OPEN) & ~OPEN;
    wait_for(pool, &pool->left, entered);
    pool->phase = self.phase;
}

int64_t pool_thread_count(const struct pdk_pool *pool) { return pool->threads; }

static void *scratch_of(struct scratch *scratch, int64_t bytes)
{
    if (scratch->bytes < bytes) {
        free(scratch->memory);
        scratch->bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        scratch->memory = aligned_alloc(PAGE_BYTES, (size_t)scratch->bytes);
        if (!scratch->memory)
            scratch->bytes = 0;
    }
    return scratch->memory;
}

void *pool_scratch(struct pdk_pool *pool, int64_t thread, int64_t bytes)
{
    return scratch_of(&pool->scratch[1 + thread], bytes);
}

void *pool_shared(struct pdk_pool *pool, int64_t bytes) { return scratch_of(&pool->scratch[0], bytes); }

static bool start_helpers(struct pdk_pool *pool)
{
    for (int64_t index = 1; index < pool->threads; index++) {
        struct helper *helper = &pool->helpers[index - 1];
        *helper = (struct helper){.pool = pool, .index = index};
        if (pthread_create(&helper->thread, NULL, help, helper) != 0) {
            pool->threads = index;
            return false;
        }
    }
    pin_helpers(pool);
    return true;
}

struct pdk_pool *pdk_pool_create(int64_t thread_count)
{
    struct pdk_pool *pool = aligned_alloc(LINE_BYTES, (sizeof *pool + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
    if (!pool)
        return NULL;
    *pool = (struct pdk_pool){.threads = thread_count, .scratch_count = 1 + thread_count};
    pool->pieces = aligned_alloc(LINE_BYTES, (size_t)thread_count * sizeof *pool->pieces);
    pool->scratch = calloc((size_t)pool->scratch_count, sizeof *pool->scratch);
    pool->helpers = calloc((size_t)thread_count, sizeof *pool->helpers);
    const bool ready = pool->pieces && pool->scratch && pool->helpers;
    if (ready)
        memset(pool->pieces, 0, (size_t)thread_count * sizeof *pool->pieces);
    else
        pool->threads = 1;
    if (!ready || !start_helpers(pool)) {
        pdk_pool_destroy(pool);
        return NULL;
    }
    return pool;
}

void pdk_pool_destroy(struct pdk_pool *pool)
{
    if (!pool)
        return;
    pool->stopping = true;
    signal_raise(&pool->start);
    for (int64_t index = 1; index < pool->threads; index++)
        pthread_join(pool->helpers[index - 1].thread, NULL);
    for (int64_t i = 0; pool->scratch && i < pool->scratch_count; i++)
        free(pool->scratch[i].memory);
    free(pool->pieces);
    free(pool->scratch);
    free(pool->helpers);
    free(pool);
}
