// What a warp reads of a row of logits, and what the blocks that share the row tell each other: see sample_rows.cu.
#pragma once
#include "sampling/weights.cuh"

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
constexpr int kMeetingBytes = 11264;  // as in sample_rows.py
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

}  // namespace
