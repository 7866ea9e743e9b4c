// Types, conversions and warp operations that every kernel here uses; no CUDA header is included,
// so that the runtime compiler needs nothing but this text. tests/inference/gpu/emulated.h gives
// the same names to a C++ compiler, which runs the kernels on a CPU.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define WARP 32
#define ALL 0xffffffffu

#ifndef APRFMT_EMULATED
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define SHARED_BYTES(name) extern __shared__ uint4 name##_words[]; u8* name = (u8*)name##_words

__device__ __forceinline__ float half_to_float(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ u16 float_to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
__device__ __forceinline__ u16 float_to_bf16(float f) {
  u16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
// Two roundings at a time: the first number in the low half.
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 w;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 w;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
// a * b + c on two halves at once, each rounded once.
__device__ __forceinline__ u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// c[16 x 8] += a[16 x 16] * b[16 x 8]: f16 factors, exact products, float32 sums, by one warp.
__device__ __forceinline__ void mma_16x8x16(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16x8x8(float* c, u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
// (a & mask) | bits, in one instruction.
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
// A read that will not be repeated: it does not displace what the first-level cache holds.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void store_once(uint4* p, uint4 v) { __stcs(p, v); }
// The same for what neighbours read around: the second-level cache fetches all 256 bytes at once.
#if __CUDA_ARCH__ >= 800
#define NEAR "ld.global.nc.L1::no_allocate.L2::256B."
#else
#define NEAR "ld.global.nc."
#endif
__device__ __forceinline__ u32 load_near(const u32* p) {
  u32 v;
  asm(NEAR "u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ u16 load_near(const u16* p) {
  u16 v;
  asm(NEAR "u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 load_near(const uint4* p) {
  uint4 v;
  asm(NEAR "v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// All threads of a block write `size` bytes that they have put into shared memory, by the copy
// engine where there is one; both places and the size are multiples of 16. Nothing is to be put
// there afterwards.
__device__ __forceinline__ void store_tile(void* to, const void* from, u32 size) {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x) return;
  asm volatile(
      "{ .reg .u64 wide; .reg .u32 place; cvta.to.shared.u64 wide, %1; cvt.u32.u64 place, wide;"
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [place], %2;"
      "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; }"
      :: "l"(to), "l"(from), "r"(size) : "memory");
#else
  __syncthreads();
  for (u32 i = threadIdx.x; i < size / 16; i += blockDim.x)
    store_once((uint4*)to + i, ((const uint4*)from)[i]);
#endif
}
#endif

__device__ __forceinline__ float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }

// 16-bit elements as types of their own, so that overloads tell them apart.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return bf16_to_float(x.bits); }
__device__ __forceinline__ float widen(f16 x) { return half_to_float(x.bits); }

__device__ __forceinline__ void narrow(float& y, float x) { y = x; }
__device__ __forceinline__ void narrow(float& y, double x) { y = (float)x; }
__device__ __forceinline__ void narrow(double& y, double x) { y = x; }
__device__ __forceinline__ void narrow(bf16& y, float x) { y.bits = float_to_bf16(x); }
__device__ __forceinline__ void narrow(f16& y, float x) { y.bits = float_to_half(x); }

// What sums and functions of T are made in.
template <class T> struct Wide { typedef float type; };
template <> struct Wide<double> { typedef double type; };

// Return x as T holds it.
template <class T> __device__ __forceinline__ typename Wide<T>::type rounded(typename Wide<T>::type x) {
  T y;
  narrow(y, x);
  return widen(y);
}

// Write N consecutive numbers; whole 16-byte stores where the place allows.
__device__ __forceinline__ uint4 pack16(const float* v, float) {
  return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}
__device__ __forceinline__ uint4 pack16(const float* v, bf16) {
  return make_uint4(two_bf16(v[0], v[1]), two_bf16(v[2], v[3]), two_bf16(v[4], v[5]), two_bf16(v[6], v[7]));
}
__device__ __forceinline__ uint4 pack16(const float* v, f16) {
  return make_uint4(two_halves(v[0], v[1]), two_halves(v[2], v[3]), two_halves(v[4], v[5]), two_halves(v[6], v[7]));
}
__device__ __forceinline__ uint4 pack16(const float* v, double) {
  u64 a = (u64)__double_as_longlong((double)v[0]), b = (u64)__double_as_longlong((double)v[1]);
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}

// Sums and maxima over a warp, every lane with the result; the order is fixed.
template <class W> __device__ __forceinline__ W warp_sum(W x) {
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
  return x;
}
template <class W> __device__ __forceinline__ W warp_max(W x) {
  for (int step = 16; step; step >>= 1) {
    W other = __shfl_xor_sync(ALL, x, step);
    x = other > x ? other : x;
  }
  return x;
}
