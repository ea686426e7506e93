// Products of a few rows with a matrix of each head: those of queries with what makes keys, and those of sums of
// latents with what makes values. Bounded by memory: a thread block has some features of a head, whose weights are on
// their way before the kernel ahead has ended; so are inputs of the step, which are there before its first kernel.
// Compiled with INPUTS; MERGES (1: rows whose tokens were cut lie in the parts that attend.cu left, which every block
// merges for itself); and APPENDS (1: blocks beside those of the product turn the queries and append latents, of which
// the product needs nothing: so no kernel waits for that), with what append.cuh says.
#include "latent/attend/cut.cuh"

#ifndef APPENDS
#define APPENDS 0
#endif
#if APPENDS
#include "latent/append.cuh"
#endif

#ifndef INPUTS
#define INPUTS 512
#endif
#ifndef MERGES
#define MERGES 1
#endif
constexpr int kInputs = INPUTS, kMostRows = 8, kWarps = kThreads / 32;
constexpr int kWords = (kInputs / 8 + 31) / 32;  // 16-byte words of a feature that a lane has
constexpr int kFeatures = kWords > 1 ? 2 : 8;    // of a warp
static_assert(INPUTS % 8 == 0, "inputs");

// Shared memory: the rows of a head, and where the tiles begin that attend.cu cut.
struct HeadRows {
  float4 of[kMostRows][kInputs / 4];
  int begins[MERGES ? kMostRows * 8 + 1 : 1];
};

// By the blocks blockIdx.x of each head, `block` of them features apart. x: [rows, heads, ..], rows x_stride and heads
// x_head elements apart; weight: [heads, features, INPUTS]; out: likewise. partial, kv_lens: of attend.cu or
// attend_sm90.cu, of requests of one query each, row for row, whose grid had this cutting.
__device__ __forceinline__ void multiply_heads(HeadRows& inputs, const bf16* x, long long x_stride, int x_head,
                                               const bf16* weight, bf16* out, long long out_stride, int out_head,
                                               int rows, int features, int block, const Cutting& cutting,
                                               const float* partial, const int* kv_lens) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const int feature0 = (block * kWarps + warp) * kFeatures;
  const bf16* const of_head = weight + static_cast<long long>(head) * features * kInputs;
  uint4 w[kFeatures][kWords];
#pragma unroll
  for (int f = 0; f < kFeatures; ++f)
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = i * 32 + lane;
      w[f][i] = make_uint4(0, 0, 0, 0);
      if (feature0 + f < features && word < kInputs / 8)
        w[f][i] = load16(of_head + static_cast<long long>(feature0 + f) * kInputs + word * 8);
    }
  if (MERGES && threadIdx.x == 0) cutting.line(kv_lens, rows, inputs.begins);
  let_next_begin();
  wait_for_ahead();
  if (MERGES) __syncthreads();
  const Cut cut = MERGES ? cutting.cut(inputs.begins, rows) : Cut(0, 1, 1, true);
  for (int slot = threadIdx.x; slot < rows * (kInputs / 4); slot += kThreads) {
    const int row = slot / (kInputs / 4), column = slot % (kInputs / 4) * 4;
    float4 sum;
    const float* parts = nullptr;
    int pieces = 1;
    if (MERGES) {
      const Parts of_row(cutting, cut, inputs.begins, row, head, partial, kInputs);
      parts = of_row.first, pieces = of_row.pieces;
    }
    if (pieces > 1) {
      const Merged merged =
          merge_parts<8>(parts, pieces, cutting.beside, cutting.tile_rows, kInputs, head % cutting.tile_rows, column);
      const float once = merged.total == 0 ? 0 : 1 / merged.total;
      sum = make_float4(merged.sum.x * once, merged.sum.y * once, merged.sum.z * once, merged.sum.w * once);
    } else {
      const uint2 pairs = *reinterpret_cast<const uint2*>(x + row * x_stride + head * x_head + column);
      sum = make_float4(wide_low(pairs.x), wide_high(pairs.x), wide_low(pairs.y), wide_high(pairs.y));
    }
    inputs.of[row][column / 4] = sum;
  }
  __syncthreads();
  for (int row = 0; row < rows; ++row) {
    float sums[kFeatures] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int word = i * 32 + lane;
      if (word >= kInputs / 8) continue;
      const float4 low = inputs.of[row][word * 2];
      const float4 high = inputs.of[row][word * 2 + 1];
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) {
        const uint4 y = w[f][i];
        float& sum = sums[f];
        sum = fmaf(low.x, wide_low(y.x), fmaf(low.y, wide_high(y.x), sum));
        sum = fmaf(low.z, wide_low(y.y), fmaf(low.w, wide_high(y.y), sum));
        sum = fmaf(high.x, wide_low(y.z), fmaf(high.y, wide_high(y.z), sum));
        sum = fmaf(high.z, wide_low(y.w), fmaf(high.w, wide_high(y.w), sum));
      }
    }
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) {
#pragma unroll
      for (int o = 16; o; o >>= 1) sums[f] += __shfl_xor_sync(~0u, sums[f], o);
      if (lane == 0 && feature0 + f < features)
        out[row * out_stride + head * out_head + feature0 + f] = narrow(sums[f]);
    }
  }
}

