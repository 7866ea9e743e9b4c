/* Packed weights of safetensors: codes in streams and the numbers of tiles beside them, as
 * laid_out.py has them. What numpy does there in steps is done here element by element, in the same
 * order of roundings: (number of the code - zero) * scale + offset. */

/* Eight codes of `bits` bits each from the `bits` bytes at `at`; `end` is the end of the stream. */
FN vi codes_8(const uint8_t *at, const uint8_t *end, int bits) {
    uint64_t all = 0;
    if (end - at >= 8)
        memcpy(&all, at, 8);
    else
        memcpy(&all, at, (size_t)bits);
    int32_t low = (int32_t)all, high = (int32_t)(all >> 4 * bits);
    vi both = {low, low, low, low, high, high, high, high};
    const vi shift = i_all(bits) * (vi){0, 1, 2, 3, 0, 1, 2, 3};
    return (vi)((vu)both >> (vu)shift) & ((1 << bits) - 1);
}

FN int code_at(const uint8_t *stream, size_t index, int bits) {
    const size_t first = index * (size_t)bits, byte = first / 8, shift = first % 8;
    unsigned both = stream[byte];
    if (shift + (size_t)bits > 8) both |= (unsigned)stream[byte + 1] << 8;
    return (int)(both >> shift) & ((1 << bits) - 1);
}

/* E4M3: an exponent of four bits, biased by 7, and three bits; without infinities. */
FN vf e4m3_8(vi byte) {
    vi rest = byte & 0x7f, wide = (rest << 20) + (120 << 23);
    wide = i_pick((vi)(rest < 8), (vi)(to_f(rest) * f_all(0x1p-9f)), wide);
    wide = i_pick((vi)(rest == 0x7f), i_all(0x7fc00000), wide);
    return (vf)(wide | (byte & 0x80) << 24);
}

/* What is known of a table of numbers: those that need no look-up. */
enum { IN_ORDER, TWO_SIGNS, IS_E4M3, IN_TABLE };

static int kind_of(const float *values, int bits) {
    const int count = 1 << bits;
    int ordered = 1, twos = 1, i;
    for (i = 0; i < count; i++) {
        if (!(values[i] == values[0] + (float)i)) ordered = 0;
        if (!(values[i] == (float)(i < count / 2 ? i : i - count))) twos = 0;
    }
    if (ordered && fabsf(values[0]) < 0x1p20f) return IN_ORDER;
    if (twos) return TWO_SIGNS;
    return bits == 8 && !memcmp(values, aprfmt_f8[F8_E4M3], 1024) ? IS_E4M3 : IN_TABLE;
}

/* Sixteen of them, by way of float16, whose exponent is biased by 8 more. */
FN void e4m3_16(const uint8_t *at, vf *first, vf *second) {
#ifdef APRFMT_AVX2
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)at));
    __m256i rest = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(-0x8000));
    __m256i nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x3f80));
    rest = _mm256_xor_si256(rest, _mm256_and_si256(nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    rest = _mm256_or_si256(rest, sign);
    *first = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(rest)) * f_all(256.0f);
    *second = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(rest, 1)) * f_all(256.0f);
#else
    *first = e4m3_8(load_u8(at));
    *second = e4m3_8(load_u8(at + 8));
#endif
}

FN vf numbers_8(vi code, const float *values, int kind, int bits) {
    if (kind == IN_ORDER) return to_f(code) + f_all(values[0]);
    if (kind == TWO_SIGNS) return to_f((code ^ 1 << (bits - 1)) - (1 << (bits - 1)));
    if (kind == IS_E4M3) return e4m3_8(code);
    int32_t at[8];
    i_store(at, code);
    return (vf){values[at[0]], values[at[1]], values[at[2]], values[at[3]],
                values[at[4]], values[at[5]], values[at[6]], values[at[7]]};
}

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

