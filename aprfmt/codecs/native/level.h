/* What generic.c and avx2.c offer: one table of kernels each, in the same order. */
#ifndef APRFMT_LEVEL_H
#define APRFMT_LEVEL_H

#include <stddef.h>
#include <stdint.h>

enum { SEGMENT = 4096, TOKENS = 64 }; /* elements, and rows of x, that are taken at a time */

typedef void (*decode_fn)(const uint8_t *raw, float *out, size_t blocks);
typedef void (*dots_fn)(const uint8_t *raw, size_t rows, const float *x, size_t blocks,
                        float *out); /* `blocks` of one row */

typedef struct {
    const char *name;
    uint32_t block_size, type_size; /* elements and bytes of a block */
    decode_fn decode[3];            /* by the way of storing, see sink.h */
    dots_fn dots;                   /* rows times one x */
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

/* How a second rounding changed numbers. */
typedef struct {
    size_t differ, over, under;
} changes;

/* What a step of two arrays is given as. */
typedef enum { NO_STEPS, STEP_OF_ALL, STEPS_F32, STEPS_F64 } steps_kind;

/* Two arrays and how far apart their elements may be; one of `step`, `floats` and `doubles` counts,
 * as `kind` says. */
typedef struct {
    const float *x, *y;
    size_t count;
    steps_kind kind;
    double step;
    const float *floats;
    const double *doubles;
} two_arrays;

/* How far two arrays are apart: elements that differ, and those more than a step apart; the largest
 * distance in float32 numbers (ulp), of values (most), and in steps (off); sums of squares of x - y,
 * x and y, and of products. */
typedef struct {
    uint64_t changed, beyond;
    uint32_t ulp;
    double dd, aa, bb, ab, most, off;
} distances;

/* How far x is from a reference y, elements that are not finite on both sides left out of the sums:
 * sums of squares of x - y and of y, the largest distance and its first place. `odd_x` and `odd_y`
 * count what is not finite on a side; of these places `alone` count those where the other side holds
 * something else (NaN equals NaN), `both` the others. `alone_at` and `both_at` are the first. */
typedef struct {
    double dd, yy, most;
    size_t at, odd_x, odd_y, alone, both, alone_at, both_at;
} apart_from;

/* Activations; the order is that of step.py. */
enum { SILU, GELU_TANH, RELU, GELU };

/* x and its rotation [tokens, heads, width]. */
typedef struct {
    size_t tokens, heads, width, pairs;
    int interleaved; /* pairs are neighbours, not `pairs` apart */
} rotation;

/* Keys and elements of a value that are one part of attention's work. */
enum { KEY_RUN = 64, MIX_RUN = 64 };

/* q [tokens, heads, width], k [keys, kv_heads, width], v [keys, kv_heads, value_width], out
 * [tokens, heads, value_width]; probs [tokens, heads, keys] is room. Query t sees the keys up to
 * `cached` + t, and of these the last `window` if that is not 0; `first`, a multiple of KEY_RUN, is
 * not after any of them. */
typedef struct {
    const float *q, *k, *v, *sinks; /* sinks [heads] or NULL */
    float *probs, *out;
    size_t tokens, heads, kv_heads, keys, width, value_width, cached, window, first;
    float scale, softcap; /* softcap 0: none */
    int by_head;          /* probs is [heads, tokens, keys], not scaled yet, and wanted with zeros */
} attention;

/* Numbers of tiles by strides in bytes: float32, or bytes where there is a table of what they are.
 * `at` NULL: there are none. */
typedef struct {
    const uint8_t *at;
    ptrdiff_t down, across;
    const float *table;
} tile_numbers;

/* Rows of a packed weight (weight_layout.py): `first` is the number of the first in its matrix. `group`
 * [columns] or NULL, of `groups`; `sixteen` are `values`, repeated, of codes of up to four bits. */
typedef struct {
    const uint8_t *streams;
    size_t row_bytes, stride, rows, columns, first, tall, wide, groups;
    int bits;
    const float *values;
    float sixteen[16];
    const int32_t *group;
    tile_numbers zero, scale, offset;
} packed;

typedef struct {
    tile_numbers zero, scale, offset;
} three_numbers;

/* Codes of four bits, two a byte, in groups of `size` under the numbers that they have before and
 * after; `values` [16] is what a code counts as. Groups in which a value changes are added to
 * `changed`; `most` becomes the largest change, if it is larger. */
typedef struct {
    const uint8_t *streams;
    size_t stride, rows, groups, size;
    const float *values;
    three_numbers before, after;
    size_t changed;
    double most;
} regrouped;

/* Nibbles of blocks, `bytes` of each, whose order changes within every `half` bytes. */
typedef struct {
    const uint8_t *from;
    uint8_t *to;
    size_t from_stride, to_stride, blocks, bytes, half;
} nibbles;

/* How codes lie that are turned into streams of rows. */
enum { TURN_WORDS, TURN_BYTES, TURN_AWQ, TURN_PAIRS };
enum { BAND = 128, SPAN = 64 }; /* rows and columns of them that are decoded at a time */

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
    void (*add_changes)(const float *x, const float *y, size_t n, changes *c);
    int (*add_distances)(const two_arrays *p, distances *d); /* 0: a value is not finite */
    size_t (*first_apart)(const two_arrays *p, double most);
    void (*measure_apart)(const float *x, const float *y, size_t n, apart_from *found);
    /* out[t * stride + r] = row r of raw times row t of x [tokens, columns] */
    void (*products)(const decoder *kind, const uint8_t *raw, size_t rows, const float *x,
                     size_t tokens, size_t columns, float *out, size_t stride);
    void (*stream_fill)(float *out, size_t n,
                        int mode); /* the limit that benchmarks compare with */
    void (*activate)(int kind, const float *x, const float *up, float *out, size_t n);
    void (*rms_norm)(const float *x, const float *weight, float *out, size_t rows, size_t n,
                     float eps, float offset);
    void (*rope)(const float *x, const float *cos, const float *sin, float *out,
                 const rotation *r);
    void (*scores)(void *attention, size_t part); /* runs of keys */
    void (*probs)(void *attention, size_t row);   /* tokens * heads */
    void (*mix)(void *attention, size_t part);    /* kv_heads * runs of elements */
    void (*packed)(const packed *p, float *out, int mode);
    /* The same of codes that lie in another order: `streams` is where they do, in units that are
     * `stride` bytes apart; rows, columns and `first` are multiples of 8. */
    void (*across)(const packed *p, int order, float *room, float *out, int mode);
    void (*turn)(int order, const uint8_t *held, ptrdiff_t down, size_t units, size_t rows,
                 uint8_t *out, size_t stride);
    void (*halves)(const nibbles *n, int back);
    void (*regroup)(regrouped *g);
} level;

extern const level aprfmt_generic;
#if defined(__x86_64__) && !defined(APRFMT_NO_AVX2)
#define APRFMT_HAS_AVX2 1
extern const level aprfmt_avx2;
#ifndef APRFMT_NO_AVX512
#define APRFMT_HAS_AVX512 1
extern level aprfmt_avx512;
void aprfmt_fill_avx512(void); /* before it is used */
#endif
#endif

/* strings.c: starts[i] becomes the offset of string i's length field; returns the offset after the
 * last string, or SIZE_MAX where one passes the end, with its index in *bad. */
size_t aprfmt_walk_strings(const uint8_t *data, size_t size, size_t offset, size_t count,
                           int swapped, uint64_t *starts, size_t *bad);

#endif
