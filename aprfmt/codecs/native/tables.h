/* Tables that both levels of kernels read; filled when the module is imported, or by the loader. */
#ifndef APRFMT_TABLES_H
#define APRFMT_TABLES_H

#include <stddef.h>
#include <stdint.h>

enum { F8_E4M3, F8_E5M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, F8_KINDS };

extern float aprfmt_f8[F8_KINDS][256];
extern float aprfmt_half_ue4m3[256]; /* half of NVFP4's scales, as its table of values is doubled */

extern int8_t aprfmt_iq2_xxs[256 * 8], aprfmt_iq2_xs[512 * 8], aprfmt_iq2_s[1024 * 8];
extern int8_t aprfmt_iq3_xxs[256 * 4], aprfmt_iq3_s[512 * 4];
extern int8_t aprfmt_iq1[2048 * 8];

void aprfmt_fill_tables(void);

/* Take one lattice of iq_grids.py by its name there; -1 if there is none of that name and size. */
int aprfmt_set_grid(const char *name, const uint8_t *entries, size_t size);

#endif