FN three three_of(const packed *p, const tile_row *row, size_t across) {
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
        three t = three_of(p, row, (size_t)p->group[c]);
        out[c] = (p->values[code_at(stream, c, bits)] - t.zero) * t.scale + t.offset;
    }
}

/* Elements [at, stop) of a row, which all have the same three numbers. */
FN void packed_run(const packed *p, int kind, int bare, const uint8_t *stream, const uint8_t *end, three t,
                   size_t at, size_t stop, float *out, sink *to) {
    const int bits = p->bits;
    for (; at < stop && at % 8; at++)
        out[at] = (p->values[code_at(stream, at, bits)] - t.zero) * t.scale + t.offset;
    if (bits <= 4 && at + 8 <= stop) {
        const float *values = p->sixteen;
        const vf low = with_three(f_load(values), t, bare), high = with_three(f_load(values + 8), t, bare);
        ahead(stream + at / 2);
        if (bits == 4) {
            for (; at + 8 <= stop; at += 8) {
                vu all = (vu)i_all((int32_t)u32_at(stream + at / 2));
                put(out + at, pick16(low, high, (vi)(all >> (vu){0, 4, 8, 12, 16, 20, 24, 28})),
                    to);
            }
        } else {
            for (; at + 8 <= stop; at += 8)
                put(out + at, pick16(low, high, codes_8(stream + at / 8 * (size_t)bits, end, bits)),
                    to);
        }
    } else if (bits == 8 && kind == IS_E4M3) {
        for (; at + 16 <= stop; at += 16) {
            vf a, b;
            if (at % 64 == 0) ahead(stream + at);
            e4m3_16(stream + at, &a, &b);
            put(out + at, with_three(a, t, bare), to);
            put(out + at + 8, with_three(b, t, bare), to);
        }
        for (; at + 8 <= stop; at += 8) put(out + at, with_three(e4m3_8(load_u8(stream + at)), t, bare), to);
    } else if (bits == 8) {
        for (; at + 8 <= stop; at += 8) {
            if (at % 64 == 0) ahead(stream + at);
            put(out + at, with_three(numbers_8(load_u8(stream + at), p->values, kind, 8), t, bare), to);
        }
    } else {
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
        for (; at < p->columns; across++) {
            const size_t left = p->columns - at, stop = at + (left < p->wide ? left : p->wide);
            packed_run(p, kind, bare, stream, end, three_of(p, &row, across), at, stop, out, to);
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
            PACKED_KIND(mode, IN_TABLE)                                 \
        }                                                               \
        if (mode != PLAIN) fence();                                     \
    }

PACKED_MODE(plain, PLAIN)
#ifdef APRFMT_AVX2
PACKED_MODE(past32, PAST32)
PACKED_MODE(past16, PAST16)
#endif

TARGET static void run_packed(const packed *p, float *out, int mode) {
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

/* Codes that do not lie in rows, turned into streams of rows, `stride` bytes
 * apart. */

/* held [units, rows] of 4 bytes: a row's stream goes down a column. */
TARGET static void turn_words(const uint8_t *held, ptrdiff_t down, size_t units, size_t rows,
                              uint8_t *out, size_t stride) {
    size_t u = 0;
    for (; u + 16 <= units; u += 16) {
        const uint8_t *from = held + (ptrdiff_t)u * down;
        size_t r = 0;
        for (; r + 8 <= rows; r += 8) {
            for (size_t half = 0; half < 16; half += 8) {
                vf t[8];
                turn8((const float *)(const void *)(from + (ptrdiff_t)half * down) + r,
                      (size_t)down / 4, t);
                for (size_t k = 0; k < 8; k++)
                    memcpy(out + (r + k) * stride + 4 * (u + half), &t[k], 32);
            }
        }
        for (; r < rows; r++)
            for (size_t k = 0; k < 16; k++)
                memcpy(out + r * stride + 4 * (u + k), from + (ptrdiff_t)k * down + 4 * (ptrdiff_t)r, 4);
    }
    for (; u < units; u++)
        for (size_t r = 0; r < rows; r++)
            memcpy(out + r * stride + 4 * u, held + (ptrdiff_t)u * down + 4 * (ptrdiff_t)r, 4);
}

#ifdef APRFMT_AVX2
/* Sixteen rows of sixteen bytes, turned. */
FN void turn16(const uint8_t *from, ptrdiff_t down, uint8_t *out, size_t stride) {
    __m128i a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + i * down));
    for (int step = 0; step < 4; step++) { /* rows i and i + 8 become 2i and 2i + 1 */
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        memcpy(a, b, sizeof a);
    }
    for (size_t i = 0; i < 16; i++) _mm_storeu_si128((__m128i *)(void *)(out + i * stride), a[i]);
}
#endif

