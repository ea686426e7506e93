// Thresholds and draws among the few tokens of a list, by the first block of a row.
#pragma once
#include "sampling/sample_part.cuh"

namespace {

// Each of at most kNear tokens by kSplit neighbouring threads: body gets it, and which of them this is, in whole warps.
constexpr int kSplit = kThreads > kNear ? kThreads / kNear : 1;
template <class Body>
__device__ __forceinline__ void each_token(int count, Body body) {
  for (int base = 0; base < count; base += kThreads / kSplit) {
    const int i = base + static_cast<int>(threadIdx.x) / kSplit;
    if (i - static_cast<int>(threadIdx.x) % 32 / kSplit >= count) break;  // none for this warp
    body(min(i, count - 1), i < count, static_cast<int>(threadIdx.x) % kSplit);
  }
}
template <class T>
__device__ __forceinline__ T sum_of_split(T mine) {
  for (int o = 1; o < kSplit; o *= 2) mine += __shfl_xor_sync(~0u, mine, o);
  return mine;
}
__device__ __forceinline__ void put_least(uint32_t* least, uint32_t mine) {
  mine = __reduce_min_sync(~0u, mine);
  if (threadIdx.x % 32 == 0 && mine != ~0u) atomicMin(least, mine);
}

// Tokens as y's bits, the weight's halves, the id. The smallest y, as bits, at which the weight up to it, and `before`,
// meets the goal.
__device__ __noinline__ uint32_t threshold_of(const uint4* tokens, int count, u64 before, Goal goal, Meeting& all) {
  each_token(count, [&](int i, bool is_there, int split) {
    const uint32_t its = tokens[i].x;
    u64 sum = 0;
#pragma unroll 4
    for (int j = split; j < count; j += kSplit) {
      const uint4 other = tokens[j];
      sum += other.x <= its ? join(other.y, other.z) : 0;
    }
    sum = sum_of_split(sum);
    put_least(&all.threshold, is_there && goal.is_met(before + sum) ? its : ~0u);
  });
  __syncthreads();
  return all.threshold;
}

// By the first block, of at most kNear tokens: by top-k, top-p and min-p.
__device__ __noinline__ int draw_few(const float* logits, const int* ids, int count, Scale scale, int top_k,
                                     double top_p, float min_z, double share, Meeting& all) {
  uint4* const tokens = reinterpret_cast<uint4*>(all.s.keys);
  uint32_t* const keys = all.s.low;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float x = __ldcg(logits + i), y = scale.y(x);
    const u64 weight = scale.weight(y);
    keys[i] = ordered(x);
    tokens[i] = make_uint4(__float_as_uint(y), static_cast<uint32_t>(weight), static_cast<uint32_t>(weight >> 32),
                           __ldcg(ids + i));
  }
  __syncthreads();
  each_token(count, [&](int i, bool is_there, int split) {
    const uint32_t its = keys[i];
    int higher = 0;
#pragma unroll 4
    for (int j = split; j < count; j += kSplit) higher += keys[j] > its;
    if (sum_of_split(higher) >= top_k && is_there && split == 0) tokens[i].y = tokens[i].z = 0;
  });
  __syncthreads();
  uint32_t most = ~0u;
  if (top_p < 1) {
    each_token(count, [&](int i, bool is_there, int split) {
      const uint4 its = tokens[i];
      u64 sum = 0, total = 0;
#pragma unroll 4
      for (int j = split; j < count; j += kSplit) {
        const uint4 other = tokens[j];
        const u64 weight = join(other.y, other.z);
        total += weight;
        sum += other.x <= its.x ? weight : 0;
      }
      sum = sum_of_split(sum);
      const Goal goal = {top_p * static_cast<double>(sum_of_split(total)), false};
      put_least(&all.threshold, is_there && (its.y | its.z) && goal.is_met(sum) ? its.x : ~0u);
    });
    __syncthreads();
    most = all.threshold;
  }
  each_token(count, [&](int i, bool is_there, int split) {
    const uint32_t its = tokens[i].w;
    u64 sum = 0, total = 0;
#pragma unroll 4
    for (int j = split; j < count; j += kSplit) {
      const uint4 other = tokens[j];
      const u64 weight = other.x <= most && -__uint_as_float(other.x) >= min_z ? join(other.y, other.z) : 0;
      total += weight;
      sum += other.w <= its ? weight : 0;
    }
    sum = sum_of_split(sum);
    const Goal goal = {share * static_cast<double>(sum_of_split(total)), true};
    put_least(&all.token, is_there && goal.is_met(sum) ? its : ~0u);
  });
  __syncthreads();
  return static_cast<int>(all.token);
}

// Of whole warps.
__device__ __forceinline__ u64 sum_of_warp(u64 mine) {
  for (int o = 16; o > 0; o /= 2) mine += __shfl_xor_sync(~0u, mine, o);
  return mine;
}

// By the first block, from the list where it holds all that can be drawn, or the whole row.
__device__ __noinline__ int draw_alone(const Items& items, float highest, const Settings& its, double share, int vocab,
                                       Shared& s) {
  const Scale scale(highest, its.temperature, vocab);
  return draw_from(items, scale, its, its.top_k, share, s);
}

}  // namespace
