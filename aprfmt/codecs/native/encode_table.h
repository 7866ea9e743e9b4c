/* Encoders of encodings whose codes index a table of 16 values, and of F16 and BF16. */

/* Where a value stands among 15 ascending bounds, in four comparisons. `from`: a bound itself and
 * NaN count as above it; else as below. */
FN vi above(vf v, vf bound, int from) { return from ? ~(vi)(v < bound) : (vi)(v > bound); }

typedef struct {
    vf middle, first, third, quarters, rest; /* bounds 7, 3, 11; 1, 5, 9, 13; and the even ones */
} ranks;

FN ranks ranks_of(const float *b) {
    return (ranks){f_all(b[7]),
                   f_all(b[3]),
                   f_all(b[11]),
                   {b[1], b[5], b[9], b[13]},
                   {b[0], b[2], b[4], b[6], b[8], b[10], b[12], b[14]}};
}

FN vi rank15(vf v, const ranks *b, int from) {
    vi half = above(v, b->middle, from);
    vi rank = (half & 2) | (above(v, f_pick(half, b->third, b->first), from) & 1);
    rank = rank << 1 | (above(v, pick8(b->quarters, rank), from) & 1);
    return rank << 1 | (above(v, pick8(b->rest, rank), from) & 1);
}

/* ggml's comparison of sixteen rounded differences, of which the first of equals wins. */
FN uint8_t e2m1_far(float v, float d) {
    static const float value[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    uint8_t best = 0;
    for (uint8_t i = 1; i < 16; i++) {
        if (fabsf(value[i] * d - v) < fabsf(value[best] * d - v)) best = i;
    }
    return best;
}

/* Codes of v / d for d >= 0: the nearest value of E2M1, of equally near ones the smaller. The
 * midpoints times d are exact. Zero is code 0 whatever its sign. */
FN vi e2m1(vf v, float d) {
    static const float middle[7] = {0.5f, 1.5f, 2.5f, 3.5f,
                                    5.0f, 7.0f, 10.0f}; /* of the doubled values */
    const vf magnitude = f_abs(v);
    vi code = i_all(0);
    if (__builtin_expect(any((vi)(magnitude > f_all(0x1p20f * d))),
                         0)) { /* differences drown in rounding */
        float lane[8];
        uint8_t far[8];
        f_store(lane, v);
        for (int i = 0; i < 8; i++) far[i] = e2m1_far(lane[i], d);
        return load_u8(far);
    }
    for (int i = 0; i < 7; i++) code -= (vi)(magnitude > f_all(middle[i] * d));
    return code | ((vi)(v < f_all(0.0f)) & (vi)(code > 0) & 8);
}

FN void enc_mxfp4(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                  int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    for (; n--; x += 32, out += 17) {
        float most = most_of(x, 32), half_power;
        uint32_t e = most > 0.0f ? (uint8_t)(int)(floorf(log2f(most)) - 2 + 127) : 0;
        uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        memcpy(&half_power, &bits, 4);
        vi q[4];
        out[0] = (uint8_t)e;
        for (int k = 0; k < 4; k++) q[k] = e2m1(f_load(x + 8 * k), half_power);
        put_nibbles(out + 1, q);
    }
}

/* E4M3 without a sign, nearest (the bit below decides); all from 248 on is 448, as ggml has it. */
FN uint32_t to_ue4m3(float x) {
    uint32_t bits;
    if (!(x > 0.0f)) return 0;
    if (x > 448.0f) x = 448.0f;
    memcpy(&bits, &x, 4);
    int exponent = (int)(bits >> 23) - 127 + 7;
    if (exponent <= 0) {
        int fraction = (int)(x * 512.0f + 0.5f);
        return (uint32_t)(fraction > 7 ? 7 : fraction);
    }
    uint32_t code = ((uint32_t)exponent << 3 | (bits >> 20 & 7)) + (bits >> 19 & 1);
    return code >= 15 << 3 ? 0x7e : code;
}

FN void enc_nvfp4(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                  int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    for (; n--; x += 64, out += 36) {
        for (int k = 0; k < 4; k++) {
            const float *sub = x + 16 * k;
            uint32_t scale = to_ue4m3(most_of(sub, 16) / 6.0f);
            float d = aprfmt_half_ue4m3[scale];
            out[k] = (uint8_t)scale;
            store_u8(out + 4 + 8 * k, e2m1(f_load(sub), d) | e2m1(f_load(sub + 8), d) << 4);
        }
    }
}

/* Midpoints of IQ4_NL's values; ggml's best_index_int8 takes the upper one from there on. */
static const float NL_FROM[15] = {-115.5f, -93.5f, -74.0f, -57.0f, -42.0f, -28.5f, -16.0f, -4.5f,
                                  7.0f,    19.0f,  31.5f,  45.5f,  61.0f,  79.0f,  101.0f};

FN vi nl_code(vf v) {
    const ranks from = ranks_of(NL_FROM);
    return rank15(v, &from, 1);
}

FN void nl_sums(const vf *x, const vf *w, vf inverse, fit *sums, int fuse) {
    sums->lx = sums->l2 = f_all(0.0f);
    for (int i = 0; i < 32; i++) {
        vf q = pick16(NL_LOW, NL_HIGH, nl_code(inverse * x[i]));
        sums->lx = multiply_add(w[i] * q, x[i], sums->lx, fuse);
        sums->l2 = multiply_add(w[i] * q, q, sums->l2, fuse);
    }
}

/* The scale of each of eight blocks of 32, by ggml's search. */
FN vf nl_scale(const vf *x, const vf *w, int fuse) {
    const vf largest = first_largest(x, 32), zero = f_all(0.0f);
    fit sums;
    nl_sums(x, w, f_all(1.0f) / (-largest / f_all(-127.0f)), &sums, fuse);
    vf d = f_pick((vi)(sums.l2 > zero), sums.lx / sums.l2, zero), best = d * sums.lx;
    for (int step = -7; step <= 7; step++) {
        nl_sums(x, w, f_all((float)(step - 127)) / largest, &sums, fuse);
        vi better = (vi)(sums.l2 > zero) & (vi)(sums.lx * sums.lx > best * sums.l2);
        d = f_pick(better, sums.lx / sums.l2, d);
        best = f_pick(better, d * sums.lx, best);
    }
    return f_pick((vi)(f_abs(largest) < f_all(SMALLEST)), zero, d);
}

/* Weights of eight blocks of 32 and their scales; `sigma2` is twice the mean square, a lane a
 * block. */
FN vf nl_search(const float *runs, const float *weights, vf sigma2, int fuse) {
    vf t[32], w[32];
    turn(runs, 32, t);
    if (weights) {
        turn(weights, 32, w);
        weigh(t, w, sigma2, 32, w, fuse);
    } else {
        for (int i = 0; i < 32; i++) w[i] = t[i] * t[i];
    }
    return nl_scale(t, w, fuse);
}

FN void nl_pack(const float *x, float inverse, uint8_t *to) {
    vi q[4];
    for (int k = 0; k < 4; k++) q[k] = nl_code(f_all(inverse) * f_load(x + 8 * k));
    put_nibbles(to, q);
}

FN void enc_iq4_nl(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                   int fuse) {
    for (size_t at = 0; at < n; at += 8) {
        const size_t blocks = n - at < 8 ? n - at : 8;
        float runs[256] = {0}, weights[256] = {0}, sigma2[8] = {0}, d[8];
        memcpy(runs, x + at * 32, blocks * 128);
        for (size_t b = 0; importance && b < blocks; b++) {
            memcpy(weights + 32 * b, importance + (at + b) % per_row * 32, 128);
            sigma2[b] = square_sum(runs + 32 * b, 32, fuse) * (2.0f / 32.0f);
        }
        f_store(d, nl_search(runs, importance ? weights : NULL, f_load(sigma2), fuse));
        for (size_t b = 0; b < blocks; b++) {
            uint8_t *to = out + (at + b) * 18;
            put_half(to, d[b]);
            nl_pack(runs + 32 * b, inverse_of(d[b]), to + 2);
        }
    }
}

FN void enc_iq4_xs(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                   int fuse) {
    for (size_t at = 0; at < n; at++, x += 256, out += 136) {
        const float *weights = importance ? importance + at % per_row * 256 : NULL;
        float sigma2 = weights ? square_sum(x, 256, fuse) * (2.0f / 256.0f) : 0.0f;
        float scale[8], largest = 0.0f;
        f_store(scale, nl_search(x, weights, f_all(sigma2), fuse));
        for (int k = 0; k < 8; k++) {
            if (fabsf(scale[k]) > fabsf(largest)) largest = scale[k];
        }
        float d = -largest / 32.0f;
        int32_t six[8];
        vi code = clamp(nearest_product(f_all(inverse_of(d)), f_load(scale), fuse), -32, 31);
        i_store(six, code);
        put_half(out, d);
        memset(out + 2, 0, 6);
        for (int k = 0; k < 8; k++) {
            nl_pack(x + 32 * k, inverse_of(d * (float)six[k]), out + 8 + 16 * k);
            int bits = six[k] + 32;
            out[2 + k / 4] |= (uint8_t)(bits >> 4 << 2 * (k % 4));
            out[4 + k / 2] |= (uint8_t)((bits & 15) << 4 * (k % 2));
        }
    }
}

FN void enc_f16(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) store_u16(out + 2 * i, to_half(f_load(x + i)));
    for (; i < n; i++) put_half(out + 2 * i, x[i]);
}

