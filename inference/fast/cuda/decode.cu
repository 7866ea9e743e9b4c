// Encoded bytes to numbers. A group of threads stages one tile of bytes in shared memory with
// 16-byte reads, whatever the alignment of a block, and writes it decoded with 16-byte stores; or,
// where DIRECT is defined, each thread reads its bytes where they are, several groups ahead. Where
// BULK is defined, a whole tile is put together in shared memory and written as one piece.
//
// Compiled once per encoding: ENCODING is a struct of blocks.cuh.

#ifndef DECODE_THREADS
#define DECODE_THREADS 128
#endif
#ifndef DECODE_BLOCKS
#define DECODE_BLOCKS 8  // of a multiprocessor: bounds the registers, fills it with threads
#endif
#ifndef TILE
#define TILE 2048  // elements, a multiple of what the threads write at a time
#endif
#ifndef AHEAD
#define AHEAD 1
#endif

template <class T> struct Step { enum { N = 8 }; };
template <> struct Step<float> { enum { N = 4 }; };
template <> struct Step<double> { enum { N = 4 }; };

// Write v to out[at ...], no further than out[count].
template <class T, int N>
__device__ __forceinline__ void put(T* out, i64 at, i64 count, bool whole, const float* v) {
  if (whole && at + N <= count) {
    const int each = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N / each; i++) store_once((uint4*)(out + at) + i, pack16(v + i * each, T()));
  } else {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (at + i < count) narrow(out[at + i], v[i]);
  }
}

// Copy `size` bytes to shared memory; return where they begin there (as aligned as in `from`).
__device__ __forceinline__ const u8* staged(u8* stage, const u8* from, int size) {
  int before = (int)((u64)from & 15), words = (before + size) / 16;
  const u8* start = from - before;
  for (int i = threadIdx.x; i < words; i += DECODE_THREADS)
    ((uint4*)stage)[i] = load_once((const uint4*)start + i);
  for (int i = words * 16 + threadIdx.x; i < before + size; i += DECODE_THREADS)
    if (i >= before) stage[i] = start[i];
  return stage + before;
}

template <class E, class T>
__device__ __forceinline__ void decode_tile(const u8* raw, T* out, i64 count) {
  const int N = Step<T>::N, EACH = N * E::FAN;
  i64 first = (i64)blockIdx.x * TILE, begin = first / E::BLOCK * E::BYTES;
#ifdef DIRECT
  const u8* block = raw + begin;
#else
  SHARED_BYTES(stage);
  i64 last = (count + E::BLOCK - 1) / E::BLOCK * E::BYTES;  // bytes that are there
  if (PLAIN<E>) last = count * (E::BYTES / E::BLOCK);
  i64 end = begin + (i64)TILE / E::BLOCK * E::BYTES;
  const u8* block = staged(stage, raw + begin, (int)((end > last ? last : end) - begin));
  __syncthreads();
#endif
  bool whole = ((u64)out & 15) == 0;
#ifdef BULK
  alignas(16) __shared__ T made[TILE];
  if (whole && first + TILE <= count) {
#pragma unroll
    for (int u = threadIdx.x; u < TILE / EACH; u += DECODE_THREADS) {
      int i = E::base(u, N);
      float v[E::FAN][N];
      E::template fan<N>(block + i / E::BLOCK * E::BYTES, i % E::BLOCK, v);
#pragma unroll
      for (int f = 0; f < E::FAN; f++)
#pragma unroll
        for (int k = 0; k < N; k += 16 / sizeof(T))
          *(uint4*)(made + i + 32 * f + k) = pack16(v[f] + k, T());
    }
    store_tile(out + first, made, TILE * sizeof(T));
    return;
  }
#endif
#pragma unroll AHEAD
  for (int u = threadIdx.x; u < TILE / EACH; u += DECODE_THREADS) {
    int i = E::base(u, N);
    if (first + i >= count) continue;
    float v[E::FAN][N];
    E::template fan<N>(block + i / E::BLOCK * E::BYTES, i % E::BLOCK, v);
#pragma unroll
    for (int f = 0; f < E::FAN; f++) put<T, N>(out, first + i + 32 * f, count, whole, v[f]);
  }
}

#define DECODER(name, T)                                                               \
  extern "C" __global__ void __launch_bounds__(DECODE_THREADS, DECODE_BLOCKS)                    \
      name(const u8* raw, T* out, i64 count) {                                         \
    decode_tile<ENCODING, T>(raw, out, count);                                         \
  }
DECODER(decode_float32, float)
DECODER(decode_float64, double)
DECODER(decode_bfloat16, bf16)
DECODER(decode_float16, f16)
