/* Products of one row and one x, sixteen lanes at a time: the same numbers as dot.h's, bit for bit.
 *
 * Sums 0 and 1 of sink.h are the halves of one register, sums 2 and 3 those of another, so every
 * element is added to the lane it is added to there, in the same order. A four-bit code picks its
 * value from a register that holds all sixteen, computed once a block as a decoder computes it.
 *
 * Each function below takes one block. ROWS rows are multiplied side by side: a short row ends
 * before the processor has guessed how long it is.
 */

enum { ROWS = 4, AHEAD = 4096 };

typedef struct {
    __m512 first, second; /* sums 0 and 1, sums 2 and 3 */
} sums;

#define IOTA _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)

FN __m512 all16(float x) { return _mm512_set1_ps(x); }

FN __m512i bytes16(const uint8_t *at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)at));
}

FN __m512 pick_of16(__m512 table, __m512i index) { return _mm512_permutexvar_ps(index, table); }

/* Multiply 32 weights with 32 numbers. */
FN void add_32(__m512 w, __m512 w2, const float *x, sums *s) {
    s->first = _mm512_fmadd_ps(w, _mm512_loadu_ps(x), s->first);
    s->second = _mm512_fmadd_ps(w2, _mm512_loadu_ps(x + 16), s->second);
}

FN float sums_total(sums s) {
    const vf sum[4] = {
        (vf)_mm512_castps512_ps256(s.first),
        (vf)_mm512_extractf32x8_ps(s.first, 1),
        (vf)_mm512_castps512_ps256(s.second),
        (vf)_mm512_extractf32x8_ps(s.second, 1),
    };
    return lanes_total(sum);
}

/* The float16 at `at` and the one after it. They go through memory, where a register's lanes are
 * filled from: the port that would do it otherwise is the one all picking goes through. */
typedef struct {
    float at[4];
} halves;

FN halves halves_at(const uint8_t *at) {
    halves two;
    __m128i raw = _mm_loadl_epi64((const __m128i *)(const void *)at);
    _mm_storeu_ps(two.at, _mm_cvtph_ps(raw));
    __asm__("" : "+m"(two));
    return two;
}

/* Sixteen bytes of nibbles, low ones first, that index a table of sixteen. */
FN void nibbles_of(const uint8_t *qs, __m512 table, const float *x, sums *s) {
    __m512i q = bytes16(qs);
    add_32(pick_of16(table, q), pick_of16(table, _mm512_srli_epi32(q, 4)), x, s);
}

/* The same with a fifth bit each: `low` where it is not set, `high` where it is. */
FN void fives_of(const uint8_t *qs, const uint8_t *bits, __m512 low, __m512 high, const float *x,
                 sums *s) {
    const __m512i four = _mm512_set1_epi32(15), fifth = _mm512_set1_epi32(16);
    __m512i both = bytes16(qs), q = _mm512_and_si512(both, four), q2 = _mm512_srli_epi32(both, 4);
    q = _mm512_mask_or_epi32(q, (__mmask16)u16_at(bits), q, fifth);
    q2 = _mm512_mask_or_epi32(q2, (__mmask16)u16_at(bits + 2), q2, fifth);
    add_32(_mm512_permutex2var_ps(low, q, high), _mm512_permutex2var_ps(low, q2, high), x, s);
}

FN void block_q4_0(const uint8_t *raw, const float *x, sums *s) {
    const __m512 levels = _mm512_sub_ps(IOTA, all16(8));
    halves d = halves_at(raw);
    nibbles_of(raw + 2, _mm512_mul_ps(levels, all16(d.at[0])), x, s);
}

FN void block_q4_1(const uint8_t *raw, const float *x, sums *s) {
    halves two = halves_at(raw);
    nibbles_of(raw + 4, _mm512_fmadd_ps(IOTA, all16(two.at[0]), all16(two.at[1])), x, s);
}

FN void block_q5_0(const uint8_t *raw, const float *x, sums *s) {
    const __m512 levels = _mm512_sub_ps(IOTA, all16(16));
    halves two = halves_at(raw);
    __m512 d = all16(two.at[0]);
    fives_of(raw + 6, raw + 2, _mm512_mul_ps(levels, d), _mm512_mul_ps(IOTA, d), x, s);
}

FN void block_q5_1(const uint8_t *raw, const float *x, sums *s) {
    const __m512 levels = _mm512_add_ps(IOTA, all16(16));
    halves two = halves_at(raw);
    __m512 d = all16(two.at[0]), m = all16(two.at[1]);
    fives_of(raw + 8, raw + 4, _mm512_fmadd_ps(IOTA, d, m), _mm512_fmadd_ps(levels, d, m), x,
             s);
}

FN __m512 signed16(const uint8_t *at) {
    __m128i q = _mm_loadu_si128((const __m128i *)(const void *)at);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q));
}

