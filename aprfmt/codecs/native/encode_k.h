/* Encoders of the K-quants, as aprfmt/codecs/k_search.py: scales of sub-blocks by search, scales of
 * those, then codes under the rounded scales. Up to eight superblocks go together: sub-blocks are
 * lanes first, superblocks are afterwards. */

typedef struct {
    float scale[16][8], min[16][8], weight[16][8]; /* (sub-block, superblock) */
    int32_t outer[16][8], outer_min[16][8];        /* codes of scale and min */
    float d[8], dmin[8];
    uint8_t code[8][256];
} group;

/* Sum of squares in order of index, one at a time, as it decides bits. */
FN float square_sum(const float *x, size_t n, int fuse) {
    float sum = 0.0f;
    for (size_t i = 0; i < n; i++) {
        sum = fuse ? fmaf(x[i], x[i], sum) : sum + x[i] * x[i];
    }
    return sum;
}

/* importance * sqrt(sigma2 + x*x) */
FN void weigh(const vf *x, const vf *importance, vf sigma2, int n, vf *w, int fuse) {
    for (int i = 0; i < n; i++)
        w[i] = importance[i] * f_sqrt(multiply_add(x[i], x[i], sigma2, fuse));
}

/* Eight sub-blocks' results into the group: from `sub` on, of superblock `block`. */
FN void keep8(float to[16][8], int sub, int block, vf v) {
    float lane[8];
    f_store(lane, v);
    for (int k = 0; k < 8; k++) to[sub + k][block] = lane[k];
}

FN vf sum_in_order(const vf *terms, int n) {
    vf sum = terms[0];
    for (int i = 1; i < n; i++) sum += terms[i];
    return sum;
}

/* Which search a type takes, and its sizes. */
typedef struct {
    int size, nmax;    /* elements of a sub-block; largest code, or half the codes if signed */
    int top;           /* largest code of scales */
    float mean_square; /* of the superblock, by this factor, in the weights with importance; 0: not
                          in it */
    steps plain;       /* of scale_and_min without importance */
} k_plan;

enum {
    WITH_MIN,
    SIGNED,
    REFINED
}; /* scale_and_min; signed_scale; without importance refined_scale */

/* Search all sub-blocks of one superblock. */
FN void search_block(const float *x, const float *importance, const k_plan *plan, int search,
                     group *g, int block, int fuse) {
    const int n = plan->size, subs = 256 / n;
    const int weighs = importance && plan->mean_square != 0.0f;
    const vf sigma2 = f_all(weighs ? plan->mean_square * square_sum(x, 256, fuse) / 256.0f : 0.0f);
    for (int sub = 0; sub < subs; sub += 8) {
        vf t[32], w[32], min = f_all(0.0f), scale;
        vi code[32];
        turn(x + n * sub, n, t);
        if (importance) {
            turn(importance + n * sub, n, w);
            if (weighs) weigh(t, w, sigma2, n, w, fuse);
            keep8(g->weight, sub, block, sum_in_order(w, n));
        } else if (search != WITH_MIN) {
            for (int i = 0; i < n; i++) w[i] = t[i] * t[i];
        } else if (plan->plain.absolute) {
            for (int i = 0; i < n; i++) w[i] = f_abs(t[i]);
        } else {
            vf sum = f_all(0.0f);
            for (int i = 0; i < n; i++) sum = multiply_add(t[i], t[i], sum, fuse);
            vf mean = f_sqrt(sum / f_all((float)n));
            for (int i = 0; i < n; i++) w[i] = mean + f_abs(t[i]);
        }
        if (search == WITH_MIN) {
            const steps *tries = importance ? &WEIGHTED_STEPS : &plan->plain;
            scale = scale_and_min(t, w, n, plan->nmax, tries, &min, code, fuse);
        } else if (search == REFINED && !importance) {
            scale = refined_scale(t, n, plan->nmax, code, fuse);
        } else {
            scale = signed_scale(t, w, n, plan->nmax, code, fuse);
        }
        keep8(g->scale, sub, block, scale);
        keep8(g->min, sub, block, min);
        turn_back(code, n, g->code[block] + n * sub);
    }
}

/* Codes of non-negative scales and what they are multiples of: by search, or so that the largest is
 * `top`. */
FN void positive_outer(float scale[16][8], float weight[16][8], int subs, int top, int weighted,
                       int32_t outer[16][8], float d[8], int fuse) {
    vf v[16], w[16];
    vi code[16];
    for (int k = 0; k < subs; k++) v[k] = f_load(scale[k]);
    if (weighted) {
        for (int k = 0; k < subs; k++) w[k] = f_load(weight[k]);
        f_store(d, positive_scale(v, w, subs, top, code, fuse));
    } else {
        vf largest = f_all(0.0f);
        for (int k = 0; k < subs; k++) largest = f_more_of(v[k], largest);
        vi some = (vi)(largest > f_all(0.0f));
        vf inverse = f_pick(some, f_all((float)top) / largest, f_all(0.0f));
        for (int k = 0; k < subs; k++) {
            code[k] = i_less_of(nearest_product(inverse, v[k], fuse) & 255, i_all(top));
        }
        f_store(d, largest / f_all((float)top));
    }
    for (int k = 0; k < subs; k++) i_store(outer[k], code[k]);
}

