// What the CUDA kernels need of a GPU, for a C++ compiler: blocks one after the other, a block's
// threads as coroutines that take turns at barriers and at what a warp does together. Shared memory
// is one array. A barrier that not all threads reach ends the program with a message, and so does a
// read or write of words at a place that is no multiple of their size, which a GPU refuses too.
#define APRFMT_EMULATED
#include <immintrin.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__ __attribute__((visibility("default")))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Index { unsigned x, y, z; };
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {
enum State { RUNS, AT_BLOCK, AT_WARP, ENDED };
const size_t STACK = 64 << 10;
// A thread begins by its ucontext; later switches are jumps, which make no system call.
struct Thread { ucontext_t context; jmp_buf place; bool begun; State state; std::unique_ptr<char[]> stack; };
static std::vector<Thread> threads;
static std::vector<std::vector<unsigned char>> exchange;  // a thread's words for its warp
static jmp_buf scheduler;
static int now;
static Index thread_index, block_index, grid_size, block_size;
alignas(16) static unsigned char shared[256 << 10];
static void (*kernel)(long long, long long, long long, long long, long long, long long, long long, long long,
                      long long, long long, long long, long long, long long, long long, double, double, double, double);
static const long long* integers;
static const double* reals;

static void wait(State state) {
  threads[now].state = state;
  if (!_setjmp(threads[now].place)) _longjmp(scheduler, 1);
}
static void go_on(Thread& thread) {
  if (_setjmp(scheduler)) return;
  if (thread.begun) _longjmp(thread.place, 1);
  thread.begun = true;
  setcontext(&thread.context);
}
static void body() {
  const long long* i = integers;
  kernel(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], reals[0], reals[1],
         reals[2], reals[3]);
  threads[now].state = ENDED;
  _longjmp(scheduler, 1);
}
// Let a group go on once all of it that has not ended waits for the same.
static bool release(int begin, int end, State state) {
  bool waits = false;
  for (int i = begin; i < end; i++) {
    if (threads[i].state == state) waits = true;
    else if (threads[i].state != ENDED) return false;
  }
  for (int i = begin; waits && i < end; i++)
    if (threads[i].state == state) threads[i].state = RUNS;
  return waits;
}
static void misplaced(int) {
  std::fprintf(stderr, "block %u, thread %d: words at a place that is no multiple of their size\n", block_index.x, now);
  std::abort();
}
static void run_block(int count) {
  for (int i = 0; i < count; i++) {
    Thread& thread = threads[i];
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    thread.state = RUNS;
    thread.begun = false;
    makecontext(&thread.context, body, 0);
  }
  for (;;) {
    bool ran = false, all = true;
    for (now = 0; now < count; now++) {
      if (threads[now].state != RUNS) continue;
      thread_index = {(unsigned)now, 0, 0};
      go_on(threads[now]);
      ran = true;
    }
    for (int i = 0; i < count; i++) all &= threads[i].state == ENDED;
    if (all) return;
    bool freed = false;
    for (int i = 0; i < count; i += 32) freed |= release(i, i + 32 < count ? i + 32 : count, AT_WARP);
    if (!freed) freed = release(0, count, AT_BLOCK);
    if (!freed && !ran) {
      std::fprintf(stderr, "a barrier that not all threads reach\n");
      std::abort();
    }
  }
}
// Every lane gives `value`, every lane can read the others' after this.
template <class T> static T* give(const T& value) {
  std::memcpy(exchange[now].data(), &value, sizeof(T));
  wait(AT_WARP);
  return nullptr;
}
template <class T> static T of_lane(int lane) {
  T value;
  std::memcpy(&value, exchange[now / 32 * 32 + lane].data(), sizeof(T));
  return value;
}
}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define gridDim emulation::grid_size
#define blockDim emulation::block_size
#define SHARED_BYTES(name) unsigned char* name = emulation::shared

extern "C" __attribute__((visibility("default"))) void emulate(void* kernel, const unsigned* grid, unsigned block,
                                                               const long long* integers, const double* reals) {
  using namespace emulation;
  signal(SIGILL, misplaced);  // the compiler's check of alignment traps
  emulation::kernel = (decltype(emulation::kernel))kernel;
  emulation::integers = integers;
  emulation::reals = reals;
  while (threads.size() < block) {
    threads.push_back({});
    threads.back().stack.reset(new char[STACK]);
    exchange.emplace_back(64);
  }
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {block, 1, 1};
  for (unsigned z = 0; z < grid[2]; z++)
    for (unsigned y = 0; y < grid[1]; y++)
      for (unsigned x = 0; x < grid[0]; x++) {
        block_index = {x, y, z};
        std::memset(shared, 0xab, sizeof shared);
        run_block((int)block);
      }
}

