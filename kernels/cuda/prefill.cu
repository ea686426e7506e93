// Prefill attention over paged KV, for sm_80 and later: FlashAttention-2 (T. Dao, arXiv:2307.08691) with the heads of a
// group in the rows of one tile, so that they share its keys and values. Bounded by the tensor cores (mma.sync).
// Compiled with what kv.cuh names, SOFT_CAP (1: logits are capped) and PARTIAL (1: float32 states of parts of the
// tokens, to be merged). One barrier a tile of tokens: keys and values are in two buffers, those of the next tile on
// their way while this one is computed. Codes come the same way and are made bfloat16 once for all rows.
#include "kv.cuh"

#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#ifndef PARTIAL
#define PARTIAL 0
#endif
// Rows of a warp are as many as its registers can hold sums for.
constexpr int kWarps = D <= 128 ? 4 : 8, kMatrices = D <= 128 ? 2 : 1, kWarpRows = kMatrices * 16;
constexpr int kRows = kWarps * kWarpRows, kTokens = D <= 128 ? 64 : 32, kThreads = kWarps * 32;
constexpr int kPitch = pitch(D * 2), kCodePitch = pitch(kRow), kQueryChunks = D / 8;
constexpr int kTileBytes = kTokens * kPitch, kCodeBytes = kTokens * kCodePitch;  // of keys or values
constexpr int kScores = kTokens / 8;
constexpr int kStageBytes = 2 * (kIsCodes ? kCodeBytes : kTileBytes) + (kScaled ? 16 * kTokens : 0);
static_assert(kRows == 128 && kTokens <= kThreads, "as prefill.py has it");

// Codes of a tile as bfloat16.
__device__ __forceinline__ void widen(char* to, const char* codes, const float* scales) {
#pragma unroll 1  // more of them spill registers
  for (int j = 0; j < (kTokens * kChunks + kThreads - 1) / kThreads; ++j) {
    const int at = j * kThreads + threadIdx.x, r = at / kChunks, c = at % kChunks;
    if (kTokens * kChunks % kThreads && r >= kTokens) break;
    uint32_t words[4];
    load_words<kCodePitch, 4>(words, codes, r, c * 16);
    const float zero = kScaled ? scales[r] + kBias : 0, scale = kScaled ? scales[kTokens + r] : 0;
    constexpr int kElements = 128 / kBits;
    uint32_t x[kElements / 2];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t pairs[kPairs];
      spread(pairs, words[w]);
#pragma unroll
      for (int i = 0; i < kPairs; i += 2) {  // codes i and i + 1, and those kPairs further
        uint32_t low = __byte_perm(pairs[i], pairs[i + 1], 0x5410), high = __byte_perm(pairs[i], pairs[i + 1], 0x7632);
        if (kScaled) {
          low = pack((wide(low & 0xffff) - zero) * scale, (wide(low >> 16) - zero) * scale);
          high = pack((wide(high & 0xffff) - zero) * scale, (wide(high >> 16) - zero) * scale);
        }
        x[w * kPairs + i / 2] = low, x[w * kPairs + (kPairs + i) / 2] = high;
      }
    }
#pragma unroll
    for (int i = 0; i < kElements / 8; ++i)
      *reinterpret_cast<uint4*>(to + chunk<kPitch>(r, c * (kElements / 8) + i)) =
          make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
}

// tiles: [blocks][2]: request (-1: none), and first row of the tile; row i of a request is query i / group, head
// i % group of the KV head's. first_heads: [kv_heads + 1], or null: as many query heads for each. Part z of a tile's
// tokens goes to out_ and lse from row z * q_rows on.
extern "C" __global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    prefill(const bf16* q, long long q_stride, const char* k_cache, const char* v_cache, const float* k_scales,
            const float* v_scales, long long page_stride, long long head_stride, long long token_stride,
            const int* tiles, const int* qo_indptr, const int* page_indptr, const int* indices, const int* kv_lens,
            const int* first_heads, void* out, float* lse, int q_rows, int heads, int page_shift, int is_causal,
            int window, float scale, float cap) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_ahead();
  let_next_begin();
  const int request = tiles[2 * blockIdx.x], row0 = tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
  if (request < 0) return;
  const int kv_heads = gridDim.y, even = heads / kv_heads;
  const int first_head = first_heads ? first_heads[kv_head] : even * kv_head;
  const int group = first_heads ? first_heads[kv_head + 1] - first_head : even;
  const int first_query = qo_indptr[request], queries = qo_indptr[request + 1] - first_query;
  const int length = kv_lens[request], rows = queries * group;
  if (row0 >= rows) return;
  const int* pages = indices + page_indptr[request];
  const char *k = k_cache + kv_head * head_stride, *v = v_cache + kv_head * head_stride;
  constexpr int kBuffers = kIsCodes ? 1 : 2;
  char *const q_tile = shared, *const tile = q_tile + kRows * kPitch;                 // [kBuffers]: keys, values
  char* const stages = kIsCodes ? tile + 2 * kTileBytes : tile;                       // [2]: as they come
  long long* const offsets = reinterpret_cast<long long*>(stages + 2 * kStageBytes);  // [2][kTokens], -1: not there

  const int before = length - queries;  // tokens that the first query sees beside itself
  const int last_row = min(row0 + kRows, rows) - 1;
  int begin = window < 0 ? 0 : max(0, before + row0 / group - window) / kTokens * kTokens;
  int end = is_causal ? min(length, before + last_row / group + 1) : length;
  const int stride = ((end - begin + kTokens - 1) / kTokens + gridDim.z - 1) / gridDim.z * kTokens;
  begin += blockIdx.z * stride, end = min(end, begin + stride);
  const int all_see = is_causal ? before + row0 / group + 1 : length;  // tokens that every row of the tile sees, up to
  const int all_from = window < 0 ? 0 : before + last_row / group - window;  // … and from

