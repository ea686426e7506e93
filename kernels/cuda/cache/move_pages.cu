// Pages of a KV cache gathered into a buffer, one after the other, or (SCATTER) put back from it. Memory bounds it:
// each byte is read once and written once; 64 bytes of a thread are on their way at once.
#include "ptx/ptx.cuh"

constexpr int kUnits = 4;

struct Places {
  int pages[PAGES];
};

// grid: (parts of a row, layers, pages). Units of 16 bytes: a page has `row` of them in each layer of `cache`, whose
// layers are `layer` apart; in `buffer` its layers follow each other, and pages are `page` apart.
extern "C" __global__ void __launch_bounds__(THREADS)
    move_pages(uint4* cache, long long layer, long long row, uint4* buffer, long long page,
               const __grid_constant__ Places places) {
  uint4* const paged = cache + blockIdx.y * layer + places.pages[blockIdx.z] * row;
  uint4* const packed = buffer + blockIdx.z * page + blockIdx.y * row;
  const uint4* const from = SCATTER ? packed : paged;
  uint4* const to = SCATTER ? paged : packed;
  const long long at = static_cast<long long>(blockIdx.x) * kUnits * THREADS + threadIdx.x;
  uint4 held[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (at + i * THREADS < row) held[i] = from[at + i * THREADS];
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (at + i * THREADS < row) to[at + i * THREADS] = held[i];
}
