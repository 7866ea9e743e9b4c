/* Decoders of plain elements: F32, F16, BF16 and the five 8-bit floats. One element is a block. */

FN void f32(const uint8_t *raw, float *out, size_t n, sink *to) {
    size_t i = 0;
    vf v = f_all(0.0f);
    for (; i + 8 <= n; i += 8) {
        ahead(raw + 4 * i);
        memcpy(&v, raw + 4 * i, sizeof v);
        put(out + i, v, to);
    }
    if (i == n) return;
    memcpy(&v, raw + 4 * i, 4 * (n - i));
    put_some(out + i, v, n - i, to);
}

FN void f16(const uint8_t *raw, float *out, size_t n, sink *to) {
    size_t i = 0;
#ifdef APRFMT_AVX2
    /* The processor's own conversion makes signalling NaNs quiet, so blocks with a NaN go round. */
    const __m256i magnitude = _mm256_set1_epi16(0x7fff), infinity = _mm256_set1_epi16(0x7c00);
    for (; i + 16 <= n; i += 16) {
        ahead(raw + 2 * i);
        __m256i h = _mm256_loadu_si256((const __m256i *)(const void *)(raw + 2 * i));
        __m256i nan = _mm256_cmpgt_epi16(_mm256_and_si256(h, magnitude), infinity);
        if (__builtin_expect(!_mm256_testz_si256(nan, nan), 0)) {
            put(out + i, half_bits(load_u16(raw + 2 * i)), to);
            put(out + i + 8, half_bits(load_u16(raw + 2 * i + 16)), to);
        } else {
            put(out + i, (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(h)), to);
            put(out + i + 8, (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), to);
        }
    }
#endif
    for (; i + 8 <= n; i += 8) put(out + i, half_bits(load_u16(raw + 2 * i)), to);
    if (i == n) return;
    uint8_t last[16] = {0};
    memcpy(last, raw + 2 * i, 2 * (n - i));
    put_some(out + i, half_bits(load_u16(last)), n - i, to);
}

FN void bf16(const uint8_t *raw, float *out, size_t n, sink *to) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        ahead(raw + 2 * i);
        for (size_t k = i; k < i + 32; k += 8) put(out + k, (vf)(load_u16(raw + 2 * k) << 16), to);
    }
    for (; i + 8 <= n; i += 8) put(out + i, (vf)(load_u16(raw + 2 * i) << 16), to);
    if (i == n) return;
    uint8_t last[16] = {0};
    memcpy(last, raw + 2 * i, 2 * (n - i));
    put_some(out + i, (vf)(load_u16(last) << 16), n - i, to);
}

/* 8-bit floats: 256 values each, from tables.c. */
FN vf f8_eight(const float *table, const uint8_t *r) {
    return (vf){table[r[0]], table[r[1]], table[r[2]], table[r[3]],
                table[r[4]], table[r[5]], table[r[6]], table[r[7]]};
}

FN void f8(const float *table, const uint8_t *raw, float *out, size_t n, sink *to) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) put(out + i, f8_eight(table, raw + i), to);
    if (i == n) return;
    uint8_t last[8] = {0};
    memcpy(last, raw + i, n - i);
    put_some(out + i, f8_eight(table, last), n - i, to);
}

FN void f8_e4m3(const uint8_t *raw, float *out, size_t n, sink *to) {
    f8(aprfmt_f8[F8_E4M3], raw, out, n, to);
}
FN void f8_e5m2(const uint8_t *raw, float *out, size_t n, sink *to) {
    f8(aprfmt_f8[F8_E5M2], raw, out, n, to);
}
FN void f8_e8m0(const uint8_t *raw, float *out, size_t n, sink *to) {
    f8(aprfmt_f8[F8_E8M0], raw, out, n, to);
}
FN void f8_e4m3fnuz(const uint8_t *raw, float *out, size_t n, sink *to) {
    f8(aprfmt_f8[F8_E4M3FNUZ], raw, out, n, to);
}
FN void f8_e5m2fnuz(const uint8_t *raw, float *out, size_t n, sink *to) {
    f8(aprfmt_f8[F8_E5M2FNUZ], raw, out, n, to);
}
