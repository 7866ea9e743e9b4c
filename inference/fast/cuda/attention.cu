// Attention in T, a query at a time: scores, softmax and the weighted sum of values in the orders
// that the single operations and the fused one share, so that both give the same bits. A key that
// the mask hides adds nothing, so bits do not depend on how many there are. Up to 2^24 keys.
//
// q [tokens, heads, d], k [keys, kv_heads, d], v [keys, kv_heads, dv], mask [tokens, keys] bytes,
// scores and probs [heads, tokens, keys]. Compiled once per dtype, after ops.cu.

// q.k of one head by one warp, every lane with the result.
__device__ __forceinline__ W dot(const T* q, const T* k, i64 d) {
  W sum = 0;
  for (i64 i = threadIdx.x % WARP; i < d; i += WARP) sum += widen(q[i]) * widen(k[i]);
  return warp_sum(sum);
}
// A score as T holds it: the product, the scaled one, the capped one, each rounded.
__device__ __forceinline__ W finished(W product, W scale, W cap) {
  W v = r(r(product) * scale);
  return cap > 0 ? r(r(tanh_of(r(v / cap))) * cap) : v;
}
__device__ __forceinline__ W group_max(W x, W* room) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  W most = room[0];
  for (int i = 1; i < GROUP / WARP; i++) most = room[i] > most ? room[i] : most;
  return most;
}
// Turn a row of scores (wide, -inf where masked) into probabilities as T holds them. The sum over
// keys runs in rounds of GROUP; `input` subtracts the largest in T first. `sink` is -inf or a logit.
__device__ __forceinline__ void softmax_row(W* row, i64 keys, bool input, W sink, W* room) {
  W most = -(W)INFINITY;
  for (i64 j = threadIdx.x; j < keys; j += GROUP) most = row[j] > most ? row[j] : most;
  most = group_max(most, room);
  most = sink > most ? sink : most;
  W sum = 0;
  for (i64 j = threadIdx.x; j < keys; j += GROUP) {
    W v = row[j] - most;
    row[j] = exp_of(input ? r(v) : v);
    sum += row[j];
  }
  sum = group_sum(sum, room);
  if (sink > -(W)INFINITY) sum += exp_of(input ? r(sink - most) : sink - most);
  for (i64 j = threadIdx.x; j < keys; j += GROUP) row[j] = r(row[j] / sum);
}
// out[i] = sum over keys in order of p[j] * v[j][i].
__device__ __forceinline__ void mix_row(const W* p, const T* v, i64 stride, i64 first, i64 last, T* out, i64 dv) {
  for (i64 i = threadIdx.x; i < dv; i += GROUP) {
    W sum = 0;
    for (i64 j = first; j < last; j++) sum += p[j] * widen(v[j * stride + i]);
    narrow(out[i], sum);
  }
}

// which keys a token sees: those of its own and of earlier positions, of a window the last; the
// first token stands at *cached, or at `before` where that is null
KERNEL causal(u8* mask, const i64* cached, i64 before, i64 count, i64 keys, i64 window) {
  OVER(i, count) {
    i64 at = (cached ? *cached : before) + i / keys, key = i % keys;
    mask[i] = key <= at && (!window || key > at - window);
  }
}
// grid (keys / (GROUP / WARP), tokens, heads): a warp makes one score
KERNEL scores(const T* q, const T* k, T* out, i64 keys, i64 heads, i64 kv_heads, i64 d, double scale, double cap) {
  i64 j = (i64)blockIdx.x * (GROUP / WARP) + threadIdx.x / WARP, token = blockIdx.y, head = blockIdx.z;
  if (j >= keys) return;
  W v = dot(q + (token * heads + head) * d, k + (j * kv_heads + head / (heads / kv_heads)) * d, d);
  if (threadIdx.x % WARP == 0)
    narrow(out[(head * gridDim.y + token) * keys + j], finished(v, (W)scale, (W)cap));
}
// A row of `keys` wide numbers: in dynamic shared memory, or in `rows` where these are too many.
#define ROW(rows, shared) ((rows) ? (rows) + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * keys : (W*)(shared))

