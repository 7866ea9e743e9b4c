/* Packed weights whose codes do not lie in rows, decoded where they lie: the eight lanes are eight
 * rows, which are neighbours there, and eight columns of them are turned at a time. Input is copied
 * first, SPAN columns of BAND rows: its rows lie apart by powers of two, and of such lines a cache
 * holds few at a time. What is done to a number is what packed.h does. */

/* Codes of columns c to c + 8 of rows r to r + 8; `held` has units of `apart` bytes. */
FN void codes_across(int order, int bits, const uint8_t *held, size_t apart, size_t r, size_t c,
                     vi *code) {
    const size_t each = (size_t)((order == TURN_WORDS ? 32 : 8) / bits); /* columns of a unit */
    const vi mask = i_all((1 << bits) - 1);
    for (size_t k = 0; k < 8; k++) {
        if (order == TURN_AWQ) {
            const vu places = {0, 16, 4, 20, 8, 24, 12, 28};
            const uint32_t word = u32_at(held + (c + k) * apart + r / 2);
            code[k] = (vi)((vu)i_all((int32_t)word) >> places) & mask;
            continue;
        }
        const uint8_t *at = held + (c + k) / each * apart;
        const int shift = bits * (int)((c + k) % each);
        vi unit = order == TURN_WORDS ? i_load((const int32_t *)(const void *)(at + 4 * r))
                                      : load_u8(at + r);
        code[k] = (vi)((vu)unit >> (uint32_t)shift) & mask;
    }
}

/* The numbers of a band by slot: each of up to three is [slots][BAND]. */
typedef struct {
    const float *zero, *scale, *offset; /* zero and offset may be NULL */
    int32_t slot[SPAN];
} band;

FN void numbers_across(const packed *p, int kind, int bits, const band *b, size_t r, size_t c,
                       const vi *code, vf *v) {
    if (bits <= 4 && kind != IN_ORDER && kind != TWO_SIGNS) {
        const vf low = f_load(p->sixteen), high = f_load(p->sixteen + 8);
        for (int k = 0; k < 8; k++) v[k] = pick16(low, high, code[k]);
    } else if (kind == IN_ORDER) {
        for (int k = 0; k < 8; k++) v[k] = numbers_8(code[k], p->values, IN_ORDER, bits);
    } else if (kind == IS_E4M3) {
        for (int k = 0; k < 8; k++) v[k] = e4m3_8(code[k]);
    } else {
        for (int k = 0; k < 8; k++) v[k] = numbers_8(code[k], p->values, kind, bits);
    }
    for (int k = 0; k < 8; k++) {
        const size_t at = (size_t)b->slot[c + (size_t)k] * BAND + r;
        if (b->zero) v[k] -= f_load(b->zero + at);
        v[k] *= f_load(b->scale + at);
        if (b->offset) v[k] += f_load(b->offset + at);
    }
}

/* Put the numbers of one kind for `rows` rows from `first` on into slots: those of groups `from` to
 * `stop`. */
TARGET static void spread_numbers(const tile_numbers *n, float otherwise, size_t first, size_t rows,
                           size_t from, size_t stop, float *to) {
    for (size_t g = from; g < stop; g++, to += BAND) {
        const uint8_t *at = n->at ? n->at + (ptrdiff_t)first * n->down + (ptrdiff_t)g * n->across : NULL;
        if (at && !n->table && n->down == 4) {
            memcpy(to, at, 4 * rows);
            continue;
        }
        for (size_t r = 0; r < rows; r++) {
            if (!at)
                to[r] = otherwise;
            else
                to[r] = n->table ? n->table[at[(ptrdiff_t)r * n->down]]
                                 : f32_at(at + (ptrdiff_t)r * n->down);
        }
    }
}

FN void put_rows(float *out, size_t columns, const vf *t, size_t count, int mode) {
    sink past32 = {.kind = PAST32}, past16 = {.kind = PAST16}, plain = {.kind = PLAIN};
    for (size_t i = 0; i < 8; i++, out += columns)
        for (size_t k = 0; k < count; k++) {
            if (mode == PAST32)
                put(out + 8 * k, t[8 * k + i], &past32);
            else if (mode == PAST16)
                put(out + 8 * k, t[8 * k + i], &past16);
            else
                put(out + 8 * k, t[8 * k + i], &plain);
        }
}