static inline void __syncthreads() { emulation::wait(emulation::AT_BLOCK); }
static inline void __syncwarp() { emulation::wait(emulation::AT_WARP); }
static inline void __threadfence() {}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int step) {
  emulation::give(x);
  int lane = emulation::now % 32 ^ step;
  T found = emulation::of_lane<T>(lane);
  emulation::wait(emulation::AT_WARP);
  return found;
}
static inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long n) {
  unsigned long long before = *p;
  *p += n;
  return before;
}
static inline unsigned atomicAdd(unsigned* p, unsigned n) {
  unsigned before = *p;
  *p += n;
  return before;
}
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class To, class From> static inline To same_bits_as(From x) {
  To y;
  static_assert(sizeof x == sizeof y, "");
  std::memcpy(&y, &x, sizeof y);
  return y;
}
static inline float __uint_as_float(unsigned x) { return same_bits_as<float>(x); }
static inline float __int_as_float(int x) { return same_bits_as<float>(x); }
static inline unsigned __float_as_uint(float x) { return same_bits_as<unsigned>(x); }
static inline long long __double_as_longlong(double x) { return same_bits_as<long long>(x); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  unsigned long long all = x | (unsigned long long)y << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(all >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((low | (unsigned long long)high << 32) >> (shift & 31));
}
static inline float half_to_float(unsigned short h) { return _cvtsh_ss(h); }
static inline unsigned short float_to_half(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }
static inline unsigned short float_to_bf16(float f) {
  unsigned b = __float_as_uint(f);
  return f != f ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
static inline unsigned two_halves(float a, float b) { return float_to_half(a) | (unsigned)float_to_half(b) << 16; }
static inline unsigned two_bf16(float a, float b) { return float_to_bf16(a) | (unsigned)float_to_bf16(b) << 16; }
static inline unsigned half2_fma(unsigned a, unsigned b, unsigned c) {
  unsigned out = 0;
  for (int s = 0; s < 32; s += 16) {
    double exact = (double)half_to_float(a >> s) * half_to_float(b >> s) + half_to_float(c >> s);
    out |= (unsigned)float_to_half((float)exact) << s;
  }
  return out;
}
static inline unsigned and_or(unsigned a, unsigned mask, unsigned bits) { return (a & mask) | bits; }
struct Factors { unsigned a[4], b[2]; };
// The fragments' places: PTX ISA, matrix fragments for mma.m16n8k16 and mma.m16n8k8.
static inline void multiply_fragments(float* c, const Factors& mine, int depth) {
  emulation::give(mine);
  int lane = emulation::now % 32, g = lane / 4, t = lane % 4;
  double sum[4] = {};
  for (int k = 0; k < depth; k++) {
    int owner = k % 8 / 2, half = 16 * (k % 2), upper = k / 8;
    for (int i = 0; i < 4; i++) {
      Factors row = emulation::of_lane<Factors>(g * 4 + owner);
      Factors column = emulation::of_lane<Factors>((2 * t + i % 2) * 4 + owner);
      sum[i] += (double)half_to_float(row.a[i / 2 + 2 * upper] >> half) * half_to_float(column.b[upper] >> half);
    }
  }
  for (int i = 0; i < 4; i++) c[i] += (float)sum[i];
  emulation::wait(emulation::AT_WARP);
}
static inline void mma_16x8x16(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  multiply_fragments(c, {{a[0], a[1], a[2], a[3]}, {b0, b1}}, 16);
}
static inline void mma_16x8x8(float* c, unsigned a0, unsigned a1, unsigned b0) {
  multiply_fragments(c, {{a0, a1, 0, 0}, {b0, 0}}, 8);
}
static inline uint4 load_once(const uint4* p) { return *p; }
static inline void store_once(uint4* p, uint4 v) { *p = v; }
template <class T> static inline T load_near(const T* p) { return *p; }
static inline void store_tile(void* to, const void* from, unsigned size) {
  __syncthreads();
  if (threadIdx.x == 0) std::memcpy(to, from, size);
}
