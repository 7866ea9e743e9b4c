// Experts that are chosen and given their rows on the device (routing.py, expert_blocks.py).

// Places of each row's elements, highest first: of equals the first, numbers that are none last.
KERNEL ranked(const W* x, i64* y, i64 count, i64 width) {
  OVER(i, count) {
    i64 own = i % width, rank = 0;
    const W* row = x + (i - own);
    W mine = row[own];
    for (i64 j = 0; j < width; j++) {
      W other = row[j];
      bool equal = other == mine || (other != other && mine != mine);
      rank += equal ? j < own : other > mine || mine != mine;
    }
    y[i - own + rank] = own;
  }
}
// The blocks of ExpertBlocks (backends/hosted.py): a group of threads lays out those of one expert.
// `experts` and `weights` [pairs], `used` of a token side by side; `count` blocks of `size` rows.
KERNEL lay_out(const i64* experts, const W* weights, i64* owners, i64* rows, W* padded, i64* places, i64 pairs,
               i64 used, i64 size, i64 count) {
  SHARED_BYTES(room);
  u32* chosen = (u32*)room;  // pairs of each expert
  __shared__ u32 found[GROUP];
  i64 expert = blockIdx.x, last = gridDim.x - 1;
  for (i64 i = threadIdx.x; i <= last; i += GROUP) chosen[i] = 0;
  __syncthreads();
  i64 each = (pairs + GROUP - 1) / GROUP, begin = threadIdx.x * each;
  i64 end = begin + each < pairs ? begin + each : pairs;
  u32 mine = 0;
  for (i64 i = begin; i < end; i++) {
    atomicAdd(&chosen[experts[i]], 1u);
    mine += experts[i] == expert;
  }
  found[threadIdx.x] = mine;
  __syncthreads();
  i64 block = 0;
  for (i64 i = 0; i < expert; i++) block += (chosen[i] + size - 1) / size;
  // Blocks after the last one that is used are anybody's: all their rows are padding.
  i64 stop = expert == last ? count : block + (chosen[expert] + size - 1) / size, slot = block * size;
  for (i64 i = slot + chosen[expert] + threadIdx.x; i < stop * size; i += GROUP) {
    rows[i] = 0;
    padded[i] = 0;
  }
  for (i64 i = block + threadIdx.x; i < stop; i += GROUP) owners[i] = expert;
  for (i64 i = 0; i < threadIdx.x; i++) slot += found[i];
  for (i64 i = begin; i < end; i++) {
    if (experts[i] != expert) continue;
    const i64* others = experts + (i - i % used);
    i64 rank = 0;  // of this expert among the token's
    for (i64 j = 0; j < used; j++) rank += others[j] < expert || (others[j] == expert && j < i % used);
    rows[slot] = i / used;
    padded[slot] = weights[i];
    places[i - i % used + rank] = slot++;
  }
}
// For each token the sum of its rows of y, in order, each weighed; products and sums are rounded.
KERNEL combine(const T* y, const i64* places, const W* weights, T* out, i64 count, i64 width, i64 used) {
  OVER(i, count) {
    i64 first = i / width * used;
    W total = 0;
    for (i64 j = first; j < first + used; j++) {
      W row = widen(y[places[j] * width + i % width]);
      if (weights) row = r(row * weights[j]);
      total = j == first ? row : r(total + row);
    }
    narrow(out[i], total);
  }
}
// Where `count` products find each block's rows (at x, then every x_step bytes), its expert's
// weight, and room for the result: three lists.
KERNEL addresses(const i64* weights, const i64* experts, i64* out, i64 count, i64 x, i64 x_step, i64 y, i64 y_step) {
  OVER(i, count) {
    out[i] = x + i * x_step;
    out[count + i] = weights[experts[i]];
    out[2 * count + i] = y + i * y_step;
  }
}