#pragma unroll
  for (int j = 0; j < kRows * kQueryChunks / kThreads; ++j) {
    const int at = j * kThreads + threadIdx.x, r = at / kQueryChunks, c = at % kQueryChunks, row = row0 + r;
    const bool is_there = row < rows;
    const long long from =
        is_there ? (first_query + row / group) * q_stride + (first_head + row % group) * D + c * 8 : 0;
    copy16(smem(q_tile + chunk<kPitch>(r, c)), q + from, is_there);
  }
  const auto look_up = [&](int token0) {  // the page of this thread's token
    const int token = token0 + threadIdx.x;
    return threadIdx.x < kTokens && token < end ? __ldg(pages + (token >> page_shift)) : 0;
  };
  const auto put = [&](int token0, int page) {
    const int token = token0 + threadIdx.x;
    if (threadIdx.x < kTokens)
      offsets[(token0 - begin) / kTokens % 2 * kTokens + threadIdx.x] =
          token < end ? page * page_stride + (token & ((1 << page_shift) - 1)) * token_stride : -1;
  };
  const auto ask = [&](int token0, int page) {
    const int parity = (token0 - begin) / kTokens % 2;
    char* const to = stages + parity * kStageBytes;
    constexpr int kPitchHere = kIsCodes ? kCodePitch : kPitch, kBytes = kTokens * kPitchHere;
#pragma unroll 4  // all of them spill registers
    for (int j = 0; j < (kTokens * kChunks + kThreads - 1) / kThreads; ++j) {
      const int at = j * kThreads + threadIdx.x, r = at / kChunks, c = at % kChunks;
      if (kTokens * kChunks % kThreads && r >= kTokens) break;
      const long long offset = offsets[parity * kTokens + r];
      const bool is_there = offset >= 0;
      const long long from = (is_there ? offset : 0) + c * 16;
      copy16(smem(to + chunk<kPitchHere>(r, c)), k + from, is_there);
      copy16(smem(to + kBytes + chunk<kPitchHere>(r, c)), v + from, is_there);
    }
    if (kScaled && threadIdx.x < kTokens) {
      const int token = token0 + threadIdx.x;
      const bool is_there = token < end;
      const long long zero = (static_cast<long long>(page) * kv_heads + kv_head << 1) << page_shift;
      const uint32_t scales = smem(to + 2 * kBytes) + threadIdx.x * 4;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const long long at = is_there ? zero + (which << page_shift) + (token & ((1 << page_shift) - 1)) : 0;
        copy4(scales + which * kTokens * 4, k_scales + at, is_there);
        copy4(scales + (2 + which) * kTokens * 4, v_scales + at, is_there);
      }
    }
  };
  int page_next = look_up(begin);
  put(begin, page_next);
  const int page_first = page_next;
  page_next = look_up(begin + kTokens);
  put(begin + kTokens, page_next);
  __syncthreads();
  if (begin < end) ask(begin, page_first);
  commit();

  float o[kMatrices][kOut][4], top[kMatrices][2], total[kMatrices][2];
#pragma unroll
  for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
    for (int n = 0; n < kOut; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0;
    top[m][0] = top[m][1] = -kInf, total[m][0] = total[m][1] = 0;
  }
  const uint32_t q_at = smem(q_tile);
  // Row of a fragment's lane: q is read as 16 x 16 tiles, keys as 16 tokens x 16 elements, values transposed.
  const int q_row = warp * kWarpRows + lane % 16, q_half = lane / 16;
  const int k_row = lane % 8 + lane / 16 * 8, k_half = lane / 8 % 2;
