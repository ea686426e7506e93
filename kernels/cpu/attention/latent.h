// Attention over latents: kernels/ops.py, latent_attention. Keys and values are never made: queries and sums of latents
// are multiplied instead, for any number of rows, so that no row's bits depend on how a prompt is cut.
#pragma once

#include "attention/attention.h"

namespace allspan {

struct LatentArgs {
  const float* q;  // [n, heads, key_dim + rotary_dim], rows q_stride elements apart
  int64_t q_stride;
  const void* k_up;  // [heads, latent_dim, key_dim], of `type`
  const void* v_up;  // [heads, value_dim, latent_dim]
  float* absorbed;   // [n, heads, latent_dim + rotary_dim]
  float* mixed;      // [n, heads, latent_dim]
  float* out;        // [n, heads, value_dim]
  int64_t heads, key_dim, rotary_dim, latent_dim, value_dim;
  Type type;
};

// attention: q, out and sizes are those of `args`.
void latent_attention(Worker& worker, const Kernels& kernels, const LatentArgs& args, AttentionArgs attention,
                      const AttentionBatch& batch, int64_t rows);

}  // namespace allspan
