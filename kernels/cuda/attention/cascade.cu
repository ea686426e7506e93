// Merging of attention states: what queries make of parts of their tokens, with the logarithm to base 2 of the sum of
// each (-inf: of none). Bounded by memory: all is read once. Compiled with WIDE_IN and WIDE_OUT, 1 for float32, 0 for
// 16 bits. A thread takes 8 elements of a head.
#include "attention/scores.cuh"
#include "ptx/ptx.cuh"

#ifndef WIDE_IN
#define WIDE_IN 1
#endif
#ifndef WIDE_OUT
#define WIDE_OUT 0
#endif

template <bool kWide>
__device__ __forceinline__ void load8(float* x, const void* from, long long at) {
  if (kWide) {
    const float4* const p = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    const float4 a = __ldcs(p), b = __ldcs(p + 1);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const uint4 a = __ldcs(reinterpret_cast<const uint4*>(static_cast<const bf16*>(from) + at));
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = wide(words[i] & 0xffff), x[2 * i + 1] = wide(words[i] >> 16);
  }
}

// State i of a row is at v + i * state_stride + row * row_stride elements, heads one after the other, and its logarithm
// likewise, in heads instead of elements. With own, own_lse (out's rows, or null) that is one more state; they may be
// out and lse. With sinks ([heads], to base e, or null) a row that saw anything has one more, without a value.
extern "C" __global__ void __launch_bounds__(256)
    merge_states(const void* v, const float* s, long long state_stride, long long row_stride, int states,
                 const void* own, const float* own_lse, void* out, float* lse, int rows, int heads, int dim,
                 const float* sinks) {
  const int eighths = dim / 8, each = 256 / eighths;  // heads of a block, whole ones
  const long long place = static_cast<long long>(blockIdx.x) * each + threadIdx.x / eighths;  // of a row and a head
  const int column = threadIdx.x % eighths * 8;
  const bool is_there = threadIdx.x < each * eighths && place < static_cast<long long>(rows) * heads;
  wait_for_ahead();
  let_next_begin();
  const float mine = own && is_there ? own_lse[place] : -kInf;
  __syncthreads();  // before lse is written, which may be own_lse
  if (!is_there) return;
  const long long first = place / heads * row_stride + place % heads;  // in heads

  float top = mine;
#pragma unroll 4
  for (int i = 0; i < states; ++i) top = fmaxf(top, s[first + i * state_stride]);
  float base = top == -kInf ? 0 : top, total = 0, sum[8] = {};
  if (own && mine != -kInf) {  // what nothing was seen of may hold anything
    total = power(mine - base);
    load8<WIDE_OUT>(sum, own, place * dim + column);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] *= total;
  }
#pragma unroll 4
  for (int i = 0; i < states; ++i) {
    const float part = s[first + i * state_stride], by = power(part - base);
    float x[8];
    load8<WIDE_IN>(x, v, (first + i * state_stride) * dim + column);
    total += by;
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += part == -kInf ? 0 : x[e] * by;
  }
  const float keep = sinks && total != 0 ? join_sink(sinks[place % heads], base, total) : 1;
  const float once = total == 0 ? 0 : keep / total;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum[e] *= once;
  if (WIDE_OUT) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(out) + place * dim + column);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  } else {
    *reinterpret_cast<uint4*>(static_cast<bf16*>(out) + place * dim + column) =
        make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
  }
  if (lse && column == 0) lse[place] = total == 0 ? -kInf : base + log2f(total);
}