/* The same of single bytes. */
TARGET static void turn_bytes(const uint8_t *held, ptrdiff_t down, size_t units, size_t rows,
                              uint8_t *out, size_t stride) {
    enum { SIDE = 64 };
    for (size_t u = 0; u < units; u += SIDE) {
        const size_t tall = units - u < SIDE ? units - u : SIDE;
        const uint8_t *from = held + (ptrdiff_t)u * down;
        size_t r = 0;
#ifdef APRFMT_AVX2
        for (; tall == SIDE && r + 16 <= rows; r += 16)
            for (size_t k = 0; k < SIDE; k += 16)
                turn16(from + (ptrdiff_t)k * down + r, down, out + r * stride + u + k, stride);
#endif
        for (; r < rows; r++)
            for (size_t k = 0; k < tall; k++)
                out[r * stride + u + k] = from[(ptrdiff_t)k * down + (ptrdiff_t)r];
    }
}

/* held [columns, rows / 8] of 4 bytes: nibble k of a word is that of row `order[k]` of its eight. */
/* Eight columns of up to eight words, at once. */
FN void turn_awq_8(vu *a, size_t wide, size_t bytes, uint8_t *out, size_t stride) {
    static const uint8_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int step = 1; step < 8; step *= 2) { /* swaps nibbles of words that are `step` apart */
        const vu mask = (vu)i_all(step == 1 ? 0x0f0f0f0f : step == 2 ? 0x00ff00ff : 0xffff);
        for (int k = 0; k < 8; k++) {
            if (k & step) continue;
            vu moved = (a[k] >> 4 * step ^ a[k + step]) & mask;
            a[k + step] ^= moved;
            a[k] ^= moved << 4 * step;
        }
    }
    for (size_t k = 0; k < 8; k++) {
        uint32_t lane[8];
        memcpy(lane, &a[k], 32);
        for (size_t i = 0; i < wide; i++) memcpy(out + (8 * i + order[k]) * stride, &lane[i], bytes);
    }
}

TARGET static void turn_awq(const uint8_t *held, ptrdiff_t down, size_t columns, size_t rows,
                            uint8_t *out, size_t stride) {
    const size_t words = rows / 8;
    for (size_t c = 0; c < columns; c += 8) {
        const size_t now = columns - c < 8 ? columns - c : 8;
        for (size_t w = 0; w < words; w += 8) {
            const size_t wide = words - w < 8 ? words - w : 8;
            const uint8_t *from = held + (ptrdiff_t)c * down + 4 * (ptrdiff_t)w;
            uint8_t *to = out + 8 * w * stride + c / 2;
            vu a[8];
            if (now == 8 && wide == 8) {
                for (int k = 0; k < 8; k++) memcpy(&a[k], from + k * down, 32);
                turn_awq_8(a, 8, 4, to, stride);
                continue;
            }
            for (size_t k = 0; k < 8; k++) {
                a[k] = (vu)i_all(0);
                if (k < now) memcpy(&a[k], from + (ptrdiff_t)k * down, 4 * wide);
            }
            turn_awq_8(a, wide, (now + 1) / 2, to, stride);
        }
    }
}

