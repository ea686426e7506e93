// The sort of a step's rows by their adapters: see `route_adapters` in kernels/adapter_ops.py. By one block, each warp
// of which has a stretch of neighbouring rows, so that the order is the same each time: that of the rows. Those without
// an adapter come last. No later kernel begins before this one has ended and what it wrote is there: they all read it
// before they wait for the kernel ahead of them.
#include "ptx/ptx.cuh"

// adapters [tokens]; rows [count], tokens, or null. Written: places and weights [count], slots [count], starts
// [num_places + 1]. Shared: numbers of each warp's rows of each place, and of none; and where each place begins.
extern "C" __global__ void __launch_bounds__(1024)
    route_adapters(const int* adapters, int tokens, const int* rows, int count, int num_places, int* places,
                   float* weights, int* slots, int* starts) {
  DYNAMIC_SHARED(shared);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, keys = num_places + 1;
  int* const counts = reinterpret_cast<int*>(shared);  // [warps][keys]
  int* const begins = counts + warps * keys;           // [keys]
  int* const mine = counts + warp * keys;
  const int stretch = (count + blockDim.x - 1) / blockDim.x * 32;
  const int begin = min(warp * stretch, count), end = min(begin + stretch, count);
  for (int i = threadIdx.x; i < warps * keys; i += blockDim.x) counts[i] = 0;
  wait_for_ahead();
  __syncthreads();
  const auto key_of = [&](int row) {
    const int token = rows ? rows[row] : row;
    const int place = token >= 0 && token < tokens ? adapters[token] : -1;
    return place >= 0 && place < num_places ? place : num_places;
  };
  for (int at = begin; at < end; at += 32) {
    const int row = at + lane, key = row < end ? key_of(row) : -1;
    if (row < end) places[row] = key < num_places ? key : -1, weights[row] = 1.0f;
    const unsigned equal = __match_any_sync(~0u, key);
    if (row < end && __ffs(equal) - 1 == lane) mine[key] += __popc(equal);
    __syncwarp();
  }
  __syncthreads();
  // Where each warp's rows begin within a place.
  for (int key = threadIdx.x; key < keys; key += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      const int own = counts[w * keys + key];
      counts[w * keys + key] = sum;
      sum += own;
    }
    begins[key] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < keys; first += 32) {
      const int key = first + lane, own = key < keys ? begins[key] : 0;
      int up_to = own;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const int other = __shfl_up_sync(~0u, up_to, o);
        if (lane >= o) up_to += other;
      }
      if (key < keys) begins[key] = starts[key] = before + up_to - own;
      before += __shfl_sync(~0u, up_to, 31);
    }
  }
  __syncthreads();
  for (int at = begin; at < end; at += 32) {
    const int row = at + lane, key = row < end ? key_of(row) : -1;
    const unsigned equal = __match_any_sync(~0u, key);
    const int to = row < end ? begins[key] + mine[key] : 0;
    __syncwarp();
    if (row < end) {
      slots[to + __popc(equal & ((1u << lane) - 1))] = row;
      if (__ffs(equal) - 1 == lane) mine[key] += __popc(equal);
    }
    __syncwarp();
  }
  __threadfence();
}
