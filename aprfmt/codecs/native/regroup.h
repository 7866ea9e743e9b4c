/* Codes of four bits under two sets of numbers. A group has sixteen values at most under each, so
 * that the two are compared once for every code, and then only for the codes that it has. */

/* Which of the sixteen codes are among the nibbles of `n` bytes, by bit. */
FN uint32_t codes_among(const uint8_t *at, size_t n) {
    uint32_t found = 0;
    size_t i = 0;
#ifdef APRFMT_AVX2
    const __m128i low = _mm_set1_epi8(15);
    const __m128i eight = _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i other = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, -128);
    __m128i first = _mm_setzero_si128(), second = first;
    for (; i + 8 <= n; i += 8) {
        const __m128i x = _mm_loadl_epi64((const __m128i *)(const void *)(at + i));
        const __m128i code = _mm_unpacklo_epi64(_mm_and_si128(x, low),
                                                _mm_and_si128(_mm_srli_epi16(x, 4), low));
        first = _mm_or_si128(first, _mm_shuffle_epi8(eight, code));
        second = _mm_or_si128(second, _mm_shuffle_epi8(other, code));
    }
    __m128i both = _mm_or_si128(_mm_unpacklo_epi8(first, second), _mm_unpackhi_epi8(first, second));
    both = _mm_or_si128(both, _mm_srli_si128(both, 8));
    both = _mm_or_si128(both, _mm_srli_si128(both, 4));
    both = _mm_or_si128(both, _mm_srli_si128(both, 2));
    found = (uint32_t)_mm_cvtsi128_si32(both) & 0xffff;
#endif
    for (; i < n; i++) found |= 1u << (at[i] & 15) | 1u << (at[i] >> 4);
    return found;
}

/* The numbers of a group in one row of them. */
typedef struct {
    const uint8_t *row[3];
} number_rows;

FN number_rows rows_at(const three_numbers *n, size_t down) {
    return (number_rows){{row_of(&n->zero, down), row_of(&n->scale, down), row_of(&n->offset, down)}};
}

FN three numbers_at(const three_numbers *n, const number_rows *rows, size_t across) {
    return (three){number_of(&n->zero, rows->row[0], across, 0.0f),
                   number_of(&n->scale, rows->row[1], across, 1.0f),
                   number_of(&n->offset, rows->row[2], across, -0.0f)};
}

/* The largest distance of eight numbers where `off` has a bit, exactly, if it is more than `most`. */
FN double distance_8(vf a, vf b, uint32_t off, double most) {
    float before[8], after[8];
    f_store(before, a);
    f_store(after, b);
    for (; off; off &= off - 1) {
        const int i = __builtin_ctz(off);
        const double apart = fabs((double)before[i] - (double)after[i]);
        if (apart > most) most = apart;
    }
    return most;
}

TARGET void OF(regroup)(regrouped *g) {
    const vf low = f_load(g->values), high = f_load(g->values + 8);
    const size_t bytes = g->size / 2;
    float seen = (float)g->most; /* what is nearer needs no look */
    for (size_t r = 0; r < g->rows; r++) {
        const uint8_t *at = g->streams + r * g->stride;
        const number_rows from = rows_at(&g->before, r), to = rows_at(&g->after, r);
        for (size_t c = 0; c < g->groups; c++, at += bytes) {
            const three a = numbers_at(&g->before, &from, c), b = numbers_at(&g->after, &to, c);
            const vf a0 = with_three(low, a, 0), a1 = with_three(high, a, 0);
            const vf b0 = with_three(low, b, 0), b1 = with_three(high, b, 0);
            uint32_t off = bits_of((vi)(a0 != b0)) | bits_of((vi)(a1 != b1)) << 8;
            if (!off) continue;
            ahead(at);
            off &= codes_among(at, bytes);
            if (!off) continue;
            g->changed++;
            /* Rounded, the largest distance of all is still the largest. */
            const uint32_t far0 = bits_of((vi)(f_abs(a0 - b0) >= f_all(seen))) & off;
            const uint32_t far1 = bits_of((vi)(f_abs(a1 - b1) >= f_all(seen))) & off >> 8;
            if (far0 | far1) {
                g->most = distance_8(a1, b1, far1, distance_8(a0, b0, far0, g->most));
                seen = (float)g->most;
            }
        }
    }
}
