// x [columns] times a Q4_K weight [rows, columns] transposed, on tensor cores, without loss.
//
// value = d*(scale*q) - dmin*min. scale*q is an integer below 1024, which an f16 holds; x times a
// power of two (one per superblock) is the sum of three f16, exactly but for 2^-35 of the largest.
// So products are exact and sums are float32: the result is that of float32 arithmetic.
//
// One matrix instruction multiplies 16 rows by 16 columns with up to 8 vectors; the three parts of
// x are three of them. A lane (g = lane / 4, t = lane % 4) holds rows g and g + 8 and, of every
// superblock, bytes 16t to 16t + 15 of either half of qs, so that four lanes read 64 neighbouring
// bytes: half of run t / 2 and half of run 2 + t / 2. Which columns meet in one instruction does not
// matter as long as x is laid out the same way.
//
// `along` of the 16 warps share the superblocks of one tile of 16 rows; 16 / along tiles at a time.

#define WARPS 16
#define PARTS 4  // of x; the fourth is zero and stands for lanes without a part

struct Piece { uint4 head[2], q[2][2]; };  // rows g, g + 8: header, 16 bytes of each half of qs

// The shared memory of a block; sizes in bytes are repeated in matvec.py.
struct XParts {
  uint4* columns;  // [superblock][word of a lane][part][t]: low nibbles' 4 columns, high nibbles'
  u16* sums;       // [superblock][part][t][2]: sums over sub-blocks 2t, 2t + 1
  float* scale;    // [superblock]: what takes the power of two back
};

__device__ __forceinline__ void split(float v, u16* part) {
  part[0] = float_to_half(v);
  float rest = v - half_to_float(part[0]);
  bool finite = fabsf(v) < 65504.0f;
  part[1] = finite ? float_to_half(rest) : (u16)0;
  part[2] = finite ? float_to_half(rest - half_to_float(part[1])) : (u16)0;
  part[3] = 0;
}

// Lay out superblock s of x; a lane has 8 neighbouring columns.
template <class T> __device__ __forceinline__ void lay_out(const T* x, int s, const XParts& to) {
  int lane = threadIdx.x % WARP, run = lane / 8, high = lane / 4 & 1, t = run % 2 * 2 + lane / 2 % 2;
  float v[8], largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] = widen(x[s * 256 + 8 * lane + i]);
    largest = fmaxf(largest, fabsf(v[i]));
  }
  largest = warp_max(largest);
  u32 exponent = __float_as_uint(largest) >> 23 & 255;  // the largest becomes 2^9 to 2^10
  if (exponent < 10) exponent = 10;
  float factor = __uint_as_float((263 - exponent) << 23);
  double sum = 0;
  u16 part[8][PARTS];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float scaled = v[i] * factor;
    sum += scaled;
    split(scaled, part[i]);
  }
  sum += __shfl_xor_sync(ALL, sum, 1);
  sum += __shfl_xor_sync(ALL, sum, 2);
#pragma unroll
  for (int two = 0; two < 2; two++) {
    int word = run / 2 * 4 + lane % 2 * 2 + two;
#pragma unroll
    for (int n = 0; n < PARTS; n++) {
      uint2 pair;
      pair.x = part[4 * two][n] | (u32)part[4 * two + 2][n] << 16;
      pair.y = part[4 * two + 1][n] | (u32)part[4 * two + 3][n] << 16;
      ((uint2*)(to.columns + ((s * 8 + word) * PARTS + n) * 4 + t))[high] = pair;
    }
  }
  if (lane % 4 == 0) {
    u16 whole[PARTS];
    split((float)sum, whole);
#pragma unroll
    for (int n = 0; n < PARTS; n++) to.sums[((s * PARTS + n) * 4 + run) * 2 + high] = whole[n];
  }
  if (lane == 0) to.scale[s] = __uint_as_float((exponent - 9) << 23);
}

// Two scales, or mins, as two f16.
__device__ __forceinline__ u32 small_halves(u32 two) {
  return half2_fma(two | 0x64006400u, 0x3c003c00u, 0xe400e400u);  // (1024 + n) * 1 - 1024
}