/* held [rows / 2, columns] of bytes: an even row in the low nibbles, the next in the high ones. */
TARGET static void turn_pairs(const uint8_t *held, ptrdiff_t down, size_t columns, size_t rows,
                              uint8_t *out, size_t stride) {
    for (size_t r = 0; r < rows; r += 2, held += down) {
        uint8_t *even = out + r * stride, *odd = even + stride;
        for (size_t c = 0; c < columns / 2; c++) {
            const uint8_t a = held[2 * c], b = held[2 * c + 1];
            even[c] = (uint8_t)((a & 15) | b << 4);
            if (r + 1 < rows) odd[c] = (uint8_t)(a >> 4 | (b & 0xf0));
        }
        if (columns % 2) {
            even[columns / 2] = held[columns - 1] & 15;
            if (r + 1 < rows) odd[columns / 2] = held[columns - 1] >> 4;
        }
    }
}

TARGET static void run_turn(int order, const uint8_t *held, ptrdiff_t down, size_t units,
                            size_t rows, uint8_t *out, size_t stride) {
    switch (order) {
        case TURN_WORDS: turn_words(held, down, units, rows, out, stride); break;
        case TURN_BYTES: turn_bytes(held, down, units, rows, out, stride); break;
        case TURN_AWQ: turn_awq(held, down, units, rows, out, stride); break;
        case TURN_PAIRS: turn_pairs(held, down, units, rows, out, stride); break;
    }
}

/* Nibbles in another order, `half` bytes of them at a time (8 or 16): from codes in their order, two
 * a byte, the low one first, to those of the first half low and of the second high; or `back`. */
FN void halves_16(const uint8_t *from, uint8_t *to, size_t half, int back) {
    uint8_t code[32];
    for (size_t i = 0; i < half; i++) {
        code[back ? i : 2 * i] = from[i] & 15;
        code[back ? i + half : 2 * i + 1] = from[i] >> 4;
    }
    for (size_t i = 0; i < half; i++)
        to[i] = (uint8_t)(code[back ? 2 * i : i] | code[back ? 2 * i + 1 : i + half] << 4);
}

#ifdef APRFMT_AVX2
/* Sixteen bytes of the same: one unit of 16, or two of 8. */
FN __m128i halves_of(__m128i x, size_t half, int back) {
    const __m128i low = _mm_set1_epi8(15), pair = _mm_set1_epi16(0x1001); /* even + 16 * odd */
    const __m128i even = _mm_and_si128(x, low), odd = _mm_and_si128(_mm_srli_epi16(x, 4), low);
    if (back) {
        __m128i both = _mm_packus_epi16(_mm_maddubs_epi16(even, pair), _mm_maddubs_epi16(odd, pair));
        return half == 8 ? _mm_shuffle_epi32(both, _MM_SHUFFLE(3, 1, 2, 0)) : both;
    }
    __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
    if (half == 8) {
        const __m128i swapped = _mm_unpackhi_epi64(first, second);
        first = _mm_unpacklo_epi64(first, second);
        second = swapped;
    }
    return _mm_or_si128(first, _mm_slli_epi16(second, 4));
}
#endif

FN void halves_rows(const nibbles *n, size_t half, int back) {
    for (size_t b = 0; b < n->blocks; b++) {
        const uint8_t *from = n->from + b * n->from_stride;
        uint8_t *to = n->to + b * n->to_stride;
        size_t at = 0;
#ifdef APRFMT_AVX2
        for (; at + 16 <= n->bytes; at += 16) {
            const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(from + at));
            _mm_storeu_si128((__m128i *)(void *)(to + at), halves_of(x, half, back));
        }
#endif
        for (; at < n->bytes; at += half) halves_16(from + at, to + at, half, back);
    }
}

TARGET static void run_halves(const nibbles *n, int back) {
    if (n->half == 8 && back)
        halves_rows(n, 8, 1);
    else if (n->half == 8)
        halves_rows(n, 8, 0);
    else if (back)
        halves_rows(n, 16, 1);
    else
        halves_rows(n, 16, 0);
}