FN void block_q8_0(const uint8_t *raw, const float *x, sums *s) {
    halves two = halves_at(raw);
    __m512 d = all16(two.at[0]);
    add_32(_mm512_mul_ps(signed16(raw + 2), d), _mm512_mul_ps(signed16(raw + 18), d), x, s);
}

FN void block_q4_k(const uint8_t *raw, const float *x, sums *s) {
    float scale[8], min[8];
    k_scales(raw + 4, half_at(raw), half_at(raw + 2), scale, min);
#pragma GCC unroll 4
    for (int run = 0; run < 4; run++, x += 64) {
        __m512i q = bytes16(raw + 16 + 32 * run), q2 = bytes16(raw + 32 + 32 * run);
        __m512 low = _mm512_fmsub_ps(IOTA, all16(scale[2 * run]), all16(min[2 * run]));
        __m512 high = _mm512_fmsub_ps(IOTA, all16(scale[2 * run + 1]), all16(min[2 * run + 1]));
        add_32(pick_of16(low, q), pick_of16(low, q2), x, s);
        add_32(pick_of16(high, _mm512_srli_epi32(q, 4)),
               pick_of16(high, _mm512_srli_epi32(q2, 4)), x + 32, s);
    }
}

FN void block_q5_k(const uint8_t *raw, const float *x, sums *s) {
    const __m512i four = _mm512_set1_epi32(15), fifth = _mm512_set1_epi32(16);
    const __m512 levels = _mm512_add_ps(IOTA, all16(16));
    float scale[8], min[8];
    k_scales(raw + 4, half_at(raw), half_at(raw + 2), scale, min);
    const __m512i high[2] = {_mm512_slli_epi32(bytes16(raw + 16), 4),
                             _mm512_slli_epi32(bytes16(raw + 32), 4)};
#pragma GCC unroll 8
    for (int sub = 0; sub < 8; sub++, x += 32) {
        const uint8_t *qs = raw + 48 + 32 * (sub / 2);
        __m512 d = all16(scale[sub]), m = all16(min[sub]), w[2];
        __m512 t = _mm512_fmsub_ps(IOTA, d, m), t2 = _mm512_fmsub_ps(levels, d, m);
        for (int k = 0; k < 2; k++) {
            __m512i q = bytes16(qs + 16 * k);
            q = sub & 1 ? _mm512_srli_epi32(q, 4) : _mm512_and_si512(q, four);
            __m512i bit = _mm512_and_si512(_mm512_srli_epi32(high[k], (unsigned)sub), fifth);
            w[k] = _mm512_permutex2var_ps(t, _mm512_or_si512(q, bit), t2);
        }
        add_32(w[0], w[1], x, s);
    }
}

FN void block_q6_k(const uint8_t *raw, const float *x, sums *s) {
    const __m512i four = _mm512_set1_epi32(15), two = _mm512_set1_epi32(48);
    float scale[16], d = half_at(raw + 208);
    f_store(scale, to_f(load_i8(raw + 192)) * f_all(d));
    f_store(scale + 8, to_f(load_i8(raw + 200)) * f_all(d));
    for (int half = 0; half < 2; half++) {
        const uint8_t *ql = raw + 64 * half, *qh = raw + 128 + 32 * half;
        const __m512i high[2] = {_mm512_slli_epi32(bytes16(qh), 4),
                                 _mm512_slli_epi32(bytes16(qh + 16), 4)};
#pragma GCC unroll 4
        for (int run = 0; run < 4; run++, x += 32) {
            __m512 w[2];
            for (int k = 0; k < 2; k++) {
                __m512i q = bytes16(ql + 32 * (run & 1) + 16 * k);
                q = run < 2 ? _mm512_and_si512(q, four) : _mm512_srli_epi32(q, 4);
                __m512i more = _mm512_srli_epi32(high[k], 2 * (unsigned)run);
                q = _mm512_or_si512(q, _mm512_and_si512(more, two));
                q = _mm512_sub_epi32(q, _mm512_set1_epi32(32));
                w[k] = _mm512_mul_ps(_mm512_cvtepi32_ps(q),
                                     all16(scale[8 * half + 2 * run + k]));
            }
            add_32(w[0], w[1], x, s);
        }
    }
}

/* Entries 8 to 15 after entries 0 to 7. */
FN __m512 table16(vf low, vf high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)low), (__m256)high, 1);
}

FN void block_iq4_nl(const uint8_t *raw, const float *x, sums *s) {
    const __m512 levels = table16(NL_LOW, NL_HIGH);
    halves d = halves_at(raw);
    nibbles_of(raw + 2, _mm512_mul_ps(levels, all16(d.at[0])), x, s);
}

FN void block_mxfp4(const uint8_t *raw, const float *x, sums *s) {
    const __m512 levels = table16(E2M1_LOW, E2M1_HIGH);
    nibbles_of(raw + 1, _mm512_mul_ps(levels, all16(half_power(raw[0]))), x, s);
}
