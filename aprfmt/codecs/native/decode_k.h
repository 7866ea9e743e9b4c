/* Decoders of the K-quants: superblocks of 256 elements, sub-blocks with scales of their own.
 *
 * value = (d * scale) * q - (dmin * min). A scale times d has at most 19 significant bits and q at
 * most 6, so except for Q6_K the product with q is exact and only the subtraction rounds.
 */

/* The 12 bytes of eight 6-bit scales and eight 6-bit mins (k_scales.py), times d and dmin. */
FN void k_scales(const uint8_t *packed, float d, float dmin, float scale[8], float min[8]) {
    uint32_t a = u32_at(packed), b = u32_at(packed + 4), c = u32_at(packed + 8);
    uint32_t six[4] = {
        a & 0x3f3f3f3f,
        (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030),
        b & 0x3f3f3f3f,
        (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030),
    };
    const uint8_t *bytes = (const uint8_t *)six;
    f_store(scale, to_f(load_u8(bytes)) * f_all(d));
    f_store(min, to_f(load_u8(bytes + 8)) * f_all(dmin));
}

/* 2 d, 2 dmin, 12 scales and mins, 128 nibbles: of each 32 bytes first the low ones, then the high
 */
FN void q4_k(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 144, out += 256) {
        ahead_block(raw, 144);
        float scale[8], min[8];
        k_scales(raw + 4, half_at(raw), half_at(raw + 2), scale, min);
#pragma GCC unroll 4
        for (int run = 0; run < 4; run++) {
            const uint8_t *qs = raw + 16 + 32 * run;
            float *at = out + 64 * run;
            vf s = f_all(scale[2 * run]), m = f_all(min[2 * run]);
            vf s2 = f_all(scale[2 * run + 1]), m2 = f_all(min[2 * run + 1]);
            vi q[4];
            for (int k = 0; k < 4; k++) q[k] = load_u8(qs + 8 * k);
            for (int k = 0; k < 4; k++) put(at + 8 * k, exact_sub(to_f(q[k] & 15), s, m), to);
            for (int k = 0; k < 4; k++)
                put(at + 32 + 8 * k, exact_sub(to_f(q[k] >> 4), s2, m2), to);
        }
    }
}

/* As Q4_K with 32 bytes of fifth bits before the nibbles: bit j of byte l is of element 32j + l */
FN void q5_k(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 176, out += 256) {
        ahead_block(raw, 176);
        float scale[8], min[8];
        k_scales(raw + 4, half_at(raw), half_at(raw + 2), scale, min);
        vi high[4];
        for (int k = 0; k < 4; k++) high[k] = load_u8(raw + 16 + 8 * k) << 4;
#pragma GCC unroll 4
        for (int run = 0; run < 4; run++) {
            const uint8_t *qs = raw + 48 + 32 * run;
            float *at = out + 64 * run;
            vf s = f_all(scale[2 * run]), m = f_all(min[2 * run]);
            vf s2 = f_all(scale[2 * run + 1]), m2 = f_all(min[2 * run + 1]);
            vi q[4];
            for (int k = 0; k < 4; k++) q[k] = load_u8(qs + 8 * k);
            for (int k = 0; k < 4; k++) {
                vi five = (q[k] & 15) | (high[k] >> 2 * run & 16);
                put(at + 8 * k, exact_sub(to_f(five), s, m), to);
            }
            for (int k = 0; k < 4; k++) {
                vi five = q[k] >> 4 | (high[k] >> (2 * run + 1) & 16);
                put(at + 32 + 8 * k, exact_sub(to_f(five), s2, m2), to);
            }
        }
    }
}

