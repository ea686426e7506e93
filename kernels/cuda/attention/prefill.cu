// Prefill attention over paged KV, for sm_80 and later: FlashAttention-2 (T. Dao, arXiv:2307.08691) with the heads of a
// group in the rows of one tile, so that they share its keys and values. Bounded by the tensor cores (mma.sync).
// Compiled with what kv.cuh and scores.cuh name, PARTIAL (1: float32 states of parts of the tokens, to be merged) and
// SMALL_PAGES (1: tokens that a warp copies may lie in several pages). One barrier a tile of
// tokens: keys and values are in two buffers, those of the next tile on their way while this one is computed. Codes
// come the same way and are made bfloat16 once for all rows.
#include "attention/kv.cuh"
#include "attention/scores.cuh"

#ifndef PARTIAL
#define PARTIAL 0
#endif
#ifndef SMALL_PAGES
#define SMALL_PAGES 0
#endif
#ifndef WARPS
#define WARPS (HEAD_DIM <= 128 ? 4 : 8)
#endif
#ifndef TOKENS
#define TOKENS (HEAD_DIM <= 128 ? 64 : 32)
#endif
// Rows of a warp are as many as its registers can hold sums for.
constexpr int kWarps = WARPS, kMatrices = 8 / WARPS, kWarpRows = kMatrices * 16;
constexpr int kRows = kWarps * kWarpRows, kTokens = TOKENS, kThreads = kWarps * 32;
constexpr int kPitch = pitch(D * 2), kCodePitch = pitch(kRow), kQueryChunks = D / 8;
constexpr int kTileBytes = kTokens * kPitch, kCodeBytes = kTokens * kCodePitch;  // of keys or values
constexpr int kScores = kTokens / 8;
constexpr int kStageBytes = 2 * (kIsCodes ? kCodeBytes : kTileBytes) + (kScaled ? 16 * kTokens : 0);
static_assert(kRows == 128, "as prefill.py has it");
// A warp copies kWarpTokens tokens of a tile, kAtOnce of them, a power of two, at once.
constexpr int kWarpTokens = kTokens / kWarps;
__device__ constexpr int at_once() {
  int rows = 1;
  while (rows * 2 * kChunks <= 32 && rows < kWarpTokens) rows *= 2;
  return rows;
}
constexpr int kAtOnce = at_once();

// N words of a row in shared memory, from byte `at` on, a multiple of N * 4.
template <int kPitch, int N>
__device__ __forceinline__ void load_words(uint32_t* w, const char* tile, int row, int at) {
#pragma unroll
  for (int i = 0; i < N; i += N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1) {
    const int byte = at + i * 4;
    const char* from = tile + chunk<kPitch>(row, byte >> 4) + (byte & 15);
    if (N % 4 == 0) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    } else if (N % 2 == 0) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      w[i] = x.x, w[i + 1] = x.y;
    } else {
      w[i] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
}

// A word's codes as pairs of 16-bit elements, code i of the low 16 bits beside code i of the high ones. uint4's come
// out larger by kBias, the number of kUnitPair, whose last bits count ones.
constexpr int kPairs = kBits == 4 ? 4 : 2;
constexpr float kBias = kFormat == kUint4 ? (FP16 ? 1024.0f : 128.0f) : 0.0f;
constexpr uint32_t kUnitPair = FP16 ? 0x64006400u : 0x43004300u, kSigns = 0x80008000u;
__device__ __forceinline__ void unpack_codes(uint32_t* pairs, uint32_t word) {
  if (kFormat == kUint4) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = (word >> 4 * i & 0x000f000fu) | kUnitPair;
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t bytes = word >> 8 * i;
      if (kFormat == kInt8)  // the unit and the low seven bits, less the unit and, of a negative number, 128
        pairs[i] = add_pairs((bytes & 0x007f007fu) | kUnitPair, (bytes & 0x00800080u) | kUnitPair | kSigns);
      else if (FP16)  // the exponent's bias is less by 8
        pairs[i] = multiply_pairs((bytes << 8 & kSigns) | (bytes << 7 & 0x3f803f80u), 0x5c005c00u);
      else  // … by 120
        pairs[i] = multiply_pairs((bytes << 8 & 0x80008000u) | (bytes << 4 & 0x07f007f0u), 0x7b807b80u);
    }
  }
}
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
      unpack_codes(pairs, words[w]);
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

// tiles: [tiles][2]: request (-1: none), and first row of the tile; row i of a request is query i / group, head
// i % group of the KV head's. first_heads: [kv_heads + 1], or null: as many query heads for each. The tiles of
// heads_at_once KV heads come one after the other, then those of the next ones. Part y of a tile's tokens goes to out_
// and lse from row y * q_rows on. slopes, sinks: [heads], to base e. after: [q_rows], how many tokens come after those
// that are here for queries that all see the same ones, up to and with their own; null: queries are the last tokens.
extern "C" __global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    prefill(const bf16* q, long long q_stride, const char* k_cache, const char* v_cache, const float* k_scales,
            const float* v_scales, long long page_stride, long long head_stride, long long token_stride,
            const int* tiles, const int* qo_indptr, const int* page_indptr, const int* indices, const int* kv_lens,
            const int* first_heads, void* out, float* lse, int q_rows, int heads, int kv_heads, int heads_at_once,
            int page_shift, int is_causal, int window, float scale, float cap, const float* slopes, const float* sinks,
            const int* after) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_ahead();
  let_next_begin();
  const int of_some = gridDim.x / kv_heads * heads_at_once, head_from = blockIdx.x / of_some * heads_at_once;
  const int some = min(heads_at_once, kv_heads - head_from), kv_head = head_from + blockIdx.x % of_some % some;
  const int tile_number = blockIdx.x % of_some / some;
  const int request = tiles[2 * tile_number], row0 = tiles[2 * tile_number + 1];
  if (request < 0) return;
  const int even = heads / kv_heads;
  const int first_head = first_heads ? first_heads[kv_head] : even * kv_head;
  const int group = first_heads ? first_heads[kv_head + 1] - first_head : even;
  const int first_query = qo_indptr[request], queries = qo_indptr[request + 1] - first_query;
  const int length = kv_lens[request], rows = queries * group;
  if (row0 >= rows) return;
  const int* pages = indices + page_indptr[request];
  const char *k = k_cache + kv_head * head_stride, *v = v_cache + kv_head * head_stride;
  constexpr int kBuffers = kIsCodes ? 1 : 2;
  char *const q_tile = shared, *const tile = q_tile + kRows * kPitch;  // [kBuffers]: keys, values
  char* const stages = kIsCodes ? tile + 2 * kTileBytes : tile;        // [2]: as they come

  const int before = length - queries;  // tokens that the first query sees beside itself
  const int last_row = min(row0 + kRows, rows) - 1;
  const int first_seen = window < 0 ? 0 : max(0, before + row0 / group - window);
