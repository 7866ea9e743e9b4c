/* One piece of work at a time. Every thread takes the parts of its own span in order, so that it
 * reads memory in order too, and then what is left of the others'. The pool's threads never touch
 * Python; they start when they are first needed, and again in a process made by fork.
 *
 * A step of decoding does hundreds of products of 20 to 500 microseconds, one after another. Waking
 * a sleeping thread takes about 50, so a thread that is done looks out for more for SPIN_NS. */
#define _POSIX_C_SOURCE 200809L
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() sched_yield()
#endif

enum { MOST_THREADS = 64, SPIN_NS = 100000, PAUSES = 32, LINE = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, busy = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static size_t started; /* under `busy` */

static struct {
    atomic_size_t next;
    size_t end;
    char apart[LINE - 2 * sizeof(size_t)]; /* no two on one cache line */
} spans[MOST_THREADS];

static struct {
    part_fn fn;
    void *work;
    size_t threads;                     /* and spans */
    atomic_size_t number, open, inside; /* counts pieces of work; may be joined; have joined */
    atomic_size_t sleeping;
} job;

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void take_parts(size_t thread) {
    for (size_t i = 0; i < job.threads; i++) {
        const size_t span = (thread + i) % job.threads;
        for (size_t part; (part = atomic_fetch_add(&spans[span].next, 1)) < spans[span].end;)
            job.fn(job.work, part);
    }
}

/* Return when there is other work than number `seen`. */
static void wait_for_work(size_t seen) {
    const long end = now_ns() + SPIN_NS;
    while (now_ns() < end) {
        for (int i = 0; i < PAUSES; i++) {
            if (atomic_load(&job.number) != seen) return;
            PAUSE();
        }
    }
    pthread_mutex_lock(&lock);
    atomic_fetch_add(&job.sleeping, 1);
    while (atomic_load(&job.number) == seen) pthread_cond_wait(&wake, &lock);
    atomic_fetch_sub(&job.sleeping, 1);
    pthread_mutex_unlock(&lock);
}

static void *help(void *index) {
    size_t seen = 0;
    for (;;) {
        wait_for_work(seen);
        seen = atomic_load(&job.number);
        /* Who is counted before `open` is read is waited for. */
        atomic_fetch_add(&job.inside, 1);
        if (atomic_load(&job.open) && (size_t)index < job.threads) take_parts((size_t)index);
        atomic_fetch_sub(&job.inside, 1);
    }
    return NULL;
}

/* A child has none of its parent's threads, and locks as they were held. */
static void forget(void) {
    static const pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static const pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
    lock = busy = mutex;
    wake = condition;
    started = 0;
    atomic_store(&job.open, 0);
    atomic_store(&job.inside, 0);
    atomic_store(&job.sleeping, 0);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget); }

/* Signals are for the program's own threads: one that a helper took would interrupt nothing. */
static void start(size_t wanted) {
    pthread_attr_t attributes;
    sigset_t all, before;
    if (started >= wanted || pthread_attr_init(&attributes)) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    for (pthread_t thread; started < wanted; started++) {
        if (pthread_create(&thread, &attributes, help, (void *)(started + 1))) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void aprfmt_share(part_fn fn, void *work, size_t parts, ptrdiff_t wanted) {
    size_t threads = wanted > 1 ? (size_t)wanted : 1;
    if (threads > parts) threads = parts;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads <= 1 || pthread_mutex_trylock(&busy)) {
        for (size_t part = 0; part < parts; part++) fn(work, part);
        return;
    }
    pthread_once(&once, watch_forks);
    start(threads - 1);
    job.fn = fn;
    job.work = work;
    job.threads = threads;
    for (size_t i = 0; i < threads; i++) {
        atomic_store(&spans[i].next, parts * i / threads);
        spans[i].end = parts * (i + 1) / threads;
    }
    atomic_store(&job.open, 1);
    atomic_fetch_add(&job.number, 1);
    if (atomic_load(&job.sleeping)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    take_parts(0);
    atomic_store(&job.open, 0);
    for (size_t tries = 0; atomic_load(&job.inside); tries++) {
        if (tries % 1024 == 1023)
            sched_yield();
        else
            PAUSE();
    }
    pthread_mutex_unlock(&busy);
}
