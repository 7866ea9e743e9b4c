/* Products of float32 x [tokens, columns] with rows of encoded weights; the order of sums stands in
 * sink.h. */

FN float lanes_total(const vf sum[4]) {
    vf all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    return ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7]));
}

/* After n eights were added, put the accumulator that is first in order first. */
FN void unturn(vf sum[4], size_t eights) {
    vf turned[4];
    for (size_t i = 0; i < 4; i++) turned[(i + eights) % 4] = sum[i];
    for (size_t i = 0; i < 4; i++) sum[i] = turned[i];
}

/* Add the products of decoded w[n] and x[n] of two tokens, n a multiple of 32. */
FN void add_products(const float *w, const float *x, const float *x2, size_t n, vf *sum, vf *sum2) {
    vf a[4], b[4];
    for (int k = 0; k < 4; k++) {
        a[k] = sum[k];
        b[k] = sum2[k];
    }
    for (size_t i = 0; i < n; i += 32) {
        for (int k = 0; k < 4; k++) {
            vf v = f_load(w + i + 8 * k);
            a[k] = dot_step(v, f_load(x + i + 8 * k), a[k]);
            b[k] = dot_step(v, f_load(x2 + i + 8 * k), b[k]);
        }
    }
    for (int k = 0; k < 4; k++) {
        sum[k] = a[k];
        sum2[k] = b[k];
    }
}

/* The last n < 32 products. */
FN void add_last(const float *w, const float *x, size_t n, vf *sum) {
    size_t k = 0;
    for (; 8 * k + 8 <= n; k++) sum[k] = dot_step(f_load(w + 8 * k), f_load(x + 8 * k), sum[k]);
    if (n % 8) {
        vf v = f_load_some(w + 8 * k, n % 8), u = f_load_some(x + 8 * k, n % 8);
        sum[k] = dot_step(v, u, sum[k]);
    }
}

/* One row with up to TOKENS tokens: decode a segment, then use it for all of them. */
FN void row_products(decode_fn decode, const decoder *kind, const uint8_t *row, const float *x,
                     size_t tokens, size_t columns, float *out, size_t stride) {
    float scratch[SEGMENT];
    vf sums[TOKENS][4];
    memset(sums, 0, sizeof sums);
    for (size_t at = 0; at < columns; at += SEGMENT) {
        const size_t n = columns - at < SEGMENT ? columns - at : SEGMENT, whole = n - n % 32;
        decode(row, scratch, n / kind->block_size);
        row += n / kind->block_size * kind->type_size;
        for (size_t t = 0; t < tokens; t += 2) {
            const size_t other = t + 1 < tokens ? t + 1 : t;
            vf unused[4], *second = other > t ? sums[other] : unused;
            if (other == t) memset(unused, 0, sizeof unused);
            const float *x1 = x + t * columns + at, *x2 = x + other * columns + at;
            add_products(scratch, x1, x2, whole, sums[t], second);
            if (whole < n) {
                add_last(scratch + whole, x1 + whole, n - whole, sums[t]);
                if (other > t) add_last(scratch + whole, x2 + whole, n - whole, second);
            }
        }
    }
    for (size_t t = 0; t < tokens; t++) out[t * stride] = lanes_total(sums[t]);
}
