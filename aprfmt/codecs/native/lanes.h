/* Eight lanes of float32 or int32: the words all kernels are written in.
 *
 * Every kernel file is compiled twice, by generic.c for any processor and by avx2.c for x86-64 with
 * AVX2, F16C and FMA; only what differs between the two stands under APRFMT_AVX2 here. The vector
 * types are the compiler's own (gcc and clang), so + - * / & | << >> and comparisons are plain C
 * and round as IEEE 754 says. Nothing is contracted (-ffp-contract=off): a fused multiply-add
 * happens where `fused` below is called and nowhere else.
 */
#ifndef APRFMT_LANES_H
#define APRFMT_LANES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read little-endian blocks in place; use the numpy codecs on this machine"
#endif

#ifdef APRFMT_AVX2
#include <immintrin.h>
#ifdef APRFMT_AVX512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma")))
#else
#define TARGET __attribute__((target("avx2,f16c,fma")))
#endif
#else
#define TARGET
#endif
#define FN static inline TARGET __attribute__((always_inline, unused))

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
typedef double vd __attribute__((vector_size(32))); /* four lanes */

FN vf f_all(float x) { return (vf){x, x, x, x, x, x, x, x}; }
FN vi i_all(int32_t x) { return (vi){x, x, x, x, x, x, x, x}; }

FN vf f_load(const float *at) {
    vf v;
    memcpy(&v, at, sizeof v);
    return v;
}

/* The first n lanes; the others are 0. */
FN vf f_load_some(const float *at, size_t n) {
    vf v = f_all(0.0f);
    memcpy(&v, at, 4 * n);
    return v;
}

FN void f_store(float *at, vf v) { memcpy(at, &v, sizeof v); }

FN vi i_load(const int32_t *at) {
    vi v;
    memcpy(&v, at, sizeof v);
    return v;
}

FN void i_store(int32_t *at, vi v) { memcpy(at, &v, sizeof v); }

/* Eight integers from memory, widened. */
#ifdef APRFMT_AVX2
FN vi load_u8(const uint8_t *at) {
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)at));
}
FN vi load_i8(const uint8_t *at) {
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)at));
}
FN vi load_u16(const uint8_t *at) {
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)at));
}
#else
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
FN vi load_u8(const uint8_t *at) {
    u8x8 v;
    memcpy(&v, at, sizeof v);
    return __builtin_convertvector(v, vi);
}
FN vi load_i8(const uint8_t *at) {
    i8x8 v;
    memcpy(&v, at, sizeof v);
    return __builtin_convertvector(v, vi);
}
FN vi load_u16(const uint8_t *at) {
    u16x8 v;
    memcpy(&v, at, sizeof v);
    return __builtin_convertvector(v, vi);
}
#endif

FN vf to_f(vi v) { return __builtin_convertvector(v, vf); }

FN uint16_t u16_at(const uint8_t *at) {
    uint16_t v;
    memcpy(&v, at, sizeof v);
    return v;
}

FN uint32_t u32_at(const uint8_t *at) {
    uint32_t v;
    memcpy(&v, at, sizeof v);
    return v;
}

FN float f32_at(const uint8_t *at) {
    float v;
    memcpy(&v, at, sizeof v);
    return v;
}

