#include "level.h"
#ifdef APRFMT_HAS_AVX2
#define APRFMT_AVX2 1
#define LEVEL aprfmt_avx2
#define LEVEL_NAME "avx2"
#include "kernels.h"
#endif