/* Codes of 256 elements under rounded scales; where a scale is 0 the search's own stay. */
FN void recode(const float *x, uint8_t *code, int size, const float *scale, const float *min,
               int low, int high, int plus) {
    for (int i = 0; i < 256; i += 8) {
        float d = scale[i / size];
        if (d == 0.0f) continue;
        vf shifted = min ? f_load(x + i) + f_all(min[i / size]) : f_load(x + i);
        store_u8(code + i, clamp(nearest(shifted / f_all(d)), low, high) + plus);
    }
}

/* 2 bits of each of four runs of 32 into 32 bytes, for both halves. */
FN void join_crumbs(const uint8_t *code, uint8_t *to) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *c = code + 128 * half;
        for (int l = 0; l < 32; l++) {
            to[32 * half + l] = (uint8_t)((c[l] & 3) | (c[l + 32] & 3) << 2 | (c[l + 64] & 3) << 4 |
                                          (c[l + 96] & 3) << 6);
        }
    }
}

/* Scales are multiplied out as a decoder will read them: a garbage code of theirs shows in what is
 * stored. */
FN void pack_q2_k(const float *x, group *g, int block, uint8_t *to) {
    float scale[16], min[16];
    put_half(to + 80, g->d[block]);
    put_half(to + 82, g->dmin[block]);
    for (int k = 0; k < 16; k++)
        to[k] = (uint8_t)(g->outer[k][block] | g->outer_min[k][block] << 4);
    q2_k_scales(to, scale, min);
    recode(x, g->code[block], 16, scale, min, 0, 3, 0);
    join_crumbs(g->code[block], to + 16);
}

/* d, dmin, the 12 bytes of scales and mins and the low nibbles of Q4_K and Q5_K. */
FN void pack_q45(const float *x, group *g, int block, int nmax, uint8_t *head, uint8_t *nibbles) {
    float scale[8], min[8];
    put_half(head, g->d[block]);
    put_half(head + 2, g->dmin[block]);
    for (int k = 0; k < 4; k++) {
        int s = g->outer[k][block], s4 = g->outer[k + 4][block];
        int m = g->outer_min[k][block], m4 = g->outer_min[k + 4][block];
        if (nmax == 31) { /* ggml limits those of Q5_K and not those of Q4_K */
            s = s < 63 ? s : 63, s4 = s4 < 63 ? s4 : 63;
            m = m < 63 ? m : 63, m4 = m4 < 63 ? m4 : 63;
        }
        head[4 + k] = (uint8_t)(s | s4 >> 4 << 6);
        head[8 + k] = (uint8_t)(m | m4 >> 4 << 6);
        head[12 + k] = (uint8_t)((s4 & 15) | (m4 & 15) << 4);
    }
    k_scales(head + 4, half_at(head), half_at(head + 2), scale, min);
    recode(x, g->code[block], 32, scale, min, 0, nmax, 0);
    for (int run = 0; run < 4; run++) {
        const uint8_t *c = g->code[block] + 64 * run;
        for (int l = 0; l < 32; l++) {
            nibbles[32 * run + l] = (uint8_t)((c[l] & 15) | (c[l + 32] & 15) << 4);
        }
    }
}

FN void pack_q4_k(const float *x, group *g, int block, uint8_t *to) {
    pack_q45(x, g, block, 15, to, to + 16);
}

FN void pack_q5_k(const float *x, group *g, int block, uint8_t *to) {
    pack_q45(x, g, block, 31, to, to + 48);
    for (int l = 0; l < 32; l++) {
        int high = 0;
        for (int k = 0; k < 8; k++) high |= g->code[block][32 * k + l] >> 4 << k;
        to[16 + l] = (uint8_t)high;
    }
}

/* Signed scales of 16 sub-blocks: codes low..-low-1, the largest by magnitude becomes `low`, and so
 * do all where every scale is 0. */
FN void signed_outer(group *g, int low, int wraps, int fuse) {
    vf v[16];
    for (int k = 0; k < 16; k++) v[k] = f_load(g->scale[k]);
    vf largest = first_largest(v, 16), inverse = f_all((float)low) / largest;
    vi some = (vi)(largest != f_all(0.0f));
    for (int k = 0; k < 16; k++) {
        vi code = nearest_product(inverse, v[k], fuse);
        if (wraps)
            code =
                i_more_of(code << 24 >> 24, i_all(low)); /* ggml passes it through an int8 first */
        i_store(g->outer[k], i_pick(some, i_less_of(code, i_all(-low - 1)), i_all(low)));
    }
    f_store(g->d, f_pick(some, f_all(1.0f) / inverse, f_all(0.0f)));
    f_store(g->dmin, largest);
}

