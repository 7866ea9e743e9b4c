// Fused parts of a layer: norms, rotary positions, gated products, products of one row; attention
// is attend.cu's. Compiled once per pair of types: REAL is the arithmetic's, STORED the weights'.
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

// One token's keys and values after the positions that a cache holds.
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