#if SOFT_CAP
  const float by = 1;
#else
  const float by = scale;
#endif

  for (int token0 = begin; token0 < end; token0 += kTokens) {
    const int parity = (token0 - begin) / kTokens % 2;
    wait_for<0>();
    __syncthreads();
    if (token0 + kTokens < end) ask(token0 + kTokens, page_next);
    commit();
    page_next = look_up(token0 + 2 * kTokens);
    if (kIsCodes) {
      const char* const codes = stages + parity * kStageBytes;
      const float* const scales = reinterpret_cast<const float*>(codes + 2 * kCodeBytes);
      widen(tile, codes, scales);
      widen(tile + kTileBytes, codes + kCodeBytes, scales + 2 * kTokens);
      __syncthreads();
    }
    const uint32_t k_at = smem(tile + (kBuffers == 2 ? parity * kStageBytes : 0)), v_at = k_at + kTileBytes;

    float s[kMatrices][kScores][4];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int n = 0; n < kScores; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[kMatrices][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) load4(a[m], q_at + chunk<kPitch>(q_row + m * 16, step * 2 + q_half));
#pragma unroll
      for (int n = 0; n < kScores; n += 2) {
        uint32_t b[4];
        load4(b, k_at + chunk<kPitch>(n * 8 + k_row, step * 2 + k_half));
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          multiply(s[m][n], a[m], b[0], b[1]);
          multiply(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
#if SOFT_CAP
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int n = 0; n < kScores; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = cap * tanh_of(s[m][n][e] * scale);
#endif
    if (token0 + kTokens > min(all_see, end) || token0 < all_from) {
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int query = (row0 + warp * kWarpRows + m * 16 + h * 8 + lane / 4) / group;
          const int sees = is_causal ? min(end, before + query + 1) : end;
          const int from = window < 0 ? 0 : before + query - window;
#pragma unroll
          for (int n = 0; n < kScores; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int token = token0 + n * 8 + lane % 4 * 2 + e;
              if (token >= sees || token < from) s[m][n][h * 2 + e] = -kInf;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float high = s[m][0][h * 2];
#pragma unroll
        for (int n = 0; n < kScores; ++n) high = fmaxf(high, fmaxf(s[m][n][h * 2], s[m][n][h * 2 + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        high = fmaxf(high * by, top[m][h]);
        const float base = high == -kInf ? 0 : high;
        const float keep = power(top[m][h] - base);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kScores; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) sum += s[m][n][h * 2 + e] = power(fmaf(s[m][n][h * 2 + e], by, -base));
        total[m][h] = total[m][h] * keep + sum;
        top[m][h] = high;
        if (__any_sync(~0u, keep != 1.0f)) {
#pragma unroll
          for (int n = 0; n < kOut; ++n) o[m][n][h * 2] *= keep, o[m][n][h * 2 + 1] *= keep;
        }
      }
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
      uint32_t a[kMatrices][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        a[m][0] = pack(s[m][2 * step][0], s[m][2 * step][1]), a[m][1] = pack(s[m][2 * step][2], s[m][2 * step][3]);
        a[m][2] = pack(s[m][2 * step + 1][0], s[m][2 * step + 1][1]),
        a[m][3] = pack(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
      }
#pragma unroll
      for (int n = 0; n < kOut; n += 2) {
        uint32_t b[4];
        load4_transposed(b, v_at + chunk<kPitch>(step * 16 + lane % 16, n + lane / 16));
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          multiply(o[m][n], a[m], b[0], b[1]);
          multiply(o[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    // The place is that of this tile, which all have asked for.
    put(token0 + 2 * kTokens, page_next);
  }
  wait_for<0>();
#pragma unroll
  for (int m = 0; m < kMatrices; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = total[m][h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = row0 + warp * kWarpRows + m * 16 + h * 8 + lane / 4;
      if (row >= rows) continue;
      const float once = sum == 0 ? 0 : 1.0f / sum;
      const long long q_row = static_cast<long long>(blockIdx.z) * q_rows + first_query + row / group;
      const long long head = q_row * heads + first_head + row % group;
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
        const long long at = head * D + n * 8 + lane % 4 * 2;
        const float x = o[m][n][h * 2] * once, y = o[m][n][h * 2 + 1] * once;
        if (PARTIAL)
          *reinterpret_cast<float2*>(static_cast<float*>(out) + at) = make_float2(x, y);
        else
          *reinterpret_cast<uint32_t*>(static_cast<bf16*>(out) + at) = pack(x, y);
      }
      if (lse && lane % 4 == 0) lse[head] = sum == 0 ? -kInf : top[m][h] + log2f(sum);
    }
}
