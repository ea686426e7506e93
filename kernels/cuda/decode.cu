// Decode attention over paged KV, for sm_80 and later: one query a request, up to 16 query heads a KV head. Bounded by
// memory: each key and value is read once, and as many bytes are on their way as hide the latency.
// Compiled with what kv.cuh names, WARPS, STAGES (tiles of a warp in shared memory), HALVES (1: at most 8 query heads a
// KV head) and SOFT_CAP (1: logits are capped).
//
// Work is cut over the whole batch ("stream-K": M. Osama et al., arXiv:2301.03598): all units of kUnit tokens of all
// (request, KV head) pairs are one line, of which each thread block takes an equal stretch. Within a stretch every warp
// takes its tile of each unit, on its own: copies in flight, also over the end of a pair, scores and values by mma.sync
// (16 query rows x 8 tokens x 16 elements), online softmax; only at the end of a pair the warps are merged. Who has a
// pair whole writes the output; else partial results go to the workspace and the last one to come merges them in order.
//
// Codes are multiplied as they are: scale * (q . n - zero * sum(q)) is a score, and values are weighted by p * scale.
// They are read without shuffles: as the sum over elements may have any order, a lane takes them from one place.
#include "kv.cuh"

#ifndef STAGES
#define STAGES 2
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef HALVES
#define HALVES 2
#endif
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
constexpr int kWarps = WARPS, kStages = STAGES, kHalves = HALVES, kThreads = kWarps * 32;
constexpr int kTile = kIsCodes ? 32 : 16, kUnit = kTile * kWarps;  // tokens
constexpr int kEights = kTile / 8;
constexpr int kPitch = pitch(kRow), kTileBytes = kTile * kPitch;  // of K or of V
constexpr int kStageBytes = 2 * kTileBytes + (kScaled ? 4 * kTile * 4 : 0);
constexpr int kMergedRow = D + 8;  // floats; rows begin in different banks
constexpr int kPart = 16 * (D + 2);
constexpr int kKeyWords = kBits * D / 128, kValueWords = kBits * D / 256;  // of a lane, of a token's row of codes

struct Params {
  const bf16* q;       // [rows, heads or more, D]
  long long q_stride;  // of a row, elements
  const char *k, *v;
  const float *k_scales, *v_scales;                  // [pages, kv_heads, 2, page size]: zeros, then scales
  long long page_stride, head_stride, token_stride;  // bytes
  const int *indptr, *indices, *kv_lens;
  const int* rows;         // [requests]: of q and out, -1: the request is left out; null: 0, 1, …
  const int* first_heads;  // [kv_heads + 1], null: as many query heads for each
  bf16* out;               // [rows, heads, D]
  float* lse;              // [rows, heads] or null, base 2
  float* partial;          // [grid * 2][kPart]: 16 rows, then the top and the total of each
  int* counters;           // [requests * kv_heads], zero before and after
  int requests, kv_heads, heads, page_shift;
  int window;        // tokens before its own that a query sees, -1: all
  float scale, cap;  // scores times scale are logarithms to base 2; with a cap, cap * tanh(scores * scale)

  __device__ __forceinline__ int row(int request) const { return rows ? rows[request] : request; }
  __device__ __forceinline__ int first_head(int kv_head) const {
    return first_heads ? first_heads[kv_head] : heads / kv_heads * kv_head;
  }
};

struct State {
  float out[kOut][4];
  float top[2], total[2], shift[2];  // of rows lane / 4 and lane / 4 + 8; shift: zeros times weights, to be taken away
};

struct Cursor {
  int request, kv_head, unit, units;  // units of the request, for each head
};

