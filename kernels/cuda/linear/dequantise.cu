// A weight in rows (kernels/row_layout.py) as a plain matrix of 16-bit elements, for products of many rows. Bound by
// memory: 16 bytes a thread, one pass. Compiled with BITS, FLOATS and GROUPED (dequantise.cuh).
#include "linear/dequantise.cuh"

// Block (any, place), places place_bytes apart. out: 16-bit elements [places, features, k tiles · 32 · kSets], inputs
// in their order.
extern "C" __global__ void dequantise(const char* weights, const char* all_qparams, uint4* out, long long place_bytes,
                                      int features, int groups, int group_sets, int k_tiles) {
  const long long chunks = static_cast<long long>(features) * k_tiles * 4;
  const uint4* const weight = reinterpret_cast<const uint4*>(weights + blockIdx.y * place_bytes);
  const char* const qparams = all_qparams + blockIdx.y * place_bytes;
  out += blockIdx.y * chunks * kSets;
  for (long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; at < chunks;
       at += static_cast<long long>(gridDim.x) * blockDim.x) {
    const int feature = static_cast<int>(at / (k_tiles * 4)), k_tile = static_cast<int>(at / 4 % k_tiles);
    const uint4 chunk = stream16(weight + at);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float values[8];
      weights_of(chunk, qparams, features, groups, group_sets, feature, k_tile, set, values);
      out[(at / 4 * kSets + set) * 4 + at % 4] = packed(values);
    }
  }
}
