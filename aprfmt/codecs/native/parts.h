/* What kernels of packed weights, compiled by themselves, give the table of their level; LEVEL names
 * that. What they do is said in level.h. */
#ifndef APRFMT_PARTS_H
#define APRFMT_PARTS_H
#include "level.h"

#define JOINED(level, name) level##_##name
#define NAMED(level, name) JOINED(level, name)
#define OF(name) NAMED(LEVEL, name)

void OF(packed)(const packed *p, float *out, int mode);
void OF(across)(const packed *p, int order, float *room, float *out, int mode);
void OF(turn)(int order, const uint8_t *held, ptrdiff_t down, size_t units, size_t rows,
              uint8_t *out, size_t stride);
void OF(halves)(const nibbles *n, int back);
void OF(regroup)(regrouped *g);

#endif
