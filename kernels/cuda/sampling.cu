// From rows of logits to tokens. What bounds it is reading the logits: once for greedy rows, top-k, and what few tokens
// reach; a second time, in reverse order (the end of the first pass is in L2 still), for the total of all weights that
// top-p and plain draws need.
//
//   scan    each part of a row: the highest logit, and the highest of every group of 16; the last part ends greedy rows
//   weigh   each part: its weight; for top-p also by bins of y, from which the last part finds the bin to look at
//   narrow  each part, for top-p: the weight before that bin, and the tokens in it
//   draw    (sampling_draw.cu) each row: top-k from the groups that may hold such tokens; else the part in which the
//   draw falls
//
// Rows are cut into parts whatever the batch, and nothing depends on how.

#include "sampling.cuh"

namespace {

constexpr int kLoads = 4;  // of four logits, by each thread for a part
constexpr u64 kBad = ~0ull;

__device__ Mode mode_of(const Settings& settings, int vocab) {
  if (settings.top_k > 0 && settings.top_k < vocab) return kList;
  if (settings.typical_p < 1) return kWhole;
  return settings.top_p < 1 ? kShare : kPlain;
}

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

// Nearly all of what `weigh` computes, so what is the same for all tokens is known to the compiler.
template <bool kIsOne>
__device__ __forceinline__ float y_of(const Scale& scale, float x) {
  return kIsOne ? __fsub_rn(scale.highest, x) : scale.y(x);
}

// Those of y below `far`; returns the weights of the others.
template <bool kIsOne>
__device__ u64 weigh_into_bins(const float4 (&four)[kLoads], const bool (&counts)[kLoads], const Scale& scale,
                               float far, Shared& s) {
  u64 rest = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (!counts[i]) continue;
    const float values[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float y = y_of<kIsOne>(scale, values[j]);
      const u64 weight = scale.weight(y);
      if (y < far && weight) {
        const int bin = scale.bin(y);
        add(s.low + bin, s.high + bin, weight);
      } else {
        rest += weight;
      }
    }
  }
  return rest;
}

// The weights of tokens with z of `least` or more.
template <bool kIsOne>
__device__ u64 sum_part(const float4 (&four)[kLoads], const bool (&counts)[kLoads], const Scale& scale, float least) {
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (!counts[i]) continue;
    const float values[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float y = y_of<kIsOne>(scale, values[j]);
      sum += -y >= least ? scale.weight(y) : 0;
    }
  }
  return sum;
}

}  // namespace

// grid: (parts, rows). logits [rows, vocab]; owners: of which row of `settings` each is, -1 of none: nothing is written
// for it; settings null: all greedy; targets: a known token, or -1, or null; flags: what `change` found, or null.
// groups [rows, parts * kPart / 16]: each group's highest. partial [rows, parts], counters [rows]: scratch, counters
// zero. highest, modes [rows]. out: a token every `columns`.
extern "C" __global__ void __launch_bounds__(THREADS)
    scan(const float* logits, int vocab, const int* owners, const Settings* settings, const int* targets, int* flags,
         float* groups, u64* partial, int* counters, float* highest, int* modes, int* out, int columns) {
  begin();
  const int row = blockIdx.y, parts = gridDim.x;
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const bool aligned = vocab % 4 == 0;
  const int begin = blockIdx.x * kPart + threadIdx.x * 4;
  float4 four[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) four[i] = load_four(x, begin + i * kThreads * 4, vocab, aligned);
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
      at = begin + i * kThreads * 4 + (v.x == most ? 0 : v.y == most ? 1 : v.z == most ? 2 : 3);
    }
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
  // flags: 1 a change has seen a bad logit, 2 a finite one, 4 has been there.
  const int flag = flags ? flags[row] : 0;
  if (flags) flags[row] = 0;
  const int owner = owners ? owners[row] : 0;
  if (owner < 0) {
    modes[row] = kDone;
    return;
  }
  const int target = targets ? targets[row] : -1;
  const float top = unordered(static_cast<uint32_t>(most >> 32));
  Mode mode = kDone;
  int token;
  if (most == kBad || (flag && flag != 6)) {
    token = kNotFinite;
  } else if (top == -kInf) {
    token = target >= 0 ? kNotFinite : kAllMasked;
  } else if (target >= 0) {
    token = target;
  } else {
    token = static_cast<int>(~static_cast<uint32_t>(most));
    if (settings && settings[owner].is_random) mode = mode_of(settings[owner], vocab);
  }
  modes[row] = mode, highest[row] = top;
  if (out) out[static_cast<long long>(row) * columns] = token;
}

