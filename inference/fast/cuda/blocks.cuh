// How each encoding's block gives N consecutive elements (N 4 or 8, `at` a multiple of N), in
// float32 with the codecs' own roundings: products of scales are exact in float32, so a fused
// multiply-add rounds where the codec does. Byte maps: aprfmt/codecs, the file of that name.

// Bytes at a 2-, 4- or 16-byte aligned place as words.
template <int N, int ALIGN> __device__ __forceinline__ void bytes(const u8* p, u32* w) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    if (ALIGN >= 4) w[i] = ((const u32*)p)[i];
    else w[i] = ((const u16*)p)[2 * i] | (u32)((const u16*)p)[2 * i + 1] << 16;
  }
}
// What a whole warp reads of one block, aligned: from global memory where DIRECT is defined.
#ifdef DIRECT
template <class T> __device__ __forceinline__ T near(const u8* p) { return load_near((const T*)p); }
#else
template <class T> __device__ __forceinline__ T near(const u8* p) { return *(const T*)p; }
#endif
template <int N> __device__ __forceinline__ void near_bytes(const u8* p, u32* w) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) w[i] = near<u32>(p + 4 * i);
}
// The same at a 2-byte aligned place by aligned words: fewer reads. They touch up to 2 bytes before
// and after, which must lie in the same block or the same word as it.
template <int N> __device__ __forceinline__ void inner_bytes(const u8* p, u32* w) {
  const u32* from = (const u32*)((u64)p & ~(u64)3);
  u32 shift = ((u32)(u64)p & 2) * 8, now = from[0];
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    u32 next = i + 1 < N / 4 || shift ? from[i + 1] : 0;
    w[i] = __funnelshift_r(now, next, shift);
    now = next;
  }
}
// Byte i of w as float32, less `offset`: 2^23 + byte is a float with the byte as its last bits.
__device__ __forceinline__ float number(u32 w, int i, float offset) {
  return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 | i)) - (8388608.0f + offset);
}
__device__ __forceinline__ u16 word16(const u8* p) { return *(const u16*)p; }
// Four bits spread over the lowest bits of four bytes.
__device__ __forceinline__ u32 spread(u32 b) { return ((b & 15) * 0x00204081u) & 0x01010101u; }

// Scale and min of sub-block j from the 12 packed bytes (k_scales.py), given as three words.
__device__ __forceinline__ void k_scale(u32 s0, u32 s1, u32 s2, int j, u32& scale, u32& least) {
  int shift = 8 * (j & 3);
  u32 a = s0 >> shift, b = s1 >> shift, c = s2 >> shift;
  scale = j < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
  least = j < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
}

// Encodings whose packed bytes hold several elements 32 apart give them together, so that a byte is
// read once: `fan` fills v[FAN][N] with the elements at base(u), base(u) + 32, ... of the u-th
// group of FAN * N. With FAN 1 it is `decode`.
template <class E> struct Single {
  enum { FAN = 1 };
  static __device__ __forceinline__ int base(int u, int n) { return u * n; }
  template <int N> static __device__ __forceinline__ void fan(const u8* b, int at, float (*v)[N]) {
    E::template decode<N>(b, at, v[0]);
  }
};
template <int COUNT> struct Several {
  enum { FAN = COUNT };
  // Groups follow each other in runs of 32 columns, runs of FAN * 32 elements.
  static __device__ __forceinline__ int base(int u, int n) {
    int along = 32 / n;
    return u / along * (COUNT * 32) + u % along * n;
  }
};

struct Q4_0 : Single<Q4_0> {
  enum { BLOCK = 32, BYTES = 18, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4];
    float d = half_to_float(word16(b));
    bytes<N, ALIGN>(b + 2 + (at & 15), w);
#pragma unroll
    for (int i = 0; i < N; i++)
      v[i] = number((at < 16 ? w[i / 4] : w[i / 4] >> 4) & 0x0f0f0f0fu, i & 3, 8) * d;
  }
};

struct Q4_1 : Single<Q4_1> {
  enum { BLOCK = 32, BYTES = 20, ALIGN = 4 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], head = *(const u32*)b;
    float d = half_to_float(head & 0xffff), m = half_to_float(head >> 16);
    bytes<N, ALIGN>(b + 4 + (at & 15), w);
#pragma unroll
    for (int i = 0; i < N; i++)
      v[i] = fmaf(number((at < 16 ? w[i / 4] : w[i / 4] >> 4) & 0x0f0f0f0fu, i & 3, 0), d, m);
  }
};

