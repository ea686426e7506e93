// What the sampling kernels share: weights of tokens as integers, sums over a thread block, and the choice of a
// threshold by histograms.
//
// kernels/reference/sampling.py is the definition, and every outcome has its bits. There a token's weight is exp(z),
// z = (logit - highest) / temperature, rounded to a multiple of a power of two so coarse that all sums are exact. Here
// a weight is that multiple, an integer of at most 2^53 in all: so no outcome depends on the order of a sum, on atomics
// or on how rows are cut up. exp is a polynomial (Cephes expf, S. Moshier) in float32 without fused multiply-adds.
#ifndef ALLSPAN_SAMPLING
#define ALLSPAN_SAMPLING

#include "../abi/sampling.cuh"
#include "ptx/ptx.cuh"

// THREADS: of a block. CAPACITY: tokens in a list of few.
typedef unsigned long long u64;

constexpr int kThreads = THREADS, kWarps = kThreads / 32, kPart = kThreads * 16;
constexpr int kGroup = 16;  // logits; each group's highest is kept
constexpr int kBins = 512;  // of y = -z, up to where weights are 0
constexpr int kFew = 256;   // keys that are compared each with each
constexpr float kMost = 3.402823466e38f;
constexpr u64 kBad = ~0ull;  // a logit that is NaN or +inf, where the highest and its place are one number

// Every pass waits for the one ahead before all else, so that nothing is read too early; what this saves is the launch.
__device__ __forceinline__ void begin() {
  let_next_begin();
  wait_for_ahead();
}

// Whether every row is, to 16 bytes.
__device__ __forceinline__ bool is_aligned(const float* rows, int vocab) {
  return vocab % 4 == 0 && reinterpret_cast<unsigned long long>(rows) % 16 == 0;
}

// Four logits from column `at`; -inf beyond the row.
__device__ __forceinline__ float4 load_four(const float* row, int at, int vocab, bool aligned) {
  if (aligned && at + 4 <= vocab) return *reinterpret_cast<const float4*>(row + at);
  return make_float4(at < vocab ? row[at] : -kInf, at + 1 < vocab ? row[at + 1] : -kInf,
                     at + 2 < vocab ? row[at + 2] : -kInf, at + 3 < vocab ? row[at + 3] : -kInf);
}

// Larger for larger x; of 0 and -0 the same.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float unordered(uint32_t bits) {
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

__device__ __noinline__ inline float divided(float a, float b) { return __fdiv_rn(a, b); }

// A row's logits as y = (highest - logit) / temperature = -z, and as weights.
struct Scale {
  float highest, temperature, inverse, limit, bins;
  uint32_t exponent;  // of a unit's inverse, as bits of a float

  // limit: weights beyond it are 0. (54 - b) ln 2 is where half a unit is; b bits hold the number of tokens.
  __device__ Scale(float its_highest, float its_temperature, int vocab) {
    const int b = 32 - __clz(vocab);
    highest = its_highest, temperature = its_temperature, inverse = __fdiv_rn(1.0f, temperature);
    exponent = static_cast<uint32_t>(127 + 53 - b) << 23;
    // Rounded alike in all kernels, so that a token has one bin.
    limit = __fadd_rn(__fmul_rn(static_cast<float>(54 - b), 0.693147181f), 0.05f);
    bins = __fdiv_rn(static_cast<float>(kBins - 1), limit);
  }

  // Rounded as division rounds it (Markstein 1990: the last of these steps makes a faithful quotient the right one);
  // infinite where the weight is certainly 0.
  __device__ float y(float x) const {
    const float d = __fsub_rn(highest, x);
    if (temperature == 1.0f) return d;
    if (!(d < 1000.0f * temperature)) return kInf;
    if (d < 1e-30f) return divided(d, temperature);
    float q = __fmul_rn(d, inverse);
    q = __fmaf_rn(__fmaf_rn(-q, temperature, d), inverse, q);
    return __fmaf_rn(__fmaf_rn(-q, temperature, d), inverse, q);
  }

