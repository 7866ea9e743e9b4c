/* Decoders of small blocks: one or two scales over 32 to 128 elements. All integers are
 * little-endian, d is float16; the byte maps are those of the numpy codecs, one file each next to
 * this folder. */

/* Sixteen bytes of nibbles: the low ones are elements 0-15, the high ones 16-31. */
FN void nibbles_32(const uint8_t *qs, vi q[4]) {
    vi a = load_u8(qs), b = load_u8(qs + 8);
    q[0] = a & 15;
    q[1] = b & 15;
    q[2] = a >> 4;
    q[3] = b >> 4;
}

/* All ones where the fifth bit of elements 8k to 8k+7 is set in Q5_0's and Q5_1's 32 high bits, in
 * all lanes. */
FN vi fifth_set(vi high, int k) {
    const vi bit = (vi)((vu){1, 2, 4, 8, 16, 32, 64, 128} << 8 * k);
    return (vi)((high & bit) == bit);
}

/* 2 d, 16 nibbles: (q - 8) * d */
FN void q4_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 18, out += 32) {
        ahead(raw);
        vf d = f_all(half_at(raw));
        vi q[4];
        nibbles_32(raw + 2, q);
        for (int k = 0; k < 4; k++) put(out + 8 * k, to_f(q[k] - 8) * d, to);
    }
}

/* 2 d, 2 m, 16 nibbles: q * d + m */
FN void q4_1(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 20, out += 32) {
        ahead(raw);
        vf d = f_all(half_at(raw)), m = f_all(half_at(raw + 2));
        vi q[4];
        nibbles_32(raw + 4, q);
        for (int k = 0; k < 4; k++) put(out + 8 * k, exact_add(to_f(q[k]), d, m), to);
    }
}

/* 2 d, 4 fifth bits, 16 nibbles: (q - 16) * d */
FN void q5_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 22, out += 32) {
        ahead(raw);
        vf d = f_all(half_at(raw));
        vi high = i_all((int32_t)u32_at(raw + 2));
        vi q[4];
        nibbles_32(raw + 6, q);
        for (int k = 0; k < 4; k++) {
            put(out + 8 * k, to_f(q[k] - (~fifth_set(high, k) & 16)) * d, to);
        }
    }
}

/* 2 d, 2 m, 4 fifth bits, 16 nibbles: q * d + m */
FN void q5_1(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 24, out += 32) {
        ahead(raw);
        vf d = f_all(half_at(raw)), m = f_all(half_at(raw + 2));
        vi high = i_all((int32_t)u32_at(raw + 4));
        vi q[4];
        nibbles_32(raw + 8, q);
        for (int k = 0; k < 4; k++) {
            put(out + 8 * k, exact_add(to_f(q[k] | (fifth_set(high, k) & 16)), d, m), to);
        }
    }
}

FN void bytes_times(const uint8_t *q, vf d, float *out, int count, sink *to) {
    for (int k = 0; k < count; k += 8) {
        if (k % 64 == 0) ahead(q + k);
        put(out + k, to_f(load_i8(q + k)) * d, to);
    }
}

/* 2 d, 32 int8: q * d */
FN void q8_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 34, out += 32) bytes_times(raw + 2, f_all(half_at(raw)), out, 32, to);
}

/* 2 d, 2 sum (not needed here), 32 int8: q * d */
FN void q8_1(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 36, out += 32) bytes_times(raw + 4, f_all(half_at(raw)), out, 32, to);
}

/* 4 d (float32), 256 int8, 32 sums: q * d */
FN void q8_k(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 292, out += 256) bytes_times(raw + 4, f_all(f32_at(raw)), out, 256, to);
}

/* 2 d, 16 bytes of bits: d where set, else -d */
FN void q1_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 18, out += 128) {
        ahead(raw);
        vf d = f_all(half_at(raw));
        for (int k = 0; k < 16; k++) put(out + 8 * k, signed_by(d, ~(uint32_t)raw[2 + k]), to);
    }
}

/* 2 d, 16 bytes of 2 bits: (q - 1) * d */
FN void q2_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 18, out += 64) {
        ahead(raw);
        vf d = f_all(half_at(raw));
        for (int k = 0; k < 8; k++) {
            vu both = (vu)i_all(u16_at(raw + 2 + 2 * k)) >> (vu){0, 2, 4, 6, 8, 10, 12, 14};
            put(out + 8 * k, to_f((vi)(both & 3) - 1) * d, to);
        }
    }
}

/* 2 scale, 16 bytes, low nibble first: (q - 8) * scale */
FN void apr_q4(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 18, out += 32) {
        ahead(raw);
        vf d = f_all(half_at(raw));
        for (int k = 0; k < 4; k++) {
            vu all = (vu)i_all((int32_t)u32_at(raw + 2 + 4 * k));
            vi q = (vi)(all >> (vu){0, 4, 8, 12, 16, 20, 24, 28} & 15);
            put(out + 8 * k, to_f(q - 8) * d, to);
        }
    }
}

/* One int8 an element under a scale that stands once before all of them. */
FN void apr_q8(const uint8_t *q, float scale, float *out, size_t n, sink *to) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) put(out + i, to_f(load_i8(q + i)) * f_all(scale), to);
    if (i < n) {
        uint8_t last[8] = {0};
        memcpy(last, q + i, n - i);
        put_some(out + i, to_f(load_i8(last)) * f_all(scale), n - i, to);
    }
}

/* 48 and 4 bytes of base-3 digits (five and four a byte), 2 d: (digit - 1) * d. Digit k of a byte
 * is the integer part of 3/256 of the byte times 3**k modulo 256. */
FN void tq1_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    static const int power[5] = {1, 3, 9, 27, 81};
    for (; n--; raw += 54, out += 256) {
        ahead(raw);
        vf d = f_all(half_at(raw + 52));
        float *at = out;
        for (int run = 0; run < 2; run++) { /* bytes 0-31, then 32-47 */
            int width = run ? 16 : 32;
            for (int k = 0; k < 5; k++) {
                for (int i = 0; i < width; i += 8, at += 8) {
                    vi digit = ((load_u8(raw + 32 * run + i) * power[k] & 255) * 3) >> 8;
                    put(at, to_f(digit - 1) * d, to);
                }
            }
        }
        vi last = i_all((int32_t)u32_at(raw + 48)) >> (vi){0, 8, 16, 24, 0, 8, 16, 24} & 255;
        for (int k = 0; k < 4; k += 2, at += 8) {
            int a = power[k], b = power[k + 1];
            vi digit = ((last * (vi){a, a, a, a, b, b, b, b} & 255) * 3) >> 8;
            put(at, to_f(digit - 1) * d, to);
        }
    }
}

/* 64 bytes of 2 bits, four runs of 32 elements in each 32 bytes; 2 d: (q - 1) * d */
FN void tq2_0(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 66, out += 256) {
        ahead_block(raw, 66);
        vf d = f_all(half_at(raw + 64));
        for (int half = 0; half < 2; half++) {
            vi b[4];
            for (int k = 0; k < 4; k++) b[k] = load_u8(raw + 32 * half + 8 * k);
            for (int shift = 0; shift < 4; shift++) {
                for (int k = 0; k < 4; k++) {
                    vi q = (b[k] >> 2 * shift & 3) - 1;
                    put(out + 128 * half + 32 * shift + 8 * k, to_f(q) * d, to);
                }
            }
        }
    }
}
