/* Threads, barriers and their waiting. Linux: futexes and affinities. */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_NS = 20000, YIELD_NS = 50000, PAUSES = 32, LINE_BYTES = 64, PAGE_BYTES = 4096 };

/* A counter that threads wait on until it leaves a value. */
struct signal {
    _Alignas(LINE_BYTES) atomic_uint value;
    atomic_uint sleepers;
};

struct helper {
    struct pdk_pool *pool;
    pthread_t thread;
    int64_t index;
};

struct scratch {
    void *memory;
    int64_t bytes;
};

struct pdk_pool {
    struct signal start;   /* counts regions */
    struct signal arrived; /* counts barriers passed */
    _Alignas(LINE_BYTES) atomic_uint waiting;
    int64_t threads;
    region_function *body;
    void *argument;
    bool stopping;
    struct scratch *scratch;
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

void pool_barrier(struct pdk_pool *pool)
{
    if (pool->threads == 1)
        return;
    const unsigned seen = atomic_load(&pool->arrived.value);
    if (atomic_fetch_add(&pool->waiting, 1) + 1 == (unsigned)pool->threads) {
        atomic_store(&pool->waiting, 0);
        signal_raise(&pool->arrived);
    } else {
        signal_wait(&pool->arrived, seen);
    }
}

static void *help(void *argument)
{
    const struct helper *helper = argument;
    struct pdk_pool *pool = helper->pool;
    for (unsigned seen = 0;; seen++) {
        signal_wait(&pool->start, seen);
        if (pool->stopping)
            return NULL;
        pool->body(pool->argument, helper->index);
        pool_barrier(pool);
    }
}

void pool_run(struct pdk_pool *pool, region_function *body, void *argument)
{
    if (pool->threads > 1) {
        pool->body = body;
        pool->argument = argument;
        signal_raise(&pool->start);
    }
    body(argument, 0);
    pool_barrier(pool);
}

int64_t pool_thread_count(const struct pdk_pool *pool) { return pool->threads; }

void *pool_scratch(struct pdk_pool *pool, int64_t thread, int64_t bytes)
{
    struct scratch *scratch = &pool->scratch[thread];
    if (scratch->bytes < bytes) {
        free(scratch->memory);
        scratch->bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        scratch->memory = aligned_alloc(PAGE_BYTES, (size_t)scratch->bytes);
        if (!scratch->memory)
            scratch->bytes = 0;
    }
    return scratch->memory;
}

/* Pin the helper to the core of its index in the mask. The caller's thread is left alone: it is not ours. */
static void pin(const struct helper *helper, const cpu_set_t *allowed)
{
    int64_t index = 0;
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, allowed) && index++ == helper->index) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(core, &one);
            pthread_setaffinity_np(helper->thread, sizeof one, &one);
        }
}

static bool start_helpers(struct pdk_pool *pool)
{
    cpu_set_t allowed;
    const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    const bool pins = known && pool->threads <= CPU_COUNT(&allowed);
    for (int64_t index = 1; index < pool->threads; index++) {
        struct helper *helper = &pool->helpers[index - 1];
        *helper = (struct helper){.pool = pool, .index = index};
        if (pthread_create(&helper->thread, NULL, help, helper) != 0) {
            pool->threads = index;
            return false;
        }
        if (pins)
            pin(helper, &allowed);
    }
    return true;
}

struct pdk_pool *pdk_pool_create(int64_t thread_count)
{
    struct pdk_pool *pool = aligned_alloc(LINE_BYTES, (sizeof *pool + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
    if (!pool)
        return NULL;
    *pool = (struct pdk_pool){.threads = thread_count};
    pool->scratch = calloc((size_t)thread_count, sizeof *pool->scratch);
    pool->helpers = calloc((size_t)thread_count, sizeof *pool->helpers);
    if (!pool->scratch || !pool->helpers)
        pool->threads = 1;
    if (!pool->scratch || !pool->helpers || !start_helpers(pool)) {
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
    for (int64_t thread = 0; pool->scratch && thread < pool->threads; thread++)
        free(pool->scratch[thread].memory);
    free(pool->scratch);
    free(pool->helpers);
    free(pool);
}
