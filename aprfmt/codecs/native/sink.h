/* Where a decoder's results go, eight at a time: to memory, or into a dot product.
 *
 * Every decoder is written once over a sink, which is a constant wherever it is inlined. A dot
 * product has four accumulators of eight lanes: elements 32k + 8j + i are added to lane i of
 * accumulator j, in order of k, by fused multiply-adds (on the generic level by a product and a
 * sum). At the end the accumulators are added as (0 + 1) + (2 + 3) and their lanes as a tree. So a
 * result depends on the row and on x, and on nothing else.
 */

/* Store through the cache, or past it to addresses aligned to 32 or to 16; or multiply with what is
 * there. */
enum { PLAIN, PAST32, PAST16, DOT };

typedef struct {
    int kind;
    vf sum[4]; /* of DOT; the first is the next to be added to */
} sink;

FN vf dot_step(vf w, vf x, vf sum) {
#ifdef APRFMT_AVX2
    return fused(w, x, sum);
#else
    return w * x + sum;
#endif
}

/* Take eight results; `at` is their place, or that of the numbers to multiply with. */
FN void put(float *at, vf v, sink *to) {
    if (to->kind == DOT) {
        vf sum = dot_step(v, f_load(at), to->sum[0]);
        to->sum[0] = to->sum[1];
        to->sum[1] = to->sum[2];
        to->sum[2] = to->sum[3];
        to->sum[3] = sum;
        return;
    }
#ifdef APRFMT_AVX2
    if (to->kind == PAST32) {
        _mm256_stream_ps(at, (__m256)v);
        return;
    }
    if (to->kind == PAST16) {
        _mm_stream_ps(at, _mm256_castps256_ps128((__m256)v));
        _mm_stream_ps(at + 4, _mm256_extractf128_ps((__m256)v, 1));
        return;
    }
#endif
    f_store(at, v);
}

/* Take the first n of eight results, the last of all. */
FN void put_some(float *at, vf v, size_t n, sink *to) {
    if (to->kind == DOT) {
        float some[8] = {0}, x[8] = {0};
        memcpy(x, at, 4 * n);
        memcpy(some, &v, 4 * n);
        put(x, f_load(some), to);
    } else {
        memcpy(at, &v, 4 * n);
    }
}

/* Ask for input before it is needed: a product with small blocks runs three times as fast where the
 * processor does not do so by itself (measured on a virtual machine), a decoder a tenth faster. The
 * address may lie past the end. */
FN void ahead(const uint8_t *at) { __builtin_prefetch(at + 2048); }

FN void ahead_block(const uint8_t *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) ahead(at + i);
}

FN void fence(void) {
#ifdef APRFMT_AVX2
    _mm_sfence();
#endif
}
