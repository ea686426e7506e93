// The choice of experts for each token by warps, each for a row from logits that its lanes hold, and the sort of what
// they choose by place, for few rows: what the kernels of route.cu and norm_route.cu have in common.
//
// Compiled with EACH: logits of a lane, so that 32 · EACH experts are the most; and CLUSTER, blocks of a kernel.
#pragma once
#include "ptx/ptx.cuh"

#ifndef EACH
#define EACH 4
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define OF_CLUSTER
#endif
constexpr int kSortWarps = 32, kNowhere = 0x7fffffff;
constexpr int kSoftmax = 0, kSigmoid = 1;  // scores; 2: the softmax of those chosen

struct Router {
  int experts, copies, top_k, score, groups, kept_groups, two_best, normalises;
  float epsilon, scale;
};

// Bits that are ordered as numbers are; 0 is below those of any number.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// The logits of a lane: those of EACH neighbouring experts, so that of equal choices the lowest lane has the lower
// ones.
struct Logits {
  float of[EACH];

  __device__ __forceinline__ void load(const float* row, int experts) {
    const int first = threadIdx.x % 32 * EACH;
    if (EACH % 4 == 0 && experts % 4 == 0 && reinterpret_cast<unsigned long long>(row) % 16 == 0) {
#pragma unroll
      for (int i = 0; i + 3 < EACH; i += 4) {
        const float4 four = first + i < experts ? *reinterpret_cast<const float4*>(row + first + i)
                                                : make_float4(-kInf, -kInf, -kInf, -kInf);
        of[i] = four.x, of[i + 1] = four.y, of[i + 2] = four.z, of[i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) of[i] = first + i < experts ? row[first + i] : -kInf;
  }
};

// Groups that count, as bits: the best of them, between equal ones the lower. `choices`: those of a warp's row.
__device__ __forceinline__ unsigned kept_groups(const float* choices, const Router& router, int lane) {
  const int size = router.experts / router.groups;
  unsigned key = 0;
  if (lane < router.groups) {
    float best = -kInf, second = -kInf;
    for (int i = 0; i < size; ++i) {
      const float x = choices[lane * size + i];
      second = fmaxf(second, fminf(best, x)), best = fmaxf(best, x);
    }
    key = ordered(router.two_best && size > 1 ? best + second : best);
  }
  unsigned kept = 0;
  for (int i = 0; i < router.kept_groups; ++i) {
    const unsigned most = __reduce_max_sync(~0u, key);
    const int group = __ffs(__ballot_sync(~0u, key == most)) - 1;
    if (lane == group) key = 0;
    kept |= 1u << group;
  }
  return kept;
}

// What is the same for all rows: of the experts of a lane, where they are and what their choices are more than scores.
struct Experts {
  int place[EACH];
  float bias[EACH];

  __device__ __forceinline__ void load(const int* places, const float* biases, const Router& router) {
    const int first = threadIdx.x % 32 * EACH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const bool is_there = first + i < router.experts;
      place[i] = router.copies == 1 && is_there ? places[first + i] : -1;
      bias[i] = biases && is_there ? biases[first + i] : 0.0f;
    }
  }
};

struct Choice {
  int expert, place;
  float score;
  int pad;
};

// By a warp. `choices`, of 32 · EACH, and `chosen`, of top_k, are its own, in shared memory. put(j, place or -1,
// weight) is called for each choice j, in ascending order of places.
template <class Put>
__device__ __forceinline__ void choose_row(const Logits& logits, const Experts& all_experts, const int* places,
                                           unsigned long long* load, bool is_padding, const Router& router,
                                           float* choices, Choice* chosen, const Put& put) {
  const int lane = threadIdx.x % 32, experts = router.experts, top_k = router.top_k, mine = lane * EACH;
  if (is_padding) {
    for (int j = lane; j < top_k; j += 32) put(j, -1, 0.0f);
    return;
  }
  float score[EACH];
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < EACH; ++i) score[i] = logits.of[i], is_bad |= score[i] != score[i];
  is_bad = __any_sync(~0u, is_bad);
  if (router.score == kSoftmax) {
    float top = score[0], total = 0;
#pragma unroll
    for (int i = 1; i < EACH; ++i) top = fmaxf(top, score[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < EACH; ++i) score[i] = expf(score[i] - top), total += score[i];
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < EACH; ++i) score[i] /= total;
  } else if (router.score == kSigmoid) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) score[i] = 1.0f / (1.0f + expf(-score[i]));
  }
  unsigned key[EACH];  // 0: cannot be chosen, or was
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float choice = score[i] + all_experts.bias[i];
    key[i] = mine + i < experts ? ordered(choice) : 0;
    if (router.groups > 1) choices[mine + i] = choice;
  }
  if (router.groups > 1) {
    __syncwarp();
    const unsigned kept = kept_groups(choices, router, lane);
    const int size = experts / router.groups;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (mine + i < experts && !(kept >> (mine + i) / size & 1)) key[i] = ordered(-kInf);
  }
  for (int j = 0; j < top_k; ++j) {
    unsigned best = key[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i) best = max(best, key[i]);
    const unsigned most = __reduce_max_sync(~0u, best);
    if (lane != __ffs(__ballot_sync(~0u, best == most)) - 1) continue;
    Choice choice = {};
    bool is_found = false;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (!is_found && key[i] == most) {
        is_found = true, key[i] = 0;
        choice.expert = mine + i, choice.place = all_experts.place[i], choice.score = score[i];
      }
    chosen[j] = choice;
  }
  __syncwarp();

  // Lane j has choices j and j + 32.
  float weight[2], total = 0;
  int expert[2], place[2], all = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = h * 32 + lane;
    expert[h] = 0, place[h] = -1, weight[h] = -kInf;
    if (j >= top_k) continue;
    expert[h] = is_bad ? j : chosen[j].expert, place[h] = chosen[j].place, weight[h] = chosen[j].score;
    all += expert[h];
  }
  if (router.score > kSigmoid) {
    const float top = chosen[0].score;
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = expf(weight[h] - top), total += weight[h];
    total = warp_sum(total);
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] /= total;
    total = 0;
  }
  if (router.normalises) {
#pragma unroll
    for (int h = 0; h < 2; ++h) total += h * 32 + lane < top_k ? weight[h] : 0.0f;
    total = warp_sum(total) + router.epsilon;
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] /= total;
  }
  if (router.copies > 1) {
#pragma unroll
    for (int o = 16; o; o >>= 1) all += __shfl_xor_sync(~0u, all, o);
  }
  int key_of[2], rank[2] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = h * 32 + lane;
    weight[h] = is_bad ? __int_as_float(0x7fc00000) : weight[h] * router.scale;
    if (j < top_k) {
      if (load) atomicAdd(load + expert[h], 1ull);  // whole numbers: the same in any order
      if (is_bad || router.copies > 1) place[h] = places[all % router.copies * experts + expert[h]];
      key_of[h] = place[h] < 0 ? kNowhere : place[h];
    } else {
      key_of[h] = kNowhere;
    }
  }
  for (int other = 0; other < top_k; ++other) {
    const int its = __shfl_sync(~0u, other < 32 ? key_of[0] : key_of[1], other % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) rank[h] += its < key_of[h] || (its == key_of[h] && other < h * 32 + lane);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (h * 32 + lane < top_k) put(rank[h], key_of[h] == kNowhere ? -1 : key_of[h], weight[h]);
}