#if WINDOW
  __shared__ volatile int least;  // as a register for each thread it has others spilled
  least = first_seen;             // pages before its own may be another request's
#else
  constexpr int least = 0;
#endif
  const auto is_behind = [&](int token) { return WINDOW && token < least; };
  int begin = first_seen / kTokens * kTokens;
  int end = is_causal ? min(length, before + last_row / group + 1) : length;
  const int stride = ((end - begin + kTokens - 1) / kTokens + gridDim.y - 1) / gridDim.y * kTokens;
  begin += blockIdx.y * stride, end = min(end, begin + stride);
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
  const int first = warp * kWarpTokens;   // of this warp's tokens of a tile
  const auto look_up = [&](int token0) {  // the page of this warp's tokens, or of its own token for every lane
    const int token = token0 + first + (SMALL_PAGES ? lane % kWarpTokens : 0);
    return token < end && !(WINDOW && token >> page_shift < least >> page_shift) ? __ldg(pages + (token >> page_shift))
                                                                                 : 0;
  };
  const int in_page = (1 << page_shift) - 1, my_row = lane / kChunks, my_chunk = lane % kChunks;
  const auto ask = [&](int token0, int page) {
    constexpr int kPitchHere = kIsCodes ? kCodePitch : kPitch, kBytes = kTokens * kPitchHere;
    const uint32_t to = smem(stages + (token0 - begin) / kTokens % 2 * kStageBytes);
    const uint32_t at = to + chunk<kPitchHere>(first + my_row, my_chunk);
    const int token = token0 + first + (SMALL_PAGES ? lane % kWarpTokens : 0);
    const long long from = page * page_stride + (token & in_page) * token_stride;
    const auto ask_rows = [&](bool all_there) {
      long long place = from + (SMALL_PAGES ? 0 : my_row * token_stride) + my_chunk * 16;
#pragma unroll
      for (int row = 0; row < kWarpTokens; row += kAtOnce) {
        if (SMALL_PAGES) place = __shfl_sync(~0u, from, row + my_row) + my_chunk * 16;
        const int token = token0 + first + my_row + row;
        const bool is_there = all_there || (token < end && !is_behind(token));
        if (kAtOnce * kChunks == 32 || my_row < kAtOnce) {
          copy16(rows_on<kPitchHere>(at, row), k + (is_there ? place : 0), is_there);
          copy16(rows_on<kPitchHere>(at, row) + kBytes, v + (is_there ? place : 0), is_there);
        }
        if (!SMALL_PAGES) place += kAtOnce * token_stride;
      }
    };
    if (token0 + kTokens <= end && !is_behind(token0))
      ask_rows(true);
    else
      ask_rows(false);
    if (kScaled && lane < kWarpTokens) {
      const int token = token0 + first + lane;
      const bool is_there = token < end && !is_behind(token);
      const long long zero = (static_cast<long long>(page) * kv_heads + kv_head << 1) << page_shift;
      const uint32_t scales = to + 2 * kBytes + (first + lane) * 4;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const long long place = is_there ? zero + (which << page_shift) + (token & in_page) : 0;
        copy4(scales + which * kTokens * 4, k_scales + place, is_there);
        copy4(scales + (2 + which) * kTokens * 4, v_scales + place, is_there);
      }
    }
  };
  if (begin < end) ask(begin, look_up(begin));
  commit();
  int page_next = look_up(begin + kTokens);

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
  const float by = kIsBent ? 1 : scale;
  float slope[kMatrices][2];  // of this lane's rows, to base 2
  int own[kMatrices][2];      // the query's place, less that of this lane's first token of a tile
#pragma unroll
  for (int m = 0; SLOPES && m < kMatrices; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(row0 + warp * kWarpRows + m * 16 + h * 8 + lane / 4, rows - 1), query = row / group;
      slope[m][h] = slopes[first_head + row % group] * kLog2E;
      own[m][h] = (after ? length - 1 + after[first_query + query] : before + query) - lane % 4 * 2;
    }

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
    if (kIsBent) {
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float from_own = SLOPES ? token0 - own[m][h] : 0;
#pragma unroll
          for (int n = 0; n < kScores; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = s[m][n][h * 2 + e];
              x = logit_of(x, scale, cap, slope[m][h], from_own + (n * 8 + e));
            }
        }
    }
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
      const float keep = SINKS && !PARTIAL && sum != 0 ? join_sink(sinks[first_head + row % group], top[m][h], sum) : 1;
      const float once = sum == 0 ? 0 : keep / sum;
      const long long q_row = static_cast<long long>(blockIdx.y) * q_rows + first_query + row / group;
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
