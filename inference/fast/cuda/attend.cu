// Softmax and attention of a layer, included after layers.cu.

// The masked softmax of a row of scores, in float: block (row = head * tokens + token). The token
// stands at position *cached + token (or `before` + token) and sees the last `window` keys up to
// itself (0: all of them); what it does not see becomes 0. A sink joins the sum only.
extern "C" __global__ void softmax_causal(const T* scores, const T* sinks, T* probs,
                                          const i64* cached, i64 before, i64 tokens, i64 keys,
                                          i64 window) {
  __shared__ float shared[WARP];
  i64 token = blockIdx.x % tokens, stop = (cached ? *cached : before) + token + 1;
  i64 begin = window > 0 && stop > window ? stop - window : 0;
  const T* row = scores + (i64)blockIdx.x * keys;
  T* out = probs + (i64)blockIdx.x * keys;
  float sink = sinks ? widen(sinks[blockIdx.x / tokens]) : LOWEST, highest = sink;
  for (i64 j = begin + threadIdx.x; j < stop; j += blockDim.x)
    highest = fmaxf(highest, widen(row[j]));
  highest = block_max(highest, shared);
  float sum = 0.f;
  for (i64 j = begin + threadIdx.x; j < stop; j += blockDim.x) sum += expf(widen(row[j]) - highest);
  sum = block_sum(sum, shared);
  if (sinks) sum += expf(sink - highest);
  for (i64 j = threadIdx.x; j < keys; j += blockDim.x)
    narrow(out[j], j >= begin && j < stop ? expf(widen(row[j]) - highest) / sum : 0.f);
}

// q.k over `dim` elements, 16 bytes at a time where `fast`.
__device__ __forceinline__ float dot(const float* query, const T* key, int dim, bool fast) {
  float sum = 0.f;
  int i = 0;
  const int n = 16 / sizeof(T);
  if (fast) {
#pragma unroll 8
    for (; i < dim; i += n) {
      uint4 words = *(const uint4*)(key + i);
      const T* values = (const T*)&words;
#pragma unroll
      for (int j = 0; j < n; j++) sum = fmaf(query[i + j], widen(values[j]), sum);
    }
  }
  for (; i < dim; i++) sum = fmaf(query[i], widen(key[i]), sum);
  return sum;
}

