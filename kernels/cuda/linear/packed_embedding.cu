// Rows of an embedding that is a weight in rows (kernels/row_layout.py). Bound by memory: 16 bytes a thread, one pass.
// Compiled with BITS, FLOATS and GROUPED (dequantise.cuh).
#include "linear/dequantise.cuh"

// A block a token: out [tokens, inputs] = feature id - first_row, or 0.
extern "C" __global__ void packed_embedding(const int* ids, const uint4* weight, const void* qparams, void* out,
                                            int features, int groups, int group_sets, int inputs, int k_tiles,
                                            int k_offset, int first_row, int out_floats) {
  const int feature = ids[blockIdx.x] - first_row;
  const bool is_ours = feature >= 0 && feature < features;
  const long long row = static_cast<long long>(blockIdx.x) * inputs;
  for (int at = threadIdx.x; at < k_tiles * 4; at += blockDim.x) {
    const uint4 chunk = is_ours ? weight[static_cast<long long>(feature) * k_tiles * 4 + at] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float values[8] = {};
      if (is_ours) weights_of(chunk, qparams, features, groups, group_sets, feature, at / 4, set, values);
      const int input = (at / 4 * kSets + set) * 32 + at % 4 * 8 - k_offset;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (input + e < 0 || input + e >= inputs) continue;
        if (out_floats)
          static_cast<float*>(out)[row + input + e] = values[e];
        else
          static_cast<bf16*>(out)[row + input + e] = narrow(values[e]);
      }
    }
  }
}