// grid: (parts, rows). sums [rows, parts]; for top-p bins [rows, parts, kBins], too, and cuts [rows]. settings null:
// the sums of all weights of all rows at temperature 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    weigh(const float* logits, int vocab, const int* owners, const Settings* settings, const float* groups,
          const float* highest, const int* modes, int* counters, u64* sums, u64* bins, Cut* cuts) {
  begin();
  const int row = gridDim.y - 1 - blockIdx.y, part = gridDim.x - 1 - blockIdx.x, parts = gridDim.x;
  const int mode = settings ? modes[row] : kPlain;
  if (mode != kPlain && mode != kShare) return;
  __shared__ Shared s;
  Settings its = {0, 1, 1, 1, -kInf, 0, 1};
  if (settings) its = settings[owners[row]];
  const Scale scale(highest[row], its.temperature, vocab);
  const bool by_share = mode == kShare;
  // For top-p all weights count; else min-p is a limit known by now.
  const float least = by_share ? -kInf : its.min_z;
  const float reach = fminf(scale.limit, -least) * its.temperature * 1.0001f;
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const long long place = static_cast<long long>(row) * parts + part;
  const float* const group = groups + place * (kPart / kGroup);
  const bool aligned = vocab % 4 == 0;
  if (by_share) clear_bins(s, kBins);
  bool counts[kLoads];
  float4 four[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    counts[i] = __fsub_rn(scale.highest, group[(i * kThreads + threadIdx.x) / 4]) <= reach;
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (counts[i]) four[i] = load_four(x, part * kPart + (i * kThreads + threadIdx.x) * 4, vocab, aligned);
  const bool is_one = scale.temperature == 1.0f;
  u64 sum = 0;
  if (by_share) {
    // All tokens beyond `far` together weigh less than what top-p leaves out, so the cut does not lie there. Rounding
    // makes a weight twice as large at most.
    const float far = logf(vocab / static_cast<float>(1 - its.top_p)) + 0.8f;
    sum = is_one ? weigh_into_bins<true>(four, counts, scale, far, s)
                 : weigh_into_bins<false>(four, counts, scale, far, s);
    sum = sum_of(sum, s);
    if (threadIdx.x == 0) add(s.low + kBins - 1, s.high + kBins - 1, sum);
  } else {
    sum = is_one ? sum_part<true>(four, counts, scale, least) : sum_part<false>(four, counts, scale, least);
  }
  if (!by_share) {
    sum = sum_of(sum, s);
    if (threadIdx.x == 0) sums[place] = sum;
    return;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[place * kBins + i] = join(s.low[i], s.high[i]);
  if (!is_last(counters + row, parts)) return;

  constexpr int kEach = (kBins + kThreads - 1) / kThreads;
  const u64* const all = bins + static_cast<long long>(row) * parts * kBins;
  u64 each[kEach];
  u64 mine = 0;
  for (int i = 0; i < kEach; ++i) {
    const int bin = threadIdx.x * kEach + i;
    each[i] = 0;
    if (bin < kBins)
#pragma unroll 8
      for (int p = 0; p < parts; ++p) each[i] += __ldcg(all + p * kBins + bin);
    mine += each[i];
  }
  const double wanted = its.top_p * static_cast<double>(sum_of(mine, s));
  const int bin = first_bin(each, 0, Goal{wanted, false}, s);
  // min-p may cut before.
  const int floor = scale.bin(-its.min_z);
  if (threadIdx.x == 0) cuts[row] = Cut{min(bin, floor), bin <= floor, s.found, wanted};
}

// grid: (parts, rows). sums [rows, parts]: the weight in bins before the cut. Tokens in that bin: tokens
// [rows, kInBin] of logit and id, counts [rows] of them, more if they do not fit.
extern "C" __global__ void __launch_bounds__(THREADS)
    narrow(const float* logits, int vocab, const int* owners, const Settings* settings, const float* groups,
           const float* highest, const int* modes, const u64* bins, const Cut* cuts, u64* sums, float2* tokens,
           int* counts) {
  begin();
  const int row = blockIdx.y, part = blockIdx.x, parts = gridDim.x;
  if (modes[row] != kShare) return;
  __shared__ Shared s;
  const Settings its = settings[owners[row]];
  const Scale scale(highest[row], its.temperature, vocab);
  const int cut = cuts[row].bin;
  const long long place = static_cast<long long>(row) * parts + part;
  const u64* const its_bins = bins + place * kBins;
  const bool is_empty = its_bins[cut] == 0;
  u64 mine = 0;
  for (int i = threadIdx.x; i < cut; i += kThreads) mine += its_bins[i];
  mine = sum_of(mine, s);
  if (threadIdx.x == 0) sums[place] = mine;
  if (is_empty) return;
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const float* const group = groups + place * (kPart / kGroup);
  const bool aligned = vocab % 4 == 0;
  // A quick look by a multiplication; what it lets pass is divided.
  const float by = scale.bins * scale.inverse, from = cut - 0.01f, to = cut + 1.01f;
  bool reaches[kLoads];
  float4 four[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    reaches[i] = __fsub_rn(scale.highest, group[(i * kThreads + threadIdx.x) / 4]) * by < to;
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (reaches[i]) four[i] = load_four(x, part * kPart + (i * kThreads + threadIdx.x) * 4, vocab, aligned);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (!reaches[i]) continue;
    const float values[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float guess = __fsub_rn(scale.highest, values[j]) * by;
      if (guess < from || !(guess < to) || scale.bin(scale.y(values[j])) != cut) continue;
      const int at = atomicAdd(counts + row, 1);
      const int id = part * kPart + (i * kThreads + threadIdx.x) * 4 + j;
      if (at < kInBin) tokens[static_cast<long long>(row) * kInBin + at] = make_float2(values[j], __int_as_float(id));
    }
  }
}
