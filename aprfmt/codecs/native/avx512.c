/* The avx2 kernels, with the products of single rows in sixteen lanes. */
#include "decoders.h"
#include "level.h"
#ifdef APRFMT_HAS_AVX512
#define APRFMT_AVX2 1
#define APRFMT_AVX512 1
#include "lanes.h"
#include "tables.h"

#include "sink.h"

#include "decode_k.h"
#include "decode_small.h"
#include "decode_table.h"
#include "dot.h"
#include "dot512.h"

#define DOTS(X) \
    X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(mxfp4)

/* `count` rows side by side, a constant wherever this is inlined. Input is asked for AHEAD of its
 * use, at a row's end that of the rows `count` further on. */
#define DEFINE(fn)                                                                                 \
    FN void fn##_some(const uint8_t *raw, int count, const float *x, size_t blocks,                \
                      float *out) {                                                                \
        const size_t bytes = blocks * fn##_SIZE, more = bytes * (size_t)(count - 1);               \
        sums s[ROWS];                                                                              \
        for (int r = 0; r < count; r++) s[r].first = s[r].second = _mm512_setzero_ps();            \
        for (size_t at = 0; at < bytes; at += fn##_SIZE, x += fn##_BLOCK) {                        \
            const size_t next = at + AHEAD < bytes ? at + AHEAD : at + AHEAD + more;               \
            for (int r = 0; r < count; r++) {                                                      \
                const uint8_t *row = raw + bytes * (size_t)r;                                      \
                for (size_t i = 0; i < fn##_SIZE; i += 64)                                         \
                    __builtin_prefetch(row + next + i, 0, 2);                                      \
                block_##fn(row + at, x, s + r);                                                    \
            }                                                                                      \
        }                                                                                          \
        for (int r = 0; r < count; r++) out[r] = sums_total(s[r]);                                 \
    }                                                                                              \
    TARGET static void fn##_dots(const uint8_t *raw, size_t rows, const float *x,                  \
                                 size_t blocks, float *out) {                                      \
        size_t r = 0;                                                                              \
        for (; r + ROWS <= rows; r += ROWS)                                                        \
            fn##_some(raw + r * blocks * fn##_SIZE, ROWS, x, blocks, out + r);                     \
        for (; r < rows; r++) fn##_some(raw + r * blocks * fn##_SIZE, 1, x, blocks, out + r);      \
    }

DOTS(DEFINE)

static decoder decoders[DECODER_COUNT + 1]; /* the last has no name */
level aprfmt_avx512;

#define TAKE(fn) decoders[fn##_AT].dots = fn##_dots;

void aprfmt_fill_avx512(void) {
    memcpy(decoders, aprfmt_avx2.decoders, sizeof decoders);
    DOTS(TAKE)
    aprfmt_avx512 = aprfmt_avx2;
    aprfmt_avx512.name = "avx512";
    aprfmt_avx512.decoders = decoders;
}
#endif