/* 128 low nibbles, 64 bytes of two high bits, 16 int8 scales, 2 d: (d * scale) * (q - 32) */
FN void q6_k(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 210, out += 256) {
        ahead_block(raw, 210);
        float scale[16], d = half_at(raw + 208);
        f_store(scale, to_f(load_i8(raw + 192)) * f_all(d));
        f_store(scale + 8, to_f(load_i8(raw + 200)) * f_all(d));
        for (int half = 0; half < 2; half++) {
            const uint8_t *ql = raw + 64 * half, *qh = raw + 128 + 32 * half;
            vi high[4];
            for (int k = 0; k < 4; k++) high[k] = load_u8(qh + 8 * k) << 4;
            for (int run = 0; run < 4;
                 run++) { /* bytes 0-31, 32-63, and again their high nibbles */
                const uint8_t *from = ql + 32 * (run & 1);
                float *at = out + 128 * half + 32 * run;
                for (int k = 0; k < 4; k++) {
                    vi q = load_u8(from + 8 * k);
                    q = run < 2 ? q & 15 : q >> 4;
                    q |= high[k] >> 2 * run & 48;
                    put(at + 8 * k, to_f(q - 32) * f_all(scale[8 * half + 2 * run + k / 2]), to);
                }
            }
        }
    }
}

/* The scales and mins of a Q2_K block, multiplied out. */
FN void q2_k_scales(const uint8_t *raw, float scale[16], float min[16]) {
    vf d = f_all(half_at(raw + 80)), dmin = f_all(half_at(raw + 82));
    for (int k = 0; k < 16; k += 8) {
        vi both = load_u8(raw + k);
        f_store(scale + k, to_f(both & 15) * d);
        f_store(min + k, to_f(both >> 4) * dmin);
    }
}

/* 16 scale (low) and min (high) nibbles, 64 bytes of 2 bits, 2 d, 2 dmin */
FN void q2_k(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 84, out += 256) {
        ahead_block(raw, 84);
        float scale[16], min[16];
        q2_k_scales(raw, scale, min);
        for (int half = 0; half < 2; half++) {
            vi b[4];
            for (int k = 0; k < 4; k++) b[k] = load_u8(raw + 16 + 32 * half + 8 * k);
#pragma GCC unroll 4
            for (int run = 0; run < 4; run++) {
                for (int k = 0; k < 4; k++) {
                    int sub = 8 * half + 2 * run + k / 2;
                    vf q = to_f(b[k] >> 2 * run & 3);
                    vf v = exact_sub(q, f_all(scale[sub]), f_all(min[sub]));
                    put(out + 128 * half + 32 * run + 8 * k, v, to);
                }
            }
        }
    }
}

/* 32 bytes of third bits (set: do not subtract 4), 64 bytes of 2 bits, 12 bytes of sixteen 6-bit
 * scales, 2 d: (d * (scale - 32)) * (q - 4) */
FN void q3_k(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 110, out += 256) {
        ahead_block(raw, 110);
        uint32_t a = u32_at(raw + 96), b = u32_at(raw + 100), c = u32_at(raw + 104);
        uint32_t six[4] = {
            (a & 0x0f0f0f0f) | (c << 4 & 0x30303030),
            (b & 0x0f0f0f0f) | (c << 2 & 0x30303030),
            (a >> 4 & 0x0f0f0f0f) | (c & 0x30303030),
            (b >> 4 & 0x0f0f0f0f) | (c >> 2 & 0x30303030),
        };
        const uint8_t *bytes = (const uint8_t *)six;
        float scale[16];
        vf d = f_all(half_at(raw + 108));
        f_store(scale, to_f(load_u8(bytes) - 32) * d);
        f_store(scale + 8, to_f(load_u8(bytes + 8) - 32) * d);
        vi third[4];
        for (int k = 0; k < 4; k++) third[k] = load_u8(raw + 8 * k) << 2;
        for (int half = 0; half < 2; half++) {
            vi low[4];
            for (int k = 0; k < 4; k++) low[k] = load_u8(raw + 32 + 32 * half + 8 * k);
#pragma GCC unroll 4
            for (int run = 0; run < 4; run++) {
                for (int k = 0; k < 4; k++) {
                    vi q = (low[k] >> 2 * run & 3) | (third[k] >> (4 * half + run) & 4);
                    vf s = f_all(scale[8 * half + 2 * run + k / 2]);
                    put(out + 128 * half + 32 * run + 8 * k, to_f(q - 4) * s, to);
                }
            }
        }
    }
}
