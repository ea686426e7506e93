// Parts of a pair of a request and a KV head: what the warps of a block have of it, and what several blocks have.
#ifndef ALLSPAN_DECODE_MERGE
#define ALLSPAN_DECODE_MERGE
#include "attention/scores.cuh"
#include "ptx/ptx.cuh"

constexpr int kPart = 16 * (D + 2);  // floats: 16 rows, then the top and the total of each

struct Result {
  bf16* out;   // [rows, heads, D]
  float* lse;  // [rows, heads] or null, base 2
  const float* sinks;
  int heads;

  // Four elements from `col` on of a row's head, which is seen whole: the weighted sum of them, and of the weights.
  __device__ __forceinline__ void write(long long head, int col, float4 sum, float top, float total) const {
    const float keep = SINKS ? join_sink(sinks[head % heads], top, total) : 1, by = keep / total;
    *reinterpret_cast<uint2*>(out + head * D + col) =
        make_uint2(pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by));
    if (lse && col == 0) lse[head] = top + log2f(total);
  }
};

// Of `group` rows of every warp, which lie in a stage of each: out from `head` on, or this block's part of it.
__device__ __forceinline__ void merge_warps(const Result& to, float* part, const char* stage, long long head, int group,
                                            bool is_whole) {
  const auto merged = [&](int warp) { return reinterpret_cast<const float*>(stage + warp * kWarpBytes); };
  const auto state_of = [&](int warp, int row) {
    return reinterpret_cast<const float2*>(merged(warp) + kHeads * kMergedRow)[row];
  };
  for (int slot = threadIdx.x; slot < group * (D / 4); slot += kThreads) {
    const int row = slot / (D / 4), col = slot % (D / 4) * 4;
    float top = -kInf, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, state_of(w, row).x);
    const float base = top == -kInf ? 0 : top;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 state = state_of(w, row);
      const float by = power(state.x - base);
      total += state.y * by;
      const float4 x = *reinterpret_cast<const float4*>(merged(w) + row * kMergedRow + col);
      sum.x += x.x * by, sum.y += x.y * by, sum.z += x.z * by, sum.w += x.w * by;
    }
    if (is_whole) {
      to.write(head + row, col, sum, base, total);
    } else {
      *reinterpret_cast<float4*>(part + row * D + col) = sum;
      if (col == 0) *reinterpret_cast<float2*>(part + 16 * D + row * 2) = make_float2(base, total);
    }
  }
}

// Merges what `pieces` thread blocks from `begin_block` on have of a pair into `group` rows of out, from `head` on.
__device__ __forceinline__ void merge_blocks(const Result& to, const float* partial, char* stage, int begin_block,
                                             int pieces, long long head, int group) {
  // Only the first has the pair's beginning, as its last piece; others have theirs as their first.
  const float* const parts = partial + static_cast<long long>(begin_block) * 2 * kPart;
  const auto piece = [&](int i) { return parts + (i == 0 ? kPart : i * 2 * kPart); };
  const int slots = group * (D / 4), ways = max(1, kThreads / slots);  // ways threads share a slot's pieces
  for (int base = 0; base < slots; base += kThreads) {
    const int way = ways > 1 ? threadIdx.x / slots : 0, slot = base + threadIdx.x - way * slots;
    const int row = slot / (D / 4), col = slot % (D / 4) * 4;
    float top = -kInf, total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
    constexpr int kAtOnce = 8;
    for (int b0 = way; slot < slots && way < ways && b0 < pieces; b0 += ways * kAtOnce) {
      float2 s[kAtOnce];
      float4 x[kAtOnce];
      float high = top;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = b0 + i * ways;
        const float* from = piece(min(b, pieces - 1));
        s[i] = __ldcg(reinterpret_cast<const float2*>(from + 16 * D + row * 2));
        x[i] = __ldcg(reinterpret_cast<const float4*>(from + row * D + col));
        if (b >= pieces) s[i] = make_float2(-kInf, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) high = fmaxf(high, s[i].x);
      const float keep = power(top - high);
      total *= keep, sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep, top = high;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float by = power(s[i].x - high);
        total += s[i].y * by;
        sum.x += x[i].x * by, sum.y += x[i].y * by, sum.z += x[i].z * by, sum.w += x[i].w * by;
      }
    }
    if (ways > 1) {
      const auto sum_of = [&](int i) -> float4& {
        return reinterpret_cast<float4*>(stage + i / 32 * kWarpBytes)[i % 32];
      };
      const auto state_of = [&](int i) -> float2& {
        return reinterpret_cast<float2*>(stage + i / 32 * kWarpBytes + 32 * sizeof(float4))[i % 32];
      };
      sum_of(threadIdx.x) = sum, state_of(threadIdx.x) = make_float2(top, total);
      __syncthreads();
      for (int w = 1; way == 0 && w < min(ways, pieces); ++w) {
        const float2 other = state_of(w * slots + slot);
        const float4 x = sum_of(w * slots + slot);
        const float high = fmaxf(top, other.x), keep = power(top - high), by = power(other.x - high);
        total = total * keep + other.y * by, top = high;
        sum.x = sum.x * keep + x.x * by, sum.y = sum.y * keep + x.y * by;
        sum.z = sum.z * keep + x.z * by, sum.w = sum.w * keep + x.w * by;
      }
    }
    if (way == 0 && slot < slots) to.write(head + row, col, sum, top, total);
  }
}
#endif
