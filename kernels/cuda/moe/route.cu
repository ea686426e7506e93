// The choice of experts for each token, and the sort of all slots (token, choice) by place: see `route` in
// kernels/ops.py. A warp chooses for a row, from logits that its lanes hold; one block sorts. `route` does both, for
// few rows; `choose` and `sort` share them out.
//
// Compiled with EACH: logits of a lane, so that 32 · EACH experts are the most.
#include "ptx/ptx.cuh"

#ifndef EACH
#define EACH 4
#endif
constexpr int kMostChoices = 64, kSortWarps = 32;
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

// What a warp has of a row.
struct Chosen {
  float choices[32 * EACH];
  int experts[kMostChoices], keys[kMostChoices];
  float weights[kMostChoices];
};

// Groups that count, as bits: the best of them, between equal ones the lower.
__device__ __forceinline__ unsigned kept_groups(const Chosen& held, const Router& router, int lane) {
  const int size = router.experts / router.groups;
  unsigned key = 0;
  if (lane < router.groups) {
    float best = -kInf, second = -kInf;
    for (int i = 0; i < size; ++i) {
      const float x = held.choices[lane * size + i];
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

__device__ __forceinline__ void choose_row(const float* logits, const float* bias, const int* places,
                                           unsigned long long* load, bool is_padding, const Router& router,
                                           int num_places, Chosen& held, int* out_places, float* out_weights) {
  const int lane = threadIdx.x % 32, experts = router.experts, top_k = router.top_k;
  if (is_padding) {
    for (int j = lane; j < top_k; j += 32) out_places[j] = -1, out_weights[j] = 0;
    return;
  }
  float score[EACH];
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    score[i] = expert < experts ? logits[expert] : -kInf;
    is_bad |= score[i] != score[i];
  }
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
  float choice[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    choice[i] = score[i] + (bias && expert < experts ? bias[expert] : 0.0f);
    held.choices[expert] = choice[i];
  }
  __syncwarp();
  const unsigned kept = router.groups > 1 ? kept_groups(held, router, lane) : 0;
  const int size = experts / router.groups;
  unsigned key[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    key[i] = ordered(router.groups > 1 && expert < experts && !(kept >> expert / size & 1) ? -kInf : choice[i]);
    if (expert >= experts) key[i] = 0;
  }
  for (int j = 0; j < top_k; ++j) {
    unsigned most = key[0];
#pragma unroll
    for (int i = 1; i < EACH; ++i) most = max(most, key[i]);
    most = __reduce_max_sync(~0u, most);
    unsigned first = ~0u;
#pragma unroll
    for (int i = EACH - 1; i >= 0; --i)
      if (key[i] == most) first = i * 32 + lane;
    first = __reduce_min_sync(~0u, first);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (first == i * 32 + lane) {
        key[i] = 0;
        held.experts[j] = is_bad ? j : first, held.weights[j] = score[i];
      }
  }
  __syncwarp();

  // Lane j has choices j and j + 32.
  float weight[2], total = 0, top = -kInf;
  int expert[2], all = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = i * 32 + lane;
    expert[i] = j < top_k ? held.experts[j] : 0, weight[i] = j < top_k ? held.weights[j] : -kInf;
    top = fmaxf(top, weight[i]), all += expert[i];
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) all += __shfl_xor_sync(~0u, all, o);
  const bool is_of_chosen = router.score > kSigmoid;
  if (is_of_chosen) {
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = expf(weight[i] - top), total += weight[i];
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] /= total;
    total = 0;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) total += i * 32 + lane < top_k ? weight[i] : 0.0f;
  total = warp_sum(total) + router.epsilon;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = i * 32 + lane;
    if (j >= top_k) continue;
    if (router.normalises) weight[i] /= total;
    weight[i] = is_bad ? __int_as_float(0x7fc00000) : weight[i] * router.scale;
    if (load) atomicAdd(load + expert[i], 1ull);  // whole numbers: the same in any order
    const int place = places[all % router.copies * experts + expert[i]];
    held.keys[j] = place < 0 ? num_places : place;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int j = i * 32 + lane;
    if (j >= top_k) continue;
    const int mine = held.keys[j];
    int rank = 0;
    for (int other = 0; other < top_k; ++other)
      rank += held.keys[other] < mine || (held.keys[other] == mine && other < j);
    out_places[rank] = mine == num_places ? -1 : mine, out_weights[rank] = weight[i];
  }
  __syncwarp();  // before what is held becomes the next row's
}

