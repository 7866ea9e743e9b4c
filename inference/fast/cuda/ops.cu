// The forward pass's operations in T, rounded where backends/base.py says; sums and functions in
// float32 (float64 where that is T). Every result depends on its own row's inputs only and is made
// in one order, so bits are the same in any company.
//
// Compiled once per dtype: ELEMENT is float, double, bf16 or f16.

typedef ELEMENT T;
typedef Wide<T>::type W;  // what sums and functions are made in
#define GROUP 256
#define OVER(i, count) \
  for (i64 i = (i64)blockIdx.x * GROUP + threadIdx.x; i < (count); i += (i64)gridDim.x * GROUP)
#define KERNEL extern "C" __global__ void __launch_bounds__(GROUP)

__device__ __forceinline__ W r(W x) { return rounded<T>(x); }
__device__ __forceinline__ float exp_of(float x) { return expf(x); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float erf_of(float x) { return erff(x); }
__device__ __forceinline__ double erf_of(double x) { return erf(x); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
__device__ __forceinline__ float cos_of(float x) { return cosf(x); }
__device__ __forceinline__ double cos_of(double x) { return cos(x); }
__device__ __forceinline__ float sin_of(float x) { return sinf(x); }
__device__ __forceinline__ double sin_of(double x) { return sin(x); }
__device__ __forceinline__ W sigmoid_of(W x) { return (W)1 / ((W)1 + exp_of(-x)); }

// Sum of a whole group of GROUP threads, everyone with the result.
__device__ __forceinline__ W group_sum(W x, W* room) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % WARP == 0) room[threadIdx.x / WARP] = x;
  __syncthreads();
  W total = 0;
  for (int i = 0; i < GROUP / WARP; i++) total += room[i];
  return total;
}

// element by element; b repeats every `period` elements, or stands for `run` neighbours each
KERNEL add(const T* a, const T* b, T* y, i64 count, i64 period) {
  OVER(i, count) narrow(y[i], widen(a[i]) + widen(b[i % period]));
}
KERNEL mul(const T* a, const T* b, T* y, i64 count, i64 period, i64 run) {
  OVER(i, count) narrow(y[i], widen(a[i]) * widen(b[i / run % period]));
}
KERNEL scale(const T* x, T* y, i64 count, double factor) {
  OVER(i, count) narrow(y[i], widen(x[i]) * (W)factor);
}
KERNEL shift(const T* x, T* y, i64 count, double number) {
  OVER(i, count) narrow(y[i], widen(x[i]) + (W)number);
}
KERNEL clip(const T* x, T* y, i64 count, double low, double high) {
  OVER(i, count) {
    W v = widen(x[i]), least = (W)low, most = (W)high;
    narrow(y[i], v > most ? most : v < least ? least : v);
  }
}
KERNEL softcap(const T* x, T* y, i64 count, double cap) {
  OVER(i, count) narrow(y[i], r(tanh_of(r(widen(x[i]) / (W)cap))) * (W)cap);
}
KERNEL silu(const T* x, T* y, i64 count) {
  OVER(i, count) {
    W v = widen(x[i]);
    narrow(y[i], v / ((W)1 + exp_of(-v)));
  }
}
KERNEL gelu(const T* x, T* y, i64 count) {
  OVER(i, count) {
    W v = widen(x[i]);
    narrow(y[i], v * (W)0.5 * ((W)1 + erf_of(v * (W)0.70710678118654752440)));
  }
}
KERNEL gelu_tanh(const T* x, T* y, i64 count) {
  OVER(i, count) {
    W v = widen(x[i]), inner = (W)0.79788456080286535588 * (v + (W)0.044715 * (v * v * v));
    narrow(y[i], v * (W)0.5 * ((W)1 + tanh_of(inner)));
  }
}
KERNEL gelu_tanh_steps(const T* x, T* y, i64 count) {
  OVER(i, count) {
    W v = widen(x[i]), cube = r(v * v * v);
    W inner = r((W)0.79788456080286535588 * r(v + r((W)0.044715 * cube)));
    narrow(y[i], r((W)0.5 * v) * r((W)1 + r(tanh_of(inner))));
  }
}
KERNEL relu(const T* x, T* y, i64 count) {
  OVER(i, count) {
    W v = widen(x[i]);
    narrow(y[i], v > 0 || v != v ? v : (W)0);
  }
}
KERNEL relu2(const T* x, T* y, i64 count) {
  OVER(i, count) {
    W v = widen(x[i]);
    narrow(y[i], v > 0 || v != v ? v * v : (W)0);
  }
}
KERNEL sigmoid(const T* x, T* y, i64 count) { OVER(i, count) narrow(y[i], sigmoid_of(widen(x[i]))); }
KERNEL swiglu_oai(const T* gate, const T* up, T* y, i64 count, double limit, double alpha) {
  OVER(i, count) {
    W g = widen(gate[i]), u = widen(up[i]), most = r((W)limit);
    g = g > most ? most : g;
    u = u > most ? most : u < -most ? -most : u;
    narrow(y[i], r(u + (W)1) * r(g * r(sigmoid_of(r(g * (W)alpha)))));
  }
}
KERNEL to_wide(const T* x, W* y, i64 count) { OVER(i, count) y[i] = widen(x[i]); }
KERNEL from_wide(const W* x, T* y, i64 count) { OVER(i, count) narrow(y[i], x[i]); }
KERNEL to_double(const T* x, double* y, i64 count) { OVER(i, count) y[i] = (double)widen(x[i]); }
KERNEL from_double(const double* x, T* y, i64 count) { OVER(i, count) narrow(y[i], (W)x[i]); }
// total[rows[i]] += y[i] * weights[i]; a group takes one row, no row occurs twice
KERNEL add_weighted(T* total, const i64* rows, const T* y, const W* weights, i64 width) {
  i64 from = blockIdx.x, to = rows[from];
  for (i64 i = threadIdx.x; i < width; i += GROUP) {
    T& place = total[to * width + i];
    narrow(place, widen(place) + r(widen(y[from * width + i]) * weights[from]));
  }
}