// Where choices go: places and weights [n, top_k], slots, starts [places + 1].
struct Chosen {
  int* places;
  float* weights;
  int *slots, *starts;
};

// The shared memory of `choose_and_sort`; a warp has `chosen` and `choices` to itself.
struct Board {
  Choice* chosen;
  int *of_warps, *begins;  // [kSortWarps], [places]
  unsigned* bits;          // [places]
  int* held;               // [stretch][top_k] places
  float* choices;

  __device__ __forceinline__ Board(char* shared, int stretch, int top_k, int num_places) {
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Choice* const all_chosen = reinterpret_cast<Choice*>(shared);
    chosen = all_chosen + warp * top_k;
    of_warps = reinterpret_cast<int*>(all_chosen + warps * top_k);
    begins = of_warps + kSortWarps;
    bits = reinterpret_cast<unsigned*>(begins + num_places);
    held = begins + num_places * 2;
    choices = reinterpret_cast<float*>(held + stretch * top_k) + warp * (32 * EACH);
    for (int i = threadIdx.x; i < num_places; i += blockDim.x) bits[i] = 0;
  }
};

// By all threads of BLOCKS blocks, a cluster if there are several, each with a stretch of at most 32 rows: one
// multiprocessor would take longer to choose for many. Each place has a bit for each row of the stretch that goes
// there, no row twice to one: a slot's number among those of its place is the number of bits before its own, so the
// sort meets no memory but the blocks'. load_row(logits, row) has a warp's lanes hold the logits of a row, and says
// whether it is padding.
template <int BLOCKS, class LoadRow>
__device__ __forceinline__ void choose_and_sort(const Board& board, const LoadRow& load_row, const Experts& experts,
                                                const int* places, unsigned long long* load, int n,
                                                const Router& router, int num_places, const Chosen& out) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, top_k = router.top_k;
  const int rank = BLOCKS > 1 ? blockIdx.x : 0, stretch = (n + BLOCKS - 1) / BLOCKS, row0 = rank * stretch;
  const int own = max(min(n - row0, stretch), 0);
  Logits logits_of, next;
  bool is_padding = false;
  if (warp < own) is_padding = load_row(next, row0 + warp);
  __syncthreads();
  for (int i = warp; i < own; i += warps) {
    logits_of = next;
    const bool is_none = is_padding;
    if (i + warps < own) is_padding = load_row(next, row0 + i + warps);
    const auto put = [&](int j, int place, float weight) {
      const int slot = (row0 + i) * top_k + j;
      out.places[slot] = board.held[i * top_k + j] = place, out.weights[slot] = weight;
      if (place >= 0) atomicOr(board.bits + place, 1u << i);
    };
    choose_row(logits_of, experts, places, load, is_none, router, board.choices, board.chosen, put);
    __syncwarp();  // before what is held becomes the next row's
  }
  if (BLOCKS > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  int before = 0;
  for (int first = 0; first < num_places; first += blockDim.x) {
    const int place = first + threadIdx.x;
    int count = 0, ahead = 0;  // of all blocks, and of those before this one
    if (place < num_places) {
      unsigned its[BLOCKS];
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) its[r] = BLOCKS > 1 ? *of_block(board.bits + place, r) : board.bits[place];
#pragma unroll
      for (int r = 0; r < BLOCKS; ++r) count += __popc(its[r]), ahead += r < rank ? __popc(its[r]) : 0;
    }
    int up_to = count;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int other = __shfl_up_sync(~0u, up_to, o);
      if (lane >= o) up_to += other;
    }
    if (lane == 31) board.of_warps[warp] = up_to;
    __syncthreads();
    int its = lane < warps ? board.of_warps[lane] : 0, earlier = lane < warp ? its : 0;
#pragma unroll
    for (int o = 16; o; o >>= 1) its += __shfl_xor_sync(~0u, its, o), earlier += __shfl_xor_sync(~0u, earlier, o);
    if (place < num_places) {
      const int begin = before + earlier + up_to - count;
      board.begins[place] = begin + ahead;
      if (rank == 0) out.starts[place] = begin;
    }
    before += its;
    __syncthreads();
  }
  if (BLOCKS > 1) cluster_arrive();  // this block reads no other's memory any more
  if (rank == 0 && threadIdx.x == 0) out.starts[num_places] = before;
  for (int i = threadIdx.x; i < own * top_k; i += blockDim.x) {
    const int place = board.held[i];
    if (place < 0) continue;
    const unsigned ahead = board.bits[place] & ((1u << i / top_k) - 1);
    out.slots[board.begins[place] + __popc(ahead)] = row0 * top_k + i;
  }
  if (BLOCKS > 1) cluster_wait();
}
