// The highest logit of rows and the token that it belongs to, and the weight of rows: memory bounds both.
//
//   scan   each part of a row: the highest logit, and the highest of every group of 16; the last part knows the row's
//   weigh  each part: its weight, reading in reverse order: the end of the first pass is in L2 still
//
// Rows are cut into parts whatever the batch, and nothing depends on how.

#include "sampling/weights.cuh"

namespace {

constexpr int kLoads = 4;  // of four logits, by each thread for a part

// Is this the last block of `count` to come here? What others have written is there then. The counter is left at zero.
__device__ bool is_last(int* counter, int count) {
  __shared__ int last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(counter, 1) == count - 1;
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace

// grid: (parts, rows). logits [rows, vocab]. groups [rows, parts * kPart / 16]: each group's highest; or null. partial
// [rows, parts], counters [rows]: scratch, counters zero. highest [rows]. out, or null: a token every `columns`.
extern "C" __global__ void __launch_bounds__(THREADS) scan(const float* logits, int vocab, float* groups, u64* partial,
                                                           int* counters, float* highest, int* out, int columns) {
  begin();
  const int row = blockIdx.y, parts = gridDim.x;
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const bool aligned = is_aligned(logits, vocab);
  const int first = blockIdx.x * kPart + threadIdx.x * 4;
  float4 four[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) four[i] = load_four(x, first + i * kThreads * 4, vocab, aligned);
  float* const group = groups + (static_cast<long long>(row) * parts + blockIdx.x) * (kPart / kGroup);
  float best = -kInf;
  int at = 0;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const float4 v = four[i];
    bad |= !(v.x <= kMost) | !(v.y <= kMost) | !(v.z <= kMost) | !(v.w <= kMost);
    float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    if (most > best) {
      best = most;
      at = first + i * kThreads * 4 + (v.x == most ? 0 : v.y == most ? 1 : v.z == most ? 2 : 3);
    }
    if (!groups) continue;
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (threadIdx.x % 4 == 0) group[(i * kThreads + threadIdx.x) / 4] = most;
  }
  __shared__ Shared s;
  const u64 mine = bad ? kBad : static_cast<u64>(ordered(best)) << 32 | ~static_cast<uint32_t>(at);
  const u64 found = most_of(mine, s);
  if (threadIdx.x == 0) partial[static_cast<long long>(row) * parts + blockIdx.x] = found;
  if (!is_last(counters + row, parts)) return;
  u64 most = 0;
  for (int p = threadIdx.x; p < parts; p += kThreads)
    most = max(most, __ldcg(partial + static_cast<long long>(row) * parts + p));
  most = most_of(most, s);
  if (threadIdx.x != 0) return;
  const float top = unordered(static_cast<uint32_t>(most >> 32));
  highest[row] = top;
  if (!out) return;
  const int token = static_cast<int>(~static_cast<uint32_t>(most));
  out[static_cast<long long>(row) * columns] = most == kBad ? kNotFinite : top == -kInf ? kAllMasked : token;
}

// grid: (parts, rows). sums [rows, parts]: of all weights at temperature 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    weigh(const float* logits, int vocab, const float* groups, const float* highest, u64* sums) {
  begin();
  const int row = gridDim.y - 1 - blockIdx.y, part = gridDim.x - 1 - blockIdx.x, parts = gridDim.x;
  __shared__ Shared s;
  const Scale scale(highest[row], 1.0f, vocab);
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const long long place = static_cast<long long>(row) * parts + part;
  const float* const group = groups + place * (kPart / kGroup);
  const bool aligned = is_aligned(logits, vocab);
  bool counts[kLoads];
  float4 four[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    counts[i] = __fsub_rn(scale.highest, group[(i * kThreads + threadIdx.x) / 4]) <= scale.limit;
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (counts[i]) four[i] = load_four(x, part * kPart + (i * kThreads + threadIdx.x) * 4, vocab, aligned);
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (!counts[i]) continue;
    float ys[4];
    scale.four(four[i], ys);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += scale.weight(ys[j]);
  }
  sum = sum_of(sum, s);
  if (threadIdx.x == 0) sums[place] = sum;
}
