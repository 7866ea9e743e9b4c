#define LEVEL aprfmt_generic
#include "weights.h"