// Products with q: rows lane / 4 and + 8; elements in the order in which a lane meets those of keys.
__device__ __forceinline__ void load_queries(uint32_t (*q)[4], const bf16* from, int group) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + half * 8;
    const bool is_there = half < kHalves && row < group;
    if (!kIsCodes) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          q[s][half + 2 * i] =
              is_there ? *reinterpret_cast<const uint32_t*>(from + row * D + s * 16 + t * 2 + i * 8) : 0u;
    } else {
      constexpr int kCodes = 32 / kBits;  // of a word, as many pairs of which are two steps' or one's
#pragma unroll
      for (int w = 0; w < kKeyWords; ++w) {
        uint32_t x[kCodes / 2];
#pragma unroll
        for (int i = 0; i < kCodes / 2; i += 2) {
          const bf16* at = from + row * D + (t * kKeyWords + w) * kCodes + i * 2;
          const uint2 two = is_there ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
          x[i] = two.x, x[i + 1] = two.y;
        }
#pragma unroll
        for (int i = 0; i < kPairs; ++i)  // codes i and i + kPairs
          q[w * (kPairs / 2) + i / 2][half + i % 2 * 2] =
              __byte_perm(x[i / 2], x[i / 2 + kPairs / 2], i % 2 ? 0x7632 : 0x5410);
      }
    }
  }
}

