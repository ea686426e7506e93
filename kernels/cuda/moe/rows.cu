// What mixtures of experts need beside products with weights of experts: sums of a token's choices, gated products of
// single slots, rows times a number, and a router's logits.
//
// Compiled with OUT_FLOATS (out is float32; else of 16 bits).
#include "linear/decode.cuh"

#ifndef OUT_FLOATS
#define OUT_FLOATS 0
#endif

__device__ __forceinline__ float read(const void* from, long long at) {
  return OUT_FLOATS ? static_cast<const float*>(from)[at] : wide(static_cast<const bf16*>(from)[at]);
}
__device__ __forceinline__ void write(void* to, long long at, float x) {
  if (OUT_FLOATS)
    static_cast<float*>(to)[at] = x;
  else
    static_cast<bf16*>(to)[at] = narrow(x);
}
__device__ __forceinline__ long long first_of_thread() {
  let_next_begin();
  wait_for_ahead();
  return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ long long all_threads() { return static_cast<long long>(gridDim.x) * blockDim.x; }

// out[row] (+)= sum of weights · products of the row's choices that have a place: products float32 [rows, top_k,
// width], a multiple of 4 wide.
extern "C" __global__ void __launch_bounds__(256)
    sum_choices(const float4* products, const int* places, const float* weights, void* out, int rows, int top_k,
                int width, int out_stride, int adds) {
  const int units = width / 4;
  for (long long at = first_of_thread(); at < static_cast<long long>(rows) * units; at += all_threads()) {
    const long long row = at / units, unit = at % units;
    float total[4] = {};
    for (int j = 0; j < top_k; ++j) {
      const long long slot = row * top_k + j;
      if (places[slot] < 0) break;  // all of these are last
      const float4 product = products[slot * units + unit];
      const float weight = weights[slot];
      total[0] += weight * product.x, total[1] += weight * product.y;
      total[2] += weight * product.z, total[3] += weight * product.w;
    }
    const long long to = row * out_stride + unit * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) write(out, to + i, adds ? read(out, to + i) + total[i] : total[i]);
  }
}

// … of products of 16 bits, a multiple of 8 wide; rows of out begin at multiples of 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
    sum_halves(const uint4* products, const int* places, const float* weights, void* out, int rows, int top_k,
               int width, int out_stride, int adds) {
  constexpr int kTogether = 8;
  const int units = width / 8;
  for (long long at = first_of_thread(); at < static_cast<long long>(rows) * units; at += all_threads()) {
    const long long row = at / units, unit = at % units;
    float total[8] = {};
    for (int first = 0; first < top_k; first += kTogether) {
      uint4 product[kTogether];
      float weight[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const long long slot = row * top_k + first + j;
        const bool is_there = first + j < top_k && places[slot] >= 0;
        product[j] = is_there ? products[slot * units + unit] : make_uint4(0, 0, 0, 0);
        weight[j] = is_there ? weights[slot] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[i * 2] += weight[j] * wide_low(word(product[j], i));
          total[i * 2 + 1] += weight[j] * wide_high(word(product[j], i));
        }
    }
    const long long to = row * out_stride + unit * 8;
    if (OUT_FLOATS) {
      float4* const four = reinterpret_cast<float4*>(static_cast<float*>(out) + to);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 old = adds ? four[i] : make_float4(0, 0, 0, 0);
        four[i] = make_float4(old.x + total[i * 4], old.y + total[i * 4 + 1], old.z + total[i * 4 + 2],
                              old.w + total[i * 4 + 3]);
      }
    } else {
      uint4* const eight = reinterpret_cast<uint4*>(static_cast<bf16*>(out) + to);
      const uint4 old = adds ? *eight : make_uint4(0, 0, 0, 0);
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[i] = pack(wide_low(word(old, i)) + total[i * 2], wide_high(word(old, i)) + total[i * 2 + 1]);
      *eight = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

// out[slot] = activation(first half) · second half of rows of slots that have a place.
extern "C" __global__ void __launch_bounds__(256)
    gated_slots(const bf16* gate_up, const int* places, void* out, long long slots, int width, int activation) {
  for (long long at = first_of_thread(); at < slots * width; at += all_threads()) {
    const long long slot = at / width, from = at + slot * width;
    if (places[slot] >= 0) write(out, at, gated(wide(gate_up[from]), wide(gate_up[from + width]), activation));
  }
}

// out[slot] = x[slot / choices] at the columns of the slot's place, of slots that have one.
extern "C" __global__ void __launch_bounds__(256) gather_slots(const bf16* x, const int* columns, const int* places,
                                                               bf16* out, long long slots, int width, int choices) {
  for (long long at = first_of_thread(); at < slots * width; at += all_threads()) {
    const long long slot = at / width, place = places[slot];
    if (place >= 0) out[at] = x[slot / choices * width + columns[place * width + at % width]];
  }
}

// x[row] *= logistic(logits[row]).
extern "C" __global__ void __launch_bounds__(256) scale_rows(void* x, const float* logits, long long rows, int width) {
  for (long long at = first_of_thread(); at < rows * width; at += all_threads())
    write(x, at, read(x, at) / (1.0f + expf(-logits[at / width])));
}

// out[row][feature] = x[row] · weight[feature] (+ bias), in float32: block (feature, 8 rows), whose weight it asks for
// before it waits. inputs are a multiple of 4.
constexpr int kThreads = 128, kAhead = 4, kTogether = 8;
extern "C" __global__ void __launch_bounds__(kThreads)
    exact_linear(const bf16* x, const float4* weight, const float* bias, float* out, int rows, int inputs) {
  __shared__ float of_warps[kThreads / 32][kTogether];
  const int chunks = inputs / 4, features = gridDim.x, row0 = blockIdx.y * kTogether;
  const float4* const from = weight + static_cast<long long>(blockIdx.x) * chunks;
  const int there = min(kTogether, rows - row0);
  float sums[kTogether] = {};
  const auto add = [&](int chunk, const float4& w) {
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      if (r >= there) break;
      const uint2 pairs = *reinterpret_cast<const uint2*>(x + static_cast<long long>(row0 + r) * inputs + chunk * 4);
      sums[r] = fmaf(wide_low(pairs.x), w.x, fmaf(wide_high(pairs.x), w.y, sums[r]));
      sums[r] = fmaf(wide_low(pairs.y), w.z, fmaf(wide_high(pairs.y), w.w, sums[r]));
    }
  };
  float4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int chunk = threadIdx.x + i * kThreads;
    if (chunk < chunks) ahead[i] = from[chunk];
  }
  let_next_begin();
  wait_for_ahead();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int chunk = threadIdx.x + i * kThreads;
    if (chunk < chunks) add(chunk, ahead[i]);
  }
  for (int chunk = threadIdx.x + kAhead * kThreads; chunk < chunks; chunk += kThreads) add(chunk, from[chunk]);
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
#pragma unroll
    for (int o = 16; o; o >>= 1) sums[r] += __shfl_xor_sync(~0u, sums[r], o);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][r] = sums[r];
  }
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= there) return;
  float total = bias ? bias[blockIdx.x] : 0.0f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) total += of_warps[w][r];
  out[static_cast<long long>(row0 + r) * features + blockIdx.x] = total;
}
