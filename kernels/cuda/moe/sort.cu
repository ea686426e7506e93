// The sort of many slots (token, choice) by place, by several blocks: what `sort` of route.cu does with one. Each has a
// stretch of neighbouring slots, and a warp of it another, so that the order is the same each time: that of the slots.
#include "ptx/ptx.cuh"

constexpr int kWarps = 8, kThreads = kWarps * 32;

// counts [blocks][num_places]: slots of each place in a block's stretch.
extern "C" __global__ void __launch_bounds__(kThreads)
    count_slots(const int* places, int total, int num_places, int stretch, int* counts) {
  DYNAMIC_SHARED(shared);
  int* const mine = reinterpret_cast<int*>(shared);  // [num_places]
  for (int i = threadIdx.x; i < num_places; i += kThreads) mine[i] = 0;
  let_next_begin();
  wait_for_ahead();
  __syncthreads();
  const int begin = blockIdx.x * stretch, end = min(begin + stretch, total);
  for (int at = begin + threadIdx.x; at < end; at += kThreads)
    if (places[at] >= 0) add_shared(smem(mine + places[at]), 1);
  __syncthreads();
  for (int i = threadIdx.x; i < num_places; i += kThreads) counts[blockIdx.x * num_places + i] = mine[i];
}

// Written: slots [total], starts [num_places + 1].
extern "C" __global__ void __launch_bounds__(kThreads)
    place_slots(const int* places, int total, int num_places, int stretch, const int* counts, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  int* const of_warps = reinterpret_cast<int*>(shared);  // [kWarps][num_places]
  int* const begins = of_warps + kWarps * num_places;    // [num_places]
  __shared__ int carried[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kWarps * num_places; i += kThreads) of_warps[i] = 0;
  let_next_begin();
  wait_for_ahead();
  __syncthreads();
  const int part = stretch / kWarps, begin = blockIdx.x * stretch + warp * part, end = min(begin + part, total);
  int* const mine = of_warps + warp * num_places;
  for (int at = begin; at < end; at += 32) {
    const int place = at + lane < end ? places[at + lane] : -1;
    const unsigned equal = __match_any_sync(~0u, place);
    if (place >= 0 && __ffs(equal) - 1 == lane) mine[place] += __popc(equal);
    __syncwarp();
  }
  __syncthreads();

  // Where the slots of each place begin, and of those this block's, and of those each warp's.
  const int each = (num_places + kThreads - 1) / kThreads;  // places of a thread, neighbours
  const int first = min(static_cast<int>(threadIdx.x) * each, num_places), last = min(first + each, num_places);
  int own = 0;
  for (int place = first; place < last; ++place) {
    int all = 0, ahead = 0;
#pragma unroll 8
    for (int block = 0; block < gridDim.x; ++block) {
      const int count = counts[block * num_places + place];
      all += count, ahead += block < blockIdx.x ? count : 0;
    }
    begins[place] = all;
    for (int w = 0; w < kWarps; ++w) {
      const int count = of_warps[w * num_places + place];
      of_warps[w * num_places + place] = ahead;
      ahead += count;
    }
    own += all;
  }
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
    begins[place] = before;
    if (blockIdx.x == 0) starts[place] = before;
    before += count;
  }
  if (blockIdx.x == 0 && threadIdx.x == kThreads - 1) starts[num_places] = before;
  __syncthreads();
  for (int at = begin; at < end; at += 32) {
    const int place = at + lane < end ? places[at + lane] : -1;
    const unsigned equal = __match_any_sync(~0u, place);
    const int to = place >= 0 ? begins[place] + mine[place] : 0;
    __syncwarp();
    if (place >= 0) {
      slots[to + __popc(equal & ((1u << lane) - 1))] = at + lane;
      if (__ffs(equal) - 1 == lane) mine[place] += __popc(equal);
    }
    __syncwarp();
  }
}
