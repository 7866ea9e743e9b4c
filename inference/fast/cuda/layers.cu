// Fused parts of a layer: norms, rotary positions, gated products, products of one row, attention
// of one query. Compiled once per pair of types: REAL is the arithmetic's, STORED the weights'.
//
// What base.py says is rounded to the dtype goes through rounded<T>; sums are float and run in a
// fixed order, so equal inputs give equal bits.

typedef REAL T;
typedef STORED W;

#define LOWEST __int_as_float(0xff800000)

// The sum, or the highest, over a block, in every thread; `shared` has a float a warp.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < blockDim.x / WARP; i++) total += shared[i];
  __syncthreads();
  return total;
}
__device__ __forceinline__ float block_max(float x, float* shared) {
  x = warp_max(x);
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = x;
  __syncthreads();
  float highest = shared[0];
  for (int i = 1; i < blockDim.x / WARP; i++) highest = fmaxf(highest, shared[i]);
  __syncthreads();
  return highest;
}

__device__ __forceinline__ bool aligned(const void* p) { return ((u64)p & 15) == 0; }

// One block a row. before: rounded, then multiplied by weight + offset; else the other way round.
// Where a thread's share is one piece of 16 bytes, x and the weight are read once, at the start.
extern "C" __global__ void rms_norm(const T* x, const T* weight, T* y, i64 width, double eps,
                                    double offset, i64 before) {
  __shared__ float shared[WARP];
  const int n = 16 / sizeof(T);
  const T* row = x + (i64)blockIdx.x * width;
  T* out = y + (i64)blockIdx.x * width;
  float more = (float)offset, sum = 0.f;
  bool once = width % n == 0 && width <= (i64)blockDim.x * n && aligned(row) && aligned(weight);
  uint4 xs = make_uint4(0, 0, 0, 0), ws = xs;
  i64 at = (i64)threadIdx.x * n;
  if (once) {
    if (at < width) xs = *(const uint4*)(row + at), ws = __ldg((const uint4*)(weight + at));
    for (int i = 0; i < n; i++) {
      float value = widen(((const T*)&xs)[i]);
      sum = fmaf(value, value, sum);
    }
  } else {
    for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
      float value = widen(row[i]);
      sum = fmaf(value, value, sum);
    }
  }
  float scale = 1.f / sqrtf(block_sum(sum, shared) / (float)width + (float)eps);
  if (once) {
    if (at >= width) return;
    uint4 ys;
    for (int i = 0; i < n; i++) {
      float normed = widen(((const T*)&xs)[i]) * scale, w = widen(((const T*)&ws)[i]) + more;
      narrow(((T*)&ys)[i], before ? rounded<T>(w) * rounded<T>(normed) : normed * w);
    }
    *(uint4*)(out + at) = ys;
    return;
  }
  for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
    float normed = widen(row[i]) * scale, w = widen(weight[i]) + more;
    narrow(out[i], before ? rounded<T>(w) * rounded<T>(normed) : normed * w);
  }
}

// Rotates two tensors of heads: block (head, token), the heads of x, then those of z. Strides
// count elements from token to token; results are contiguous. C is the type of the table.
// stepped: every product is rounded, not only the result.
template <class C>
__device__ __forceinline__ void rotate(const T* x, i64 x_stride, T* x_out, i64 x_heads, const T* z,
                                       i64 z_stride, T* z_out, i64 z_heads, const C* cosines,
                                       const C* sines, i64 dim, i64 pairs, i64 interleaved,
                                       i64 stepped) {
  i64 token = blockIdx.y, head = blockIdx.x;
  const T* from = x + token * x_stride + head * dim;
  T* to = x_out + (token * x_heads + head) * dim;
  if (head >= x_heads) {
    head -= x_heads;
    from = z + token * z_stride + head * dim;
    to = z_out + (token * z_heads + head) * dim;
  }
  for (i64 i = threadIdx.x; i < pairs; i += blockDim.x) {
    float c = widen(cosines[token * pairs + i]), s = widen(sines[token * pairs + i]);
    float a = widen(from[interleaved ? 2 * i : i]);
    float b = widen(from[interleaved ? 2 * i + 1 : i + pairs]);
    float ac = a * c, bs = b * s, bc = b * c, as = a * s;
    if (stepped) {
      ac = rounded<T>(ac), bs = rounded<T>(bs), bc = rounded<T>(bc), as = rounded<T>(as);
    }
    narrow(to[i], ac - bs);
    narrow(to[i + pairs], bc + as);
  }
  for (i64 i = 2 * pairs + threadIdx.x; i < dim; i += blockDim.x) to[i] = from[i];
}

#define ROPE(name, C)                                                                             \
  extern "C" __global__ void name(const T* x, i64 x_stride, T* x_out, i64 x_heads, const T* z,    \
                                  i64 z_stride, T* z_out, i64 z_heads, const C* cosines,          \
                                  const C* sines, i64 dim, i64 pairs, i64 interleaved,            \
                                  i64 stepped) {                                                  \
    rotate<C>(x, x_stride, x_out, x_heads, z, z_stride, z_out, z_heads, cosines, sines, dim,      \
              pairs, interleaved, stepped);                                                       \
  }
ROPE(rope_rounded, T)
ROPE(rope_wide, float)

// One token's keys and values behind the positions that a cache holds.
extern "C" __global__ void append(const T* k, const T* v, T* keys, T* values, const i64* cached,
                                  i64 k_width, i64 v_width) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < k_width)
    keys[*cached * k_width + i] = k[i];
  else if (i - k_width < v_width)
    values[*cached * v_width + i - k_width] = v[i - k_width];
}