// Merges what `pieces` thread blocks from `begin_block` on have of a pair into `group` rows of out, from `head` on.
__device__ __forceinline__ void merge(const Params& p, float* scratch, int begin_block, int pieces, long long head,
                                      int group) {
  // Only the first has the pair's beginning, as its last piece; others have theirs as their first.
  const float* const parts = p.partial + static_cast<long long>(begin_block) * 2 * kPart;
  const auto piece = [&](int i) { return parts + (i == 0 ? kPart : i * 2 * kPart); };
  const int slots = group * (D / 4), ways = max(1, kThreads / slots);  // ways threads share a slot's pieces
  for (int base = 0; base < slots; base += kThreads) {
    const int way = ways > 1 ? threadIdx.x / slots : 0, slot = base + threadIdx.x - way * slots;
    const int row = slot / (D / 4), col = slot % (D / 4) * 4;
    float top = -kInf, total = 0;
    float4 sum = make_float4(0, 0, 0, 0);
    constexpr int kAtOnce = 8;
    for (int b0 = way; slot < slots && way < ways && b0 < pieces; b0 += ways * kAtOnce) {
      float2 s[kAtOnce];
      float4 x[kAtOnce];
      float high = top;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int b = b0 + i * ways;
        const float* from = piece(min(b, pieces - 1));
        s[i] = __ldcg(reinterpret_cast<const float2*>(from + 16 * D + row * 2));
        x[i] = __ldcg(reinterpret_cast<const float4*>(from + row * D + col));
        if (b >= pieces) s[i] = make_float2(-kInf, 0);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) high = fmaxf(high, s[i].x);
      const float keep = power(top - high);
      total *= keep, sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep, top = high;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float by = power(s[i].x - high);
        total += s[i].y * by;
        sum.x += x[i].x * by, sum.y += x[i].y * by, sum.z += x[i].z * by, sum.w += x[i].w * by;
      }
    }
    if (ways > 1) {
      float4* const sums = reinterpret_cast<float4*>(scratch);
      float2* const states = reinterpret_cast<float2*>(scratch + kThreads * 4);
      sums[threadIdx.x] = sum, states[threadIdx.x] = make_float2(top, total);
      __syncthreads();
      for (int w = 1; way == 0 && w < min(ways, pieces); ++w) {
        const float2 other = states[w * slots + slot];
        const float4 x = sums[w * slots + slot];
        const float high = fmaxf(top, other.x), keep = power(top - high), by = power(other.x - high);
        total = total * keep + other.y * by, top = high;
        sum.x = sum.x * keep + x.x * by, sum.y = sum.y * keep + x.y * by;
        sum.z = sum.z * keep + x.z * by, sum.w = sum.w * keep + x.w * by;
      }
    }
    if (way == 0 && slot < slots) {
      const float by = 1.0f / total;
      *reinterpret_cast<uint2*>(p.out + (head + row) * D + col) =
          make_uint2(pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by));
      if (p.lse && col == 0) p.lse[head + row] = top + log2f(total);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    decode(const bf16* q_, long long q_stride, const char* k_, const char* v_, const float* k_scales,
           const float* v_scales, long long page_stride, long long head_stride, long long token_stride,
           const int* indptr, const int* indices, const int* kv_lens, const int* rows, const int* first_heads,
           bf16* out, float* lse, float* partial, int* counters, int requests, int kv_heads, int heads, int page_shift,
           int window, float scale, float cap) {
  const Params p = {q_,          q_stride,     k_,      v_,       k_scales, v_scales, page_stride,
                    head_stride, token_stride, indptr,  indices,  kv_lens,  rows,     first_heads,
                    out,         lse,          partial, counters, requests, kv_heads, heads,
                    page_shift,  window,       scale,   cap};
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  char* const tiles = shared + warp * (kStages * kStageBytes);
  float* const merged = reinterpret_cast<float*>(shared + kWarps * kStages * kStageBytes);  // [kWarps][16][kMergedRow]
  float2* const states = reinterpret_cast<float2*>(merged + kWarps * 16 * kMergedRow);      // [kWarps][16]
  int* const begins = reinterpret_cast<int*>(states + kWarps * 16);  // [requests + 1], in units of a head
  int* const lengths = begins + requests + 1;                        // [requests]
  int* const starts = lengths + requests;                            // [requests], of pages

  let_next_begin();  // where blocks of this one have ended, or leave room: products ask for their weights
  wait_for_ahead();

  // The line of work: every thread block finds out for itself.
  __shared__ int warp_sums[kWarps], is_last;
  int carry = 0;
  for (int base = 0; base < requests; base += kThreads) {
    const int r = base + threadIdx.x;
    int x = 0;
    if (r < requests) {
      const int length = kv_lens[r], row = p.row(r), start = indptr[r];
      const int tokens = row < 0 ? 0 : length;
      lengths[r] = tokens, starts[r] = start;
      x = ((window < 0 ? tokens : min(tokens, window + 1)) + kUnit - 1) / kUnit;
      if (tokens == 0 && row >= 0 && r % gridDim.x == blockIdx.x)
        for (int h = 0; h < heads; ++h) {
          const long long head = static_cast<long long>(row) * heads + h;
          for (int i = 0; i < D; i += 8) *reinterpret_cast<uint4*>(out + head * D + i) = make_uint4(0, 0, 0, 0);
          if (lse) lse[head] = -kInf;
        }
    }
    for (int o = 1; o < 32; o <<= 1) {
      const int y = __shfl_up_sync(~0u, x, o);
      if (lane >= o) x += y;
    }
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int before = carry;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_sums[w];
      carry += warp_sums[w];
    }
    if (r < requests) begins[r + 1] = before + x;
    __syncthreads();
  }
  if (threadIdx.x == 0) begins[0] = 0;
  __syncthreads();
  // Thread block b has units b * each + min(b, more) and on, `each` of them or one more; none has none.
  const int all = carry * kv_heads, grid = min(static_cast<int>(gridDim.x), all);
  if (static_cast<int>(blockIdx.x) >= grid) return;
  const int each = all / grid, more = all % grid, mine = blockIdx.x;
  const int first_unit = mine * each + min(mine, more), count = each + (mine < more);
  const auto owner = [&](int unit) {
    return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each;
  };

  // Units of a request lie together, its heads one after the other.
  Cursor at;
  {
    int low = 0, high = requests;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begins[middle] * kv_heads <= first_unit)
        low = middle;
      else
        high = middle;
    }
    const int offset = first_unit - begins[low] * kv_heads, units = begins[low + 1] - begins[low];
    at = {low, offset / units, offset % units, units};
  }
  const auto next_pair = [&](Cursor& c) {
    c.unit = 0;
    if (++c.kv_head < kv_heads) return;
    c.kv_head = 0;
    do ++c.request;
    while (begins[c.request + 1] == begins[c.request]);
    c.units = begins[c.request + 1] - begins[c.request];
  };
  const auto first_token = [&](int length) { return window < 0 ? 0 : max(0, length - 1 - window); };

  // What is asked for runs kStages - 1 tiles ahead; pages one tile more.
  Cursor ahead = at;
  int length = 0, token = 0, page = 0;  // token: this lane's, of lane % kTile
  const int* pages = indices;
  const auto look_up = [&] {
    token = first_token(length) + ahead.unit * kUnit + warp * kTile + lane % kTile;
    page = token < length ? __ldg(pages + (token >> page_shift)) : 0;
  };
  const auto enter = [&] { length = lengths[ahead.request], pages = indices + starts[ahead.request]; };
  enter();
  look_up();
  const auto ask = [&](int i) {
    if (i < count) {
      char* const to = tiles + i % kStages * kStageBytes;
      const int offset = token & ((1 << page_shift) - 1);
      const long long from = token < length ? page * page_stride + offset * token_stride : 0;
      const char *const k = k_ + ahead.kv_head * head_stride, *const v = v_ + ahead.kv_head * head_stride;
      const int token0 = token - lane % kTile;
#pragma unroll
      for (int j = 0; j < kTile * kChunks / 32; ++j) {
        const int row = (j * 32 + lane) / kChunks, c = (j * 32 + lane) % kChunks;
        const long long byte = __shfl_sync(~0u, from, row) + c * 16;
        const bool is_there = token0 + row < length;
        copy16(smem(to + chunk<kPitch>(row, c)), k + byte, is_there);
        copy16(smem(to + kTileBytes + chunk<kPitch>(row, c)), v + byte, is_there);
      }
      if (kScaled) {
        const long long zero = (static_cast<long long>(page) * kv_heads + ahead.kv_head << 1) << page_shift;
        const bool is_there = token < length;
        const uint32_t scales = smem(to + 2 * kTileBytes) + lane % kTile * 4;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const long long place = is_there ? zero + (which << page_shift) + offset : 0;
          copy4(scales + which * kTile * 4, k_scales + place, is_there);
          copy4(scales + (2 + which) * kTile * 4, v_scales + place, is_there);
        }
      }
      if (i + 1 < count) {
        if (++ahead.unit == ahead.units) {
          const int before = ahead.request;
          next_pair(ahead);
          if (ahead.request != before) enter();
        }
        look_up();
      }
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) ask(i);

  uint32_t q[kSteps][4];
  float q_sums[2] = {};
  State st;
  int piece_begin = 0, group = 0;
  long long head0 = 0;
  const auto begin_pair = [&] {
    piece_begin = at.unit;
    const int first_head = p.first_head(at.kv_head), row = p.row(at.request);
    group = p.first_head(at.kv_head + 1) - first_head;
    head0 = static_cast<long long>(row) * heads + first_head;
    load_queries(q, q_ + row * q_stride + first_head * D, group);
    if (kScaled) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        float sum = 0;
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
          for (int i = 0; i < 2; ++i) sum += wide(q[s][h + 2 * i] & 0xffff) + wide(q[s][h + 2 * i] >> 16);
        sum += __shfl_xor_sync(~0u, sum, 1);
        q_sums[h] = sum + __shfl_xor_sync(~0u, sum, 2);
      }
    }
  };
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kOut; ++i) st.out[i][0] = st.out[i][1] = st.out[i][2] = st.out[i][3] = 0;
    st.top[0] = st.top[1] = -kInf, st.total[0] = st.total[1] = 0, st.shift[0] = st.shift[1] = 0;
  };

  const auto take = [&](const char* keys, int there) {  // a tile, of which `there` tokens are there, one or more
    const char* const values = keys + kTileBytes;
    const float* const scales = reinterpret_cast<const float*>(keys + 2 * kTileBytes);
    float s[kEights][4];
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      s[n][0] = s[n][1] = -kBias * q_sums[0];
      s[n][2] = s[n][3] = -kBias * q_sums[1];
    }
    if (!kIsCodes) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b[4];  // tokens 0-7 and 8-15, elements 0-7 and 8-15 of the step
        load4(b, smem(keys + chunk<kPitch>(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2)));
        multiply(s[0], q[step], b[0], b[1]);
        multiply(s[1], q[step], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        uint32_t words[kKeyWords];
        load_words<kPitch, kKeyWords>(words, keys, n * 8 + lane / 4, lane % 4 * kKeyWords * 4);
#pragma unroll
        for (int w = 0; w < kKeyWords; ++w) {
          uint32_t b[kPairs];
          spread(b, words[w]);
#pragma unroll
          for (int i = 0; i < kPairs; i += 2) multiply(s[n], q[w * (kPairs / 2) + i / 2], b[i], b[i + 1]);
        }
      }
    }
    if (kScaled) {
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float2 zero = *reinterpret_cast<const float2*>(scales + n * 8 + lane % 4 * 2);
        const float2 by = *reinterpret_cast<const float2*>(scales + kTile + n * 8 + lane % 4 * 2);
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          s[n][h * 2] = (s[n][h * 2] - zero.x * q_sums[h]) * by.x;
          s[n][h * 2 + 1] = (s[n][h * 2 + 1] - zero.y * q_sums[h]) * by.y;
        }
      }
    }