/* Lanes of `a` where `mask` is all ones, of `b` where it is all zeros. */
FN vi i_pick(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
FN vf f_pick(vi mask, vf a, vf b) {
#ifdef APRFMT_AVX2
    return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (vf)i_pick(mask, (vi)a, (vi)b);
#endif
}

FN vf f_abs(vf v) { return (vf)((vi)v & 0x7fffffff); }

#ifdef APRFMT_AVX2
FN vi i_less_of(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
FN vi i_more_of(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
FN vf f_less_of(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
FN vf f_more_of(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
FN uint32_t bits_of(vi mask) { return (uint32_t)_mm256_movemask_ps((__m256)mask); }
FN float lanes_most(vf v) {
    __m128 four =
        _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
FN vf f_sqrt(vf v) { return (vf)_mm256_sqrt_ps((__m256)v); }
FN vf fused(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
FN vi i_less_of(vi a, vi b) { return i_pick(a < b, a, b); }
FN vi i_more_of(vi a, vi b) { return i_pick(a > b, a, b); }
FN vf f_less_of(vf a, vf b) { return f_pick(a < b, a, b); }
FN vf f_more_of(vf a, vf b) { return f_pick(a > b, a, b); }
FN uint32_t bits_of(vi mask) {
    uint32_t bits = 0;
    int32_t lane[8];
    i_store(lane, mask);
    for (int i = 0; i < 8; i++) bits |= ((uint32_t)lane[i] >> 31) << i;
    return bits;
}
FN float lanes_most(vf v) {
    float lane[8], most;
    f_store(lane, v);
    most = lane[0];
    for (int i = 1; i < 8; i++) most = lane[i] > most ? lane[i] : most;
    return most;
}
FN vf f_sqrt(vf v) {
    float lane[8];
    f_store(lane, v);
    for (int i = 0; i < 8; i++) lane[i] = sqrtf(lane[i]);
    return f_load(lane);
}
FN vf fused(vf a, vf b, vf c) {
    float x[8], y[8], z[8];
    f_store(x, a);
    f_store(y, b);
    f_store(z, c);
    for (int i = 0; i < 8; i++) z[i] = fmaf(x[i], y[i], z[i]);
    return f_load(z);
}
#endif

/* Bit i of bits_of: the sign of lane i of a mask. lanes_most: the largest of eight numbers that are
 * no NaN. */
FN int any(vi mask) { return bits_of(mask) != 0; }

/* a*b + c and a*b - c where the product is exact in float32, so that both roundings agree. */
FN vf exact_add(vf a, vf b, vf c) {
#ifdef APRFMT_AVX2
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
FN vf exact_sub(vf a, vf b, vf c) {
#ifdef APRFMT_AVX2
    return (vf)_mm256_fmsub_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b - c;
#endif
}

/* float16 to float32 bits: NaN payloads are kept, a signalling NaN stays signalling. */
FN vf half_bits(vi h) {
    vi sign = (h & 0x8000) << 16, rest = h & 0x7fff;
    vi wide = (rest << 13) + (112 << 23); /* the exponent's bias grows from 15 to 127 */
    wide += (vi)(rest >= 0x7c00) & (112 << 23);
    vf small = to_f(rest) * f_all(0x1p-24f);
    wide = i_pick((vi)(rest < 0x400), (vi)small, wide);
    return (vf)(wide | sign);
}

/* float32 to float16, nearest even, in the low 16 bits of each lane: a NaN becomes quiet and keeps
 * its sign and the upper bits of its payload, as the processor's own conversion does it. */
FN vi to_half(vf v) {
#ifdef APRFMT_AVX2
    return (vi)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    vi bits = (vi)v, sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    vi half = (rest - (112 << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    vi small =
        (vi)((vf)rest + f_all(0.5f)) - 0x3f000000; /* 0.5 has the unit of the smallest halves */
    half = i_pick((vi)(rest < 0x38800000), small, half);
    half = i_pick((vi)(rest >= 0x47800000), i_all(0x7c00), half);
    half = i_pick((vi)(rest > 0x7f800000), 0x7e00 | (rest >> 13 & 0x1ff), half);
    return half | sign;
#endif
}

/* The low 16 bits of eight lanes to memory. */
FN void store_u16(uint8_t *at, vi v) {
#ifdef APRFMT_AVX2
    __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v);
    pairs = _mm256_permute4x64_epi64(pairs, 0x08);
    _mm_storeu_si128((__m128i *)(void *)at, _mm256_castsi256_si128(pairs));
#else
    u16x8 narrow = __builtin_convertvector(v, u16x8);
    memcpy(at, &narrow, sizeof narrow);
#endif
}

/* The low 8 bits of eight lanes to memory. */
FN void store_u8(uint8_t *at, vi v) {
#ifdef APRFMT_AVX2
    const __m256i low =
        _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12,
                         -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i fours = _mm256_shuffle_epi8((__m256i)v, low);
    __m128i bytes =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    _mm_storel_epi64((__m128i *)(void *)at, bytes);
#else
    u8x8 narrow = __builtin_convertvector(v, u8x8);
    memcpy(at, &narrow, sizeof narrow);
#endif
}

/* Eight rows of `stride` elements, turned: t[i] holds element i of all of them. */
FN void turn8(const float *rows, size_t stride, vf *t) {
#ifdef APRFMT_AVX2
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows + stride * (size_t)i);
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = (vf)_mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
        t[i + 4] = (vf)_mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
#else
    for (int i = 0; i < 8; i++) {
        float lane[8];
        for (size_t k = 0; k < 8; k++) lane[k] = rows[stride * k + (size_t)i];
        t[i] = f_load(lane);
    }
#endif
}

/* Eight runs of n elements one after another, turned. */
FN void turn(const float *runs, int n, vf *t) {
    for (int i = 0; i < n; i += 8) turn8(runs + i, (size_t)n, t + i);
}

/* The inverse, for codes: byte i of run k is lane k of code[i]. */
FN void turn_back(const vi *code, int n, uint8_t *runs) {
    for (int i = 0; i < n; i++) {
        uint8_t lane[8];
        store_u8(lane, code[i]);
        for (int k = 0; k < 8; k++) runs[n * k + i] = lane[k];
    }
}

FN void put_half(uint8_t *at, float v) {
#ifdef APRFMT_AVX2
    uint16_t half =
        (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT));
    memcpy(at, &half, 2);
#else
    uint8_t lane[16];
    store_u16(lane, to_half(f_all(v)));
    memcpy(at, lane, 2);
#endif
}

/* One float16, as the scales of blocks are: a NaN may come out with another payload. */
FN float half_at(const uint8_t *at) {
#ifdef APRFMT_AVX2
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(u16_at(at))));
#else
    float lane[8];
    f_store(lane, half_bits(i_all(u16_at(at))));
    return lane[0];
#endif
}

/* Entry `index` & 15 of a table of 16; bit 3 picks the half. */
FN vf pick16(vf low, vf high, vi index) {
#ifdef APRFMT_AVX2
    __m256 a = _mm256_permutevar8x32_ps((__m256)low, (__m256i)index);
    __m256 b = _mm256_permutevar8x32_ps((__m256)high, (__m256i)index);
    return (vf)_mm256_blendv_ps(a, b, (__m256)(index << 28));
#else
    float table[16], out[8];
    int32_t at[8];
    f_store(table, low);
    f_store(table + 8, high);
    i_store(at, index & 15);
    for (int i = 0; i < 8; i++) out[i] = table[at[i]];
    return f_load(out);
#endif
}

/* Entry `index` & 7 of a table of 8. */
FN vf pick8(vf table, vi index) {
#ifdef APRFMT_AVX2
    return (vf)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
    float from[8], out[8];
    int32_t at[8];
    f_store(from, table);
    i_store(at, index & 7);
    for (int i = 0; i < 8; i++) out[i] = from[at[i]];
    return f_load(out);
#endif
}

/* Negate lane i where bit i of `bits` is set. */
FN vf signed_by(vf v, uint32_t bits) {
    vu mask = (vu)i_all((int32_t)bits) << (vu){31, 30, 29, 28, 27, 26, 25, 24};
    return (vf)((vu)v ^ (mask & 0x80000000u));
}

#endif