// kind is the place in layers.ACTIVATIONS.
__device__ __forceinline__ float activated(float x, i64 kind) {
  if (kind == 0) return x / (1.f + expf(-x));
  if (kind == 1) return x * 0.5f * (1.f + erff(x * 0.70710678118654752440f));
  if (kind == 2)
    return 0.5f * x * (1.f + tanhf(0.79788456080286535588f * (x + 0.044715f * (x * x * x))));
  return fmaxf(x, 0.f);
}

// act(gate) * up, each rounded; rows of `width` elements, `gate_stride` and `up_stride` apart.
extern "C" __global__ void act_mul(const T* gate, i64 gate_stride, const T* up, i64 up_stride,
                                   T* y, i64 width, i64 kind) {
  i64 row = blockIdx.y, i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < width) {
    float g = rounded<T>(activated(widen(gate[row * gate_stride + i]), kind));
    narrow(y[row * width + i], g * widen(up[row * up_stride + i]));
  }
}

// A lane's 16 bytes of a weight's row times the same elements of x.
__device__ __forceinline__ float piece(const W* w, const T* x) {
  const int n = 16 / sizeof(W), each = 16 / sizeof(T);
  uint4 words = load_once((const uint4*)w);
  const W* values = (const W*)&words;
  float sum = 0.f;
#pragma unroll
  for (int part = 0; part < n / each; part++) {
    uint4 others = __ldg((const uint4*)x + part);
    const T* xs = (const T*)&others;
#pragma unroll
    for (int i = 0; i < each; i++) sum = fmaf(widen(values[part * each + i]), widen(xs[i]), sum);
  }
  return sum;
}

// The products of x with R rows, summed by `split` warps of which this is number `share`; true in
// the lane that has the sums.
template <int R>
__device__ __forceinline__ bool products(const W* const (&rows)[R], const T* x, i64 columns,
                                         int split, float (*shared)[R], float (&sums)[R]) {
  const int n = 16 / sizeof(W), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  int count = (int)columns, step = WARP * split * n;
#pragma unroll
  for (int r = 0; r < R; r++) sums[r] = 0.f;
#pragma unroll 4
  for (int i = (warp % split * WARP + lane) * n; i < count; i += step) {
#pragma unroll
    for (int r = 0; r < R; r++) sums[r] += piece(rows[r] + i, x + i);
  }
#pragma unroll
  for (int r = 0; r < R; r++) sums[r] = warp_sum(sums[r]);
  if (split == 1) return lane == 0;
  if (lane == 0)
    for (int r = 0; r < R; r++) shared[warp][r] = sums[r];
  __syncthreads();
  if (lane || warp % split) return false;
#pragma unroll
  for (int r = 0; r < R; r++)
    for (int i = 1; i < split; i++) sums[r] += shared[warp + i][r];
  return true;
}

// y = W x + bias over the rows of up to three weights, then residual + that.
template <int R>
__device__ __forceinline__ void multiply(const W* w0, const W* w1, const W* w2, const T* b0,
                                         const T* b1, const T* b2, i64 n0, i64 n1, i64 n2,
                                         const T* x, T* y, const T* residual, i64 columns,
                                         int split) {
  __shared__ float shared[4][R];
  i64 first = ((i64)blockIdx.x * (4 / split) + threadIdx.x / WARP / split) * R;
  i64 total = n0 + n1 + n2;
  const W* rows[R];
  const T* bias[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    i64 row = first + r < total ? first + r : total - 1;
    bool second = row >= n0, third = row >= n0 + n1;
    row -= third ? n0 + n1 : second ? n0 : 0;
    rows[r] = (third ? w2 : second ? w1 : w0) + row * columns;
    bias[r] = third ? b2 : second ? b1 : b0;
    if (bias[r]) bias[r] += row;
  }
  float sums[R];
  if (!products<R>(rows, x, columns, split, shared, sums)) return;
#pragma unroll
  for (int r = 0; r < R; r++)
    if (first + r < total) {
      float value = bias[r] ? sums[r] + widen(*bias[r]) : sums[r];
      if (residual) value = widen(residual[first + r]) + rounded<T>(value);
      narrow(y[first + r], value);
    }
}

#define MATVEC(name, R)                                                                           \
  extern "C" __global__ void __launch_bounds__(128) name(                                         \
      const W* w0, const W* w1, const W* w2, const T* b0, const T* b1, const T* b2, i64 n0,       \
      i64 n1, i64 n2, const T* x, T* y, const T* residual, i64 columns, i64 split) {              \
    multiply<R>(w0, w1, w2, b0, b1, b2, n0, n1, n2, x, y, residual, columns, (int)split);         \
  }
MATVEC(matvec1, 1)
MATVEC(matvec2, 2)

// act(gate x) * (up x), each rounded: the same row of both by the same warps.
extern "C" __global__ void __launch_bounds__(128) matvec_gated(
    const W* gate, const W* up, const T* gate_bias, const T* up_bias, i64 n, const T* x, T* y,
    i64 columns, i64 split, i64 kind) {
  __shared__ float shared[4][2];
  i64 row = (i64)blockIdx.x * (4 / (int)split) + threadIdx.x / WARP / (int)split;
  i64 there = row < n ? row : n - 1;
  const W* rows[2] = {gate + there * columns, up + there * columns};
  float sums[2];
  if (!products<2>(rows, x, columns, (int)split, shared, sums) || row >= n) return;
  float g = rounded<T>(gate_bias ? sums[0] + widen(gate_bias[row]) : sums[0]);
  float u = rounded<T>(up_bias ? sums[1] + widen(up_bias[row]) : sums[1]);
  narrow(y[row], rounded<T>(activated(g, kind)) * u);
}

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
