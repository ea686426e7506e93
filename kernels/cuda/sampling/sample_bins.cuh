// Weights and counts of a row's tokens in bins of y, sums of weights, and lists of the tokens in some bins.
#pragma once
#include "sampling/sample_part.cuh"

namespace {

// Of the lane: all weights. Those of y from `near` and below `far` go into bins, too, in shared memory at `low` and
// `high`: at two cycles for each token of a multiprocessor, so few should.
__device__ __noinline__ u64 weigh_into_bins(Part part, Scale scale, float near, float far, uint32_t low,
                                            uint32_t high) {
  u64 sum = 0;
  part.each([&](const float4& v, int) {
    float ys[4];
    scale.four(v, ys);
    u64 weights[4];
    uint32_t places[4], more[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      weights[j] = scale.weight(ys[j]);
      sum += weights[j];
      places[j] = scale.bin_below(ys[j]) * 4;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t less = static_cast<uint32_t>(weights[j]);
      more[j] = 0;
      if (ys[j] >= near && ys[j] < far) more[j] = add_shared(low + places[j], less);
    }
    // What overflows the low half is carried.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t carry = more[j] + static_cast<uint32_t>(weights[j]) < more[j] ? 1u : 0u;
      more[j] = ys[j] >= near && ys[j] < far ? static_cast<uint32_t>(weights[j] >> 32) + carry : 0;
    }
    if (more[0] | more[1] | more[2] | more[3]) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (more[j]) add_shared(high + places[j], more[j]);
    }
  });
  return sum;
}

// All tokens with y beyond this together weigh less than what top-p leaves out, so the threshold does not lie there.
// The total is at least what the threads' highest weigh, of which each has one (best).
__device__ __forceinline__ float far_of(float best, const Scale& scale, int vocab, double top_p, Shared& s) {
  const float its = power(-scale.y(best) * 1.44269504f) * 1048576.0f;
  const float least = static_cast<float>(sum_of(static_cast<u64>(its), s)) * (0.999f / 1048576.0f);
  const float far = logf(vocab / (static_cast<float>(1 - top_p) * fmaxf(least, 1.0f))) + 0.1f;
  // Where weights are few units, rounding makes them twice as large at most.
  return fminf(far < scale.limit - 6.0f ? far : far + 0.7f, scale.limit);
}

// Below which y the thresholds of top-p and top-k lie nearly always, where logits are about normal, or peaked: what is
// beyond goes into bins only if they turn out not to.
__device__ __forceinline__ float guess_of(int vocab, double top_p) {
  return 0.8f * logf(static_cast<float>(vocab)) - logf(static_cast<float>(1 - top_p)) - 1.8f;
}
__device__ __forceinline__ float guess_of(int top_k) { return logf(static_cast<float>(top_k)) + 2.0f; }

// The highest of each four tokens, one each, of those of y from `near` and below `far`.
__device__ __noinline__ void count_into_bins(Part part, Scale scale, float near, float far, uint32_t counts) {
  part.each([&](const float4& v, int) {
    const float y = scale.y(highest_of(v));
    if (y >= near && y < far) add_shared(counts + scale.bin_below(y) * 4, 1);
  });
}

// Of the lane: the weights of tokens with y of at most `most` and z of at least `least`.
__device__ __noinline__ u64 sum_of_part(Part part, Scale scale, uint32_t most, float least) {
  const float farthest = fminf(-least, most == ~0u ? kInf : __uint_as_float(most));
  const float reach = fminf(scale.limit, farthest) * scale.temperature * 1.0001f;
  u64 sum = 0;
  if (farthest >= scale.limit) {
    part.each([&](const float4& v, int) {
      float ys[4];
      scale.four(v, ys);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += scale.weight(ys[j]);
    });
    return sum;
  }
  // Few of them count: of 16 at a time a lane weighs only those, while others weigh theirs.
  constexpr int kAtOnce = 4;
  for (int base = threadIdx.x % 32; base < part.count; base += 32 * kAtOnce) {
    unsigned mine = 0;
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) {
      if (base + q * 32 >= part.count) continue;
      const float4 v = part.at(base + q * 32);
      const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) mine |= (__fsub_rn(scale.highest, values[j]) <= reach ? 1u : 0u) << (q * 4 + j);
    }
    for (; mine; mine &= mine - 1) {
      const int which = __ffs(mine) - 1;
      const float y = scale.y(part.one(base + which / 4 * 32, which % 4));
      if (__float_as_uint(y) <= most && -y >= least) sum += scale.weight(y);
    }
  }
  return sum;
}

