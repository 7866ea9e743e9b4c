/* Encoders of small blocks. Without importance a block goes alone, four runs of eight elements;
 * with it, eight blocks go together through ggml's searches (Q4_0, Q4_1, Q5_0, Q5_1). */

/* Largest magnitude of n elements, n a multiple of 8. */
FN float most_of(const float *x, int n) {
    vf most = f_all(0.0f);
    for (int i = 0; i < n; i += 8) most = f_more_of(f_abs(f_load(x + i)), most);
    return lanes_most(most);
}

/* The element of largest magnitude of 32, the first of equals; 0 if all are, whatever their signs.
 */
FN float first_of_most(const float *x) {
    const float most = most_of(x, 32);
    uint32_t at = 0, negative = 0;
    for (int k = 0; k < 4; k++) {
        vf v = f_load(x + 8 * k);
        at |= bits_of((vi)(f_abs(v) == f_all(most))) << 8 * k;
        negative |= bits_of((vi)v) << 8 * k;
    }
    return most > 0.0f && (negative & at & -at) ? -most : most;
}

FN float inverse_of(float d) { return d != 0.0f ? 1.0f / d : 0.0f; }

/* To the nearest integer, ties away from zero (C's roundf). */
FN vi round_away(vf v) {
    vf almost_half = (vf)(((vi)v & INT32_MIN) | 0x3effffff);
    return __builtin_convertvector(v + almost_half, vi);
}

/* Nibbles of 32 codes: the low ones are elements 0-15. */
FN void put_nibbles(uint8_t *to, const vi q[4]) {
    store_u8(to, (q[0] & 15) | q[2] << 4);
    store_u8(to + 8, (q[1] & 15) | q[3] << 4);
}

/* Bit 4 of 32 codes as 32 bits. */
FN void put_fifth_bits(uint8_t *to, const vi q[4]) {
    for (int k = 0; k < 4; k++) to[k] = (uint8_t)bits_of(q[k] << 27);
}

/* Q4_0 and Q5_0: the element of largest magnitude becomes -nmax. */
FN void q_signed(const float *x, uint8_t *out, size_t n, int nmax, int bytes, int fuse) {
    for (; n--; x += 32, out += bytes) {
        float d = first_of_most(x) / (float)-nmax;
        vf inverse = f_all(inverse_of(d)), middle = f_all((float)nmax + 0.5f);
        vi q[4];
        put_half(out, d);
        for (int k = 0; k < 4; k++) {
            vf v = multiply_add(f_load(x + 8 * k), inverse, middle, fuse);
            q[k] = i_less_of(__builtin_convertvector(v, vi), i_all(2 * nmax - 1));
        }
        if (nmax == 16) put_fifth_bits(out + 2, q);
        put_nibbles(out + bytes - 16, q);
    }
}

/* Q4_1 and Q5_1: from smallest to largest in nmax steps. */
FN void q_ranged(const float *x, uint8_t *out, size_t n, int nmax, int bytes, int fuse) {
    for (; n--; x += 32, out += bytes) {
        float low = x[0], high = x[0];
        for (int i = 1; i < 32; i++) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
        }
        float d = (high - low) / (float)nmax;
        vf inverse = f_all(inverse_of(d));
        vi q[4];
        put_half(out, d);
        put_half(out + 2, low);
        for (int k = 0; k < 4; k++) {
            vf v = multiply_add(f_load(x + 8 * k) - f_all(low), inverse, f_all(0.5f), fuse);
            q[k] = __builtin_convertvector(v, vi);
            if (nmax == 15) q[k] = i_less_of(q[k], i_all(nmax));
        }
        if (nmax == 31) put_fifth_bits(out + 4, q);
        put_nibbles(out + bytes - 16, q);
    }
}

/* Importance and mean square of the row for each of eight blocks that start at block `at`. */
typedef struct {
    const float *importance;
    size_t per_row, row; /* blocks in a row; the row whose mean square is known */
    float sigma2;
} row_weights;

FN float row_sigma2(row_weights *of, const float *x, size_t block, int fuse) {
    size_t row = block / of->per_row;
    if (row != of->row) {
        size_t columns = of->per_row * 32;
        of->row = row;
        of->sigma2 = square_sum(x + row * columns, columns, fuse) / (float)columns;
    }
    return of->sigma2;
}

