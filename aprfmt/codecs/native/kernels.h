/* All kernels of one level but those of packed weights (weights.h, which takes longer to compile);
 * generic.c and avx2.c define LEVEL and include this. */
#include "lanes.h"
#include "decoders.h"
#include "level.h"
#include "tables.h"
#include "parts.h"

#include "sink.h"

#include "decode_plain.h"
#include "decode_small.h"
#include "decode_k.h"
#include "decode_table.h"
#include "decode_iq.h"
#include "search.h"
#include "encode_k.h"
#include "encode_small.h"
#include "encode_table.h"
#include "moments.h"
#include "distances.h"
#include "apart.h"
#include "dot.h"
#include "step.h"

#define ONE_MODE(fn, suffix, mode)                                                    \
    TARGET static void fn##_##suffix(const uint8_t *raw, float *out, size_t blocks) { \
        sink to = {.kind = mode};                                                     \
        fn(raw, out, blocks, &to);                                                    \
        if (mode != PLAIN) fence();                                                   \
    }

/* Rows times one x: nothing is stored. Kernels only read what they multiply with. */
#define ROW_DOTS(fn, block, size)                                                             \
    TARGET static void fn##_dots(const uint8_t *raw, size_t rows, const float *x,             \
                                 size_t blocks, float *out) {                                 \
        for (; rows--; raw += blocks * size, out++) {                                         \
            sink to;                                                                          \
            to.kind = DOT;                                                                    \
            for (int k = 0; k < 4; k++) to.sum[k] = f_all(0.0f);                              \
            fn(raw, (float *)(uintptr_t)x, blocks, &to);                                      \
            if (block % 32) unturn(to.sum, (blocks * block + 7) / 8);                         \
            *out = lanes_total(to.sum);                                                       \
        }                                                                                     \
    }

#ifdef APRFMT_AVX2
#define DEFINE(fn, name, block, size) \
    ONE_MODE(fn, plain, PLAIN)        \
    ONE_MODE(fn, past32, PAST32) ONE_MODE(fn, past16, PAST16) ROW_DOTS(fn, block, size)