struct Q5_0 : Single<Q5_0> {
  enum { BLOCK = 32, BYTES = 22, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], high;
    float d = half_to_float(word16(b));
    bytes<4, ALIGN>(b + 2, &high);
    bytes<N, ALIGN>(b + 6 + (at & 15), w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 low = (at < 16 ? w[i / 4] : w[i / 4] >> 4) & 0x0f0f0f0fu;
      v[i] = number(low | spread(high >> (at + (i & ~3))) << 4, i & 3, 16) * d;
    }
  }
};

struct Q5_1 : Single<Q5_1> {
  enum { BLOCK = 32, BYTES = 24, ALIGN = 4 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], head = *(const u32*)b, high = ((const u32*)b)[1];
    float d = half_to_float(head & 0xffff), m = half_to_float(head >> 16);
    bytes<N, ALIGN>(b + 8 + (at & 15), w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 low = (at < 16 ? w[i / 4] : w[i / 4] >> 4) & 0x0f0f0f0fu;
      v[i] = fmaf(number(low | spread(high >> (at + (i & ~3))) << 4, i & 3, 0), d, m);
    }
  }
};

struct Q8_0 : Single<Q8_0> {
  enum { BLOCK = 32, BYTES = 34, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4];
    float d = half_to_float(word16(b));
    bytes<N, ALIGN>(b + 2 + at, w);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = number(w[i / 4] ^ 0x80808080u, i & 3, 128) * d;
  }
};

struct Q2_K : Single<Q2_K> {
  enum { BLOCK = 256, BYTES = 84, ALIGN = 4 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], tail = *(const u32*)(b + 80), packed = b[at >> 4];
    float d = half_to_float(tail & 0xffff) * (packed & 15), m = half_to_float(tail >> 16) * (packed >> 4);
    int shift = at >> 4 & 6;  // twice k = at / 32 mod 4
    bytes<N, ALIGN>(b + 16 + 32 * (at >> 7) + (at & 31), w);
#pragma unroll
    for (int i = 0; i < N; i++)
      v[i] = fmaf(d, number(w[i / 4] >> shift & 0x03030303u, i & 3, 0), -m);
  }
};

struct Q3_K : Single<Q3_K> {
  enum { BLOCK = 256, BYTES = 110, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], mask[N / 4];
    int s = at >> 4, k = at >> 5;  // k counts over both halves: the mask's bit
    u32 low = s < 8 ? b[96 + s] & 15 : b[88 + s] >> 4, high = b[104 + (s & 3)] >> 2 * (s >> 2) & 3;
    float d = half_to_float(word16(b + 108)) * (float)((int)(low | high << 4) - 32);
    bytes<N, ALIGN>(b + (at & 31), mask);
    bytes<N, ALIGN>(b + 32 + 32 * (at >> 7) + (at & 31), w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 q = (w[i / 4] >> 2 * (k & 3) & 0x03030303u) | (mask[i / 4] >> k & 0x01010101u) << 2;
      v[i] = number(q, i & 3, 4) * d;
    }
  }
};

struct Q4_K : Several<2> {
  template <int N> static __device__ __forceinline__ void fan(const u8* b, int at, float (*v)[N]) {
    u32 w[N / 4];
    uint4 head = near<uint4>(b);
    int j = at >> 5;  // even
    float d = half_to_float(head.x & 0xffff), m = half_to_float(head.x >> 16);
    near_bytes<N>(b + 16 + 32 * (j >> 1) + (at & 31), w);
#pragma unroll
    for (int f = 0; f < 2; f++) {
      u32 scale, least;
      k_scale(head.y, head.z, head.w, j + f, scale, least);
      float times = d * scale, minus = -(m * least);
#pragma unroll
      for (int i = 0; i < N; i++)
        v[f][i] = fmaf(times, number(w[i / 4] >> 4 * f & 0x0f0f0f0fu, i & 3, 0), minus);
    }
  }

  enum { BLOCK = 256, BYTES = 144, ALIGN = 16 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], scale, least;
    uint4 head = *(const uint4*)b;
    int j = at >> 5;
    k_scale(head.y, head.z, head.w, j, scale, least);
    float d = half_to_float(head.x & 0xffff) * scale, m = half_to_float(head.x >> 16) * least;
    bytes<N, 4>(b + 16 + 32 * (j >> 1) + (at & 31), w);
#pragma unroll
    for (int i = 0; i < N; i++)
      v[i] = fmaf(d, number((j & 1 ? w[i / 4] >> 4 : w[i / 4]) & 0x0f0f0f0fu, i & 3, 0), -m);
  }
};