/* Q4_0 to Q5_1 with importance: ggml's searches, eight blocks at a time. */
FN void q_weighted(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                   int ranged, int nmax, int bytes, int fuse) {
    row_weights of = {importance, per_row, SIZE_MAX, 0.0f};
    const int five = nmax == 16 || nmax == 31;
    for (size_t at = 0; at < n; at += 8) {
        float runs[256] = {0}, weights[256] = {0}, sigma2[8] = {0}, scale[8], offset[8];
        const size_t blocks = n - at < 8 ? n - at : 8;
        for (size_t b = 0; b < blocks; b++) {
            memcpy(runs + 32 * b, x + (at + b) * 32, 128);
            memcpy(weights + 32 * b, importance + (at + b) % per_row * 32, 128);
            sigma2[b] = row_sigma2(&of, x, at + b, fuse);
        }
        vf t[32], w[32], min = f_all(0.0f), d;
        vi code[32];
        uint8_t codes[256];
        turn(runs, 32, t);
        turn(weights, 32, w);
        weigh(t, w, f_load(sigma2), 32, w, fuse);
        d = ranged ? scale_and_min(t, w, 32, nmax, &WEIGHTED_STEPS, &min, code, fuse)
                   : signed_scale(t, w, 32, nmax, code, fuse);
        turn_back(code, 32, codes);
        f_store(scale, d);
        f_store(offset, -min);
        for (size_t b = 0; b < blocks; b++) {
            uint8_t *to = out + (at + b) * (size_t)bytes;
            vi q[4];
            for (int k = 0; k < 4; k++) q[k] = load_u8(codes + 32 * b + 8 * k);
            put_half(to, scale[b]);
            if (ranged) put_half(to + 2, offset[b]);
            if (five) put_fifth_bits(to + (ranged ? 4 : 2), q);
            put_nibbles(to + bytes - 16, q);
        }
    }
}

#define SMALL_ENCODER(fn, plain, ranged, nmax, bytes)                              \
    FN void enc_##fn(const float *x, uint8_t *out, size_t n, size_t per_row,       \
                     const float *importance, int fuse) {                          \
        if (importance)                                                            \
            q_weighted(x, out, n, per_row, importance, ranged, nmax, bytes, fuse); \
        else                                                                       \
            plain(x, out, n, nmax, bytes, fuse);                                   \
    }
SMALL_ENCODER(q4_0, q_signed, 0, 8, 18)
SMALL_ENCODER(q4_1, q_ranged, 1, 15, 20)
SMALL_ENCODER(q5_0, q_signed, 0, 16, 22)
SMALL_ENCODER(q5_1, q_ranged, 1, 31, 24)

FN void enc_q8_0(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                 int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    for (; n--; x += 32, out += 34) {
        float d = most_of(x, 32) / 127.0f;
        vf inverse = f_all(inverse_of(d));
        put_half(out, d);
        for (int k = 0; k < 32; k += 8) store_u8(out + 2 + k, round_away(f_load(x + k) * inverse));
    }
}

/* The digit of a ternary element: -1, 0 or 1 plus 1. */
FN vi ternary(const float *x, vf inverse) { return round_away(f_load(x) * inverse) + 1; }

FN void enc_tq1_0(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                  int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    for (; n--; x += 256, out += 54) {
        float d = most_of(x, 256);
        vf inverse = f_all(inverse_of(d));
        int32_t digit[256];
        for (int i = 0; i < 256; i += 8) i_store(digit + i, ternary(x + i, inverse));
        for (int l = 0; l < 52; l++) {
            int width = l < 32   ? 32
                        : l < 48 ? 16
                                 : 4,
                first = l < 32   ? l
                        : l < 48 ? 128 + l
                                 : 192 + l;
            uint32_t number = 0; /* modulo 256 in the end */
            for (int k = 0; k < 5; k++) {
                number = number * 3 + (l < 48 || k < 4 ? (uint32_t)digit[first + width * k] : 0);
            }
            out[l] = (uint8_t)(((number & 255) * 256 + 242) / 243);
        }
        put_half(out + 52, d);
    }
}

FN void enc_tq2_0(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                  int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    for (; n--; x += 256, out += 66) {
        float d = most_of(x, 256);
        vf inverse = f_all(inverse_of(d));
        uint8_t code[256];
        for (int i = 0; i < 256; i += 8) store_u8(code + i, ternary(x + i, inverse));
        join_crumbs(code, out);
        put_half(out + 64, d);
    }
}