// Attention of one query: block (head, part of the keys); the last block of a head to arrive
// joins the parts in order. keys [capacity, kv_heads, dim], values [capacity, kv_heads, v_dim].
// The query stands at position *cached (`count` - 1 where that is null) and sees the last
// `window` keys (0: all). parts [heads, gridDim.y, v_dim + 2]; arrived [heads] is zeros, and is
// left as zeros. Parts of fewer than SHARE keys are not begun. Dynamic shared memory:
// dim + max(v_dim, KEYS * 16 / sizeof(T)) floats.
#define KEYS 256
#define SHARE 256
#define MOST_PARTS 64
extern "C" __global__ void __launch_bounds__(KEYS) attend(
    const T* q, const T* keys, const T* values, const T* sinks, T* y, float* parts, u32* arrived,
    const i64* cached, i64 count, i64 window, i64 kv_heads, i64 dim, i64 v_dim, double scale_,
    double softcap_) {
  SHARED_BYTES(memory);
  __shared__ float shared[WARP];
  __shared__ float weights[KEYS];
  __shared__ float totals[MOST_PARTS];
  __shared__ bool last;
  const int n = 16 / sizeof(T);
  float* query = (float*)memory;
  float* sums = query + dim;
  float scale = (float)scale_, softcap = (float)softcap_;
  i64 head = blockIdx.x, splits = gridDim.y, kv = head / (gridDim.x / kv_heads);
  i64 stop = cached ? *cached + 1 : count;
  i64 begin = window > 0 && stop > window ? stop - window : 0;
  i64 active = (stop - begin + SHARE - 1) / SHARE;
  if (active > splits) active = splits;
  if (blockIdx.y >= active) return;
  i64 share = (stop - begin + active - 1) / active;
  i64 from = begin + share * blockIdx.y, to = from + share < stop ? from + share : stop;
  bool fast = dim % n == 0 && aligned(keys);
  for (int i = threadIdx.x; i < dim; i += KEYS) query[i] = widen(q[head * dim + i]);
  __syncthreads();
  // A thread sums a piece of 16 bytes of every `groups`-th value, or single elements of each.
  bool whole = v_dim % n == 0 && v_dim / n <= KEYS && aligned(values);
  int pieces = whole ? (int)v_dim / n : 0;
  int groups = pieces ? KEYS / pieces : 1, group = pieces ? threadIdx.x / pieces : 0;
  int piece_at = pieces ? threadIdx.x % pieces * n : 0;
  float mine[n];
  for (int i = 0; i < n; i++) mine[i] = 0.f;
  if (!pieces)
    for (int i = threadIdx.x; i < v_dim; i += KEYS) sums[i] = 0.f;
  float highest = LOWEST, total = 0.f;
  for (i64 start = from; start < to; start += KEYS) {
    i64 j = start + threadIdx.x;
    float score = LOWEST;
    if (j < to) {
      score = dot(query, keys + (j * kv_heads + kv) * dim, (int)dim, fast) * scale;
      if (softcap > 0.f) score = tanhf(score / softcap) * softcap;
    }
    float now = fmaxf(highest, block_max(score, shared));
    float weight = j < to ? expf(score - now) : 0.f, shrink = expf(highest - now);
    weights[threadIdx.x] = weight;
    total = total * shrink + block_sum(weight, shared);  // its barriers make the weights visible
    highest = now;
    int seen = to - start < KEYS ? (int)(to - start) : KEYS;
    const T* value = values + (start * kv_heads + kv) * v_dim;
    i64 next = kv_heads * v_dim;
    if (pieces) {
      for (int i = 0; i < n; i++) mine[i] *= shrink;
      if (group < groups) {
#pragma unroll 4
        for (int k = group; k < seen; k += groups) {
          uint4 words = *(const uint4*)(value + k * next + piece_at);
          for (int i = 0; i < n; i++)
            mine[i] = fmaf(weights[k], widen(((const T*)&words)[i]), mine[i]);
        }
      }
    } else {
      for (int i = threadIdx.x; i < v_dim; i += KEYS) {
        float sum = sums[i] * shrink;
        for (int k = 0; k < seen; k++) sum = fmaf(weights[k], widen(value[k * next + i]), sum);
        sums[i] = sum;
      }
    }
    __syncthreads();
  }
  if (pieces) {
    if (group < groups)
      for (int i = 0; i < n; i++) sums[group * v_dim + piece_at + i] = mine[i];
    __syncthreads();
    for (int i = threadIdx.x; i < v_dim; i += KEYS)
      for (int g = 1; g < groups; g++) sums[i] += sums[g * v_dim + i];
  }
  if (active == 1) {  // nothing to join
    float sink = sinks ? widen(sinks[head]) : LOWEST, top = fmaxf(highest, sink);
    float shrink = expf(highest - top), sum = total * shrink + (sinks ? expf(sink - top) : 0.f);
    for (int i = threadIdx.x; i < v_dim; i += KEYS)
      narrow(y[head * v_dim + i], sums[i] * shrink / sum);
    return;
  }
  i64 size = v_dim + 2;
  float* all = parts + head * splits * size;
  for (int i = threadIdx.x; i < v_dim; i += KEYS) all[blockIdx.y * size + i] = sums[i];
  if (threadIdx.x == 0) {
    all[blockIdx.y * size + v_dim] = highest;
    all[blockIdx.y * size + v_dim + 1] = total;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived + head, 1u) == (u32)active - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x < active) {
    weights[threadIdx.x] = __ldcg(all + threadIdx.x * size + v_dim);
    totals[threadIdx.x] = __ldcg(all + threadIdx.x * size + v_dim + 1);
  }
  __syncthreads();
  float sink = sinks ? widen(sinks[head]) : LOWEST, top = sink;
  for (int s = 0; s < active; s++) top = fmaxf(top, weights[s]);
  float sum = sinks ? expf(sink - top) : 0.f;
  for (int s = 0; s < active; s++) sum += expf(weights[s] - top) * totals[s];
  for (int i = threadIdx.x; i < v_dim; i += KEYS) {
    float value = 0.f;
#pragma unroll 4
    for (int s = 0; s < active; s++)
      value = fmaf(expf(weights[s] - top), __ldcg(all + s * size + i), value);
    narrow(y[head * v_dim + i], value / sum);
  }
  if (threadIdx.x == 0) arrived[head] = 0u;
}