/* `room` is for 3 * BAND floats for every group, or for SPAN + 1 where groups are in order. */
FN void across_rows(const packed *p, int order, int bits, int kind, float *room, float *out,
                    int mode) {
    const size_t wide_band = order == TURN_WORDS ? 4 * BAND : order == TURN_AWQ ? BAND / 2 : BAND;
    const size_t units = order == TURN_AWQ ? SPAN : SPAN * (size_t)bits / (order == TURN_WORDS ? 32 : 8);
    const size_t slots = p->group ? p->groups : SPAN + 1;
    uint8_t local[SPAN * BAND] __attribute__((aligned(64)));
    float *zero = room, *scale = zero + slots * BAND, *offset = scale + slots * BAND;
    band b = {p->zero.at ? zero : NULL, scale, p->offset.at ? offset : NULL, {0}};
    for (size_t r0 = 0; r0 < p->rows; r0 += BAND) {
        const size_t rows = p->rows - r0 < BAND ? p->rows - r0 : BAND;
        const size_t size = wide_band * rows / BAND;
        const uint8_t *held = p->streams + wide_band * (r0 / BAND);
        size_t from = 0, stop = 0; /* the groups in the slots */
        for (size_t c0 = 0; c0 < p->columns; c0 += SPAN) {
            const size_t span = p->columns - c0 < SPAN ? p->columns - c0 : SPAN;
            const size_t now = units * span / SPAN;
            const uint8_t *at = held + c0 / SPAN * units * p->stride;
            for (size_t u = 0; u < now; u++) memcpy(local + u * wide_band, at + u * p->stride, size);
            if (c0 + 2 * SPAN <= p->columns)
                for (size_t u = units; u < 2 * units; u++)
                    for (size_t i = 0; i < size; i += 64)
                        __builtin_prefetch(at + u * p->stride + i, 0, 2);
            const size_t low = p->group ? 0 : c0 / p->wide;
            const size_t high = p->group ? p->groups : (c0 + span - 1) / p->wide + 1;
            if (low != from || high != stop) {
                from = low, stop = high;
                if (p->zero.at) spread_numbers(&p->zero, 0.0f, p->first + r0, rows, from, stop, zero);
                spread_numbers(&p->scale, 1.0f, p->first + r0, rows, from, stop, scale);
                if (p->offset.at)
                    spread_numbers(&p->offset, -0.0f, p->first + r0, rows, from, stop, offset);
            }
            for (size_t c = 0; c < span; c++)
                b.slot[c] = p->group ? p->group[c0 + c] : (int32_t)((c0 + c) / p->wide - from);
            for (size_t r = 0; r < rows; r += 8) {
                float *to = out + (r0 + r) * p->columns + c0;
                for (size_t c = 0; c < span; c += 16) {
                    const size_t count = span - c < 16 ? 1 : 2;
                    vf t[16];
                    for (size_t k = 0; k < count; k++) {
                        vi code[8];
                        vf v[8];
                        codes_across(order, bits, local, wide_band, r, c + 8 * k, code);
                        numbers_across(p, kind, bits, &b, r, c + 8 * k, code, v);
                        turn8((const float *)v, 8, t + 8 * k);
                    }
                    put_rows(to + c, p->columns, t, count, mode);
                }
            }
        }
    }
}

#define ACROSS(which, width)                                           \
    if (order == which && p->bits == width) {                          \
        across_rows(p, which, width, kind, room, out, mode);           \
        if (mode != PLAIN) fence();                                    \
        return;                                                        \
    }

TARGET void OF(across)(const packed *given, int order, float *room, float *out, int mode) {
    const packed copy = *given, *p = &copy;
    const int kind = kind_of(p->values, p->bits);
    ACROSS(TURN_WORDS, 4)
    ACROSS(TURN_WORDS, 8)
    ACROSS(TURN_WORDS, 2)
    ACROSS(TURN_AWQ, 4)
    ACROSS(TURN_BYTES, 4)
    ACROSS(TURN_BYTES, 8)
}
