/* Packed weights of safetensors: codes in streams and the numbers of tiles with them, as
 * weight_layout.py has them. What numpy does there in steps is done here element by element, in the same
 * order of roundings: (number of the code - zero) * scale + offset. */

FN const uint8_t *row_of(const tile_numbers *n, size_t down) {
    return n->at ? n->at + (ptrdiff_t)down * n->down : NULL;
}

/* Number `across` of a row of them, where there are any. */
FN float number_of(const tile_numbers *n, const uint8_t *row, size_t across, float otherwise) {
    if (!row) return otherwise;
    const uint8_t *at = row + (ptrdiff_t)across * n->across;
    return n->table ? n->table[*at] : f32_at(at);
}

FN vf numbers_of(const tile_numbers *n, const uint8_t *row, const int32_t *at, float otherwise) {
    if (!row) return f_all(otherwise);
    if (!n->table && n->across == 4) {
        const float *v = (const float *)(const void *)row;
#ifdef APRFMT_AVX2
        return (vf)_mm256_i32gather_ps(v, (__m256i)i_load(at), 4);
#endif
        return (vf){v[at[0]], v[at[1]], v[at[2]], v[at[3]], v[at[4]], v[at[5]], v[at[6]], v[at[7]]};
    }
    float v[8];
    for (int i = 0; i < 8; i++) v[i] = number_of(n, row, (size_t)at[i], otherwise);
    return f_load(v);
}

/* What is done to every number: a zero of 0, a scale of 1 and an offset of -0 change none. */
typedef struct {
    float zero, scale, offset;
} three;

/* Where the numbers of one row of tiles begin. */
typedef struct {
    const uint8_t *zero, *scale, *offset;
} tile_row;

FN three three_of(const packed *p, const tile_row *row, size_t across, int bare) {
    if (bare) return (three){0.0f, number_of(&p->scale, row->scale, across, 1.0f), -0.0f};
    return (three){number_of(&p->zero, row->zero, across, 0.0f),
                   number_of(&p->scale, row->scale, across, 1.0f),
                   number_of(&p->offset, row->offset, across, -0.0f)};
}

FN vf with_three(vf v, three t, int bare) {
    if (bare) return v * f_all(t.scale);
    return (v - f_all(t.zero)) * f_all(t.scale) + f_all(t.offset);
}

/* Columns of a row of which each says whose numbers it has. */
FN void packed_grouped(const packed *p, int kind, const uint8_t *stream, const uint8_t *end,
                       const tile_row *row, float *out) {
    const int bits = p->bits;
    size_t c = 0;
    for (; c + 8 <= p->columns; c += 8) {
        const int32_t *across = p->group + c;
        vi code = codes_8(stream + c / 8 * (size_t)bits, end, bits);
        vf v = numbers_8(code, p->values, kind, bits) - numbers_of(&p->zero, row->zero, across, 0.0f);
        v *= numbers_of(&p->scale, row->scale, across, 1.0f);
        f_store(out + c, v + numbers_of(&p->offset, row->offset, across, -0.0f));
    }
    for (; c < p->columns; c++) {
        three t = three_of(p, row, (size_t)p->group[c], 0);
        out[c] = (p->values[code_at(stream, c, bits)] - t.zero) * t.scale + t.offset;
    }
}

/* Whole eights of codes of four bits, all with the same three numbers. Of numbers with two signs
 * and a scale alone only the first eight are multiplied: a product's sign is that of its factors. */
FN void packed_nibbles(const float *values, int kind, int bare, const uint8_t *stream, three t,
                       size_t at, size_t stop, float *out, sink *to) {
    const vu places = {0, 4, 8, 12, 16, 20, 24, 28};
    const vf low = with_three(f_load(values), t, bare);
    if (bare && kind == SIGNED_TABLE) {
        for (; at < stop; at += 8) {
            const vu code = (vu)i_all((int32_t)u32_at(stream + at / 2)) >> places;
            put(out + at, (vf)((vu)pick8(low, (vi)code) ^ (code << 28 & 0x80000000u)), to);
        }
        return;
    }
    const vf high = with_three(f_load(values + 8), t, bare);
    for (; at < stop; at += 8) {
        const vu code = (vu)i_all((int32_t)u32_at(stream + at / 2)) >> places;
        put(out + at, pick16(low, high, (vi)code), to);
    }
}

