/* What generic.c and avx2.c offer: one table of kernels each, in the same order. */
#ifndef APRFMT_LEVEL_H
#define APRFMT_LEVEL_H

#include <stddef.h>
#include <stdint.h>

enum { SEGMENT = 4096, TOKENS = 64 }; /* elements, and rows of x, that are taken at a time */

typedef void (*decode_fn)(const uint8_t *raw, float *out, size_t blocks);

typedef struct {
    const char *name;
    uint32_t block_size, type_size; /* elements and bytes of a block */
    decode_fn decode[3];            /* by the way of storing, see sink.h */
    float (*dot)(const uint8_t *raw, const float *x, size_t blocks); /* one row times one x */
} decoder;

/* x is `blocks` whole blocks, `per_row` to a row; importance has one weight for each column, or is
 * NULL. */
typedef void (*encode_fn)(const float *x, uint8_t *out, size_t blocks, size_t per_row,
                          const float *importance);

typedef struct {
    const char *name;
    uint32_t block_size, type_size;
    encode_fn encode[2]; /* strict, fused: whether multiply-adds are rounded once */
} encoder;

typedef struct {
    uint64_t count, finite, zeros, nan, inf;
    double sum, about; /* of finite elements: sum, and sum of squares about the mean */
    float least, most; /* infinity and -infinity if no element is finite */
} moments;

typedef struct {
    const char *name;
    const decoder *decoders; /* both end with a row without name */
    const encoder *encoders;
    void (*apr_q8)(const uint8_t *q, float scale, float *out, size_t n);
    void (*coded)(const uint8_t *packed, const float *absmax, const float *code, size_t block,
                  size_t first, size_t end, float *out, int round, int mode);
    void (*encode_coded)(const float *x, uint8_t *packed, float *absmax, size_t n, size_t block,
                         const float *bounds, const uint8_t *order);
    void (*add_moments)(const float *x, size_t n, moments *m);
    ptrdiff_t (*first_not_finite)(const float *x, size_t n); /* -1: all are finite */
    /* out[t * stride + r] = row r of raw times row t of x [tokens, columns] */
    void (*products)(const decoder *kind, const uint8_t *raw, size_t rows, const float *x,
                     size_t tokens, size_t columns, float *out, size_t stride);
    void (*stream_fill)(float *out, size_t n,
                        int mode); /* the limit that benchmarks compare with */
} level;

extern const level aprfmt_generic;
#if defined(__x86_64__) && !defined(APRFMT_NO_AVX2)
#define APRFMT_HAS_AVX2 1
extern const level aprfmt_avx2;
#endif

/* strings.c: starts[i] becomes the offset of string i's length field; returns the offset after the
 * last string, or SIZE_MAX where one passes the end, with its index in *bad. */
size_t aprfmt_walk_strings(const uint8_t *data, size_t size, size_t offset, size_t count,
                           int swapped, uint64_t *starts, size_t *bad);

#endif
