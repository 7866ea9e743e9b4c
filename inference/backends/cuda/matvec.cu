// x [TOKENS, columns] times an encoded weight [rows, columns] transposed, in float32 sums.
//
// A warp takes ROWS rows; a lane takes 8 neighbouring columns, then the 8 that stand 256 further.
// Weights are decoded in registers to the codec's own float32, so every product is exact input.
// A token's sum runs in one order whatever ROWS and TOKENS are.
//
// Compiled once per encoding: ENCODING is a struct of blocks.cuh.

#define MATVEC_WARPS 4

template <class T> __device__ __forceinline__ void eight(const T* p, float* v) {
  uint4 words[sizeof(T) / 2];
#pragma unroll
  for (int i = 0; i < (int)sizeof(T) / 2; i++) words[i] = ((const uint4*)p)[i];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = widen(((const T*)words)[i]);
}

template <class E, class T, int ROWS, int TOKENS>
__device__ __forceinline__ void matvec(const u8* raw, const T* x, T* y, i64 rows, i64 columns) {
  int lane = threadIdx.x % WARP;
  i64 first = ((i64)blockIdx.x * MATVEC_WARPS + threadIdx.x / WARP) * ROWS;
  if (first >= rows) return;
  i64 row_bytes = columns / E::BLOCK * E::BYTES;
  const u8* row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) row[r] = raw + (first + r < rows ? first + r : rows - 1) * row_bytes;
  float sum[ROWS][TOKENS] = {};
  for (i64 at = 8 * lane; at < columns; at += 8 * WARP) {
    float v[ROWS][8];
    i64 block = at / E::BLOCK * E::BYTES;
#pragma unroll
    for (int r = 0; r < ROWS; r++) E::template decode<8>(row[r] + block, (int)(at % E::BLOCK), v[r]);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float u[8];
      eight(x + t * columns + at, u);
#pragma unroll
      for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int i = 0; i < 8; i++) sum[r][t] = fmaf(v[r][i], u[i], sum[r][t]);
    }
  }
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
