#include "tables.h"

#include <math.h>
#include <string.h>

float aprfmt_f8[F8_KINDS][256];
float aprfmt_half_ue4m3[256];
int8_t aprfmt_iq2_xxs[256 * 8], aprfmt_iq2_xs[512 * 8], aprfmt_iq2_s[1024 * 8];
int8_t aprfmt_iq3_xxs[256 * 4], aprfmt_iq3_s[512 * 4];
int8_t aprfmt_iq1[2048 * 8];

/* `nan` and `inf` are the magnitudes from which codes are NaN and infinity; the "uz" kinds have
 * neither infinities nor a negative zero, whose place their only NaN takes. */
static const struct {
    int fraction_bits, bias, inf, nan, uz;
} KIND[F8_KINDS] = {
    [F8_E4M3] = {3, 7, 256, 0x7f, 0},
    [F8_E5M2] = {2, 15, 0x7c, 0x7d, 0},
    [F8_E4M3FNUZ] = {3, 8, 256, 256, 1},
    [F8_E5M2FNUZ] = {2, 16, 256, 256, 1},
};

static float f8_value(int kind, int byte) {
    int bits = KIND[kind].fraction_bits, magnitude = byte & 0x7f;
    int exponent = magnitude >> bits, fraction = magnitude & ((1 << bits) - 1);
    float sign = byte & 0x80 ? -1.0f : 1.0f;
    if (magnitude >= KIND[kind].nan) return copysignf(NAN, sign);
    if (magnitude >= KIND[kind].inf) return copysignf(INFINITY, sign);
    if (KIND[kind].uz && byte == 0x80) return copysignf(NAN, -1.0f);
    if (exponent == 0) return sign * ldexpf((float)fraction, 1 - KIND[kind].bias - bits);
    return sign * ldexpf((float)(fraction + (1 << bits)), exponent - KIND[kind].bias - bits);
}

void aprfmt_fill_tables(void) {
    for (int byte = 0; byte < 256; byte++) {
        for (int kind = 0; kind < F8_KINDS; kind++) {
            aprfmt_f8[kind][byte] =
                kind == F8_E8M0 ? ldexpf(1.0f, byte - 127) : f8_value(kind, byte);
        }
        int exponent = byte >> 3 & 15, fraction = byte & 7;
        float value =
            exponent ? ldexpf((float)(fraction + 8), exponent - 10) : ldexpf((float)fraction, -9);
        aprfmt_half_ue4m3[byte] = byte == 0x7f ? 0.0f : value * 0.5f;
    }
    aprfmt_f8[F8_E8M0][255] = NAN;
}

int aprfmt_set_grid(const char *name, const uint8_t *entries, size_t size) {
    static const struct {
        const char *name;
        int8_t *to;
        size_t size;
    } GRID[] = {
        {"IQ2_XXS", aprfmt_iq2_xxs, sizeof aprfmt_iq2_xxs},
        {"IQ2_XS", aprfmt_iq2_xs, sizeof aprfmt_iq2_xs},
        {"IQ2_S", aprfmt_iq2_s, sizeof aprfmt_iq2_s},
        {"IQ3_XXS", aprfmt_iq3_xxs, sizeof aprfmt_iq3_xxs},
        {"IQ3_S", aprfmt_iq3_s, sizeof aprfmt_iq3_s},
        {"IQ1", aprfmt_iq1, sizeof aprfmt_iq1},
    };
    for (size_t i = 0; i < sizeof GRID / sizeof *GRID; i++) {
        if (!strcmp(name, GRID[i].name) && size == GRID[i].size) {
            memcpy(GRID[i].to, entries, size);
            return 0;
        }
    }
    return -1;
}