struct Q5_K : Several<2> {
  template <int N> static __device__ __forceinline__ void fan(const u8* b, int at, float (*v)[N]) {
    u32 w[N / 4], high[N / 4];
    uint4 head = near<uint4>(b);
    int j = at >> 5;  // even
    float d = half_to_float(head.x & 0xffff), m = half_to_float(head.x >> 16);
    near_bytes<N>(b + 16 + (at & 31), high);
    near_bytes<N>(b + 48 + 32 * (j >> 1) + (at & 31), w);
#pragma unroll
    for (int f = 0; f < 2; f++) {
      u32 scale, least;
      k_scale(head.y, head.z, head.w, j + f, scale, least);
      float times = d * scale, minus = -(m * least);
#pragma unroll
      for (int i = 0; i < N; i++) {
        u32 q = (w[i / 4] >> 4 * f & 0x0f0f0f0fu) | (high[i / 4] >> (j + f) & 0x01010101u) << 4;
        v[f][i] = fmaf(times, number(q, i & 3, 0), minus);
      }
    }
  }

  enum { BLOCK = 256, BYTES = 176, ALIGN = 16 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 w[N / 4], high[N / 4], scale, least;
    uint4 head = *(const uint4*)b;
    int j = at >> 5;
    k_scale(head.y, head.z, head.w, j, scale, least);
    float d = half_to_float(head.x & 0xffff) * scale, m = half_to_float(head.x >> 16) * least;
    bytes<N, 4>(b + 16 + (at & 31), high);
    bytes<N, 4>(b + 48 + 32 * (j >> 1) + (at & 31), w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 q = ((j & 1 ? w[i / 4] >> 4 : w[i / 4]) & 0x0f0f0f0fu) | (high[i / 4] >> j & 0x01010101u) << 4;
      v[i] = fmaf(d, number(q, i & 3, 0), -m);
    }
  }
};

struct Q6_K : Several<4> {
  template <int N> static __device__ __forceinline__ void fan(const u8* b, int at, float (*v)[N]) {
    u32 low[2][N / 4], high[N / 4];
    int half = at >> 7, l = at & 31;
    float d = half_to_float(word16(b + 208));
    inner_bytes<N>(b + 64 * half + l, low[0]);
    inner_bytes<N>(b + 64 * half + 32 + l, low[1]);
    inner_bytes<N>(b + 128 + 32 * half + l, high);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float times = d * (float)((const i8*)b)[192 + (at >> 4) + 2 * k];
#pragma unroll
      for (int i = 0; i < N; i++) {
        u32 q = (low[k & 1][i / 4] >> 4 * (k >> 1) & 0x0f0f0f0fu) | (high[i / 4] >> 2 * k & 0x03030303u) << 4;
        v[k][i] = number(q, i & 3, 32) * times;
      }
    }
  }

  enum { BLOCK = 256, BYTES = 210, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
    u32 low[N / 4], high[N / 4];
    int half = at >> 7, k = at >> 5 & 3;
    float d = half_to_float(word16(b + 208)) * (float)((const i8*)b)[192 + (at >> 4)];
    inner_bytes<N>(b + 64 * half + 32 * (k & 1) + (at & 31), low);
    inner_bytes<N>(b + 128 + 32 * half + (at & 31), high);
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 q = ((k & 2 ? low[i / 4] >> 4 : low[i / 4]) & 0x0f0f0f0fu) | (high[i / 4] >> 2 * k & 0x03030303u) << 4;
      v[i] = number(q, i & 3, 32) * d;
    }
  }
};

// Say whether every element takes whole bytes of its own, so that rows may have any length.
template <class E> constexpr bool PLAIN = E::BYTES % E::BLOCK == 0;

// The plain ones, as blocks of 32: their bits are kept, NaN payloads too.
struct BF16 : Single<BF16> {
  enum { BLOCK = 32, BYTES = 64, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = bf16_to_float(((const u16*)b)[at + i]);
  }
};

struct F16 : Single<F16> {
  enum { BLOCK = 32, BYTES = 64, ALIGN = 2 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
#pragma unroll
    for (int i = 0; i < N; i++) {
      u32 h = ((const u16*)b)[at + i];
      float wide = half_to_float(h);
      u32 nan = (h & 0x8000) << 16 | 0x7f800000u | (h & 0x3ff) << 13;
      v[i] = (h & 0x7fff) > 0x7c00 ? __uint_as_float(nan) : wide;
    }
  }
};

struct F32 : Single<F32> {
  enum { BLOCK = 32, BYTES = 128, ALIGN = 4 };
  template <int N> static __device__ __forceinline__ void decode(const u8* b, int at, float* v) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = ((const float*)b)[at + i];
  }
};
