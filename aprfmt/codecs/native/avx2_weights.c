#include "level.h"
#ifdef APRFMT_HAS_AVX2
#define APRFMT_AVX2 1
#define LEVEL aprfmt_avx2
#include "weights.h"
#endif
