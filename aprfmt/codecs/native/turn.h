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
            if (r % 16 == 0)
                for (ptrdiff_t k = 16; k < 32; k++)
                    __builtin_prefetch(from + k * down + 4 * (ptrdiff_t)r, 0, 2);
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
        /* Sixteen lines at a time, each as a whole: lines apart by a power of two share few places
         * of the cache. */
        for (; tall == SIDE && r + 16 <= rows; r += SIDE) {
            const size_t wide = rows - r < SIDE ? (rows - r) / 16 * 16 : SIDE;
            for (size_t k = 0; k < SIDE; k += 16) {
                for (size_t i = 0; i < 16; i++)
                    __builtin_prefetch(from + (ptrdiff_t)(SIDE + k + i) * down + r, 0, 2);
                for (size_t i = 0; i < wide; i += 16)
                    turn16(from + (ptrdiff_t)k * down + r + i, down, out + (r + i) * stride + u + k,
                           stride);
            }
            if (wide < SIDE) {
                r += wide;
                break;
            }
        }
#endif
        for (; r < rows; r++)
            for (size_t k = 0; k < tall; k++)
                out[r * stride + u + k] = from[(ptrdiff_t)k * down + (ptrdiff_t)r];
    }
}

static const uint8_t awq_order[8] = {0, 2, 4, 6, 1, 3, 5, 7};

/* Eight columns of eight words: a[k] becomes nibbles k of the eight columns, by word. */
FN void swap_nibbles(vu *a) {
    for (int step = 1; step < 8; step *= 2) { /* swaps nibbles of words that are `step` apart */
        const vu mask = (vu)i_all(step == 1 ? 0x0f0f0f0f : step == 2 ? 0x00ff00ff : 0xffff);
        for (int k = 0; k < 8; k++) {
            if (k & step) continue;
            vu moved = (a[k] >> 4 * step ^ a[k + step]) & mask;
            a[k + step] ^= moved;
            a[k] ^= moved << 4 * step;
        }
    }
}

/* held [columns, rows / 8] of 4 bytes: nibble k of a word is that of row `awq_order[k]` of its
 * eight. 64 columns of eight words: 32 bytes of each of 64 rows. */
FN void turn_awq_64(const uint8_t *from, ptrdiff_t down, uint8_t *out, size_t stride) {
    vu a[8][8]; /* by nibble, by eight columns */
    for (ptrdiff_t set = 0; set < 8; set++) {
        vu some[8];
        for (ptrdiff_t k = 0; k < 8; k++) memcpy(&some[k], from + (8 * set + k) * down, 32);
        swap_nibbles(some);
        for (size_t k = 0; k < 8; k++) a[k][set] = some[k];
    }
    for (size_t k = 0; k < 8; k++) {
        vf t[8];
        turn8((const float *)(const void *)a[k], 8, t);
        for (size_t i = 0; i < 8; i++) memcpy(out + (8 * i + awq_order[k]) * stride, &t[i], 32);
    }
}

/* Eight columns, or `now` of them, of `wide` words. */
FN void turn_awq_8(const uint8_t *from, ptrdiff_t down, size_t now, size_t wide, uint8_t *out,
                   size_t stride) {
    vu a[8];
    for (size_t k = 0; k < 8; k++) {
        a[k] = (vu)i_all(0);
        if (k < now) memcpy(&a[k], from + (ptrdiff_t)k * down, 4 * wide);
    }
    swap_nibbles(a);
    for (size_t k = 0; k < 8; k++) {
        uint32_t lane[8];
        memcpy(lane, &a[k], 32);
        for (size_t i = 0; i < wide; i++)
            memcpy(out + (8 * i + awq_order[k]) * stride, &lane[i], (now + 1) / 2);
    }
}

TARGET static void turn_awq(const uint8_t *held, ptrdiff_t down, size_t columns, size_t rows,
                            uint8_t *out, size_t stride) {
    const size_t words = rows / 8;
    for (size_t c = 0; c < columns; c += 64) {
        const size_t span = columns - c < 64 ? columns - c : 64;
        for (size_t w = 0; w < words; w += 8) {
            const size_t wide = words - w < 8 ? words - w : 8;
            const uint8_t *from = held + (ptrdiff_t)c * down + 4 * (ptrdiff_t)w;
            uint8_t *to = out + 8 * w * stride + c / 2;
            if (w % 16 == 0 && c + 128 <= columns)
                for (ptrdiff_t k = 64; k < 128; k++) __builtin_prefetch(from + k * down, 0, 2);
            if (span == 64 && wide == 8) {
                turn_awq_64(from, down, to, stride);
                continue;
            }
            for (size_t k = 0; k < span; k += 8)
                turn_awq_8(from + (ptrdiff_t)k * down, down, span - k < 8 ? span - k : 8, wide,
                           to + k / 2, stride);
        }
    }
}

/* 32 bytes of codes two a byte, the first one low, from 64 bytes of one code each. */
#ifdef APRFMT_AVX2
FN __m256i joined_32(__m256i a, __m256i b) {
    const __m256i pair = _mm256_set1_epi16(0x1001); /* even + 16 * odd */
    const __m256i both = _mm256_packus_epi16(_mm256_maddubs_epi16(a, pair), _mm256_maddubs_epi16(b, pair));
    return _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
}
#endif

/* held [rows / 2, columns] of bytes: an even row in the low nibbles, the next in the high ones. */
TARGET static void turn_pairs(const uint8_t *held, ptrdiff_t down, size_t columns, size_t rows,
                              uint8_t *out, size_t stride) {
    for (size_t r = 0; r < rows; r += 2, held += down) {
        uint8_t *even = out + r * stride, *odd = even + stride;
        size_t c = 0;
#ifdef APRFMT_AVX2
        for (; r + 1 < rows && c + 32 <= columns / 2; c += 32) {
            const __m256i low = _mm256_set1_epi8(15);
            const __m256i *at = (const __m256i *)(const void *)(held + 2 * c);
            const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
            ahead(held + 2 * c);
            _mm256_storeu_si256((__m256i *)(void *)(even + c),
                                joined_32(_mm256_and_si256(a, low), _mm256_and_si256(b, low)));
            _mm256_storeu_si256((__m256i *)(void *)(odd + c),
                                joined_32(_mm256_and_si256(_mm256_srli_epi16(a, 4), low),
                                          _mm256_and_si256(_mm256_srli_epi16(b, 4), low)));
        }
#endif
        for (; c < columns / 2; c++) {
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

TARGET void OF(turn)(int order, const uint8_t *held, ptrdiff_t down, size_t units, size_t rows,
                     uint8_t *out, size_t stride) {
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

TARGET void OF(halves)(const nibbles *n, int back) {
    if (n->half == 8 && back)
        halves_rows(n, 8, 1);
    else if (n->half == 8)
        halves_rows(n, 8, 0);
    else if (back)
        halves_rows(n, 16, 1);
    else
        halves_rows(n, 16, 0);
}
