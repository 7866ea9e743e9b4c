#define LEVEL aprfmt_generic
#define LEVEL_NAME "generic"
#include "kernels.h"
