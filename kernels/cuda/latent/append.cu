// All that lies between the products with a layer's queries and latents and its attention: a thread block has a token.
// Compiled with what append.cuh says; of a few tokens products.cu does the same.
#include "latent/append.cuh"

// q: [tokens, heads, size], of which the last rot elements turn, rows q_stride elements apart; q_scales: [positions] or
// null. The rest: see Append.
extern "C" __global__ void __launch_bounds__(kAppendThreads)
    latent_append(bf16* q, long long q_stride, int heads, int size, const float* q_scales, bf16* kv,
                  long long kv_stride, int latent, int rot, const float* norm, float eps, const int* positions,
                  const float* cos_sin, void* cache, float* scales, long long page_stride, long long token_stride,
                  int page_size, const int* slots) {
  const int token = blockIdx.x;
  const Append a = {kv,        norm,        positions,    cos_sin, cache, scales,    slots,
                    kv_stride, page_stride, token_stride, latent,  rot,   page_size, eps};
  __shared__ float room[kAppendThreads / 32];
  TokenAppend append(a);
  let_next_begin();
  wait_for_ahead();
  append.place(token);
  append.load();
  bf16* const queries = q + token * q_stride;
  for (int i = threadIdx.x; i < heads * (rot / 2); i += kAppendThreads)
    turn_query(queries, size, i, rot, append.angles()[i % (rot / 2)], append.angles()[rot / 2 + i % (rot / 2)]);
  append.run(room);  // all threads meet within
  if (q_scales) {
    const float factor = q_scales[positions[token]];
    for (int i = threadIdx.x; i < heads * size; i += kAppendThreads) queries[i] = narrow(wide(queries[i]) * factor);
  }
}
