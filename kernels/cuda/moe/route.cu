// The choice of experts for each token, and the sort of all slots (token, choice) by place: see `route` in
// kernels/ops.py. `route` does both, for few rows, by the blocks of a cluster; `choose` and `sort` share them out.
#include "moe/choose.cuh"

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
extern "C" __global__ void OF_CLUSTER __launch_bounds__(kSortWarps * 32)
    route(const float* logits, const float* bias, const int* places, const int* rows, unsigned long long* load, int n,
          Router router, int num_places, int* own_places, float* weights, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  const Board board(shared, (n + CLUSTER - 1) / CLUSTER, router.top_k, num_places);
  Experts all_experts;
  all_experts.load(places, bias, router);
  let_next_begin();
  wait_for_ahead();
  const auto load_row = [&](Logits& to, int row) {
    to.load(logits + row * router.experts, router.experts);
    return rows && rows[row] < 0;
  };
  choose_and_sort<CLUSTER>(board, load_row, all_experts, places, load, n, router, num_places,
                           {own_places, weights, slots, starts});
}

extern "C" __global__ void __launch_bounds__(256)
    choose(const float* logits, const float* bias, const int* places, const int* rows, unsigned long long* load, int n,
           Router router, int num_places, int* own_places, float* weights) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, row = blockIdx.x * 8 + warp;
  let_next_begin();
  wait_for_ahead();
  if (row >= n) return;
  Logits own;
  Experts experts;
  own.load(logits + static_cast<long long>(row) * router.experts, router.experts);
  experts.load(places, bias, router);
  const auto put = [&](int j, int place, float weight) {
    own_places[row * router.top_k + j] = place, weights[row * router.top_k + j] = weight;
  };
  Choice* const chosen = reinterpret_cast<Choice*>(shared);
  float* const choices = reinterpret_cast<float*>(chosen + 8 * router.top_k) + warp * (32 * EACH);
  choose_row(own, experts, places, load, rows && rows[row] < 0, router, choices, chosen + warp * router.top_k, put);
}

extern "C" __global__ void __launch_bounds__(kSortWarps * 32)
    sort(const int* own_places, int total, int num_places, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  let_next_begin();
  wait_for_ahead();
  sort_slots(own_places, total, num_places, reinterpret_cast<int*>(shared), slots, starts);
}