#if SOFT_CAP
#pragma unroll
    for (int n = 0; n < kEights; ++n)
#pragma unroll
      for (int e = 0; e < 2 * kHalves; ++e) s[n][e] = p.cap * tanh_of(s[n][e] * p.scale);
    const float by = 1;
#else
    const float by = p.scale;
#endif
    if (there < kTile) {
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (n * 8 + lane % 4 * 2 + e % 2 >= there) s[n][e] = -kInf;
    }
    uint32_t weights[kEights][2] = {};  // rows lane / 4 and + 8
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float top = -kInf;
#pragma unroll
      for (int n = 0; n < kEights; ++n) top = fmaxf(top, fmaxf(s[n][h * 2], s[n][h * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top * by, st.top[h]);
      const float base = top == -kInf ? 0 : top;
      const float keep = power(st.top[h] - base);
      float sum = 0, shift = 0;
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        float w[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) sum += w[e] = power(s[n][h * 2 + e] * by - base);
        if (kScaled) {
          const float2 zero = *reinterpret_cast<const float2*>(scales + 2 * kTile + n * 8 + lane % 4 * 2);
          const float2 scale = *reinterpret_cast<const float2*>(scales + 3 * kTile + n * 8 + lane % 4 * 2);
          weights[n][h] = pack(w[0] * scale.x, w[1] * scale.y);
          // What is taken away is weighted by what it was weighted by.
          shift += wide(weights[n][h] & 0xffff) * (zero.x + kBias) + wide(weights[n][h] >> 16) * (zero.y + kBias);
        } else {
          weights[n][h] = pack(w[0], w[1]);
        }
      }
      st.total[h] = st.total[h] * keep + sum;
      if (kScaled) st.shift[h] = st.shift[h] * keep + shift;
      if (keep != 1.0f) {
#pragma unroll
        for (int n = 0; n < kOut; ++n) st.out[n][h * 2] *= keep, st.out[n][h * 2 + 1] *= keep;
      }
      st.top[h] = top;
    }