/* Nearest even; a NaN keeps its sign and the upper half of its payload and becomes quiet. */
FN vi bf16_bits(vf v) {
    vu bits = (vu)v, up = bits + (0x7fff + (bits >> 16 & 1));
    vi nan = (vi)((bits & 0x7fffffff) > 0x7f800000);
    return (vi)((vu)i_pick(nan, (vi)(bits | 0x00400000), (vi)up) >> 16);
}

FN void enc_bf16(const float *x, uint8_t *out, size_t n, size_t per_row, const float *importance,
                 int fuse) {
    (void)per_row, (void)importance, (void)fuse;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) store_u16(out + 2 * i, bf16_bits(f_load(x + i)));
    for (; i < n; i++) {
        uint8_t lane[16];
        store_u16(lane, bf16_bits(f_all(x[i])));
        memcpy(out + 2 * i, lane, 2);
    }
}

/* Largest magnitude of n elements. */
FN float most_of_any(const float *x, size_t n) {
    size_t i = 0;
    vf mosts = f_all(0.0f);
    for (; i + 8 <= n; i += 8) mosts = f_more_of(f_abs(f_load(x + i)), mosts);
    float most = lanes_most(mosts);
    for (; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

/* Eight nibbles in bytes, the first of each two high, in four bytes. */
FN uint32_t join_pairs(const uint8_t nibble[8]) {
    uint64_t w;
    memcpy(&w, nibble, 8);
    w = (w << 4 | w >> 8) & 0x00ff00ff00ff00ff;
    w = (w | w >> 8) & 0x0000ffff0000ffff;
    return (uint32_t)(w | w >> 16);
}

/* NF4 and FP4 of bitsandbytes: order[how many bounds lie below x / absmax], the high nibble first.
 * The last block may be short, and is then divided by absmax, which others are multiplied with the
 * reciprocal of. */
FN void enc_coded(const float *x, uint8_t *packed, float *absmax, size_t n, size_t block,
                  const float *bounds, const uint8_t *order) {
    const vi low = load_u8(order), high = load_u8(order + 8);
    const ranks split = ranks_of(bounds);
    for (size_t at = 0, b = 0; at < n; at += block, b++) {
        const size_t count = n - at < block ? n - at : block;
        const float most = most_of_any(x + at, count), floor = most < 1e-38f ? 1e-38f : most;
        const float inverse = 1.0f / floor;
        absmax[b] = count < block ? floor : most;
        for (size_t i = 0; i < count; i += 8) {
            const size_t now = count - i < 8 ? count - i : 8, first = at + i;
            uint8_t nibble[8];
            vf v = now == 8 ? f_load(x + first) : f_load_some(x + first, now);
            v = count < block ? v / f_all(floor) : v * f_all(inverse);
            v = f_less_of(f_more_of(v, f_all(-1.0f)), f_all(1.0f));
            store_u8(nibble, (vi)pick16((vf)low, (vf)high, rank15(v, &split, 0)));
            if (now == 8 && first % 2 == 0) {
                uint32_t four = join_pairs(nibble);
                memcpy(packed + first / 2, &four, 4);
                continue;
            }
            for (size_t k = 0; k < now; k++) {
                size_t element = first + k;
                if (element & 1)
                    packed[element / 2] |= nibble[k];
                else
                    packed[element / 2] = (uint8_t)(nibble[k] << 4);
            }
        }
    }
    if (n & 1) { /* the padding is the nibble of zero */
        int below = 0;
        for (int k = 0; k < 15; k++) below += bounds[k] < 0.0f;
        packed[n / 2] |= order[below];
    }
}