  // Of four logits, for whole warps.
  __device__ __forceinline__ void four(const float4& v, float (&ys)[4]) const {
    const float values[4] = {v.x, v.y, v.z, v.w};
    if (temperature == 1.0f) {
#pragma unroll
      for (int j = 0; j < 4; ++j) ys[j] = __fsub_rn(highest, values[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) ys[j] = y(values[j]);
    }
  }

  __device__ u64 weight(float y) const {
    const float x = -fminf(y, 87.0f);
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), 12582912.0f);
    const float n = __fsub_rn(shifted, 12582912.0f);
    // n times the first constant is exact, and so is the fused difference.
    const float r = __fsub_rn(__fmaf_rn(n, -0.693359375f, x), __fmul_rn(n, -2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
    p = __fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), __fadd_rn(r, 1.0f));
    // The low bits of `shifted` are n. Powers of two: where the first product would not be exact, this is 0 anyway.
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + exponent);
    return static_cast<u64>(__float2ll_rn(__fmul_rn(p, power)));
  }

  // The same, of y below the limit.
  __device__ int bin_below(float y) const { return __float2int_rz(__fmul_rn(y, bins)); }
  __device__ int bin(float y) const { return y < limit ? static_cast<int>(__fmul_rn(y, bins)) : kBins - 1; }
};

struct Shared {
  u64 warps[kWarps], keys[kFew], weights[kFew], found;
  uint32_t low[kBins], high[kBins];
  int bin, count, groups, is_met;
};

// Exact in any order: what overflows the low half is carried.
__device__ __forceinline__ void add(uint32_t* low, uint32_t* high, u64 by) {
  const uint32_t less = static_cast<uint32_t>(by), before = atomicAdd(low, less);
  const uint32_t more = static_cast<uint32_t>(by >> 32) + (before + less < before ? 1u : 0u);
  if (more) atomicAdd(high, more);
}
__device__ __forceinline__ u64 join(uint32_t low, uint32_t high) { return static_cast<u64>(high) << 32 | low; }

__device__ inline void clear_bins(Shared& s, int count) {
  for (int i = threadIdx.x; i < count; i += kThreads) s.low[i] = s.high[i] = 0;
  __syncthreads();
}

// Of a thread block; every thread gets it.
template <class Join>
__device__ u64 reduce(u64 mine, Shared& s, Join join) {
  for (int o = 16; o > 0; o /= 2) mine = join(mine, __shfl_xor_sync(~0u, mine, o));
  if (threadIdx.x % 32 == 0) s.warps[threadIdx.x / 32] = mine;
  __syncthreads();
  u64 all = s.warps[threadIdx.x % kWarps];
  for (int o = kWarps / 2; o > 0; o /= 2) all = join(all, __shfl_xor_sync(~0u, all, o));
  __syncthreads();
  return all;
}
__device__ __noinline__ inline u64 sum_of(u64 mine, Shared& s) {
  return reduce(mine, s, [](u64 a, u64 b) { return a + b; });
}
__device__ __noinline__ inline u64 least_of(u64 mine, Shared& s) {
  return reduce(mine, s, [](u64 a, u64 b) { return a < b ? a : b; });
}
__device__ __noinline__ inline u64 most_of(u64 mine, Shared& s) {
  return reduce(mine, s, [](u64 a, u64 b) { return a > b ? a : b; });
}