FN void pack_q3_k(const float *x, group *g, int block, uint8_t *to) {
    float scale[16];
    int six[16];
    put_half(to + 108, g->d[block]);
    float d = half_at(to + 108);
    for (int k = 0; k < 16; k++) {
        scale[k] = d * (float)g->outer[k][block];
        six[k] = g->outer[k][block] + 32;
    }
    uint8_t *code = g->code[block];
    recode(x, code, 16, scale, NULL, -4, 3, 4);
    for (int k = 0; k < 8; k++) to[96 + k] = (uint8_t)((six[k] & 15) | (six[k + 8] & 15) << 4);
    for (int k = 0; k < 4; k++) {
        to[104 + k] = (uint8_t)(six[k] >> 4 | six[k + 4] >> 4 << 2 | six[k + 8] >> 4 << 4 |
                                six[k + 12] >> 4 << 6);
    }
    for (int l = 0; l < 32; l++) {
        int mask = 0;
        for (int k = 0; k < 8; k++) mask |= code[32 * k + l] >> 2 << k;
        to[l] = (uint8_t)mask;
    }
    join_crumbs(code, to + 32);
}

FN void pack_q6_k(const float *x, group *g, int block, uint8_t *to) {
    if (fabsf(g->dmin[block]) < SMALLEST) {
        memset(to, 0, 210);
        return;
    }
    float scale[16];
    put_half(to + 208, g->d[block]);
    float d = half_at(to + 208);
    for (int k = 0; k < 16; k++) {
        int8_t byte = (int8_t)g->outer[k][block];
        scale[k] = d * (float)byte;
        to[192 + k] = (uint8_t)byte;
    }
    uint8_t *code = g->code[block], high[256];
    recode(x, code, 16, scale, NULL, -32, 31, 32);
    for (int half = 0; half < 2; half++) {
        const uint8_t *c = code + 128 * half;
        for (int l = 0; l < 64; l++)
            to[64 * half + l] = (uint8_t)((c[l] & 15) | (c[l + 64] & 15) << 4);
    }
    for (int i = 0; i < 256; i++) high[i] = code[i] >> 4;
    join_crumbs(high, to + 128);
}

static const k_plan Q2_K_PLAN = {16, 3, 15, 1.0f, {-0.5f, 0.1f, 15, 1}};
static const k_plan Q3_K_PLAN = {16, 4, 32, 2.0f, {0, 0, 0, 0}};
static const k_plan Q4_K_PLAN = {32, 15, 63, 2.0f, {-1.0f, 0.1f, 20, 0}};
static const k_plan Q5_K_PLAN = {32, 31, 63, 2.0f, {-0.5f, 0.1f, 15, 0}};
static const k_plan Q6_K_PLAN = {16, 32, 128, 0.0f, {0, 0, 0, 0}};

/* Encode superblocks of a plan; `pack` writes one of `bytes` bytes. */
#define K_ENCODER(fn, PLAN, search, bytes)                                                     \
    FN void enc_##fn(const float *x, uint8_t *out, size_t n, size_t per_row,                   \
                     const float *importance, int fuse) {                                      \
        group g;                                                                               \
        memset(&g, 0, sizeof g);                                                               \
        for (size_t at = 0; at < n; at += 8) {                                                 \
            int blocks = n - at < 8 ? (int)(n - at) : 8;                                       \
            for (int b = 0; b < blocks; b++) {                                                 \
                const float *weights =                                                         \
                    importance ? importance + (at + (size_t)b) % per_row * 256 : NULL;         \
                search_block(x + (at + (size_t)b) * 256, weights, &PLAN, search, &g, b, fuse); \
            }                                                                                  \
            outer_stage(&g, &PLAN, search, importance != NULL, fuse);                          \
            for (int b = 0; b < blocks; b++) {                                                 \
                pack_##fn(x + (at + (size_t)b) * 256, &g, b, out + (at + (size_t)b) * bytes);  \
            }                                                                                  \
        }                                                                                      \
    }

FN void outer_stage(group *g, const k_plan *plan, int search, int weighted, int fuse) {
    const int subs = 256 / plan->size;
    if (search == WITH_MIN) {
        positive_outer(g->scale, g->weight, subs, plan->top, weighted, g->outer, g->d, fuse);
        positive_outer(g->min, g->weight, subs, plan->top, weighted, g->outer_min, g->dmin, fuse);
    } else if (search == REFINED && weighted) {
        vf v[16], w[16];
        vi code[16];
        for (int k = 0; k < 16; k++) v[k] = f_load(g->scale[k]);
        for (int k = 0; k < 16; k++) w[k] = f_load(g->weight[k]);
        f_store(g->d, signed_scale(v, w, 16, plan->top, code, fuse));
        for (int k = 0; k < 16; k++) i_store(g->outer[k], code[k] - plan->top);
    } else {
        signed_outer(g, -plan->top, search == REFINED, fuse);
    }
}

K_ENCODER(q2_k, Q2_K_PLAN, WITH_MIN, 84)
K_ENCODER(q3_k, Q3_K_PLAN, REFINED, 110)
K_ENCODER(q4_k, Q4_K_PLAN, WITH_MIN, 144)
K_ENCODER(q5_k, Q5_K_PLAN, WITH_MIN, 176)
K_ENCODER(q6_k, Q6_K_PLAN, SIGNED, 210)
