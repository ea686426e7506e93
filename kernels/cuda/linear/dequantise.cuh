// Weights in rows (kernels/row_layout.py) as float32 values: what dequantise.cu, packed_embedding.cu and epilogue.cu
// share. Compiled with BITS and FLOATS (decode.cuh) and GROUPED (qparams for each group, else float32 for all inputs).
#pragma once
#include "linear/decode.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif

// What is `base` more than a code, times `scale`, less `offset`, is the weight.
__device__ __forceinline__ void qparams_of(const void* qparams, long long at, int set, float base, float& scale,
                                           float& offset) {
  float least = 0;
  if (BITS == 16) {
    scale = 1;
  } else if (GROUPED) {
    const uint32_t pair = static_cast<const uint32_t*>(qparams)[at];
    scale = scale_of(pair, set), least = offset_of(pair);
  } else {
    const float2 pair = static_cast<const float2*>(qparams)[at];
    scale = pair.x, least = pair.y;
  }
  offset = base * scale + least;
}

// The 8 inputs of a set that a chunk holds, of a feature.
__device__ __forceinline__ void weights_of(const uint4& chunk, const void* qparams, int features, int groups,
                                           int group_sets, int feature, int k_tile, int set, float* values) {
  uint32_t pairs[4];
  decode(chunk, set, pairs);
  float scale, offset;
  // Of what fills the last k tile, the last one.
  const long long group = GROUPED ? min((k_tile * kSets + set) / group_sets, groups - 1) : 0;
  qparams_of(qparams, group * features + feature, set, kBase, scale, offset);
  scale *= kUnit;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    values[j * 2] = scale * wide(pairs[j] & 0xffff) - offset;
    values[j * 2 + 1] = scale * wide(pairs[j] >> 16) - offset;
  }
}

__device__ __forceinline__ uint4 packed(const float* v) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}