// grid (tokens, heads)
KERNEL probs(const T* scores, const u8* mask, const T* sinks, T* out, W* rows, i64 keys, i64 input) {
  SHARED_BYTES(shared);
  __shared__ W room[GROUP / WARP];
  W* row = ROW(rows, shared);
  i64 token = blockIdx.x, head = blockIdx.y, at = (head * gridDim.x + token) * keys;
  for (i64 j = threadIdx.x; j < keys; j += GROUP) row[j] = mask[token * keys + j] ? widen(scores[at + j]) : -(W)INFINITY;
  softmax_row(row, keys, input, sinks ? widen(sinks[head]) : -(W)INFINITY, room);
  for (i64 j = threadIdx.x; j < keys; j += GROUP) narrow(out[at + j], row[j]);
}
// grid (tokens, heads)
KERNEL mix(const T* probs, const T* v, T* out, W* rows, i64 keys, i64 heads, i64 kv_heads, i64 dv) {
  SHARED_BYTES(shared);
  W* row = ROW(rows, shared);
  i64 token = blockIdx.x, head = blockIdx.y;
  for (i64 j = threadIdx.x; j < keys; j += GROUP) row[j] = widen(probs[(head * gridDim.x + token) * keys + j]);
  __syncthreads();
  mix_row(row, v + head / (heads / kv_heads) * dv, kv_heads * dv, 0, keys, out + (token * heads + head) * dv, dv);
}
// grid (tokens, heads); the three of them, over the keys that the token sees
KERNEL attend(const T* q, const T* k, const T* v, const u8* mask, const T* sinks, T* out, W* rows, i64 keys,
              i64 kv_heads, i64 d, i64 dv, i64 input, double scale, double cap) {
  SHARED_BYTES(shared);
  __shared__ W room[GROUP / WARP];
  W* row = ROW(rows, shared);
  i64 token = blockIdx.x, head = blockIdx.y, heads = gridDim.y, kv = head / (heads / kv_heads);
  const u8* visible = mask + token * keys;
  const T* query = q + (token * heads + head) * d;
  float before = -(float)keys, end = 0;  // places of the first key seen, negative, and of the end
  for (i64 j = threadIdx.x; j < keys; j += GROUP) {
    row[j] = -(W)INFINITY;
    if (!visible[j]) continue;
    before = -(float)j > before ? -(float)j : before;
    end = j + 1;
  }
  i64 first = (i64)-group_max((W)before, room), last = (i64)group_max((W)end, room);
  __syncthreads();
  for (i64 j = first + threadIdx.x / WARP; j < last; j += GROUP / WARP) {
    if (!visible[j]) continue;
    W s = dot(query, k + (j * kv_heads + kv) * d, d);
    if (threadIdx.x % WARP == 0) row[j] = finished(s, (W)scale, (W)cap);
  }
  __syncthreads();
  softmax_row(row, keys, input, sinks ? widen(sinks[head]) : -(W)INFINITY, room);
  __syncthreads();
  mix_row(row, v + kv * dv, kv_heads * dv, first, last, out + (token * heads + head) * dv, dv);
}

// An indexer's scores [tokens, keys]: the sum over `heads` of products [heads, tokens, keys] of weight *
// max(0, product * scale). `weights` [tokens, every] begin with the first of these heads; `add`: y holds
// the sum of earlier heads.
KERNEL index_scores(const W* products, const W* weights, W* y, i64 count, i64 keys, i64 every, i64 heads, i64 add,
                    double scale) {
  OVER(i, count) {
    const W* own = weights + i / keys * every;
    W sum = add ? y[i] : (W)0;
    for (i64 head = 0; head < heads; head++) {
      W product = products[head * count + i] * (W)scale;
      sum += (product > 0 ? product : (W)0) * own[head];
    }
    y[i] = sum;
  }
}

// Whole numbers in the order of the floats, all above zero, both zeros alike; zero for NaN.
__device__ __forceinline__ u64 in_order(float x) {
  u32 bits = __float_as_uint(x == 0 ? 0.0f : x);
  return x != x ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 in_order(double x) {
  u64 bits = (u64)__double_as_longlong(x == 0 ? 0.0 : x);
  return x != x ? 0 : bits >> 63 ? ~bits : bits | 1ull << 63;
}
// The mask of each row's `count` highest scores of those that `mask` shows, of equal ones the first. A block
// takes one row. The count-th highest score is found bit by bit, then how many keys may equal it.
KERNEL choose_best(const W* scores, const u8* mask, u8* y, i64 keys, i64 count) {
  __shared__ W room[GROUP / WARP];
  i64 start = (i64)blockIdx.x * keys;
  scores += start, mask += start, y += start;
  u64 least = 0;
  for (int bit = (int)sizeof(W) * 8 - 1; bit >= 0; bit--) {
    u64 trial = least | 1ull << bit;
    W found = 0;
    for (i64 j = threadIdx.x; j < keys; j += GROUP) found += mask[j] && in_order(scores[j]) >= trial;
    if (group_sum(found, room) >= (W)count) least = trial;
  }
  W above = 0;
  for (i64 j = threadIdx.x; j < keys; j += GROUP) above += mask[j] && in_order(scores[j]) > least;
  W left = (W)count - group_sum(above, room);
  i64 stop = 0;  // keys before it that equal the least score are chosen
  for (int bit = 62; bit >= 0; bit--) {
    i64 trial = stop | (i64)1 << bit;
    if (trial > keys) continue;
    W equal = 0;
    for (i64 j = threadIdx.x; j < trial; j += GROUP) equal += mask[j] && in_order(scores[j]) == least;
    if (group_sum(equal, room) <= left) stop = trial;
  }
  for (i64 j = threadIdx.x; j < keys; j += GROUP) {
    u64 at = in_order(scores[j]);
    y[j] = mask[j] && (at > least || (at == least && j < stop));
  }
}