/* Whole sixteens of codes of eight bits, all with the same three numbers. */
FN void packed_bytes(const float *values, int kind, int bare, const uint8_t *stream, three t, size_t at,
                     size_t stop, float *out, sink *to) {
    for (; at < stop; at += 16) {
        vf a, b;
        if (at % 64 == 0) ahead(stream + at);
        if (kind == IS_E4M3) {
            e4m3_16(stream + at, &a, &b);
        } else {
            a = numbers_8(load_u8(stream + at), values, kind, 8);
            b = numbers_8(load_u8(stream + at + 8), values, kind, 8);
        }
        put(out + at, with_three(a, t, bare), to);
        put(out + at + 8, with_three(b, t, bare), to);
    }
}

/* Elements [at, stop) of a row, which all have the same three numbers. */
FN void packed_run(const packed *p, int kind, int bare, const uint8_t *stream, const uint8_t *end, three t,
                   size_t at, size_t stop, float *out, sink *to) {
    const int bits = bits_of_kind(kind, p->bits);
    for (; at < stop && at % 8; at++)
        out[at] = (p->values[code_at(stream, at, bits)] - t.zero) * t.scale + t.offset;
    if (bits <= 4 && at + 8 <= stop) {
        ahead(stream + at / 2);
        if (bits == 4) {
            const size_t whole = stop / 8 * 8;
            packed_nibbles(p->sixteen, kind, bare, stream, t, at, whole, out, to);
            at = whole;
        } else { /* three bits at most */
            const vf low = with_three(f_load(p->sixteen), t, bare);
            const vu places = (vu)(i_all(bits) * (vi){0, 1, 2, 3, 4, 5, 6, 7});
            const vi mask = i_all((1 << bits) - 1);
            const size_t inside = within(stream, end, bits, stop);
            for (; at < inside; at += 8) { /* of three bits pick8 takes no others */
                const uint32_t all = u32_at(stream + at / 8 * (size_t)bits);
                const vi code = (vi)((vu)i_all((int32_t)all) >> places);
                put(out + at, pick8(low, bits == 3 ? code : code & mask), to);
            }
            for (; at + 8 <= stop; at += 8)
                put(out + at, pick8(low, codes_8(stream + at / 8 * (size_t)bits, end, bits)), to);
        }
    } else if (bits == 8) {
        const size_t whole = at + (stop - at) / 16 * 16;
        packed_bytes(p->values, kind, bare, stream, t, at, whole, out, to);
        for (at = whole; at + 8 <= stop; at += 8)
            put(out + at, with_three(numbers_8(load_u8(stream + at), p->values, kind, 8), t, bare), to);
    } else {
#ifdef APRFMT_AVX2
        if (kind == IS_E2M3 || kind == IS_E3M2) {
            const int fraction = kind == IS_E2M3 ? 3 : 2, bias = kind == IS_E2M3 ? 1 : 3;
            for (; at + 16 <= stop; at += 16) {
                const uint8_t *from = stream + at / 8 * 6;
                vf a, b;
                if (end - from < 16) break;
                if (at % 64 == 0) ahead(from);
                six_floats_16(from, fraction, bias, &a, &b);
                put(out + at, with_three(a, t, bare), to);
                put(out + at + 8, with_three(b, t, bare), to);
            }
        }
#endif
        const size_t inside = within(stream, end, bits, stop);
        for (; at < inside; at += 8) {
            const uint8_t *from = stream + at / 8 * (size_t)bits;
            if (at % 64 == 0) ahead(from);
            vi code = codes_within(from, bits);
            put(out + at, with_three(numbers_8(code, p->values, kind, bits), t, bare), to);
        }
        for (; at + 8 <= stop; at += 8) {
            vi code = codes_8(stream + at / 8 * (size_t)bits, end, bits);
            put(out + at, with_three(numbers_8(code, p->values, kind, bits), t, bare), to);
        }
    }
    for (; at < stop; at++)
        out[at] = (p->values[code_at(stream, at, bits)] - t.zero) * t.scale + t.offset;
}

