// Layers that keep a state (inference/recurrence.py has the mathematics): a short convolution, a
// decay, and the gated delta rule, token by token; sums and state in W.

__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }

// y [tokens, channels] of x [taps - 1 + tokens, channels] and weights [channels, taps]
KERNEL convolve(const T* x, const T* weights, T* y, i64 count, i64 channels, i64 taps) {
  OVER(i, count) {
    const T* own = weights + i % channels * taps;
    W sum = widen(x[i]) * widen(own[0]);
    for (i64 tap = 1; tap < taps; tap++) sum += widen(x[i + tap * channels]) * widen(own[tap]);
    narrow(y[i], sum);
  }
}
// -exp(rate) * softplus(a + shift), of `heads` neighbours each; the identity above `linear`
KERNEL decay(const T* a, const T* rate, const T* shift, W* y, i64 count, i64 heads, double linear) {
  OVER(i, count) {
    W x = widen(a[i]) + widen(shift[i % heads]);
    W soft = x > (W)linear ? x : (x > 0 ? x : (W)0) + log1p_of(exp_of(x > 0 ? -x : x));
    y[i] = -exp_of(widen(rate[i % heads])) * soft;
  }
}

// A warp keeps one column of a head's state [key_dim, value_dim]: its lanes have every 32nd key's
// number, N each. Block x of a head has columns from GROUP / WARP * x on. `before` may be null.
template <int N> __device__ __forceinline__ void rule(
    const T* q, const T* k, const T* v, const W* g, const T* beta, const W* before, T* y, W* after, i64 tokens,
    i64 key_heads, i64 key_dim, i64 value_dim, double tiny, double scale) {
  i64 head = blockIdx.y, heads = gridDim.y, lane = threadIdx.x % WARP;
  i64 column = (i64)blockIdx.x * (GROUP / WARP) + threadIdx.x / WARP;
  if (column >= value_dim) return;
  i64 first = head / (heads / key_heads) * key_dim, place = head * key_dim * value_dim + column;
  W state[N], key[N], query[N];
  bool there[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    there[n] = lane + n * WARP < key_dim;
    state[n] = before && there[n] ? before[place + (lane + n * WARP) * value_dim] : (W)0;
  }
  for (i64 t = 0; t < tokens; t++) {
    W keys = 0, queries = 0, along = 0, read = 0;
    i64 row = t * key_heads * key_dim + first + lane, value = t * heads + head;
#pragma unroll
    for (int n = 0; n < N; n++) {
      key[n] = there[n] ? widen(k[row + n * WARP]) : (W)0;
      query[n] = there[n] ? widen(q[row + n * WARP]) : (W)0;
      keys += key[n] * key[n];
      queries += query[n] * query[n];
    }
    W kept = exp_of(g[value]), strength = widen(beta[value]), wanted = widen(v[value * value_dim + column]);
    keys = (W)1 / root(warp_sum(keys) + (W)tiny);
    queries = (W)scale / root(warp_sum(queries) + (W)tiny);
#pragma unroll
    for (int n = 0; n < N; n++) {
      key[n] *= keys;
      state[n] *= kept;
      along += key[n] * state[n];
    }
    W change = (wanted - warp_sum(along)) * strength;
#pragma unroll
    for (int n = 0; n < N; n++) {
      state[n] += key[n] * change;
      read += query[n] * queries * state[n];
    }
    read = warp_sum(read);
    if (lane == 0) narrow(y[value * value_dim + column], read);
  }
#pragma unroll
  for (int n = 0; n < N; n++)
    if (there[n]) after[place + (lane + n * WARP) * value_dim] = state[n];
}
#define DELTA(N)                                                                                               \
  KERNEL delta##N(const T* q, const T* k, const T* v, const W* g, const T* beta, const W* before, T* y,        \
                  W* after, i64 tokens, i64 key_heads, i64 key_dim, i64 value_dim, double tiny, double scale) { \
    rule<N>(q, k, v, g, beta, before, y, after, tokens, key_heads, key_dim, value_dim, tiny, scale);           \
  }
DELTA(1)
DELTA(2)
DELTA(4)
DELTA(8)
