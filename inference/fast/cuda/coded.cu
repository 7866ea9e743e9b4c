// bitsandbytes' 4-bit weights: two elements a byte, the high nibble first; value =
// code[nibble] * absmax[element / blocksize], rounded to what the weight was saved as (`to`:
// 0 float32, 1 bfloat16, 2 float16) and then to the type of `out`.

#ifndef CODED_THREADS
#define CODED_THREADS 256
#endif
#ifndef TILE
#define TILE 8192  // elements
#endif

__device__ __forceinline__ float as_saved(float x, int to) {
  if (to == 1) return bf16_to_float(float_to_bf16(x));
  if (to == 2) return half_to_float(float_to_half(x));
  return x;
}

// `shift` is log2 of the block size, at least 5. A table of the code per lane group keeps the
// look-ups of a warp apart: nibbles of one value read one word, others stand in other banks.
template <class T>
__device__ __forceinline__ void decode_coded(const u8* packed, const float* absmax, const float* code,
                                             int shift, int to, T* out, i64 count) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = code[threadIdx.x];
  __syncthreads();
  i64 first = (i64)blockIdx.x * TILE;
  bool whole = ((u64)out & 15) == 0 && ((u64)packed & 3) == 0;
  const int each = 16 / sizeof(T) > 8 ? 8 : 16 / sizeof(T);  // elements a store: 2, 4 or 8
  const int rounds = TILE / (CODED_THREADS * each), ahead = rounds < 4 ? rounds : 4;
  for (int base = 0; base < rounds; base += ahead) {
    u32 w[ahead];
    float scale[ahead];
#pragma unroll
    for (int r = 0; r < ahead; r++) {  // several reads on their way before the first is used
      i64 at = first + (i64)((base + r) * CODED_THREADS + threadIdx.x) * each;
      w[r] = 0;
      scale[r] = 0;
      if (at < count) {
        scale[r] = absmax[at >> shift];
        const u8* p = packed + (at >> 1);
        if (whole && at + each <= count) {
          if (each == 8) w[r] = load_near((const u32*)p);
          else if (each == 4) w[r] = load_near((const u16*)p);
          else w[r] = *p;
        } else {
          for (int i = 0; i < (each + 1) / 2; i++)
            if (at + 2 * i < count) w[r] |= (u32)p[i] << 8 * i;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ahead; r++) {
      i64 at = first + (i64)((base + r) * CODED_THREADS + threadIdx.x) * each;
      if (at >= count) return;
      float v[each];
#pragma unroll
      for (int i = 0; i < each; i++) {
        u32 nibble = w[r] >> (8 * (i / 2) + (i & 1 ? 0 : 4)) & 15;
        v[i] = as_saved(table[nibble] * scale[r], to);
      }
      if (whole && at + each <= count) store_once((uint4*)(out + at), pack16(v, T()));
      else
        for (int i = 0; i < each; i++)
          if (at + i < count) narrow(out[at + i], v[i]);
    }
  }
}

#define CODED(name, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(CODED_THREADS)                                       \
      name(const u8* packed, const float* absmax, const float* code, i64 shift, i64 to, T* out,     \
           i64 count) {                                                                             \
    decode_coded<T>(packed, absmax, code, (int)shift, (int)to, out, count);                                   \
  }
CODED(decode_float32, float)
CODED(decode_float64, double)
CODED(decode_bfloat16, bf16)
CODED(decode_float16, f16)
