// Prefill attention over paged KV, bfloat16, for sm_80 and later: FlashAttention-2 (T. Dao, arXiv:2307.08691) with the
// heads of a group in the rows of one tile, so that they share its keys and values.
// Compiled with HEAD_DIM (64 or 128).
#include "ptx.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
constexpr int D = HEAD_DIM, kWarps = 4, kWarpRows = 32, kRows = kWarps * kWarpRows, kTokens = 64;
constexpr int kRow = D * 2, kChunks = D / 8;  // bytes, and 16-byte chunks, of a row
constexpr int kThreads = kWarps * 32;
constexpr int kSteps = D / 16, kOut = D / 8, kScores = kTokens / 8;

// 16-byte chunk `c` of row `r`, swizzled so that ldmatrix meets no bank twice.
__device__ __forceinline__ uint32_t chunk(int r, int c) { return r * kRow + ((c ^ (r & 7)) << 4); }

// tiles: [blocks][2]: request (-1: none), and first row of the tile; row i of a request is query i / group, head
// i % group of the KV head's. first_heads: [kv_heads + 1], or null: as many query heads for each.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    prefill(const bf16* q, long long q_stride, const bf16* k_cache, const bf16* v_cache, long long page_stride,
            long long head_stride, long long token_stride, const int* tiles, const int* qo_indptr,
            const int* page_indptr, const int* indices, const int* kv_lens, const int* first_heads, bf16* out,
            float* lse, int heads, int page_shift, int is_causal, float scale_log2) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int request = tiles[2 * blockIdx.x], row0 = tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
  if (request < 0) return;
  const int even = heads / gridDim.y, first_head = first_heads ? first_heads[kv_head] : even * kv_head;
  const int group = first_heads ? first_heads[kv_head + 1] - first_head : even;
  const int first_query = qo_indptr[request], queries = qo_indptr[request + 1] - first_query;
  const int length = kv_lens[request], rows = queries * group;
  if (row0 >= rows) return;
  const int* pages = indices + page_indptr[request];
  const bf16 *k = k_cache + kv_head * head_stride, *v = v_cache + kv_head * head_stride;
  char *const q_tile = shared, *const k_tile = q_tile + kRows * kRow, *const v_tile = k_tile + kTokens * kRow;
  const int before = length - queries;  // tokens that the first query sees beside itself
  const int last_row = min(row0 + kRows, rows) - 1;
  const int end = is_causal ? min(length, before + last_row / group + 1) : length;
  const int all_see = is_causal ? before + row0 / group + 1 : length;  // tokens that every row of the tile sees

  for (int at = threadIdx.x; at < kRows * kChunks; at += kThreads) {
    const int r = at / kChunks, c = at % kChunks, row = row0 + r;
    const bool is_there = row < rows;
    const long long from =
        is_there ? (first_query + row / group) * q_stride + (first_head + row % group) * D + c * 8 : 0;
    copy16(smem(q_tile + chunk(r, c)), q + from, is_there);
  }
  commit();
  const auto ask = [&](char* to, const bf16* from, int token0) {
    constexpr int kRowsAtOnce = kThreads / kChunks;
#pragma unroll
    for (int j = 0; j < kTokens / kRowsAtOnce; ++j) {
      const int r = j * kRowsAtOnce + threadIdx.x / kChunks, c = threadIdx.x % kChunks, token = token0 + r;
      const bool is_there = token < end;
      const int page = is_there ? __ldg(pages + (token >> page_shift)) : 0;
      const long long at = page * page_stride + (token & ((1 << page_shift) - 1)) * token_stride + c * 8;
      copy16(smem(to + chunk(r, c)), from + (is_there ? at : 0), is_there);
    }
    commit();
  };
  ask(k_tile, k, 0);
  ask(v_tile, v, 0);

  float o[2][kOut][4], top[2][2], total[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kOut; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
    top[m][0] = top[m][1] = -kInf, total[m][0] = total[m][1] = 0;
  }
  const uint32_t q_at = smem(q_tile), k_at = smem(k_tile), v_at = smem(v_tile);
  // Row of a fragment's lane: q is read as 16 x 16 tiles, keys as 16 tokens x 16 elements, values transposed.
  const int q_row = warp * kWarpRows + lane % 16, q_half = lane / 16;
  const int k_row = lane % 8 + lane / 16 * 8, k_half = lane / 8 % 2;

  for (int token0 = 0; token0 < end; token0 += kTokens) {
    wait_for<1>();
    __syncthreads();
    float s[2][kScores][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < kScores; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[2][4];
      load4(a[0], q_at + chunk(q_row, step * 2 + q_half));
      load4(a[1], q_at + chunk(q_row + 16, step * 2 + q_half));
#pragma unroll
      for (int n = 0; n < kScores; n += 2) {
        uint32_t b[4];
        load4(b, k_at + chunk(n * 8 + k_row, step * 2 + k_half));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply(s[m][n], a[m], b[0], b[1]);
          multiply(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();
    if (token0 + kTokens < end)
      ask(k_tile, k, token0 + kTokens);
    else
      commit();

    if (token0 + kTokens > min(all_see, end)) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + warp * kWarpRows + m * 16 + h * 8 + lane / 4;
          const int sees = is_causal ? min(end, before + row / group + 1) : length;
#pragma unroll
          for (int n = 0; n < kScores; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (token0 + n * 8 + lane % 4 * 2 + e >= sees) s[m][n][h * 2 + e] = -kInf;
        }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float high = s[m][0][h * 2];
#pragma unroll
        for (int n = 0; n < kScores; ++n) high = fmaxf(high, fmaxf(s[m][n][h * 2], s[m][n][h * 2 + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        high = fmaxf(high * scale_log2, top[m][h]);
        const float base = high == -kInf ? 0 : high;
        const float keep = power(top[m][h] - base);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kScores; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum += s[m][n][h * 2 + e] = power(fmaf(s[m][n][h * 2 + e], scale_log2, -base));
        total[m][h] = total[m][h] * keep + sum;
        top[m][h] = high;
        if (__any_sync(~0u, keep != 1.0f)) {
#pragma unroll
          for (int n = 0; n < kOut; ++n) o[m][n][h * 2] *= keep, o[m][n][h * 2 + 1] *= keep;
        }
      }
    wait_for<1>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      uint32_t a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        a[m][0] = pack(s[m][2 * step][0], s[m][2 * step][1]), a[m][1] = pack(s[m][2 * step][2], s[m][2 * step][3]);
        a[m][2] = pack(s[m][2 * step + 1][0], s[m][2 * step + 1][1]),
        a[m][3] = pack(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kOut; n += 2) {
        uint32_t b[4];
        load4_transposed(b, v_at + chunk(step * 16 + lane % 16, n + lane / 16));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply(o[m][n], a[m], b[0], b[1]);
          multiply(o[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    __syncthreads();
    if (token0 + kTokens < end)
      ask(v_tile, v, token0 + kTokens);
    else
      commit();
  }
  wait_for<0>();
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = total[m][h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = row0 + warp * kWarpRows + m * 16 + h * 8 + lane / 4;
      if (row >= rows) continue;
      const float by = sum > 0 ? 1.0f / sum : 0;
      const long long head = static_cast<long long>(first_query + row / group) * heads + first_head + row % group;
#pragma unroll
      for (int n = 0; n < kOut; ++n)
        *reinterpret_cast<uint32_t*>(out + head * D + n * 8 + lane % 4 * 2) =
            pack(o[m][n][h * 2] * by, o[m][n][h * 2 + 1] * by);
      if (lse && lane % 4 == 0) lse[head] = sum > 0 ? top[m][h] + log2f(sum) : -kInf;
    }
}
