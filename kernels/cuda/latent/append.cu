// All that lies between the products with a layer's queries and latents and its attention: the norm of a latent, rotary
// embedding of its key and of all queries, and the append to the cache. A thread block has a token. Each step's outcome
// is rounded to 16 bits, as it would be in memory. Compiled with FORMAT (elements.cuh: kBfloat16 for pages of 16 bits,
// kInt8, kE4m3, both with scales).
#define WHOLE 1
#include "rows/elements.cuh"

#ifndef FORMAT
#define FORMAT kBfloat16
#endif
constexpr int kThreads = 128, kMostWidth = 1024, kEach = kMostWidth / kThreads;

template <class F>
__device__ __forceinline__ float over_block(float x, float* room, F&& join) {
  for (int o = 16; o; o >>= 1) x = join(x, __shfl_xor_sync(~0u, x, o));
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = join(join(room[0], room[1]), join(room[2], room[3]));
  __syncthreads();
  return x;
}

// q: [tokens, heads, size], of which the last rot elements turn; kv: [tokens, latent + rot]; tokens *_stride elements
// apart. cos_sin: [positions, rot]; q_scales: [positions] or null. Pages: strides in elements; scales [pages, 2, page
// size]. A slot of -1 writes no page.
extern "C" __global__ void __launch_bounds__(kThreads)
    latent_append(bf16* q, long long q_stride, int heads, int size, bf16* kv, long long kv_stride, int latent, int rot,
                  const float* weight, float eps, const int* positions, const float* cos_sin, const float* q_scales,
                  void* cache, float* scales, long long page_stride, long long token_stride, int page_size,
                  const int* slots) {
  __shared__ float row[kMostWidth], room[kThreads / 32];
  const int token = blockIdx.x, width = latent + rot, half = rot / 2;
  let_next_begin();
  wait_for_ahead();
  bf16 *const own = kv + token * kv_stride, *const queries = q + token * q_stride;
  const int position = positions[token], slot = slots[token];
  const float* const angles = cos_sin + static_cast<long long>(position) * rot;
  float x[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kThreads + threadIdx.x;
    x[i] = at < width ? wide(own[at]) : 0;
    if (at < latent) sum = fmaf(x[i], x[i], sum);
  }
  sum = over_block(sum, room, [](float a, float b) { return a + b; });
  const float by = rsqrtf(sum / latent + eps);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = i * kThreads + threadIdx.x;
    if (at < width) row[at] = at < latent ? rounded<kBfloat16>(x[i] * by * weight[at]) : x[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < half; i += kThreads) {
    const float low = row[latent + i], high = row[latent + half + i], cosine = angles[i], sine = angles[half + i];
    row[latent + i] = rounded<kBfloat16>(low * cosine - high * sine);
    row[latent + half + i] = rounded<kBfloat16>(high * cosine + low * sine);
  }
  for (int i = threadIdx.x; i < heads * half; i += kThreads) {
    bf16* const turned = queries + i / half * size + (size - rot) + i % half;
    const float low = wide(turned[0]), high = wide(turned[half]);
    const float cosine = angles[i % half], sine = angles[half + i % half];
    turned[0] = narrow(low * cosine - high * sine), turned[half] = narrow(high * cosine + low * sine);
  }
  __syncthreads();
  if (q_scales) {
    const float factor = q_scales[position];
    for (int i = threadIdx.x; i < heads * size; i += kThreads) queries[i] = narrow(wide(queries[i]) * factor);
  }
  float zero = 0, scale = 1, inverse = 1;
  bool is_sound = true;
  if (FORMAT != kBfloat16) {
    float least = kInf, most = -kInf, odd = 0;
    for (int at = threadIdx.x; at < width; at += kThreads) {
      least = fminf(least, row[at]), most = fmaxf(most, row[at]);
      odd = fmaf(row[at], 0.0f, odd);  // NaN from the first on that is not finite
    }
    least = over_block(least, room, [](float a, float b) { return fminf(a, b); });
    most = over_block(odd == 0 ? most : kInf, room, [](float a, float b) { return fmaxf(a, b); });
    if (FORMAT == kInt8) {
      scale = fmaxf((most - least) / 255.0f, 1e-5f);
      zero = rintf(-128.0f - least / scale);
      is_sound = most - least < kInf && fabsf(zero) < kInf;
    } else {
      const float top = fmaxf(most, -least);
      scale = fmaxf(top / 448.0f, 1e-5f);
      is_sound = top < kInf;
    }
    if (!is_sound) zero = 0;
    inverse = 1.0f / scale;
  }
  const long long page = slot < 0 ? 0 : slot / page_size, offset = slot < 0 ? 0 : slot % page_size;
  const long long to = page * page_stride + offset * token_stride;
  for (int at = threadIdx.x; at < width; at += kThreads) {
    own[at] = narrow(row[at]);
    if (slot < 0) continue;
    if (FORMAT == kBfloat16) {
      static_cast<bf16*>(cache)[to + at] = narrow(row[at]);
    } else {
      const float n = is_sound ? quotient(row[at], scale, inverse) : 0;
      static_cast<unsigned char*>(cache)[to + at] = static_cast<unsigned char>(
          FORMAT == kInt8 ? __float2int_rn(is_sound ? fminf(fmaxf(n + zero, -128.0f), 127.0f) : 0) & 0xff
                          : pack_e4m3(n, 0) & 0xff);
    }
  }
  if (FORMAT != kBfloat16 && slot >= 0 && threadIdx.x == 0) {
    float* const its = scales + page * 2 * page_size + offset;
    its[0] = zero, its[page_size] = is_sound ? scale : kNaN;
  }
}