// The token, of a block that keeps it, at which the running sum of weights exceeds the goal. mine: the lane's weights;
// before: of the blocks before this one.
__device__ __noinline__ int draw_here(Part part, Scale scale, u64 mine, uint32_t most, float least, u64 before,
                                      const Goal& goal, Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int o = 16; o > 0; o /= 2) mine += __shfl_xor_sync(~0u, mine, o);
  if (lane == 0) s.warps[warp] = mine;
  __syncthreads();
  u64 sum = before;
  for (int w = 0; w < warp; ++w) sum += s.warps[w];
  if (!goal.is_met(sum) && goal.is_met(sum + mine)) {
    bool is_found = false;
#pragma unroll 1
    for (int base = 0; base < part.count && !is_found; base += 32) {
      const int i = base + lane;
      const float4 v = i < part.count ? part.at(i) : make_float4(-kInf, -kInf, -kInf, -kInf);
      float ys[4];
      scale.four(v, ys);
      u64 weights[4];
      u64 four = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[j] = __float_as_uint(ys[j]) <= most && -ys[j] >= least ? scale.weight(ys[j]) : 0;
        four += weights[j];
      }
      u64 all = four;
      for (int o = 1; o < 32; o *= 2) {
        const u64 other = __shfl_up_sync(~0u, all, o);
        if (lane >= o) all += other;
      }
      const unsigned met = __ballot_sync(~0u, goal.is_met(sum + all));
      is_found = met != 0;
      if (is_found && lane == __ffs(met) - 1) {
        u64 running = sum + all - four;
        int j = 0;
#pragma unroll
        for (int next = 0; next < 3; ++next) {
          running += weights[next];
          if (!goal.is_met(running)) j = next + 1;
        }
        s.bin = (part.first + i) * 4 - part.shift + j;
      }
      sum += __shfl_sync(~0u, all, 31);
    }
  }
  __syncthreads();
  return s.bin;
}

// The sum of all blocks' bins, kEachBin a thread.
__device__ __noinline__ void gather_bins(u64 (&each)[kEachBin], Shared& s) {
#pragma unroll
  for (int i = 0; i < kEachBin; ++i) {
    const int bin = threadIdx.x * kEachBin + i;
    uint32_t low[CLUSTER], high[CLUSTER];
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      low[r] = bin < kBins ? *at_block(s.low + bin, r) : 0;
      high[r] = bin < kBins ? *at_block(s.high + bin, r) : 0;
    }
    each[i] = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) each[i] += join(low[r], high[r]);
  }
}

// Tokens of bins from `least` to `most` to the list, if there is room; `listed` counts them all the same.
__device__ __noinline__ void list_tokens(Part part, Scale scale, int least, int most, float* logits, int* ids,
                                         int* listed) {
  const int lane = threadIdx.x % 32;
  // A quick look at the logit; what it lets pass (all of them, should these be NaN) is computed as it was for the bins.
  const float step = __fdiv_rn(scale.temperature, scale.bins);
  const float from = scale.highest - (most + 1.01f) * step, to = scale.highest - (least - 0.01f) * step;
  part.each([&](const float4& v, int id) {
    const float values[4] = {v.x, v.y, v.z, v.w};
    bool may = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) may |= !(values[j] < from) && !(values[j] > to);
    if (!__any_sync(~0u, may)) return;
    unsigned mine = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (values[j] < from || values[j] > to) continue;
      const int bin = scale.bin(scale.y(values[j]));
      if (bin >= least && bin <= most) mine |= 1u << j;
    }
    if (!__any_sync(~0u, mine)) return;
    int place = __popc(mine);
    for (int o = 1; o < 32; o *= 2) {
      const int other = __shfl_up_sync(~0u, place, o);
      if (lane >= o) place += other;
    }
    int start = lane == 31 ? atomicAdd(listed, place) : 0;
    place += __shfl_sync(~0u, start, 31) - __popc(mine);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!(mine >> j & 1)) continue;
      if (place < CAPACITY) __stcg(logits + place, values[j]), __stcg(ids + place, id + j);
      ++place;
    }
  });
}

// Tokens of a bin to the block's, if there is room; `cut` counts them all the same.
__device__ __noinline__ void list_near(Part part, Scale scale, int bin, Meeting& all) {
  const float step = __fdiv_rn(scale.temperature, scale.bins);
  const float from = scale.highest - (bin + 1.01f) * step, to = scale.highest - (bin - 0.01f) * step;
  part.each([&](const float4& v, int) {
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (values[j] < from || values[j] > to) continue;
      const float y = scale.y(values[j]);
      if (scale.bin(y) != bin) continue;
      const int place = atomicAdd(&all.cut, 1);
      if (place >= kNear / 2) continue;
      const u64 weight = scale.weight(y);
      all.tokens[place] =
          make_uint4(__float_as_uint(y), static_cast<uint32_t>(weight), static_cast<uint32_t>(weight >> 32), 0);
    }
  });
}

}  // namespace
