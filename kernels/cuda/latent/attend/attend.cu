// Attention over latents, for sm_80 and later: a row of the cache is the key of all heads, and its first elements are
// the value. The heads of some tokens are the rows of a matrix product, so that each latent is read once for all of
// them: with 16 to 32 rows memory bounds it, with 128 heads the tensor cores do (mma.sync).
// Compiled with LATENT and TURNED (elements of a row: those that are values, too, then those that turn), ROWS (16, 32
// or 64, of a tile), STAGES, and FORMAT (0: pages of 16 bits; 1: int8; 3: e4m3, both with a zero and a scale a token).
//
// Work is cut over the whole batch ("stream-K": M. Osama et al., arXiv:2301.03598): the units of kTokens tokens of all
// tiles are one line, of which each thread block takes an equal stretch. Tokens are copied into shared memory ahead.
// Warps share out the elements of the products with keys, whose partial sums meet in shared memory, and the columns of
// those with values. Who has a tile whole writes it; else the last to come merges the parts in order.
#include "latent/attend/cut.cuh"

#ifndef LATENT
#define LATENT 512
#endif
#ifndef TURNED
#define TURNED 64
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef STAGES
#define STAGES 5
#endif
#ifndef FORMAT
#define FORMAT 0
#endif
constexpr int L = LATENT, kWidth = LATENT + TURNED, kRows = ROWS, kStages = STAGES;
constexpr bool kIsCodes = FORMAT != 0;
constexpr int kSides = kRows == 64 ? 2 : 1, kMatrices = kRows / 16 / kSides;  // of 16 rows, of a warp
constexpr int kQuarters = 4, kTokenParts = 2 / kSides, kWarpTokens = kTokens / kTokenParts;
constexpr int kSteps = kWidth / 16, kOwnSteps = (kSteps + kQuarters - 1) / kQuarters;    // 16 elements of a key each
constexpr int kGroups = L / 16, kOwnGroups = (kGroups + 8 / kSides - 1) / (8 / kSides);  // 16 columns of values each
constexpr int kPitch = (kWidth * 2 + 127) / 128 * 128, kTileBytes = kTokens * kPitch;
constexpr int kChunks = kWidth / 8, kCodeChunks = kWidth / 16;
constexpr int kStageBytes = kIsCodes ? kTokens * kWidth + kTokens * 8 : kTileBytes;
constexpr int kScoreRow = kTokens + (kRows == 64 ? 4 : 8),
              kWeightRow = kTokens * 2 + 16;  // floats, bytes: rows lie in different banks
constexpr int kLanesOfRow = kThreads / kRows, kOwnScores = kTokens / kLanesOfRow;
constexpr bool kKeepsQueries = kSides == 1;  // in registers
static_assert(kRows == 16 || kRows == 32 || kRows == 64, "rows of a tile");
static_assert(LATENT % 16 == 0 && TURNED % 16 == 0, "sizes");

// 16-byte chunk `c` of row `r`: 8 rows of one chunk lie in different banks.
__device__ __forceinline__ int chunk(int r, int c) { return r * kPitch + ((c ^ (r & 7)) << 4); }

// Two codes of a word, from code `i` on, as 16-bit elements.
__device__ __forceinline__ uint32_t widened(uint32_t word, int i, float zero, float scale) {
  float x[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const uint32_t code = word >> 8 * (i + e) & 0xff;
    if (FORMAT == 1) {
      x[e] = static_cast<float>(static_cast<signed char>(code));
    } else {
      uint32_t pairs[2];
      widen_e4m3(pairs, code);
      x[e] = half_wide(pairs[0] & 0xffff);
    }
    x[e] = (x[e] - zero) * scale;
  }
  return pack(x[0], x[1]);
}