// By one block of kSortWarps warps, each with a stretch of neighbouring slots, so that the order is the same each time.
// `counts`: [kSortWarps + 1][num_places].
__device__ __forceinline__ void sort_slots(const int* places, int total, int num_places, int* counts, int* slots,
                                           int* starts) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __shared__ int carried[kSortWarps];
  for (int i = threadIdx.x; i < kSortWarps * num_places; i += kSortWarps * 32) counts[i] = 0;
  __syncthreads();
  const int stretch = (total + kSortWarps * 32 - 1) / (kSortWarps * 32) * 32;
  const int begin = min(warp * stretch, total), end = min(begin + stretch, total);
  int* const mine = counts + warp * num_places;
  const auto same = [&](int place) { return __match_any_sync(~0u, place); };
  for (int at = begin; at < end; at += 32) {
    const int place = at + lane < end ? places[at + lane] : -1;
    const unsigned equal = same(place);
    if (place >= 0 && __ffs(equal) - 1 == lane) mine[place] += __popc(equal);
    __syncwarp();
  }
  __syncthreads();
  // Where each warp's begin within a place, and how many the place has.
  int* const begins = counts + kSortWarps * num_places;
  for (int place = threadIdx.x; place < num_places; place += kSortWarps * 32) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int own = counts[w * num_places + place];
      counts[w * num_places + place] = sum;
      sum += own;
    }
    begins[place] = sum;
  }
  __syncthreads();
  const int each = (num_places + kSortWarps * 32 - 1) / (kSortWarps * 32);  // places of a thread, neighbours
  const int first = min(static_cast<int>(threadIdx.x) * each, num_places), last = min(first + each, num_places);
  int own = 0;
  for (int place = first; place < last; ++place) own += begins[place];
  int up_to = own;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int before = __shfl_up_sync(~0u, up_to, o);
    if (lane >= o) up_to += before;
  }
  if (lane == 31) carried[warp] = up_to;
  __syncthreads();
  int before = up_to - own;
  for (int w = 0; w < warp; ++w) before += carried[w];
  for (int place = first; place < last; ++place) {
    const int count = begins[place];
    begins[place] = starts[place] = before;
    before += count;
  }
  if (threadIdx.x == kSortWarps * 32 - 1) starts[num_places] = before;
  __syncthreads();
  for (int at = begin; at < end; at += 32) {
    const int place = at + lane < end ? places[at + lane] : -1;
    const unsigned equal = same(place);
    const int from = place >= 0 ? begins[place] + mine[place] : 0;
    __syncwarp();
    if (place >= 0) {
      slots[from + __popc(equal & ((1u << lane) - 1))] = at + lane;
      if (__ffs(equal) - 1 == lane) mine[place] += __popc(equal);
    }
    __syncwarp();
  }
}

// logits [n, experts]; bias [experts] or null; places [copies, experts]; rows [n] or null: negative where a row is
// padding; load [experts] or null. Written: own_places and weights [n, top_k], slots, starts [num_places + 1].
extern "C" __global__ void __launch_bounds__(kSortWarps * 32)
    route(const float* logits, const float* bias, const int* places, const int* rows, unsigned long long* load, int n,
          Router router, int num_places, int* own_places, float* weights, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  Chosen* const held = reinterpret_cast<Chosen*>(shared);
  const int warp = threadIdx.x / 32;
  let_next_begin();
  wait_for_ahead();
  for (int row = warp; row < n; row += kSortWarps)
    choose_row(logits + row * router.experts, bias, places, load, rows && rows[row] < 0, router, num_places, held[warp],
               own_places + row * router.top_k, weights + row * router.top_k);
  __syncthreads();
  sort_slots(own_places, n * router.top_k, num_places, reinterpret_cast<int*>(held + kSortWarps), slots, starts);
}

extern "C" __global__ void __launch_bounds__(256)
    choose(const float* logits, const float* bias, const int* places, const int* rows, unsigned long long* load, int n,
           Router router, int num_places, int* own_places, float* weights) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, row = blockIdx.x * 8 + warp;
  let_next_begin();
  wait_for_ahead();
  if (row < n)
    choose_row(logits + static_cast<long long>(row) * router.experts, bias, places, load, rows && rows[row] < 0, router,
               num_places, reinterpret_cast<Chosen*>(shared)[warp], own_places + row * router.top_k,
               weights + row * router.top_k);
}

extern "C" __global__ void __launch_bounds__(kSortWarps * 32)
    sort(const int* own_places, int total, int num_places, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  let_next_begin();
  wait_for_ahead();
  sort_slots(own_places, total, num_places, reinterpret_cast<int*>(shared), slots, starts);
}