#pragma unroll
    for (int part = 0; part < kTile / 16; ++part) {
      const uint32_t a[4] = {weights[part * 2][0], weights[part * 2][1], weights[part * 2 + 1][0],
                             weights[part * 2 + 1][1]};
      if (!kIsCodes) {
#pragma unroll
        for (int n = 0; n < kOut; n += 2) {
          uint32_t b[4];  // elements n*8 … n*8+7 for tokens 0-7, 8-15; then the next 8
          load4_transposed(b, smem(values + chunk<kPitch>(lane % 16, n + lane / 16)));
          multiply(st.out[n], a, b[0], b[1]);
          multiply(st.out[n + 1], a, b[2], b[3]);
        }
      } else {
        constexpr int kWords = kValueWords > 0 ? kValueWords : 1;
        uint32_t words[4][kWords];  // of the four tokens that are this lane's
#pragma unroll
        for (int i = 0; i < 4; ++i)
          load_words<kPitch, kWords>(words[i], values, part * 16 + lane % 4 * 2 + i % 2 + i / 2 * 8,
                                     lane / 4 * kWords * 4);
#pragma unroll
        for (int w = 0; w < kWords; ++w)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t b[2][kPairs];
            spread(b[0], __byte_perm(words[0][w], words[1][w], half ? 0x7632 : 0x5410));
            spread(b[1], __byte_perm(words[2][w], words[3][w], half ? 0x7632 : 0x5410));
#pragma unroll
            for (int i = 0; i < kPairs; ++i) multiply(st.out[(w * 2 + half) * kPairs + i], a, b[0][i], b[1][i]);
          }
      }
    }
  };

  // Of what the warps have of a pair: out, or this block's part of it.
  const auto put_down = [&](int group) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float total = st.total[h], shift = st.shift[h];
