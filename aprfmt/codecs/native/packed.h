/* Packed weights of safetensors: codes in streams and the numbers of tiles beside them, as
 * laid_out.py has them. What numpy does there in steps is done here element by element, in the same
 * order of roundings: (number of the code - zero) * scale + offset. */

/* Eight codes of `bits` bits each from the low bits of `all`: each lies in two neighbouring bytes. */
FN vi codes_in(uint64_t all, int bits) {
    const vi first = i_all(bits) * (vi){0, 1, 2, 3, 4, 5, 6, 7};
#ifdef APRFMT_AVX2
    const vi byte = first >> 3, pair = byte | (byte + 1) << 8 | (int32_t)0x80800000;
    const vi both = (vi)_mm256_shuffle_epi8(_mm256_set1_epi64x((long long)all), (__m256i)pair);
    return (vi)((vu)both >> (vu)(first & 7)) & ((1 << bits) - 1);
#else
    int32_t low = (int32_t)all, high = (int32_t)(all >> 4 * bits);
    vi both = {low, low, low, low, high, high, high, high};
    const vi half = {0, 0, 0, 0, 4, 4, 4, 4};
    return (vi)((vu)both >> (vu)(first - half * i_all(bits))) & ((1 << bits) - 1);
#endif
}

/* Those from the `bits` bytes at `at`; `end` is the end of the stream. */
FN vi codes_8(const uint8_t *at, const uint8_t *end, int bits) {
    uint64_t all = 0;
    if (end - at >= 8)
        memcpy(&all, at, 8);
    else
        for (int i = 0; i < bits; i++) all |= (uint64_t)at[i] << 8 * i;
    return codes_in(all, bits);
}

/* Those where eight bytes are there. */
FN vi codes_within(const uint8_t *at, int bits) {
    uint64_t all;
    memcpy(&all, at, 8);
    return codes_in(all, bits);
}

/* How many elements of a stream, in eights and `stop` at most, may be read so. */
FN size_t within(const uint8_t *stream, const uint8_t *end, int bits, size_t stop) {
    const size_t bytes = (size_t)(end - stream);
    const size_t there = bytes < 8 ? 0 : ((bytes - 8) / (size_t)bits + 1) * 8;
    return there < stop ? there : stop / 8 * 8;
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

/* What is known of a table of numbers: those that need no look-up, and those of which the second
 * half is the first with the other sign. */
enum { IN_ORDER, TWO_SIGNS, IS_E4M3, IS_E2M3, IS_E3M2, SIGNED_TABLE, IN_TABLE };

/* Six bits with `fraction` of them behind the exponent, which is biased by `bias`, as float16: its
 * exponent is biased by 15. */
FN vf six_bits_8(vi code, int fraction, int bias) {
    const vi half = (code & 31) << (10 - fraction) | (code & 32) << 10;
#ifdef APRFMT_AVX2
    const __m128i low = _mm256_castsi256_si128(
        _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)half, (__m256i)half), 8));
    const vf wide = (vf)_mm256_cvtph_ps(low);
#else
    const vf wide = half_bits(half);
#endif
    return wide * f_all((float)(1 << (15 - bias)));
}

#ifdef APRFMT_AVX2
/* Sixteen codes of six bits from the first 12 of 16 bytes, each in the high bits of a word. */
FN __m256i six_bits_16(const uint8_t *at) {
    const __m256i pairs = _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6,
                                           6, 7, 6, 7, 7, 8, 8, 9, 9, 10, 9, 10, 10, 11, 11, 12);
    const __m256i up = _mm256_set1_epi64x(0x0100004000100400); /* by 10, 4, 6 and 8 bits */
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)at));
    return _mm256_mullo_epi16(_mm256_shuffle_epi8(all, pairs), up);
}

/* The numbers of six_bits_8, by way of float16. */
FN void six_floats_16(const uint8_t *at, int fraction, int bias, vf *first, vf *second) {
    const __m256i high = six_bits_16(at), sign = _mm256_and_si256(high, _mm256_set1_epi16(-0x8000));
    __m256i rest = _mm256_and_si256(high, _mm256_set1_epi16(0x7c00));
    rest = _mm256_or_si256(_mm256_srli_epi16(rest, fraction), sign);
    const vf unit = f_all((float)(1 << (15 - bias)));
    *first = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(rest)) * unit;
    *second = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(rest, 1)) * unit;
}
#endif

/* Whether a table of 64 is that of such codes. */
static int is_six_bits(const float *values, int fraction, int bias) {
    for (int i = 0; i < 64; i++) {
        const int exponent = (i & 31) >> fraction, rest = i & ((1 << fraction) - 1);
        const int one = exponent ? 1 << fraction : 0;
        float found = ldexpf((float)(one + rest), (exponent ? exponent : 1) - bias - fraction);
        if (i & 32) found = -found;
        if (memcmp(&found, values + i, 4)) return 0;
    }
    return 1;
}

static int kind_of(const float *values, int bits) {
    const int count = 1 << bits;
    int ordered = 1, twos = 1, i;
    for (i = 0; i < count; i++) {
        if (!(values[i] == values[0] + (float)i)) ordered = 0;
        if (!(values[i] == (float)(i < count / 2 ? i : i - count))) twos = 0;
    }
    if (ordered && fabsf(values[0]) < 0x1p20f) return IN_ORDER;
    if (twos) return TWO_SIGNS;
    if (bits == 8 && !memcmp(values, aprfmt_f8[F8_E4M3], 1024)) return IS_E4M3;
    if (bits == 6 && is_six_bits(values, 3, 1)) return IS_E2M3;
    if (bits == 6 && is_six_bits(values, 2, 3)) return IS_E3M2;
    for (i = 0; bits == 4 && i < 8; i++) {
        const float other = -values[i];
        if (memcmp(&other, values + i + 8, 4)) return IN_TABLE;
    }
    return bits == 4 ? SIGNED_TABLE : IN_TABLE;
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
    if (kind == IS_E2M3) return six_bits_8(code, 3, 1);
    if (kind == IS_E3M2) return six_bits_8(code, 2, 3);
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

/* Elements [at, stop) of a row, which all have the same three numbers. */
FN void packed_run(const packed *p, int kind, int bare, const uint8_t *stream, const uint8_t *end, three t,
                   size_t at, size_t stop, float *out, sink *to) {
    const int bits = p->bits;
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
        if (p->bits == 4 && p->wide % 16 == 0) {
            for (; at + p->wide <= p->columns; at += p->wide, across++) {
                const three t = three_of(p, &row, across, bare);
                if (p->wide > 16 || at % 128 == 0) ahead(stream + at / 2);
                if (p->wide == 16)
                    packed_nibbles(p->sixteen, kind, bare, stream, t, at, at + 16, out, to);
                else
                    packed_nibbles(p->sixteen, kind, bare, stream, t, at, at + p->wide, out, to);
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
