// Layers that keep a state (inference/recurrence.py and inference/state_space_scan.py have the mathematics): a
// short convolution, a decay, the gated delta rule and a state space scan, token by token; sums and
// state in W.

__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
__device__ __forceinline__ double log1p_of(double x) { return log1p(x); }

// y [tokens, channels] of x [taps - 1 + tokens, channels], weights [channels, taps] and bias
// [channels], which may be null
KERNEL convolve(const T* x, const T* weights, const T* bias, T* y, i64 count, i64 channels, i64 taps) {
  OVER(i, count) {
    const T* own = weights + i % channels * taps;
    W sum = widen(x[i]) * widen(own[0]);
    for (i64 tap = 1; tap < taps; tap++) sum += widen(x[i + tap * channels]) * widen(own[tap]);
    narrow(y[i], bias ? sum + widen(bias[i % channels]) : sum);
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
// number, N each. Block x of a head has columns from GROUP / WARP * x on. `before` may be null. The decay g
// is one number a head, or key_dim of them where `each`.
template <int N> __device__ __forceinline__ void rule(
    const T* q, const T* k, const T* v, const W* g, const T* beta, const W* before, T* y, W* after, i64 tokens,
    i64 key_heads, i64 key_dim, i64 value_dim, i64 each, double tiny, double scale) {
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
    W kept = each ? (W)1 : exp_of(g[value]);
    W strength = widen(beta[value]), wanted = widen(v[value * value_dim + column]);
    keys = (W)1 / root(warp_sum(keys) + (W)tiny);
    queries = (W)scale / root(warp_sum(queries) + (W)tiny);
#pragma unroll
    for (int n = 0; n < N; n++) {
      key[n] *= keys;
      if (each && there[n]) kept = exp_of(g[value * key_dim + lane + n * WARP]);
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
                  W* after, i64 tokens, i64 key_heads, i64 key_dim, i64 value_dim, i64 each, double tiny,      \
                  double scale) {                                                                              \
    rule<N>(q, k, v, g, beta, before, y, after, tokens, key_heads, key_dim, value_dim, each, tiny, scale);     \
  }
DELTA(1)
DELTA(2)
DELTA(4)
DELTA(8)

// softplus(x + bias) of `heads` neighbours each, within [low, high]; the sum and softplus are rounded
KERNEL time_step(const T* x, const T* bias, T* y, i64 count, i64 heads, double linear, double low, double high) {
  OVER(i, count) {
    W v = widen(x[i]);
    if (bias) v = r(v + widen(bias[i % heads]));
    if (!(v > (W)linear)) v = r((v > 0 ? v : (W)0) + log1p_of(exp_of(v > 0 ? -v : v)));
    narrow(y[i], v < (W)low ? (W)low : v > (W)high ? (W)high : v);
  }
}
KERNEL rates(const T* x, W* y, i64 count) {
  OVER(i, count) y[i] = -exp_of(widen(x[i]));
}

// A warp keeps the numbers of one column (of `width` of a head): its lanes have every 32nd, N each.
// `rate` has one number a head, or `state` of them where `each`. `kept` is the state, in place.
template <int N> __device__ __forceinline__ void scanned(
    const T* x, const T* step, const W* rate, const T* b, const T* c, const T* skip, W* y, W* kept,
    i64 tokens, i64 heads, i64 width, i64 groups, i64 state, i64 each) {
  i64 lane = threadIdx.x % WARP, column = (i64)blockIdx.x * (GROUP / WARP) + threadIdx.x / WARP;
  if (column >= heads * width) return;
  i64 head = column / width, group = head / (heads / groups), place = column * state + lane;
  W held[N], decay[N], passed = widen(skip[head]);
  bool there[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    there[n] = lane + n * WARP < state;
    held[n] = there[n] ? kept[place + n * WARP] : (W)0;
    decay[n] = !there[n] ? (W)0 : each ? rate[head * state + lane + n * WARP] : rate[head];
  }
  for (i64 t = 0; t < tokens; t++) {
    W grown = widen(step[t * heads + head]), value = widen(x[t * heads * width + column]);
    W left = exp_of(grown * decay[0]), read = 0;
    i64 row = (t * groups + group) * state + lane;
#pragma unroll
    for (int n = 0; n < N; n++) {
      W into = there[n] ? widen(b[row + n * WARP]) : (W)0, out = there[n] ? widen(c[row + n * WARP]) : (W)0;
      if (each && n) left = exp_of(grown * decay[n]);
      held[n] = left * held[n] + grown * into * value;
      read += held[n] * out;
    }
    read = warp_sum(read);
    if (lane == 0) y[t * heads * width + column] = read + passed * value;
  }
#pragma unroll
  for (int n = 0; n < N; n++)
    if (there[n]) kept[place + n * WARP] = held[n];
}
#define SCAN(N)                                                                                                \
  KERNEL scan##N(const T* x, const T* step, const W* rate, const T* b, const T* c, const T* skip, W* y,        \
                 W* kept, i64 tokens, i64 heads, i64 width, i64 groups, i64 state, i64 each) {                 \
    scanned<N>(x, step, rate, b, c, skip, y, kept, tokens, heads, width, groups, state, each);                 \
  }
SCAN(1)
SCAN(2)
SCAN(4)
SCAN(8)

__device__ __forceinline__ W opened(const T* gate, i64 i) {
  W z = widen(gate[i]);
  return z / ((W)1 + exp_of(-z));
}
// x times silu(gate), and RMSNorm of a group of `width` where there are weights [groups, width]; a
// block takes one group of one row. `gate` and `weight` may be null.
KERNEL gated_scan(const W* x, const T* gate, const T* weight, T* y, i64 width, i64 groups, i64 first, double eps) {
  __shared__ W room[GROUP / WARP];
  i64 start = (i64)blockIdx.x * width, own = (i64)blockIdx.x % groups * width;
  W inverse = 1;
  if (weight) {
    W squares = 0;
    for (i64 i = threadIdx.x; i < width; i += GROUP) {
      W v = x[start + i];
      if (gate && !first) v *= opened(gate, start + i);
      squares += v * v;
    }
    inverse = (W)1 / root(group_sum(squares, room) / (W)width + (W)eps);
  }
  for (i64 i = threadIdx.x; i < width; i += GROUP) {
    W v = x[start + i];
    if (gate) v *= opened(gate, start + i);
    narrow(y[start + i], weight ? v * inverse * widen(weight[own + i]) : v);
  }
}