#define ROW(fn, name, block, size) \
    {name, block, size, {fn##_plain, fn##_past32, fn##_past16}, fn##_dots},
#else
#define DEFINE(fn, name, block, size) ONE_MODE(fn, plain, PLAIN) ROW_DOTS(fn, block, size)
#define ROW(fn, name, block, size) \
    {name, block, size, {fn##_plain, fn##_plain, fn##_plain}, fn##_dots},
#endif

DECODERS(DEFINE)

static const decoder DECODER_ROWS[] = {DECODERS(ROW){NULL, 0, 0, {NULL, NULL, NULL}, NULL}};

#define ENCODERS(X)               \
    X(f16, "F16", 1, 2)           \
    X(bf16, "BF16", 1, 2)         \
    X(q4_0, "Q4_0", 32, 18)       \
    X(q4_1, "Q4_1", 32, 20)       \
    X(q5_0, "Q5_0", 32, 22)       \
    X(q5_1, "Q5_1", 32, 24)       \
    X(q8_0, "Q8_0", 32, 34)       \
    X(q2_k, "Q2_K", 256, 84)      \
    X(q3_k, "Q3_K", 256, 110)     \
    X(q4_k, "Q4_K", 256, 144)     \
    X(q5_k, "Q5_K", 256, 176)     \
    X(q6_k, "Q6_K", 256, 210)     \
    X(iq4_nl, "IQ4_NL", 32, 18)   \
    X(iq4_xs, "IQ4_XS", 256, 136) \
    X(tq1_0, "TQ1_0", 256, 54)    \
    X(tq2_0, "TQ2_0", 256, 66)    \
    X(mxfp4, "MXFP4", 32, 17)     \
    X(nvfp4, "NVFP4", 64, 36)

#define ONE_FMA(fn, suffix, fuse)                                                       \
    TARGET static void enc_##fn##_##suffix(const float *x, uint8_t *out, size_t blocks, \
                                           size_t per_row, const float *importance) {   \
        enc_##fn(x, out, blocks, per_row, importance, fuse);                            \
    }
#define DEFINE_ENCODER(fn, name, block, size) ONE_FMA(fn, strict, 0) ONE_FMA(fn, fused, 1)
#define ENCODER_ROW(fn, name, block, size) \
    {name, block, size, {enc_##fn##_strict, enc_##fn##_fused}},

ENCODERS(DEFINE_ENCODER)

static const encoder ENCODER_ROWS[] = {ENCODERS(ENCODER_ROW){NULL, 0, 0, {NULL, NULL}}};

TARGET static void run_encode_coded(const float *x, uint8_t *packed, float *absmax, size_t n,
                                    size_t block, const float *bounds, const uint8_t *order) {
    enc_coded(x, packed, absmax, n, block, bounds, order);
}

TARGET static void run_apr_q8(const uint8_t *q, float scale, float *out, size_t n) {
    sink to = {.kind = PLAIN};
    apr_q8(q, scale, out, n, &to);
}

#define ONE_CODED(round, mode)                                           \
    do {                                                                 \
        sink to = {.kind = mode};                                        \
        coded(packed, absmax, code, block, first, end, out, round, &to); \
    } while (0)

TARGET static void run_coded(const uint8_t *packed, const float *absmax, const float *code,
                             size_t block, size_t first, size_t end, float *out, int round,
                             int mode) {
#ifdef APRFMT_AVX2
    if (round == TO_F32 && mode == PAST32)
        ONE_CODED(TO_F32, PAST32);
    else if (round == TO_F32 && mode == PAST16)
        ONE_CODED(TO_F32, PAST16);
    else
#endif
        if (round == TO_F32)
        ONE_CODED(TO_F32, PLAIN);
    else if (round == TO_BF16)
        ONE_CODED(TO_BF16, PLAIN);
    else
        ONE_CODED(TO_F16, PLAIN);
    if (mode != PLAIN) fence();
}

TARGET static void run_stream_fill(float *out, size_t n, int mode) {
    const vf v = f_all(1.0f);
    sink past32 = {.kind = PAST32}, past16 = {.kind = PAST16}, plain = {.kind = PLAIN};
    for (size_t i = 0; i + 8 <= n; i += 8) {
        if (mode == PAST32)
            put(out + i, v, &past32);
        else if (mode == PAST16)
            put(out + i, v, &past16);
        else
            put(out + i, v, &plain);
    }
    fence();
}

TARGET static void run_products(const decoder *kind, const uint8_t *raw, size_t rows,
                                const float *x, size_t tokens, size_t columns, float *out,
                                size_t stride) {
    const size_t blocks = columns / kind->block_size, bytes = blocks * kind->type_size;
    if (tokens == 1) {
        kind->dots(raw, rows, x, blocks, out);
        return;
    }
    for (size_t r = 0; r < rows; r++) {
        const uint8_t *row = raw + r * bytes;
        for (size_t t = 0; t < tokens; t += TOKENS) {
            const size_t now = tokens - t < TOKENS ? tokens - t : TOKENS;
            row_products(kind->decode[0], kind, row, x + t * columns, now, columns,
                         out + r + t * stride, stride);
        }
    }
}

TARGET static void run_add_moments(const float *x, size_t n, moments *m) {
    for (size_t i = 0; i < n; i += SEGMENT) segment(x + i, n - i < SEGMENT ? n - i : SEGMENT, m);
}

TARGET static ptrdiff_t run_first_not_finite(const float *x, size_t n) {
    for (size_t i = 0; i < n; i += SEGMENT) {
        size_t count = n - i < SEGMENT ? n - i : SEGMENT;
        size_t at = not_finite(x + i, count);
        if (at < count) return (ptrdiff_t)(i + at);
    }
    return -1;
}

TARGET static void run_add_changes(const float *x, const float *y, size_t n, changes *c) {
    for (size_t i = 0; i < n; i += SEGMENT)
        add_changes(x + i, y + i, n - i < SEGMENT ? n - i : SEGMENT, c);
}

TARGET static int run_add_distances(const two_arrays *p, distances *d) {
    switch (p->kind) {
    case NO_STEPS: return add_distances(p, NO_STEPS, d);
    case STEP_OF_ALL: return add_distances(p, STEP_OF_ALL, d);
    case STEPS_F32: return add_distances(p, STEPS_F32, d);
    default: return add_distances(p, STEPS_F64, d);
    }
}

TARGET static size_t run_first_apart(const two_arrays *p, double most) {
    return first_apart(p, most);
}

TARGET static void run_measure_apart(const float *x, const float *y, size_t n,
                                     apart_from *found) {
    measure_apart(x, y, n, found);
}

const level LEVEL = {
    LEVEL_NAME,       DECODER_ROWS,    ENCODER_ROWS,         run_apr_q8,   run_coded,
    run_encode_coded, run_add_moments, run_first_not_finite, run_add_changes, run_add_distances,
    run_first_apart,  run_measure_apart, run_products,       run_stream_fill, run_activate,
    run_rms_norm,     run_rope,        run_scores,           run_probs,    run_mix,
    OF(packed),       OF(across),      OF(turn),             OF(halves),   OF(regroup),
};
