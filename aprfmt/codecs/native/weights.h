/* The kernels of packed weights, of one level; generic_weights.c and avx2_weights.c define LEVEL and
 * include this. */
#include "lanes.h"
#include "level.h"
#include "tables.h"
#include "parts.h"

#include "sink.h"

#include "packed_codes.h"
#include "packed.h"
#include "turn.h"
#include "regroup.h"
#include "across.h"