// The sum of what the threads before this one have.
__device__ __noinline__ inline u64 sum_before(u64 mine, Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = mine;
  for (int o = 1; o < 32; o *= 2) {
    const u64 other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  if (lane == 31) s.warps[warp] = sum;
  __syncthreads();
  u64 before = lane % kWarps < warp ? s.warps[lane % kWarps] : 0;
  for (int o = kWarps / 2; o > 0; o /= 2) before += __shfl_xor_sync(~0u, before, o);
  __syncthreads();
  return before + sum - mine;
}

// What a sum of weights must reach, or where `beyond`, exceed.
struct Goal {
  double wanted;
  bool beyond;
  __device__ bool is_met(u64 sum) const {
    const double value = static_cast<double>(sum);
    return beyond ? value > wanted : value >= wanted;
  }
};

// The first of the bins, of kEach a thread in order, with which the sum meets the goal; s.found: the sum without it.
// The last one if none does (s.is_met).
template <int kEach>
__device__ __noinline__ int first_bin(const u64 (&sums)[kEach], u64 before, const Goal& goal, Shared& s) {
  u64 mine = 0;
  for (int i = 0; i < kEach; ++i) mine += sums[i];
  if (threadIdx.x == 0) s.bin = kEach * kThreads - 1, s.found = before, s.is_met = 0;
  u64 sum = before + sum_before(mine, s);
  if (!goal.is_met(sum) && goal.is_met(sum + mine)) {
    int i = 0;
    for (; i < kEach - 1 && !goal.is_met(sum + sums[i]); ++i) sum += sums[i];
    s.bin = threadIdx.x * kEach + i, s.found = sum, s.is_met = 1;
  }
  __syncthreads();
  return s.bin;
}

// Tokens: of a list in any order, or (ids null) all of a row.
struct Items {
  const float* logits;
  const int* ids;
  int count;

  // Body is there once, and so is its code; what comes is asked for ahead.
  template <class Body>
  __device__ void each(Body body) const {
    constexpr int kAhead = 8;
    float next[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = threadIdx.x + a * kThreads;
      next[a] = i < count ? logits[i] : 0;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const float x = next[0];
#pragma unroll
      for (int a = 1; a < kAhead; ++a) next[a - 1] = next[a];
      const int ahead = i + kAhead * kThreads;
      next[kAhead - 1] = ahead < count ? logits[ahead] : 0;
      body(x, ids ? ids[i] : i, i);
    }
  }
};

// What a row's settings keep of its tokens; the limits are found one after the other.
struct Kept {
  uint32_t least = 0;   // of the ordered logit
  uint32_t most = ~0u;  // of y's bits
  float min_z = -kInf;
  double centre = 0;
  u64 distance = ~0ull;  // of |z - centre|, as bits
  __device__ bool has(float x, float y) const {
    if (ordered(x) < least || __float_as_uint(y) > most || !(-y >= min_z)) return false;
    return distance == ~0ull || distance_of(y) <= distance;
  }
  __device__ u64 distance_of(float y) const {
    return static_cast<u64>(__double_as_longlong(fabs(-static_cast<double>(y) - centre)));
  }
  // 0 for those that are not kept.
  __device__ u64 weight(float x, const Scale& scale) const {
    const float y = scale.y(x);
    return has(x, y) ? scale.weight(y) : 0;
  }
};

// In which order weights are summed up: the most likely first (kLogit; of equals the lowest id first: kRank), each
// counting as 1; by y; by the distance from the centre; by id.
enum Key { kLogit, kRank, kY, kDistance, kId };

__device__ __forceinline__ u64 key_of(Key key, float x, int id, const Scale& scale, const Kept& kept) {
  if (key == kLogit) return ~ordered(x);
  if (key == kRank) return static_cast<u64>(~ordered(x)) << 32 | static_cast<uint32_t>(id);
  if (key == kY) return __float_as_uint(scale.y(x));
  return key == kDistance ? kept.distance_of(scale.y(x)) : static_cast<u64>(id);
}

// The smallest key at which the sum of the weights up to it, and `before`, meets the goal. Few keys are compared each
// with each; many are counted by their highest eight bits, then those in the bin that is chosen by the next eight.
__device__ __noinline__ u64 choose(const Items& items, const Scale& scale, const Kept& kept, Key key, const Goal& goal,
                                   u64 before, Shared& s) {
  const bool by_number = key == kLogit || key == kRank;
  if (items.count <= kFew) {
    items.each([&](float x, int id, int i) {
      s.weights[i] = by_number ? 1 : kept.weight(x, scale);
      s.keys[i] = key_of(key, x, id, scale, kept);
    });
    __syncthreads();
    u64 best = ~0ull;
#pragma unroll 1
    for (int i = threadIdx.x; i < items.count; i += kThreads) {
      if (s.weights[i] == 0) continue;
      const u64 its = s.keys[i];
      u64 sum = before;
#pragma unroll 8
      for (int j = 0; j < items.count; ++j) {
        const u64 weight = s.weights[j];  // asked for whether it counts or not, so that loads do not wait for keys
        sum += s.keys[j] <= its ? weight : 0;
      }
      if (goal.is_met(sum) && its < best) best = its;
    }
    return least_of(best, s);
  }
  constexpr int kEach = (256 + kThreads - 1) / kThreads;
  const int bits = key == kRank || key == kDistance ? 64 : 32;
  u64 prefix = 0;
#pragma unroll 1
  for (int shift = bits - 8; shift >= 0; shift -= 8) {
    clear_bins(s, 256);
    items.each([&](float x, int id, int) {
      const u64 its = key_of(key, x, id, scale, kept);
      if (shift + 8 != bits && its >> (shift + 8) != prefix) return;
      const u64 weight = by_number ? 1 : kept.weight(x, scale);
      if (weight) add(&s.low[its >> shift & 255], &s.high[its >> shift & 255], weight);
    });
    __syncthreads();
    u64 sums[kEach];
    for (int i = 0; i < kEach; ++i) {
      const int bin = threadIdx.x * kEach + i;
      sums[i] = bin < 256 ? join(s.low[bin], s.high[bin]) : 0;
    }
    prefix = prefix << 8 | static_cast<u64>(min(first_bin(sums, before, goal, s), 255));
    before = s.found;
    __syncthreads();
  }
  return prefix;
}

// Philox4x32-10 (Salmon et al., SC 2011): a multiple of 2^-53 in [0, 1), as in kernels/reference/philox.py.
__device__ inline double uniform(u64 seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return static_cast<double>(static_cast<u64>(c0 >> 5) << 26 | c1 >> 6) * (1.0 / 9007199254740992.0);
}

// A token of the items, by all that the settings ask for. limit: how many top-k leaves, 0 for all.
__device__ __noinline__ int draw_from(const Items& items, const Scale& scale, const Settings& settings, int limit,
                                      double share, Shared& s) {
  Kept kept;
  const auto total = [&] {
    u64 mine = 0;
    items.each([&](float x, int, int) { mine += kept.weight(x, scale); });
    return static_cast<double>(sum_of(mine, s));
  };
  if (limit > 0 && limit < items.count) {
    const Goal goal = {static_cast<double>(limit), false};
    kept.least = ~static_cast<uint32_t>(choose(items, scale, kept, kLogit, goal, 0, s));
  }
  if (settings.top_p < 1) {
    const Goal goal = {settings.top_p * total(), false};
    kept.most = static_cast<uint32_t>(choose(items, scale, kept, kY, goal, 0, s));
  }
  kept.min_z = settings.min_z;
  double all = total();
  if (settings.typical_p < 1) {
    // Each product is rounded as the weights are.
    u64 mine = 0;
    items.each([&](float x, int, int) {
      const u64 weight = kept.weight(x, scale);
      if (weight)
        mine += static_cast<u64>(__double2ll_rn(static_cast<double>(weight) * -static_cast<double>(scale.y(x))));
    });
    kept.centre = static_cast<double>(static_cast<long long>(sum_of(mine, s))) / all;
    kept.distance = choose(items, scale, kept, kDistance, Goal{settings.typical_p * all, false}, 0, s);
    all = total();
  }
  return static_cast<int>(choose(items, scale, kept, kId, Goal{share * all, true}, 0, s));
}
#endif