// q: [rows, heads, L], and the elements that turn of each head, q_turned [rows, heads, ..], rows *_stride and heads
// turned_head elements apart. scales: [pages, 2, page size]: zeros, then scales. Strides of pages: bytes. Tiles: see
// cut.cuh. out: [rows, heads, L], lse [rows, heads] or null, base 2. partial: [grid * 2][kPart]. counters: a tile each,
// zero before and after. Where `merges` is 0, tiles that are cut are left in `partial`. scale: of scores, to base 2.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend(const bf16* q, long long q_stride, const bf16* q_turned, long long turned_stride, int turned_head,
           const char* cache, const float* scales, long long page_stride, long long token_stride, const int* cut_tiles,
           const int* qo_indptr, const int* places, const int* kv_lens, int tiles, int of_each, int heads,
           int is_before, const int* indptr, const int* indices, int page_shift, float scale, bf16* out, float* lse,
           float* partial, int* counters, int merges) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles list = {cut_tiles, qo_indptr, places, kv_lens, tiles, of_each, heads, is_before};
  char* at = shared + kStages * kStageBytes;
  char* const wide_tile = at;  // of codes
  at += kIsCodes ? kTileBytes : 0;
  char* const queries = at;
  at += kKeepsQueries ? 0 : kRows * kPitch;
  float* const scores = reinterpret_cast<float*>(at);  // [kQuarters][kRows][kScoreRow]
  char* const weights = at + kQuarters * kRows * kScoreRow * 4;
  float* const keeps = reinterpret_cast<float*>(weights + kRows * kWeightRow);  // [kRows], then [kRows][2]
  float2* const states = reinterpret_cast<float2*>(keeps + kRows);
  int* const begins = reinterpret_cast<int*>(states + kRows);  // [count + 1]
  __shared__ int warp_sums[kThreads / 32], is_last;

  let_next_begin();
  wait_for_ahead();
  const int units = line_of(list, kRows, begins, warp_sums);
  for (int i = blockIdx.x; i < list.count; i += gridDim.x) {
    if (begins[i + 1] > begins[i]) continue;
    const Tile tile = list.tile(i, kRows);
    for (int row = tile.row0; row < min(tile.row0 + kRows, tile.rows); ++row) {
      const long long head = tile.first_out * heads + row;
      for (int c = threadIdx.x; c < L / 8; c += kThreads)
        *reinterpret_cast<uint4*>(out + head * L + c * 8) = make_uint4(0, 0, 0, 0);
      if (lse && threadIdx.x == 0) lse[head] = -kInf;
    }
  }
  const Cut cut(units, gridDim.x, tiles, !merges);
  const int mine = blockIdx.x;
  if (mine >= cut.blocks) return;
  const int first_unit = cut.begin(mine), count = cut.begin(mine + 1) - first_unit;

  int now = find(begins, list.count, first_unit), now_unit = first_unit - begins[now];
  Tile tile = list.tile(now, kRows);
  // What is asked for runs kStages - 1 units ahead.
  int ahead = now, ahead_unit = now_unit, ahead_end = tile.end;
  const int* pages = indices + indptr[tile.request];
  const int in_page = (1 << page_shift) - 1;
  const auto ask = [&](int i) {
    if (i < count) {
      const int token0 = ahead_unit * kTokens;
      const int own_token = token0 + lane;  // a lane looks up a token, for all
      const int page = own_token < ahead_end ? __ldg(pages + (own_token >> page_shift)) : 0;
      const long long from = page * page_stride + (own_token & in_page) * token_stride;
      char* const stage = shared + i % kStages * kStageBytes;
      if (kIsCodes && warp == 0) {
        const bool is_there = own_token < ahead_end;
        const long long place = is_there ? (static_cast<long long>(page) * 2 << page_shift) + (own_token & in_page) : 0;
        const uint32_t to = smem(stage + kTokens * kWidth) + lane * 4;
        copy4(to, scales + place, is_there);
        copy4(to + kTokens * 4, scales + place + (is_there ? 1 << page_shift : 0), is_there);
      }
      constexpr int kOfRow = kIsCodes ? kCodeChunks : kChunks;
#pragma unroll
      for (int j = 0; j < (kTokens * kOfRow + kThreads - 1) / kThreads; ++j) {
        const int slot = j * kThreads + threadIdx.x, row = slot / kOfRow, c = slot % kOfRow;
        const long long byte = __shfl_sync(~0u, from, row % kTokens);
        if (kTokens * kOfRow % kThreads && row >= kTokens) continue;
        const bool is_there = token0 + row < ahead_end;
        copy16(smem(stage) + (kIsCodes ? row * kWidth + c * 16 : chunk(row, c)), cache + (is_there ? byte + c * 16 : 0),
               is_there);
      }
      if (i + 1 < count && ++ahead_unit == begins[ahead + 1] - begins[ahead]) {
        ahead_unit = 0;
        do ++ahead;
        while (begins[ahead + 1] == begins[ahead]);
        const Tile next = list.tile(ahead, kRows);
        ahead_end = next.end, pages = indices + indptr[next.request];
      }
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask(i);

  const int side = warp % kSides, share = warp / kSides;
  const int quarter = share % kQuarters, token_part = share / kQuarters;
  const int own_row = threadIdx.x / kLanesOfRow, own_score = threadIdx.x % kLanesOfRow * kOwnScores;
  uint32_t held[kKeepsQueries ? kMatrices : 1][kKeepsQueries ? kOwnSteps : 1][4];
  float o[kMatrices][kOwnGroups][2][4], top = -kInf, total = 0;
  int sees = 0, piece_begin = 0;
  bool is_begun = false;

  // Two elements of a row from element `e` on; rows behind the last are zeros.
  const auto query_pair = [&](int row, int e) -> uint32_t {
    if (tile.row0 + row >= tile.rows) return 0;
    const int r = tile.row0 + row;
    const long long place = tile.first_out + r / heads;
    const bf16* const from = e < L ? q + place * q_stride + r % heads * L + e
                                   : q_turned + place * turned_stride + r % heads * turned_head + (e - L);
    return *reinterpret_cast<const uint32_t*>(from);
  };
  const auto begin_tile = [&] {
    if (kKeepsQueries) {
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int s = 0; s < kOwnSteps; ++s)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int step = s * kQuarters + quarter;
            held[m][s][e] =
                step < kSteps ? query_pair(m * 16 + e % 2 * 8 + lane / 4, step * 16 + e / 2 * 8 + lane % 4 * 2) : 0;
          }
    } else {
      for (int i = threadIdx.x; i < kRows * (kWidth / 2); i += kThreads) {
        const int row = i / (kWidth / 2), e = i % (kWidth / 2) * 2;
        *reinterpret_cast<uint32_t*>(queries + chunk(row, e / 8) + e % 8 * 2) = query_pair(row, e);
      }
    }
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int g = 0; g < kOwnGroups; ++g)
#pragma unroll
        for (int n = 0; n < 2; ++n) o[m][g][n][0] = o[m][g][n][1] = o[m][g][n][2] = o[m][g][n][3] = 0;
    top = -kInf, total = 0;
    sees = min(tile.end, tile.before + (tile.row0 + own_row) / heads + 1);
    is_begun = true, piece_begin = now_unit;
  };

  for (int i = 0; i < count; ++i) {
    if (!is_begun) begin_tile();
    wait_for<kStages - 2>();
    __syncthreads();
    ask(i + kStages - 1);
    const char* keys = shared + i % kStages * kStageBytes;
    if (kIsCodes) {
      const float* const zeros = reinterpret_cast<const float*>(keys + kTokens * kWidth);
      for (int slot = threadIdx.x; slot < kTokens * kCodeChunks; slot += kThreads) {
        const int row = slot / kCodeChunks, c = slot % kCodeChunks;
        const uint4 codes = *reinterpret_cast<const uint4*>(keys + row * kWidth + c * 16);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        uint32_t x[8];
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
          for (int e = 0; e < 2; ++e) x[w * 2 + e] = widened(words[w], e * 2, zeros[row], zeros[kTokens + row]);
#pragma unroll
        for (int e = 0; e < 2; ++e)
          *reinterpret_cast<uint4*>(wide_tile + chunk(row, c * 2 + e)) =
              make_uint4(x[e * 4], x[e * 4 + 1], x[e * 4 + 2], x[e * 4 + 3]);
      }
      __syncthreads();
      keys = wide_tile;
    }
    {
      float s[kMatrices][kWarpTokens / 8][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int n = 0; n < kWarpTokens / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
      const int k_row = token_part * kWarpTokens + lane % 8 + lane / 16 * 8, k_half = lane / 8 % 2;
#pragma unroll
      for (int own = 0; own < kOwnSteps; ++own) {
        const int step = own * kQuarters + quarter;
        if (kSteps % kQuarters && step >= kSteps) continue;
        uint32_t a[kMatrices][4];
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
          if (kKeepsQueries) {
#pragma unroll
            for (int e = 0; e < 4; ++e) a[m][e] = held[m][own][e];
          } else {
            load4(a[m], smem(queries + chunk((side * kMatrices + m) * 16 + lane % 16, step * 2 + lane / 16)));
          }
        }
#pragma unroll
        for (int n = 0; n < kWarpTokens / 8; n += 2) {
          uint32_t b[4];
          load4(b, smem(keys + chunk(n * 8 + k_row, step * 2 + k_half)));
#pragma unroll
          for (int m = 0; m < kMatrices; ++m) {
            multiply(s[m][n], a[m], b[0], b[1]);
            multiply(s[m][n + 1], a[m], b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kMatrices; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int n = 0; n < kWarpTokens / 8; ++n) {
            const int row = (side * kMatrices + m) * 16 + h * 8 + lane / 4;
            const int column = token_part * kWarpTokens + n * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(scores + (quarter * kRows + row) * kScoreRow + column) =
                make_float2(s[m][n][h * 2], s[m][n][h * 2 + 1]);
          }
    }
    __syncthreads();
    {
      float x[kOwnScores], high = -kInf;
#pragma unroll
      for (int e = 0; e < kOwnScores; e += 2) {
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (int k = 0; k < kQuarters; ++k) {
          const float2 part =
              *reinterpret_cast<const float2*>(scores + (k * kRows + own_row) * kScoreRow + own_score + e);
          sum.x += part.x, sum.y += part.y;
        }
        x[e] = sum.x, x[e + 1] = sum.y;
      }
#pragma unroll
      for (int e = 0; e < kOwnScores; ++e) {
        if (now_unit * kTokens + own_score + e >= sees) x[e] = -kInf;
        high = fmaxf(high, x[e]);
      }
#pragma unroll
      for (int o = 1; o < kLanesOfRow; o <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
      high = fmaxf(high * scale, top);
      const float base = high == -kInf ? 0 : high, keep = power(top - base);
      float sum = 0;
#pragma unroll
      for (int e = 0; e < kOwnScores; ++e) sum += x[e] = power(fmaf(x[e], scale, -base));
#pragma unroll
      for (int o = 1; o < kLanesOfRow; o <<= 1) sum += __shfl_xor_sync(~0u, sum, o);
      total = total * keep + sum, top = high;
#pragma unroll
      for (int e = 0; e < kOwnScores; e += 2)
        *reinterpret_cast<uint32_t*>(weights + own_row * kWeightRow + (own_score + e) * 2) = pack(x[e], x[e + 1]);
      if (own_score == 0) keeps[own_row] = keep;
    }
    __syncthreads();
    {
      uint32_t a[kMatrices][kTokens / 16][4];
#pragma unroll
      for (int m = 0; m < kMatrices; ++m) {
        const int row = (side * kMatrices + m) * 16;
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step)
          load4(a[m][step], smem(weights + (row + lane % 16) * kWeightRow + step * 32 + lane / 16 * 16));
        const float keep[2] = {keeps[row + lane / 4], keeps[row + 8 + lane / 4]};
        if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
          for (int g = 0; g < kOwnGroups; ++g)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
              for (int e = 0; e < 4; ++e) o[m][g][n][e] *= keep[e / 2];
        }
      }
#pragma unroll
      for (int g = 0; g < kOwnGroups; ++g) {
        const int group = share * kOwnGroups + g;
        if (kGroups % (8 / kSides) && group >= kGroups) continue;
#pragma unroll
        for (int step = 0; step < kTokens / 16; ++step) {
          uint32_t b[4];
          load4_transposed(b, smem(keys + chunk(step * 16 + lane % 16, group * 2 + lane / 16)));
#pragma unroll
          for (int m = 0; m < kMatrices; ++m) {
            multiply(o[m][g][0], a[m][step], b[0], b[1]);
            multiply(o[m][g][1], a[m][step], b[2], b[3]);
          }
        }
      }
    }
    const int tile_units = begins[now + 1] - begins[now];
    if (++now_unit < tile_units && i + 1 < count) continue;

    // The end of this block's piece of a tile.
    const bool is_whole = piece_begin == 0 && now_unit == tile_units;
    float* const part = partial + (static_cast<long long>(mine) * 2 + (piece_begin == 0)) * kPart(kRows, L);
    if (own_score == 0) states[own_row] = make_float2(top, total);
    __syncthreads();
    const Tile done = tile;
    const int done_item = now;
#pragma unroll
    for (int m = 0; m < kMatrices; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (side * kMatrices + m) * 16 + h * 8 + lane / 4;
        if (done.row0 + row >= done.rows) continue;
        const float sum = states[row].y, once = sum == 0 ? 0 : 1 / sum;
        const long long head = done.first_out * heads + done.row0 + row;
#pragma unroll
        for (int g = 0; g < kOwnGroups; ++g) {
          const int group = share * kOwnGroups + g;
          if (kGroups % (8 / kSides) && group >= kGroups) continue;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int column = group * 16 + n * 8 + lane % 4 * 2;
            const float low = o[m][g][n][h * 2], high = o[m][g][n][h * 2 + 1];
            if (is_whole)
              *reinterpret_cast<uint32_t*>(out + head * L + column) = pack(low * once, high * once);
            else
              *reinterpret_cast<float2*>(part + row * L + column) = make_float2(low, high);
          }
        }
      }
    if (threadIdx.x < kRows && done.row0 + static_cast<int>(threadIdx.x) < done.rows) {
      const float2 state = states[threadIdx.x];
      if (!is_whole)
        *reinterpret_cast<float2*>(part + kRows * L + threadIdx.x * 2) = state;
      else if (lse)
        lse[done.first_out * heads + done.row0 + threadIdx.x] = state.y == 0 ? -kInf : state.x + log2f(state.y);
    }
    is_begun = false;
    if (i + 1 < count) {
      now_unit = 0;
      do ++now;
      while (begins[now + 1] == begins[now]);
      tile = list.tile(now, kRows);
    }
    if (is_whole || !merges) continue;
    const int begin_block = cut.owner(begins[done_item]),
              pieces = cut.owner(begins[done_item + 1] - 1) - begin_block + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      is_last = atomicAdd(counters + done_item, 1) == pieces - 1;
      __threadfence();
      if (is_last) counters[done_item] = 0;
    }
    __syncthreads();
    if (!is_last) continue;
    const float* const parts = partial + static_cast<long long>(begin_block) * 2 * kPart(kRows, L);
    const long long first_head = done.first_out * heads + done.row0;
    merge_tile<kRows, L, kThreads>(parts, pieces, 1, min(kRows, done.rows - done.row0), threadIdx.x,
                                   out + first_head * L, lse ? lse + first_head : nullptr);
  }
  wait_for<0>();
}
