/* The avx2 kernels, with the products of single rows in sixteen lanes. */
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

#define DOTS(X)                   \
    X(q4_0, "Q4_0", 32, 18)       \
    X(q4_1, "Q4_1", 32, 20)       \
    X(q5_0, "Q5_0", 32, 22)       \
    X(q5_1, "Q5_1", 32, 24)       \
    X(q8_0, "Q8_0", 32, 34)       \
    X(q4_k, "Q4_K", 256, 144)     \
    X(q5_k, "Q5_K", 256, 176)     \
    X(q6_k, "Q6_K", 256, 210)     \
    X(iq4_nl, "IQ4_NL", 32, 18)   \
    X(mxfp4, "MXFP4", 32, 17)

/* `count` rows side by side, a constant wherever this is inlined. Input is asked for AHEAD of its
 * use, at a row's end that of the rows `count` further on. */
#define DEFINE(fn, name, block, size)                                                          \
    FN void fn##_some(const uint8_t *raw, int count, const float *x, size_t blocks,            \
                      float *out) {                                                            \
        const size_t bytes = blocks * size, more = bytes * (size_t)(count - 1);                \
        sums s[ROWS];                                                                          \
        for (int r = 0; r < count; r++) s[r].first = s[r].second = _mm512_setzero_ps();        \
        for (size_t at = 0; at < bytes; at += size, x += block) {                              \
            const size_t next = at + AHEAD < bytes ? at + AHEAD : at + AHEAD + more;           \
            for (int r = 0; r < count; r++) {                                                  \
                const uint8_t *row = raw + bytes * (size_t)r;                                  \
                for (size_t i = 0; i < size; i += 64) __builtin_prefetch(row + next + i, 0, 2);      \
                block_##fn(row + at, x, s + r);                                                \
            }                                                                                  \
        }                                                                                      \
        for (int r = 0; r < count; r++) out[r] = sums_total(s[r]);                             \
    }                                                                                          \
    TARGET static void fn##_dots(const uint8_t *raw, size_t rows, const float *x,              \
                                 size_t blocks, float *out) {                                  \
        size_t r = 0;                                                                          \
        for (; r + ROWS <= rows; r += ROWS)                                                    \
            fn##_some(raw + r * blocks * size, ROWS, x, blocks, out + r);                      \
        for (; r < rows; r++) fn##_some(raw + r * blocks * size, 1, x, blocks, out + r);       \
    }
#define ROW(fn, name, block, size) {name, fn##_dots},

DOTS(DEFINE)

static const struct {
    const char *name;
    dots_fn dots;
} TABLE[] = {DOTS(ROW)};

enum { MOST = 64 };
static decoder decoders[MOST];
level aprfmt_avx512;

void aprfmt_fill_avx512(void) {
    size_t count = 0;
    do {
        decoders[count] = aprfmt_avx2.decoders[count];
        for (size_t i = 0; decoders[count].name && i < sizeof TABLE / sizeof *TABLE; i++) {
            if (!strcmp(decoders[count].name, TABLE[i].name))
                decoders[count].dots = TABLE[i].dots;
        }
    } while (decoders[count++].name && count < MOST);
    aprfmt_avx512 = aprfmt_avx2;
    aprfmt_avx512.name = "avx512";
    aprfmt_avx512.decoders = decoders;
}
#endif