#pragma unroll
      for (int o = 1; o < 4; o <<= 1) {
        total += __shfl_xor_sync(~0u, total, o);
        if (kScaled) shift += __shfl_xor_sync(~0u, shift, o);
      }
      const int row = lane / 4 + h * 8;
      if (row >= group) continue;
      if (lane % 4 == 0) states[warp * 16 + row] = make_float2(st.top[h], total);
      float* const to = merged + (warp * 16 + row) * kMergedRow;
      if (kIsCodes) {  // columns c of all products are elements c * kOut and on
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int n = 0; n < kOut; n += 4)
            *reinterpret_cast<float4*>(to + (lane % 4 * 2 + e) * kOut + n) =
                make_float4(st.out[n][h * 2 + e] - shift, st.out[n + 1][h * 2 + e] - shift,
                            st.out[n + 2][h * 2 + e] - shift, st.out[n + 3][h * 2 + e] - shift);
      } else {
#pragma unroll
        for (int n = 0; n < kOut; ++n)
          *reinterpret_cast<float2*>(to + n * 8 + lane % 4 * 2) = make_float2(st.out[n][h * 2], st.out[n][h * 2 + 1]);
      }
    }
  };
  const auto write = [&](bool is_whole, float* part, long long head, int group) {
    for (int slot = threadIdx.x; slot < group * (D / 4); slot += kThreads) {
      const int row = slot / (D / 4), col = slot % (D / 4) * 4;
      float top = -kInf, total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, states[w * 16 + row].x);
      const float base = top == -kInf ? 0 : top;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 state = states[w * 16 + row];
        const float by = power(state.x - base);
        total += state.y * by;
        const float4 x = *reinterpret_cast<const float4*>(merged + (w * 16 + row) * kMergedRow + col);
        sum.x += x.x * by, sum.y += x.y * by, sum.z += x.z * by, sum.w += x.w * by;
      }
      if (is_whole) {
        const float by = 1.0f / total;
        *reinterpret_cast<uint2*>(out + (head + row) * D + col) =
            make_uint2(pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by));
        if (lse && col == 0) lse[head + row] = base + log2f(total);
      } else {
        *reinterpret_cast<float4*>(part + row * D + col) = sum;
        if (col == 0) *reinterpret_cast<float2*>(part + 16 * D + row * 2) = make_float2(base, total);
      }
    }
  };

  begin_pair();
  clear();
  for (int i = 0; i < count; ++i) {
    wait_for<kStages - 2>();
    __syncwarp();
    ask(i + kStages - 1);
    const int seen = lengths[at.request] - first_token(lengths[at.request]);
    const int there = seen - at.unit * kUnit - warp * kTile;
    if (there > 0) take(tiles + i % kStages * kStageBytes, there);
    if (++at.unit < at.units && i + 1 < count) continue;

    const Cursor done = at;
    const int done_group = group;
    const long long done_head = head0;
    const bool is_whole = piece_begin == 0 && done.unit == done.units;
    float* const part = partial + (static_cast<long long>(mine) * 2 + (piece_begin == 0)) * kPart;
    put_down(done_group);
    if (i + 1 < count) {  // the next queries come while this pair is merged
      next_pair(at);
      begin_pair();
      clear();
    }
    __syncthreads();
    write(is_whole, part, done_head, done_group);
    __syncthreads();
    if (is_whole) continue;
    // The stretches that have parts of this pair are those of neighbouring thread blocks.
    const int pair0 = begins[done.request] * kv_heads + done.kv_head * done.units;
    const int begin_block = owner(pair0), end_block = owner(pair0 + done.units - 1);
    if (threadIdx.x == 0) {
      int* const counter = counters + done.request * kv_heads + done.kv_head;
      __threadfence();
      is_last = atomicAdd(counter, 1) == end_block - begin_block;
      __threadfence();
      if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) merge(p, merged, begin_block, end_block - begin_block + 1, done_head, done_group);
    __syncthreads();
  }
  wait_for<0>();
}