// norms: a group takes one row of `width`; weights repeat every `period` elements
KERNEL rms_norm(const T* x, const T* weight, T* y, i64 width, i64 period, i64 offset, i64 round_first, double eps) {
  __shared__ W room[GROUP / WARP];
  i64 row = (i64)blockIdx.x * width;
  W squares = 0;
  for (i64 i = threadIdx.x; i < width; i += GROUP) {
    W v = widen(x[row + i]);
    squares += v * v;
  }
  W inverse = (W)1 / root(group_sum(squares, room) / (W)width + (W)eps);
  for (i64 i = threadIdx.x; i < width; i += GROUP) {
    W v = widen(x[row + i]) * inverse, w = widen(weight[(row + i) % period]);
    if (round_first) narrow(y[row + i], r(v) * (offset ? r(w + (W)offset) : w));
    else narrow(y[row + i], v * (w + (W)offset));
  }
}
KERNEL layer_norm(const T* x, const T* weight, const T* bias, T* y, i64 width, i64 period, double eps) {
  __shared__ W room[GROUP / WARP];
  i64 row = (i64)blockIdx.x * width;
  W sum = 0;
  for (i64 i = threadIdx.x; i < width; i += GROUP) sum += widen(x[row + i]);
  W mean = group_sum(sum, room) / (W)width, squares = 0;
  for (i64 i = threadIdx.x; i < width; i += GROUP) {
    W d = widen(x[row + i]) - mean;
    squares += d * d;
  }
  W inverse = (W)1 / root(group_sum(squares, room) / (W)width + (W)eps);
  for (i64 i = threadIdx.x; i < width; i += GROUP) {
    W v = (widen(x[row + i]) - mean) * inverse * widen(weight[(row + i) % period]);
    narrow(y[row + i], bias ? v + widen(bias[(row + i) % period]) : v);
  }
}

// rotary positions: tables [tokens, pairs] in T or in W
template <class U> __device__ __forceinline__ void table(const i64* at, const float* inv_freq, U* cos, U* sin,
                                                         i64 count, i64 pairs, double factor) {
  OVER(i, count) {
    W angle = (W)at[i / pairs] * (W)inv_freq[i % pairs];
    narrow(cos[i], cos_of(angle) * (W)factor);
    narrow(sin[i], sin_of(angle) * (W)factor);
  }
}
KERNEL rope_table(const i64* at, const float* f, T* cos, T* sin, i64 count, i64 pairs, double factor) {
  table(at, f, cos, sin, count, pairs, factor);
}
KERNEL rope_table_wide(const i64* at, const float* f, W* cos, W* sin, i64 count, i64 pairs, double factor) {
  table(at, f, cos, sin, count, pairs, factor);
}
// x [tokens, heads, d] to y [tokens, heads, d]: `interleaved` pairs 2i, 2i + 1; each step rounded
// to T where `steps`
template <class U> __device__ __forceinline__ void rotate(const T* x, const U* cos, const U* sin, T* y, i64 count,
                                                          i64 heads, i64 d, i64 pairs, i64 interleaved, i64 steps) {
  OVER(i, count) {
    i64 j = i % d, token = i / d / heads, p = j < pairs ? j : j - pairs;
    if (j >= 2 * pairs) {
      y[i] = x[i];
      continue;
    }
    const T* head = x + (i - j);
    W first = widen(head[interleaved ? 2 * p : p]), second = widen(head[interleaved ? 2 * p + 1 : p + pairs]);
    W c = widen(cos[token * pairs + p]), s = widen(sin[token * pairs + p]);
    W a = j < pairs ? first * c : second * c, b = j < pairs ? second * s : first * s;
    if (steps) {
      a = r(a);
      b = r(b);
    }
    narrow(y[i], j < pairs ? a - b : a + b);
  }
}
KERNEL rope(const T* x, const T* cos, const T* sin, T* y, i64 count, i64 heads, i64 d, i64 pairs, i64 interleaved,
            i64 steps) {
  rotate(x, cos, sin, y, count, heads, d, pairs, interleaved, steps);
}
KERNEL rope_wide(const T* x, const W* cos, const W* sin, T* y, i64 count, i64 heads, i64 d, i64 pairs,
                 i64 interleaved, i64 steps) {
  rotate(x, cos, sin, y, count, heads, d, pairs, interleaved, steps);
}
