// Statistics of an array, in one pass and one launch: every group of threads
// reduces one piece, the last one to finish joins the pieces in their order. Which group
// that is changes nothing, so results are equal bit for bit from run to run.
//
// workspace: u64 counter (0 before the first launch, put back by each), then `pieces` rows of
// COLUMNS doubles. Sums are float64. stats_many does in one launch what stats does in many, with the
// same pieces in the same order, so with the same bits.

#define REDUCE_THREADS 256
#define COLUMNS 16

template <class W> __device__ __forceinline__ bool is_finite(W x) { return x - x == 0; }

// Join what the threads of a block have, in a fixed order: the first SUMS numbers are added, of the
// others the largest is taken. Thread 0 has the result; `room` is shared, [warps][COUNT].
#define WARPS_EACH (REDUCE_THREADS / WARP)
template <int SUMS, int COUNT> __device__ __forceinline__ void join(double* x, double (*room)[COUNT]) {
#pragma unroll
  for (int k = 0; k < COUNT; k++) x[k] = k < SUMS ? warp_sum(x[k]) : warp_max(x[k]);
  __syncthreads();
  if (threadIdx.x % WARP == 0)
#pragma unroll
    for (int k = 0; k < COUNT; k++) room[threadIdx.x / WARP][k] = x[k];
  __syncthreads();
  if (threadIdx.x < WARP) {  // a lane joins one number of all warps
    int k = threadIdx.x;
    if (k < COUNT) {
      double all = room[0][k];
#pragma unroll
      for (int i = 1; i < WARPS_EACH; i++) {
        double other = room[i][k];
        all = k < SUMS ? all + other : other > all ? other : all;
      }
      room[0][k] = all;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = room[0][i];
  }
}

// Say whether this block is the last of `blocks`; if so what the others wrote can be read.
__device__ __forceinline__ bool last_block(u64* counter, i64 blocks, bool* room) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *room = atomicAdd(counter, 1ull) == (u64)blocks - 1;
    if (*room) *counter = 0;
  }
  __syncthreads();
  if (*room) __threadfence();
  return *room;
}

// Elements of a 16-byte read; a thread takes reads side by side with its neighbours. `ready` is
// called once, when the first reads are on their way.
template <class T, class R, class F>
__device__ __forceinline__ void each(const T* x, i64 begin, i64 end, R ready, F f) {
  const int N = 16 / sizeof(T), AHEAD = 4;
  i64 at = begin + (i64)threadIdx.x * N;
  bool whole = ((u64)x & 15) == 0, fresh = true;  // begin is a multiple of 16 bytes
  const i64 step = (i64)REDUCE_THREADS * N;
  for (; whole && at + (AHEAD - 1) * step + N <= end; at += AHEAD * step) {
    uint4 words[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; k++) words[k] = load_once((const uint4*)(x + at + k * step));
    if (fresh) ready();
    fresh = false;
#pragma unroll
    for (int k = 0; k < AHEAD; k++)
#pragma unroll
      for (int i = 0; i < N; i++) f(((const T*)&words[k])[i]);
  }
  if (fresh) ready();
  for (; at < end; at += step) {
    if (whole && at + N <= end) {
      uint4 words = load_once((const uint4*)(x + at));
#pragma unroll
      for (int i = 0; i < N; i++) f(((const T*)&words)[i]);
    } else {
      for (int i = 0; i < N; i++)
        if (at + i < end) f(x[at + i]);
    }
  }
}