/* `bare`: there are scales alone. */
FN void packed_rows(const packed *p, int kind, int bare, float *out, sink *to) {
    const int bits = bits_of_kind(kind, p->bits);
    const uint8_t *end = p->streams + (p->rows - 1) * p->stride + p->row_bytes;
    for (size_t r = 0; r < p->rows; r++, out += p->columns) {
        const uint8_t *stream = p->streams + r * p->stride;
        const size_t down = (p->first + r) / p->tall;
        const tile_row row = {row_of(&p->zero, down), row_of(&p->scale, down),
                              row_of(&p->offset, down)};
        if (p->group) {
            packed_grouped(p, kind, stream, end, &row, out);
            continue;
        }
        size_t at = 0, across = 0;
        if (bits == 4 && p->wide % 16 == 0) {
            for (; at + p->wide <= p->columns; at += p->wide, across++) {
                const three t = three_of(p, &row, across, bare);
                if (p->wide > 16 || at % 128 == 0) ahead(stream + at / 2);
                if (p->wide == 16)
                    packed_nibbles(p->sixteen, kind, bare, stream, t, at, at + 16, out, to);
                else
                    packed_nibbles(p->sixteen, kind, bare, stream, t, at, at + p->wide, out, to);
            }
        }
        if (bits == 8 && p->wide % 16 == 0) {
            for (; at + p->wide <= p->columns; at += p->wide, across++) {
                const three t = three_of(p, &row, across, bare);
                if (p->wide == 32)
                    packed_bytes(p->values, kind, bare, stream, t, at, at + 32, out, to);
                else
                    packed_bytes(p->values, kind, bare, stream, t, at, at + p->wide, out, to);
            }
        }
        for (; at < p->columns; across++) {
            const size_t left = p->columns - at, stop = at + (left < p->wide ? left : p->wide);
            packed_run(p, kind, bare, stream, end, three_of(p, &row, across, bare), at, stop,
                       out, to);
            at = stop;
        }
    }
}

#define PACKED_KIND(mode, known)         \
    case known: {                        \
        sink to = {.kind = mode};        \
        if (bare)                        \
            packed_rows(p, known, 1, out, &to); \
        else                             \
            packed_rows(p, known, 0, out, &to); \
        break;                           \
    }
#define PACKED_MODE(suffix, mode)                                       \
    TARGET static void packed_##suffix(const packed *given, float *out) {   \
        const packed held = *given, *p = &held; /* nothing that is stored changes it */ \
        const int bare = !p->zero.at && !p->offset.at;                  \
        switch (kind_of(p->values, p->bits)) {                          \
            PACKED_KIND(mode, IN_ORDER)                                 \
            PACKED_KIND(mode, TWO_SIGNS)                                \
            PACKED_KIND(mode, IS_E4M3)                                  \
            PACKED_KIND(mode, IS_E2M3)                                  \
            PACKED_KIND(mode, IS_E3M2)                                  \
            PACKED_KIND(mode, SIGNED_TABLE)                             \
            PACKED_KIND(mode, IN_TABLE)                                 \
        }                                                               \
        if (mode != PLAIN) fence();                                     \
    }

PACKED_MODE(plain, PLAIN)
#ifdef APRFMT_AVX2
PACKED_MODE(past32, PAST32)
PACKED_MODE(past16, PAST16)
#endif

TARGET void OF(packed)(const packed *p, float *out, int mode) {
#ifdef APRFMT_AVX2
    if (mode == PAST32) {
        packed_past32(p, out);
        return;
    }
    if (mode == PAST16) {
        packed_past16(p, out);
        return;
    }
#endif
    (void)mode;
    packed_plain(p, out);
}