__device__ __forceinline__ void multiply(const Piece& p, int s, const XParts& x, float* total) {
  int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, n = g < 3 ? g : 3;
  float low[4] = {}, high[4] = {}, least[4] = {};
  u32 mins[2], pick = t & 1 ? 0x4342 : 0x4140;  // bytes 2t, 2t + 1 mod 4, each in a separate half
#pragma unroll
  for (int r = 0; r < 2; r++) {
    u32 b = __byte_perm(p.head[r].z, 0, pick), c = __byte_perm(p.head[r].w, 0, pick);
    mins[r] = small_halves(t < 2 ? b & 0x003f003fu : (c >> 4 & 0x000f000fu) | (b >> 2 & 0x00300030u));
  }
  pick = t & 2 ? 0x4342 : 0x4140;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 times[2][2], plus[2][2];  // of the half's two sub-blocks: low nibbles, high nibbles / 16
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 a = __byte_perm(p.head[r].y, 0, pick), c = __byte_perm(p.head[r].w, 0, pick);
      u32 two = small_halves(half ? (c & 0x000f000fu) | (a >> 2 & 0x00300030u) : a & 0x003f003fu);
      times[r][0] = __byte_perm(two, 0, 0x1010);
      times[r][1] = half2_fma(__byte_perm(two, 0, 0x3232), 0x2c002c00u, 0);
#pragma unroll
      for (int h = 0; h < 2; h++) plus[r][h] = half2_fma(times[r][h], 0xe400e400u, 0);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint4 b = x.columns[((s * 8 + half * 4 + j) * PARTS + n) * 4 + t];
      u32 a[2][4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint4& q = p.q[r][half];
        u32 w = j == 0 ? q.x : j == 1 ? q.y : j == 2 ? q.z : q.w, odd = w >> 8;
        a[0][r] = half2_fma(and_or(w, 0x000f000fu, 0x64006400u), times[r][0], plus[r][0]);
        a[0][2 + r] = half2_fma(and_or(odd, 0x000f000fu, 0x64006400u), times[r][0], plus[r][0]);
        a[1][r] = half2_fma(and_or(w, 0x00f000f0u, 0x64006400u), times[r][1], plus[r][1]);
        a[1][2 + r] = half2_fma(and_or(odd, 0x00f000f0u, 0x64006400u), times[r][1], plus[r][1]);
      }
      mma_16x8x16(low, a[0], b.x, b.y);
      mma_16x8x16(high, a[1], b.z, b.w);
    }
  }
  mma_16x8x8(least, mins[0], mins[1], ((const u32*)x.sums)[(s * PARTS + n) * 4 + t]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 head = p.head[i / 2].x;
    float d = half_to_float(head & 0xffff) * x.scale[s], m = half_to_float(head >> 16) * x.scale[s];
    total[i] = fmaf(d, low[i] + high[i], fmaf(-m, least[i], total[i]));
  }
}

// The pieces of one warp in order: superblocks `warp % along` + a multiple of `along` of every tile
// that is its.
struct Place {
  i64 tile;
  int step;
  __device__ __forceinline__ void advance(int each, i64 stride) {
    if (++step == each) {
      step = 0;
      tile += stride;
    }
  }
};

template <class T>
__device__ __forceinline__ void matvec(const u8* raw, const T* x, T* y, i64 rows, i64 columns, int along) {
  SHARED_BYTES(shared);
  int blocks = (int)(columns / 256), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  XParts parts;
  parts.columns = (uint4*)shared;
  parts.sums = (u16*)(shared + blocks * 2048);
  parts.scale = (float*)(shared + blocks * 2112);
  float* partial = (float*)(shared + blocks * 2116);  // [2][WARPS][16]
  int abreast = WARPS / along, each = (blocks + along - 1) / along, mine = warp % along;
  i64 tiles = (rows + 15) / 16, stride = (i64)gridDim.x * abreast, base = (i64)blockIdx.x * abreast;
  int rounds = base < tiles ? (int)((tiles - base + stride - 1) / stride) : 0, count = rounds * each;
  i64 row_bytes = (i64)blocks * 144;

  auto load = [&](Piece& piece, const Place& at) {
    int s = mine + at.step * along;
    if (at.tile >= tiles || s >= blocks) return;
    const u8* block = raw + s * 144;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      i64 row = at.tile * 16 + lane / 4 + 8 * r;
      const uint4* from = (const uint4*)(block + (row < rows ? row : rows - 1) * row_bytes);
      piece.head[r] = __ldg(from);
      piece.q[r][0] = __ldg(from + 1 + lane % 4);
      piece.q[r][1] = __ldg(from + 5 + lane % 4);
    }
  };
  float total[4] = {};
  int round = 0;
  auto work = [&](Piece& piece, Place& at, Place& ahead) {
    int s = mine + at.step * along;
    if (at.tile < tiles && s < blocks) multiply(piece, s, parts, total);
    load(piece, ahead);
    ahead.advance(each, stride);
    if (at.step == each - 1) {
      float* now = partial + (round++ & 1) * WARPS * 16;
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float part = total[2 * r] + total[2 * r + 1];  // t 0: parts 0, 1; t 1: part 2
        part += __shfl_xor_sync(ALL, part, 1);
        if (lane % 4 == 0) now[warp * 16 + lane / 4 + 8 * r] = part;
        total[2 * r] = total[2 * r + 1] = 0;
      }
      __syncthreads();
      if (threadIdx.x < WARPS * 16) {  // a row's `along` sums stand side by side
        int which = threadIdx.x / along, k = threadIdx.x % along;
        float sum = now[(which / 16 * along + k) * 16 + which % 16];
        for (int step = along / 2; step; step >>= 1) sum += __shfl_xor_sync(ALL, sum, step);
        i64 row = (at.tile - warp / along + which / 16) * 16 + which % 16;
        if (k == 0 && row < rows) narrow(y[row], sum);
      }
    }
    at.advance(each, stride);
  };
  Piece even = {}, odd = {};
  Place at = {base + warp / along, 0}, ahead = at;
  load(even, ahead);
  ahead.advance(each, stride);
  load(odd, ahead);
  ahead.advance(each, stride);
  for (int s = warp; s < blocks; s += WARPS) lay_out(x, s, parts);
  __syncthreads();
  for (int i = 0; i < count; i += 2) {
    work(even, at, ahead);
    if (i + 1 < count) work(odd, at, ahead);
  }
}

#define MATVEC_Q4_K(name, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1)                               \
      name(const u8* raw, const T* x, T* y, i64 rows, i64 columns, i64 along) {               \
    matvec<T>(raw, x, y, rows, columns, (int)along);                                          \
  }
MATVEC_Q4_K(matvec_float32, float)
MATVEC_Q4_K(matvec_bfloat16, bf16)
MATVEC_Q4_K(matvec_float16, f16)
