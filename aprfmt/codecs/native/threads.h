/* A pool of threads for work of microseconds: they wait actively for a moment before they sleep. */
#ifndef APRFMT_THREADS_H
#define APRFMT_THREADS_H

#include <stddef.h>

typedef void (*part_fn)(void *work, size_t part);

/* Call fn(work, part) once for every part below `parts`, on at most `threads` threads, the caller
 * among them (alone for one and less); returns when all are done. Where another thread is in here already, the caller does
 * its parts alone. */
void aprfmt_share(part_fn fn, void *work, size_t parts, ptrdiff_t threads);

#endif
