#include "level.h"

#include <string.h>

static uint64_t length_at(const uint8_t *at, int swapped) {
    uint64_t length = 0;
    for (int i = 0; i < 8; i++) length |= (uint64_t)at[swapped ? 7 - i : i] << 8 * i;
    return length;
}

size_t aprfmt_walk_strings(const uint8_t *data, size_t size, size_t offset, size_t count,
                           int swapped, uint64_t *starts, size_t *bad) {
    for (size_t i = 0; i < count; i++) {
        *bad = i;
        if (offset > size || size - offset < 8) return SIZE_MAX;
        uint64_t length = length_at(data + offset, swapped);
        if (length > size - offset - 8) return SIZE_MAX;
        starts[i] = offset;
        offset += 8 + (size_t)length;
    }
    return offset;
}
