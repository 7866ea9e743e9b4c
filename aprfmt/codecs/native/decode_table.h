/* Decoders of 4-bit encodings whose codes index a table of 16 values. */

/* Twice the values of E2M1 (MXFP4, NVFP4); code 8 is a zero without sign. */
#define E2M1_LOW ((vf){0, 1, 2, 3, 4, 6, 8, 12})
#define E2M1_HIGH ((vf){0, -1, -2, -3, -4, -6, -8, -12})
/* IQ4_NL and IQ4_XS (kvalues_iq4nl in ggml-common.h). */
#define NL_LOW ((vf){-127, -104, -83, -65, -49, -35, -22, -10})
#define NL_HIGH ((vf){1, 13, 25, 38, 53, 69, 89, 113})

/* 16 bytes, low nibbles first; the table is scaled once for the 32 elements. */
FN void table_32(const uint8_t *qs, vf low, vf high, float *out, sink *to) {
    vi a = load_u8(qs), b = load_u8(qs + 8);
    put(out, pick16(low, high, a), to);
    put(out + 8, pick16(low, high, b), to);
    put(out + 16, pick16(low, high, a >> 4), to);
    put(out + 24, pick16(low, high, b >> 4), to);
}

/* Half of 2**(e - 127), subnormal where it is. */
FN float half_power(uint32_t e) {
    uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return power;
}

/* 1 e (power of two, halved as the table is doubled), 16 nibbles */
FN void mxfp4(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 17, out += 32) {
        ahead(raw);
        vf d = f_all(half_power(raw[0]));
        table_32(raw + 1, E2M1_LOW * d, E2M1_HIGH * d, out, to);
    }
}

/* 4 UE4M3 scales, 8 bytes of nibbles for each 16 elements: low ones are elements 0-7 */
FN void nvfp4(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 36, out += 64) {
        ahead(raw);
        for (int k = 0; k < 4; k++) {
            vf d = f_all(aprfmt_half_ue4m3[raw[k]]);
            vf low = E2M1_LOW * d, high = E2M1_HIGH * d;
            vi q = load_u8(raw + 4 + 8 * k);
            put(out + 16 * k, pick16(low, high, q), to);
            put(out + 16 * k + 8, pick16(low, high, q >> 4), to);
        }
    }
}

/* 2 d, 16 nibbles */
FN void iq4_nl(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 18, out += 32) {
        ahead(raw);
        vf d = f_all(half_at(raw));
        table_32(raw + 2, NL_LOW * d, NL_HIGH * d, out, to);
    }
}

/* 2 d, 2 high and 4 low bytes of eight 6-bit scales, 128 nibbles: (d * (scale - 32)) * value */
FN void iq4_xs(const uint8_t *raw, float *out, size_t n, sink *to) {
    for (; n--; raw += 136, out += 256) {
        ahead_block(raw, 136);
        vi low = i_all((int32_t)u32_at(raw + 4)), high = i_all(u16_at(raw + 2));
        vi six = (low >> (vi){0, 4, 8, 12, 16, 20, 24, 28} & 15) |
                 (high >> (vi){0, 2, 4, 6, 8, 10, 12, 14} & 3) << 4;
        float scale[8];
        f_store(scale, to_f(six - 32) * f_all(half_at(raw)));
        for (int k = 0; k < 8; k++) {
            vf d = f_all(scale[k]);
            table_32(raw + 8 + 16 * k, NL_LOW * d, NL_HIGH * d, out + 32 * k, to);
        }
    }
}

/* Round float32 to what a BF16 or F16 weight can hold, nearest even (bitsandbytes stores such
 * weights). */
enum { TO_F32, TO_BF16, TO_F16 };

FN vf rounded_to(vf v, int to) {
    if (to == TO_BF16) {
        vi bits = (vi)v, nan = (bits & 0x7fffffff) > 0x7f800000;
        vi up = bits + (0x7fff + (bits >> 16 & 1));
        return (vf)(i_pick(nan, bits | 0x00400000, up) & (int32_t)0xffff0000);
    }
    return to == TO_F16 ? half_bits(to_half(v)) : v;
}

/* NF4 and FP4 of bitsandbytes: code[nibble] * absmax[element / block], the high nibble first. `at`
 * is the first element's index and even; blocks may have any size. */
FN void coded(const uint8_t *packed, const float *absmax, const float *code, size_t block,
              size_t at, size_t end, float *out, int round, sink *to) {
    const vf low = f_load(code), high = f_load(code + 8);
    for (size_t b = at / block; at < end; b++) {
        const size_t stop = (b + 1) * block < end ? (b + 1) * block : end;
        const float scale = absmax[b];
        if (!(at & 1)) {
            vf l = low * f_all(scale), h = high * f_all(scale);
            for (; at + 8 <= stop; at += 8, out += 8) {
                vu all = (vu)i_all((int32_t)u32_at(packed + at / 2));
                vi q = (vi)(all >> (vu){4, 0, 12, 8, 20, 16, 28, 24});
                put(out, rounded_to(pick16(l, h, q), round), to);
            }
        }
        for (; at < stop; at++, out++) {
            uint8_t both = packed[at / 2];
            vf v = f_all(code[at & 1 ? both & 15 : both >> 4] * scale);
            float lane[8];
            f_store(lane, rounded_to(v, round));
            *out = lane[0];
        }
    }
}
