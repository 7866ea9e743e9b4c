// x [TOKENS, columns] times an encoded weight [rows, columns] transposed, in float32 sums.
//
// A warp takes ROWS rows; a lane takes 8 neighbouring columns, then the 8 that stand 256 further.
// Weights are decoded in registers to the codec's own float32, so every product is exact input.
// A token's sum runs in one order whatever ROWS and TOKENS are.
//
// Compiled once per encoding: ENCODING is a struct of blocks.cuh. Columns are a multiple of 8 and x
// begins at a multiple of 16 bytes; with ANY defined x begins anywhere, and rows of a plain encoding
// have any number of columns. The sums run in the same order.

#define MATVEC_WARPS 4

// N neighbouring numbers of x.
template <int N, class T> __device__ __forceinline__ void read(const T* p, float* v) {
#ifdef ANY
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = widen(p[i]);
#else
  uint4 words[N * sizeof(T) / 16];
#pragma unroll
  for (int i = 0; i < N * (int)sizeof(T) / 16; i++) words[i] = ((const uint4*)p)[i];
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = widen(((const T*)words)[i]);
#endif
}

// Add the products of columns at ... at + N - 1, in order.
template <class E, int N, class T, int ROWS, int TOKENS>
__device__ __forceinline__ void add(const u8* const (&row)[ROWS], const T* x, i64 at, i64 columns,
                                    float (&sum)[ROWS][TOKENS]) {
  float v[ROWS][N];
  i64 block = at / E::BLOCK * E::BYTES;
#pragma unroll
  for (int r = 0; r < ROWS; r++) E::template decode<N>(row[r] + block, (int)(at % E::BLOCK), v[r]);
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    float u[N];
    read<N>(x + t * columns + at, u);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < N; i++) sum[r][t] = fmaf(v[r][i], u[i], sum[r][t]);
  }
}

template <class E, class T, int ROWS, int TOKENS>
__device__ __forceinline__ void matvec(const u8* raw, const T* x, T* y, i64 rows, i64 columns) {
  int lane = threadIdx.x % WARP;
  i64 first = ((i64)blockIdx.x * MATVEC_WARPS + threadIdx.x / WARP) * ROWS;
  if (first >= rows) return;
  i64 row_bytes = PLAIN<E> ? columns * (E::BYTES / E::BLOCK) : columns / E::BLOCK * E::BYTES;
  const u8* row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) row[r] = raw + (first + r < rows ? first + r : rows - 1) * row_bytes;
  float sum[ROWS][TOKENS] = {};
  i64 at = 8 * lane;
  for (; at + 8 <= columns; at += 8 * WARP) add<E, 8>(row, x, at, columns, sum);
#ifdef ANY
  if constexpr (PLAIN<E>)  // of one lane, fewer than 8
    for (; at < columns; at++) add<E, 1>(row, x, at, columns, sum);
#endif
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float total = warp_sum(sum[r][t]);
      if (lane == 0 && first + r < rows) narrow(y[t * rows + first + r], total);
    }
}

#define MATVEC(name, T, ROWS, TOKENS)                                               \
  extern "C" __global__ void __launch_bounds__(MATVEC_WARPS * WARP)                 \
      name##_##ROWS##_##TOKENS(const u8* raw, const T* x, T* y, i64 rows, i64 columns) { \
    matvec<ENCODING, T, ROWS, TOKENS>(raw, x, y, rows, columns);                    \
  }
#define MATVECS(name, T) \
  MATVEC(name, T, 1, 1) MATVEC(name, T, 1, 2) MATVEC(name, T, 1, 4) \
  MATVEC(name, T, 4, 1) MATVEC(name, T, 4, 2) MATVEC(name, T, 4, 4)
MATVECS(matvec_float32, float)
MATVECS(matvec_bfloat16, bf16)
MATVECS(matvec_float16, f16)
