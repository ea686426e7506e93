// From rows of logits to tokens, one launch for whatever the rows ask. Each row is read once: CLUSTER blocks (a cluster
// where there are several; one block on sm_80) share it, a warp after the other, and keep it in shared memory; what
// does not fit there is read again. What bounds it: reading; for draws of which all tokens are a part (top-p, plain
// ones) as many instructions, about 25 a token, that give its exact weight, and two cycles for each that goes into a
// bin; with few rows the meetings of blocks, 4 at most.
//
//   1 the highest logit. Greedy, known and bad rows end here
//   2 top-k: the highest of each four tokens, counted in bins of y; top-p: the weight of tokens in such bins, and of
//     all; else the weight of those that count
//   3 in all blocks alike, from all blocks' bins: the bin in which the threshold is; its tokens (top-k: and those
//     before it) go to a list
//   4 top-k: the first block draws from the list; top-p: all blocks find the threshold and in which of them the draw
//     falls; that one finds the token
//
// Typical-p without a top-k and lists of more than CAPACITY go over the row again and again, in the first block.

#include "sampling/sampling.cuh"

// CLUSTER: blocks of a row.
#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif

namespace {

constexpr int kEachBin = (kBins + kThreads - 1) / kThreads;
constexpr int kNear = CAPACITY < 4096 ? 16 : 256;  // tokens in one bin that are compared each with each: a power of 2

// How a row's token is found: it is (kDone), or from those that may be among the k most likely (kList), by the weights
// of all that count (kPlain), the same below a threshold (kShare), or step by step over the whole row (kWhole).
enum Mode { kDone, kList, kPlain, kShare, kWhole };

__device__ Mode mode_of(const Settings& settings, int vocab) {
  if (!settings.is_random) return kDone;
  if (settings.top_k > 0 && settings.top_k < vocab) return kList;
  if (settings.typical_p < 1) return kWhole;
  return settings.top_p < 1 ? kShare : kPlain;
}

// What blocks of a row tell each other, beside their bins; in shared memory.
struct Meeting {
  Shared s;
  u64 best[CLUSTER], totals[CLUSTER], sums[CLUSTER];  // of each block
  double share;                                       // of the weight, before the token that is drawn
  int listed;                                         // in the first block's: tokens in the list
  int cut;                                            // of this block: tokens in the bin that top-p cuts
  uint32_t threshold, token;                          // y's bits; an id
  uint4 tokens[kNear / 2];                            // in that bin: y's bits, the weight's halves
};
constexpr int kMeetingBytes = 11264;  // as in sampling.py
static_assert(sizeof(Meeting) <= kMeetingBytes &&
              sizeof(uint4[kNear]) <= sizeof(Shared::keys) + sizeof(Shared::weights));

// What was stored before is there for all blocks of the row after.
__device__ __forceinline__ void meet() {
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
}
template <class T>
__device__ __forceinline__ T* at_block(T* mine, int rank) {
  return CLUSTER > 1 ? of_block(mine, rank) : mine;
}

__device__ __forceinline__ float highest_of(const float4& v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

// A warp's part of a row: quads of logits, aligned to 16 bytes whatever the row is, the first of which it keeps.
struct Part {
  const float* from;  // `shift` before the row
  uint32_t kept;      // in shared memory
  int vocab, shift, first, count, stay;

  __device__ Part(const float* row, int its_vocab, uint32_t quads, int its_stay, int rank) {
    const int warp = threadIdx.x / 32;
    vocab = its_vocab, shift = static_cast<int>(reinterpret_cast<unsigned long long>(row) / 4 % 4);
    from = row - shift;
    const int all = (vocab + shift + 3) / 4, each = per_warp(all);
    first = (rank * kWarps + warp) * each, count = max(min(each, all - first), 0);
    kept = quads + warp * its_stay * 16, stay = min(its_stay, count);
  }
  __device__ static int per_warp(int quads) { return (quads + CLUSTER * kWarps - 1) / (CLUSTER * kWarps); }
  // In which block a token is.
  __device__ int block_of(int id) const { return (id + shift) / 4 / (per_warp((vocab + shift + 3) / 4) * kWarps); }

  __device__ void fetch() const {
    for (int i = threadIdx.x % 32; i < stay; i += 32) copy16(kept + i * 16, from + (first + i) * 4ll, true);
    commit();
  }
  // -inf beyond the row.
  __device__ float4 cleaned(float4 v, int i) const {
    const int id = (first + i) * 4 - shift;
    if (id >= 0 && id + 4 <= vocab) return v;
    return make_float4(id < 0 ? -kInf : v.x, id + 1 < 0 || id + 1 >= vocab ? -kInf : v.y,
                       id + 2 < 0 || id + 2 >= vocab ? -kInf : v.z, id + 3 >= vocab ? -kInf : v.w);
  }
  // After wait_for<0>() by the lane that has fetched them.
  __device__ void clean(float4* quads, int its_stay) const {
    for (int i = threadIdx.x % 32; i < stay; i += 32) {
      const int id = (first + i) * 4 - shift;
      float4* const its = quads + threadIdx.x / 32 * its_stay + i;
      if (id < 0 || id + 4 > vocab) *its = cleaned(*its, i);
    }
  }
  __device__ __forceinline__ float4 at(int i) const {
    if (i < stay) return load_shared16(kept + i * 16);
    return cleaned(*reinterpret_cast<const float4*>(from + (first + i) * 4ll), i);
  }
  // One of four that are there.
  __device__ __forceinline__ float one(int i, int which) const {
    return i < stay ? load_shared4(kept + i * 16 + which * 4) : from[(first + i) * 4ll + which];
  }
  // Body gets four logits and the id of the first, in order; all lanes of the warp together, -inf where there is none.
  template <class Body>
  __device__ __forceinline__ void each(Body body) const {
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      const int i = base + static_cast<int>(threadIdx.x % 32);
      body(i < count ? at(i) : make_float4(-kInf, -kInf, -kInf, -kInf), (first + i) * 4 - shift);
    }
  }
};

// The block's highest logit and its place, as one number that is larger for a higher logit, then for a lower place.
// best: the thread's highest.
__device__ __forceinline__ u64 best_of(const Part& part, float& best, Shared& s) {
  best = -kInf;
  int where = -1;
  bool bad = false;
  for (int i = threadIdx.x % 32; i < part.count; i += 32) {
    const float4 v = part.at(i);
    bad |= !(v.x <= kMost) | !(v.y <= kMost) | !(v.z <= kMost) | !(v.w <= kMost);
    const float most = highest_of(v);
    if (most > best) best = most, where = i;
  }
  int id = 0;
  if (where >= 0) {
    const float4 v = part.at(where);
    id = (part.first + where) * 4 - part.shift + (v.x == best ? 0 : v.y == best ? 1 : v.z == best ? 2 : 3);
  }
  return most_of(bad ? kBad : static_cast<u64>(ordered(best)) << 32 | ~static_cast<uint32_t>(id), s);
}

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

// grid: (rows * CLUSTER). logits [rows, vocab]; stay: quads that each warp keeps; ahead: how many blocks run at once,
// a multiple of CLUSTER, or 0; owners: of which row of `settings`
// each is, -1 of none: nothing is written for it; targets: a known token, or -1, or null; flags: what `change` found,
// or null. listed_logits, listed_ids [rows, CAPACITY]: scratch. out: a token every `columns`.
extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const float* logits, int vocab, int stay, int ahead, const int* owners, const Settings* settings,
           const int* positions, const int* targets, int* flags, float* listed_logits, int* listed_ids, int* out,
           int columns) {
  DYNAMIC_SHARED(memory);
  Meeting& all = *reinterpret_cast<Meeting*>(memory);
  Shared& s = all.s;
  float4* const quads = reinterpret_cast<float4*>(memory + kMeetingBytes);
  begin();
  const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const Part part(x, vocab, smem(quads), stay, rank);
  part.fetch();
  const int owner = owners[row], target = targets ? targets[row] : -1, flag = flags ? flags[row] : 0;
  const Settings its = settings[max(owner, 0)];
  if (threadIdx.x / 32 == kWarps - 1) all.share = uniform(its.seed, positions[row]);
  for (int i = threadIdx.x; i < kBins; i += kThreads) s.low[i] = s.high[i] = 0;
  if (threadIdx.x == 0) all.listed = all.cut = 0, all.threshold = all.token = ~0u;
  if (CLUSTER > 1) cluster_arrive();
  wait_for<0>();
  part.clean(quads, stay);
  float best;
  const u64 mine = best_of(part, best, s);
  // What the block needs that comes when this one ends is on its way while this one computes.
  if (ahead && blockIdx.x + ahead < gridDim.x) {
    const long long step = static_cast<long long>(ahead / CLUSTER) * vocab;
    const char* const its_first = reinterpret_cast<const char*>(part.from + part.first * 4ll + step);
    for (int i = threadIdx.x % 32 * 128; i < part.stay * 16; i += 32 * 128) prefetch_l2(its_first + i);
  }
  if (CLUSTER > 1) cluster_wait();  // all blocks are there
  if (threadIdx.x < CLUSTER) *at_block(all.best + rank, threadIdx.x) = mine;
  meet();
  u64 most = all.best[0];
#pragma unroll
  for (int r = 1; r < CLUSTER; ++r) most = max(most, all.best[r]);

  // flags: 1 a change has seen a bad logit, 2 a finite one, 4 has been there.
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
    mode = mode_of(its, vocab);
  }
  if (rank == 0 && threadIdx.x == 0 && flag) flags[row] = 0;
  if (owner < 0) return;
  int* const to = out + static_cast<long long>(row) * columns;
  const Scale scale(top, its.temperature, vocab);
  const double share = all.share;
  float* const its_logits = listed_logits + static_cast<long long>(row) * CAPACITY;
  int* const its_ids = listed_ids + static_cast<long long>(row) * CAPACITY;
  if (mode == kDone || mode == kWhole) {
    if (rank != 0) return;
    if (mode == kWhole) token = draw_alone(Items{x, nullptr, vocab}, top, its, share, vocab, s);
    if (threadIdx.x == 0) *to = token;
    return;
  }

  u64 each[kEachBin];
  if (mode == kList) {
    const float guess = fminf(guess_of(its.top_k), scale.limit);
    count_into_bins(part, scale, 0, guess, smem(s.low));
    meet();
    gather_bins(each, s);
    const Goal wanted = {static_cast<double>(its.top_k), false};
    int last = first_bin(each, 0, wanted, s);
    if (!s.is_met) {  // all blocks see so
      meet();
      count_into_bins(part, scale, guess, scale.limit, smem(s.low));
      meet();
      gather_bins(each, s);
      last = first_bin(each, 0, wanted, s);
    }
    last = min(last, kBins - 2);
    list_tokens(part, scale, 0, last, its_logits, its_ids, at_block(&all.listed, 0));
    meet();
    if (rank != 0) return;
    const int count = all.listed;
    Items items = {x, nullptr, vocab};
    if (count <= kNear && !(its.typical_p < 1)) {
      token = draw_few(its_logits, its_ids, count, scale, its.top_k, its.top_p, its.min_z, share, all);
      if (threadIdx.x == 0) *to = token;
      return;
    }
    if (count <= CAPACITY) {
      items = {its_logits, its_ids, count};
      if (count <= stay * kWarps * 2) {  // where the row was
        float* const near_logits = reinterpret_cast<float*>(quads);
        int* const near_ids = reinterpret_cast<int*>(near_logits + count);
        for (int i = threadIdx.x; i < count; i += kThreads)
          near_logits[i] = __ldcg(its_logits + i), near_ids[i] = __ldcg(its_ids + i);
        items.logits = near_logits, items.ids = near_ids;
        __syncthreads();
      }
    }
    token = draw_alone(items, top, its, share, vocab, s);
    if (threadIdx.x == 0) *to = token;
    return;
  }

  Kept kept;
  kept.min_z = its.min_z;
  u64 weight = 0;
  if (mode == kPlain) {
    weight = sum_of_part(part, scale, ~0u, its.min_z);
    const u64 sum = sum_of(weight, s);
    if (threadIdx.x < CLUSTER) *at_block(all.sums + rank, threadIdx.x) = sum;
    meet();
  } else {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float guess = fminf(guess_of(vocab, its.top_p), scale.limit);
    const u64 mine_all = sum_of(weigh_into_bins(part, scale, 0, guess, smem(s.low), smem(s.high)), s);
    if (threadIdx.x < CLUSTER) *at_block(all.totals + rank, threadIdx.x) = mine_all;
    meet();
    gather_bins(each, s);
    u64 sum = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) sum += all.totals[r];
    const Goal wanted = {its.top_p * static_cast<double>(sum), false};
    int found = first_bin(each, 0, wanted, s);
    if (!s.is_met) {  // all blocks see so
      const float far = far_of(best, scale, vocab, its.top_p, s);
      meet();
      weigh_into_bins(part, scale, guess, far, smem(s.low), smem(s.high));
      meet();
      gather_bins(each, s);
      found = first_bin(each, 0, wanted, s);
    }
    const u64 before = s.found;
    // min-p may cut before.
    const int floor = scale.bin(-its.min_z), cut = min(found, floor);
    list_near(part, scale, cut, all);
    for (int r = warp; r < CLUSTER; r += kWarps) {
      u64 less = 0;
#pragma unroll 4
      for (int i = lane; i < cut; i += 32) less += join(*at_block(s.low + i, r), *at_block(s.high + i, r));
      less = sum_of_warp(less);
      if (lane == 0) all.sums[r] = less;
    }
    meet();
    int starts[CLUSTER + 1];
    starts[0] = 0;
    bool fits = true;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const int count = *at_block(&all.cut, r);
      fits &= count <= kNear / 2;
      starts[r + 1] = starts[r] + count;
    }
    if (fits && starts[CLUSTER] <= kNear) {
      uint4* const gathered = reinterpret_cast<uint4*>(s.keys);
      for (int i = threadIdx.x; i < starts[CLUSTER]; i += kThreads) {
        int r = 0;
#pragma unroll
        for (int next = 1; next < CLUSTER; ++next) r += i >= starts[next];
        int start = 0;
#pragma unroll
        for (int next = 1; next < CLUSTER; ++next) start = r == next ? starts[next] : start;
        gathered[i] = *at_block(all.tokens + i - start, r);
      }
      if (CLUSTER > 1) cluster_arrive();  // others may end
      __syncthreads();
      if (found <= floor) kept.most = threshold_of(gathered, starts[CLUSTER], before, wanted, all);
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) {
        if (warp != r % kWarps) continue;
        u64 its_weight = 0;
        for (int i = starts[r] + lane; i < starts[r + 1]; i += 32) {
          const uint4 token = gathered[i];
          if (token.x <= kept.most && -__uint_as_float(token.x) >= its.min_z) its_weight += join(token.y, token.z);
        }
        its_weight = sum_of_warp(its_weight);
        if (lane == 0) all.sums[r] += its_weight;
      }
    } else {
      list_tokens(part, scale, cut, cut, its_logits, its_ids, at_block(&all.listed, 0));
      meet();
      const int count = *at_block(&all.listed, 0);
      if (CLUSTER > 1) cluster_arrive();
      if (count > CAPACITY) {
        if (rank == 0) {
          token = draw_alone(Items{x, nullptr, vocab}, top, its, share, vocab, s);
          if (threadIdx.x == 0) *to = token;
        }
        if (CLUSTER > 1) cluster_wait();
        return;
      }
      const Items list = {its_logits, its_ids, count};
      if (found <= floor) kept.most = static_cast<uint32_t>(choose(list, scale, kept, kY, wanted, before, s));
      clear_bins(s, CLUSTER);
      list.each([&](float v, int id, int) {
        const u64 its_weight = kept.weight(v, scale);
        const int block = part.block_of(id);
        if (its_weight) add(s.low + block, s.high + block, its_weight);
      });
      __syncthreads();
      if (threadIdx.x < CLUSTER) all.sums[threadIdx.x] += join(s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    __syncthreads();
  }
  // In which block the draw falls.
  u64 sums[CLUSTER];
  u64 total = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    sums[r] = all.sums[r];
    total += sums[r];
  }
  const Goal goal = {share * static_cast<double>(total), true};
  u64 before = 0;
  int chosen = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const bool is_past = chosen == r && r < CLUSTER - 1 && !goal.is_met(before + sums[r]);
    if (is_past) before += sums[r], chosen = r + 1;
  }
  if (rank == chosen) {
    if (mode != kPlain) weight = sum_of_part(part, scale, kept.most, its.min_z);
    token = draw_here(part, scale, weight, kept.most, its.min_z, before, goal, s);
    if (threadIdx.x == 0) *to = token;
  }
  if (CLUSTER > 1 && mode != kPlain) cluster_wait();
}