// [n finite, origin, sum of (x - origin), sum of (x - origin)^2, least, most, NaNs, infinities,
//  zeros]; the origin is some value of the array, so that constants come out exact. This block
// reduces piece `piece` of `blocks`, each of `size` elements.
template <class T>
__device__ __forceinline__ void stats(const T* x, i64 count, i64 size, i64 piece, i64 blocks, u64* counter,
                                      double* pieces, double* result) {
  __shared__ double room[WARPS_EACH][8];
  __shared__ bool last;
  typedef typename Wide<T>::type W;
  i64 begin = piece * size, end = begin + size < count ? begin + size : count;
  W first = begin < end ? widen(x[begin]) : 0;
  double shift = 0, sum = 0, squares = 0;
  W least = (W)INFINITY, most = -(W)INFINITY;
  u32 n = 0, nan = 0, zeros = 0, seen = 0;
  each(
      x, begin, end, [&]() { shift = is_finite(first) ? (double)first : 0.0; },
      [&](T element) {
        W v = widen(element);
        seen++;
        if (is_finite(v)) {
          double d = (double)v - shift;
          sum += d;
          squares = fma(d, d, squares);
          least = v < least ? v : least;
          most = v > most ? v : most;
          zeros += v == 0;
          n++;
        } else {
          nan += v != v;
        }
      });
  double all[8] = {(double)n, sum, squares, (double)nan, (double)(seen - n - nan), (double)zeros,
                   -(double)least, (double)most};
  join<6, 8>(all, room);
  if (threadIdx.x == 0) {
    double* row = pieces + piece * COLUMNS;
    for (int k = 0; k < 8; k++) row[k] = all[k];
    row[8] = shift;
  }
  if (!last_block(counter, blocks, &last)) return;
  double origin = ((const volatile double*)pieces)[8];
  double joined[8] = {0, 0, 0, 0, 0, 0, -INFINITY, -INFINITY};
  for (i64 i = threadIdx.x; i < blocks; i += REDUCE_THREADS) {
    const volatile double* row = pieces + i * COLUMNS;
    double many = row[0], total = row[1], step = row[8] - origin;
    joined[0] += many;
    joined[1] += total + many * step;
    joined[2] += row[2] + step * (2 * total + many * step);
    for (int k = 3; k < 6; k++) joined[k] += row[k];
    for (int k = 6; k < 8; k++) joined[k] = row[k] > joined[k] ? row[k] : joined[k];
  }
  join<6, 8>(joined, room);
  if (threadIdx.x == 0) {
    result[0] = joined[0];
    result[1] = origin;
    result[2] = joined[1];
    result[3] = joined[2];
    result[4] = -joined[6];
    result[5] = joined[7];
    for (int k = 3; k < 6; k++) result[k + 3] = joined[k];
  }
}

// Jobs of one dtype, rows of JOB numbers: place, count, size of a piece, result, and the first block
// of the launch that works on it. Up to REDUCE_THREADS of them; counters are one a job.
#define JOB 5
template <class T>
__device__ __forceinline__ void stats_many(const i64* jobs, i64 count, u64* counters, double* pieces) {
  __shared__ i64 own[JOB + 2];
  i64 block = blockIdx.x;
  if (threadIdx.x < count) {
    const i64* job = jobs + threadIdx.x * JOB;
    i64 first = job[4], next = threadIdx.x + 1 < count ? job[JOB + 4] : (i64)gridDim.x;
    if (first <= block && block < next) {  // one thread only
      for (int k = 0; k < JOB; k++) own[k] = job[k];
      own[JOB] = next - first;
      own[JOB + 1] = threadIdx.x;
    }
  }
  __syncthreads();
  stats<T>((const T*)own[0], own[1], own[2], block - own[4], own[5], counters + own[6],
           pieces + own[4] * COLUMNS, (double*)own[3]);
}

#define REDUCERS(suffix, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)                                        \
      stats_##suffix(const T* x, i64 count, i64 size, u64* workspace, double* result) {                 \
    stats<T>(x, count, size, blockIdx.x, gridDim.x, workspace, (double*)(workspace + 2), result);       \
  }                                                                                                   \
  extern "C" __global__ void __launch_bounds__(REDUCE_THREADS)                                        \
      stats_many_##suffix(const i64* jobs, i64 count, u64* counters, double* pieces) {                \
    stats_many<T>(jobs, count, counters, pieces);                                                     \
  }
REDUCERS(float32, float)
REDUCERS(float64, double)
REDUCERS(bfloat16, bf16)
REDUCERS(float16, f16)
