/* Decoders of the IQ1, IQ2 and IQ3 encodings: indices into lattices of 4 or 8 magnitudes, and
 * signs. The lattices come from aprfmt/codecs/iq_grids.py (tables.c holds what the loader hands
 * over). */

FN vf grid8(const int8_t *grid, uint32_t index) {
    return to_f(load_i8((const uint8_t *)grid + 8 * index));
}

FN vf grid4x2(const int8_t *grid, uint32_t first, uint32_t second) {
    uint8_t both[8];
    memcpy(both, grid + 4 * first, 4);
    memcpy(both + 4, grid + 4 * second, 4);
    return to_f(load_u8(both));
}

/* 1/8, negative where `bit` is set; without a branch, as nothing predicts it. */
FN vf eighth(uint32_t bit) { return (vf)i_all((int32_t)(0x3e000000u | (bit != 0) * 0x80000000u)); }

/* Seven stored signs; the eighth makes the number of negative elements even. */
FN uint32_t even_signs(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }

/* 2 d; for each 32 elements 4 index bytes, then 4 times 7 signs and a 4-bit scale */
FN void iq2_xxs(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 66, out += 256) {
        float d = half_at(raw);
        for (int sub = 0; sub < 8; sub++) {
            const uint8_t *q = raw + 2 + 8 * sub;
            uint32_t signs = u32_at(q + 4);
            vf s = f_all(d * (0.5f + (float)(int)(signs >> 28)) * 0.25f);
            for (int k = 0; k < 4; k++) {
                vf v = grid8(aprfmt_iq2_xxs, q[k]) * s;
                put(out + 32 * sub + 8 * k, signed_by(v, even_signs(signs >> 7 * k & 127)), to);
            }
        }
    }
}

/* 2 d; 32 words of a 9-bit index and 7 signs; 8 bytes of two scales, one for 16 elements */
FN void iq2_xs(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 74, out += 256) {
        float d = half_at(raw);
        for (int sub = 0; sub < 8; sub++) {
            vf s[2] = {f_all(d * (0.5f + (float)(raw[66 + sub] & 15)) * 0.25f),
                       f_all(d * (0.5f + (float)(raw[66 + sub] >> 4)) * 0.25f)};
            for (int k = 0; k < 4; k++) {
                uint32_t word = u16_at(raw + 2 + 8 * sub + 2 * k);
                vf v = grid8(aprfmt_iq2_xs, word & 511) * s[k / 2];
                put(out + 32 * sub + 8 * k, signed_by(v, even_signs(word >> 9)), to);
            }
        }
    }
}

/* 2 d; 32 index bytes; 32 sign bytes; 8 bytes of 2 high index bits; 8 bytes of two scales */
FN void iq2_s(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 82, out += 256) {
        float d = half_at(raw);
        for (int sub = 0; sub < 8; sub++) {
            uint32_t high = raw[66 + sub];
            vf s[2] = {f_all(d * (0.5f + (float)(raw[74 + sub] & 15)) * 0.25f),
                       f_all(d * (0.5f + (float)(raw[74 + sub] >> 4)) * 0.25f)};
            for (int k = 0; k < 4; k++) {
                uint32_t index = raw[2 + 4 * sub + k] | (high >> 2 * k & 3) << 8;
                vf v = grid8(aprfmt_iq2_s, index) * s[k / 2];
                put(out + 32 * sub + 8 * k, signed_by(v, raw[34 + 4 * sub + k]), to);
            }
        }
    }
}

/* 2 d; 64 index bytes, one for 4 elements; for each 32 elements 4 times 7 signs and a 4-bit scale
 */
FN void iq3_xxs(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 98, out += 256) {
        float d = half_at(raw);
        for (int sub = 0; sub < 8; sub++) {
            const uint8_t *q = raw + 2 + 8 * sub;
            uint32_t signs = u32_at(raw + 66 + 4 * sub);
            vf s = f_all(d * (0.5f + (float)(int)(signs >> 28)) * 0.5f);
            for (int k = 0; k < 4; k++) {
                vf v = grid4x2(aprfmt_iq3_xxs, q[2 * k], q[2 * k + 1]) * s;
                put(out + 32 * sub + 8 * k, signed_by(v, even_signs(signs >> 7 * k & 127)), to);
            }
        }
    }
}

/* 2 d; 64 index bytes; 8 bytes of high index bits; 32 sign bytes; 4 bytes of two scales */
FN void iq3_s(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 110, out += 256) {
        float d = half_at(raw);
        for (int sub = 0; sub < 8; sub++) {
            const uint8_t *q = raw + 2 + 8 * sub;
            uint32_t high = raw[66 + sub], scale = raw[106 + sub / 2] >> 4 * (sub & 1) & 15;
            vf s = f_all(d * (float)(int)(1 + 2 * scale));
            for (int k = 0; k < 4; k++) {
                uint32_t first = q[2 * k] | (high >> 2 * k & 1) << 8;
                uint32_t second = q[2 * k + 1] | (high >> (2 * k + 1) & 1) << 8;
                vf v = grid4x2(aprfmt_iq3_s, first, second) * s;
                put(out + 32 * sub + 8 * k, signed_by(v, raw[74 + 4 * sub + k]), to);
            }
        }
    }
}

/* 2 d; 32 index bytes; 8 words of 4 times 3 high index bits, a 3-bit scale and the sign of delta */
FN void iq1_s(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 50, out += 256) {
        float d = half_at(raw);
        for (int sub = 0; sub < 8; sub++) {
            uint32_t word = u16_at(raw + 34 + 2 * sub);
            vf s = f_all(d * (float)(int)(2 * (word >> 12 & 7) + 1));
            vf delta = eighth(word & 0x8000);
            for (int k = 0; k < 4; k++) {
                uint32_t index = raw[2 + 4 * sub + k] | (word >> 3 * k & 7) << 8;
                put(out + 32 * sub + 8 * k, (grid8(aprfmt_iq1, index) + delta) * s, to);
            }
        }
    }
}

/* 32 index bytes; 16 bytes of nibbles: 3 high index bits and the sign of delta; 4 words of four
 * 3-bit scales, one for 16 elements, whose top nibbles are together d */
FN void iq1_m(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 56, out += 256) {
        uint8_t top[2];
        top[0] = (uint8_t)(raw[49] >> 4 | (raw[51] & 0xf0));
        top[1] = (uint8_t)(raw[53] >> 4 | (raw[55] & 0xf0));
        float d = half_at(top);
        for (int sub = 0; sub < 8; sub++) {
            uint32_t scales = (uint32_t)u16_at(raw + 48 + 2 * (sub / 2)) >> 6 * (sub & 1);
            uint32_t nibbles = u16_at(raw + 32 + 2 * sub);
            vf s[2] = {f_all(d * (float)(int)(2 * (scales & 7) + 1)),
                       f_all(d * (float)(int)(2 * (scales >> 3 & 7) + 1))};
            for (int k = 0; k < 4; k++) {
                uint32_t nibble = nibbles >> 4 * k;
                vf v = grid8(aprfmt_iq1, raw[4 * sub + k] | (nibble & 7) << 8);
                put(out + 32 * sub + 8 * k, (v + eighth(nibble & 8)) * s[k / 2], to);
            }
        }
    }
}