#if APPENDS
static_assert(kThreads == kAppendThreads && !MERGES, "threads");

// q: [rows, heads, size], rows q_stride elements apart; weight: [heads, features, INPUTS]; out: [rows, heads, ..]. The
// first row of blocks has one for each head, which turns its queries and appends the tokens of that number.
extern "C" __global__ void __launch_bounds__(kThreads)
    absorb_append(bf16* q, long long q_stride, int size, const bf16* weight, bf16* out, long long out_stride,
                  int out_head, int rows, int heads, int features, bf16* kv, long long kv_stride, int latent, int rot,
                  const float* norm, float eps, const int* positions, const float* cos_sin, void* cache, float* scales,
                  long long page_stride, long long token_stride, int page_size, const int* slots) {
  __shared__ HeadRows inputs;
  const int head = blockIdx.x, half = rot / 2;
  if (blockIdx.y > 0) {
    multiply_heads(inputs, q, q_stride, size, weight, out, out_stride, out_head, rows, features, blockIdx.y - 1, {},
                   nullptr, nullptr);
    return;
  }
  const Append a = {kv,        norm,        positions,    cos_sin, cache, scales,    slots,
                    kv_stride, page_stride, token_stride, latent,  rot,   page_size, eps};
  __shared__ float room[kAppendThreads / 32];
  TokenAppend append(a);
  int i = threadIdx.x;
  float cosine = 0, sine = 0;
  const auto find = [&] {
    if (i >= rows * half) return;
    const float* const angles = cos_sin + static_cast<long long>(positions[i / half]) * rot;
    cosine = angles[i % half], sine = angles[half + i % half];
  };
  find();
  if (head < rows) append.place(head);
  let_next_begin();
  wait_for_ahead();
  if (head < rows) append.load();
  for (; i < rows * half; find()) {
    turn_query(q + i / half * q_stride + head * size, size, i % half, rot, cosine, sine);
    i += kThreads;
  }
  for (int token = head; token < rows; token += heads) {
    if (token != head) append.place(token), append.load();
    append.run(room);
  }
}
#else
// tile_rows and so on: see Cutting.
extern "C" __global__ void __launch_bounds__(kThreads)
    latent_product(const bf16* x, long long x_stride, int x_head, const bf16* weight, bf16* out, long long out_stride,
                   int out_head, int rows, int heads, int features, const float* partial, const int* kv_lens,
                   int tile_rows, int grid, int beside, int unit, int least) {
  __shared__ HeadRows inputs;
  multiply_heads(inputs, x, x_stride, x_head, weight, out, out_stride, out_head, rows, features, blockIdx.y,
                 {tile_rows, grid, beside, unit, least, heads}, partial, kv_lens);
}
#endif
