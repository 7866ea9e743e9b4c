/* Codes of packed weights out of their streams, and what each of them counts as. */

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

/* Six bits with `fraction` of them after the exponent, which is biased by `bias`, as float16: its
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

/* The bits of a code, which most kinds of numbers tell: what is then a constant leaves no other way
 * in the machine code. */
FN int bits_of_kind(int kind, int bits) {
    if (kind == SIGNED_TABLE) return 4;
    if (kind == IS_E2M3 || kind == IS_E3M2) return 6;
    return kind == IS_E4M3 ? 8 : bits;
}
