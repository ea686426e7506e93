// What a warp of decode.cu makes of a tile of KV: scores, weights, weighted values, by mma.sync.
//
// Keys and values are the 16 rows of a product, and 8 query heads its columns (HALVES = 2: twice 8): scores are
// keys[tokens x elements] * q[elements x heads], outputs values[elements x tokens] * weights[tokens x heads]. So no
// rows are wasted on fewer heads, and scores become the weights' fragment by one transposition of 8 x 8.
//
// Codes are multiplied as they are: the bits of a whole number below 1024 are, in half precision, that number times
// 2^-24 (a subnormal one, exact), so that a mask makes of a word of codes a pair that the tensor cores take. Scores are
// scale * (q . n - zero * sum(q)); q goes in as halves, times the power of two that brings its largest element below
// 2^15. A value's weight is the power of 2 of its score and of the logarithm of its scale, so that no scale is too
// large or too small for half precision. Who is beside whom in a word does not matter to keys, as the sum over
// elements may have any order; values are transposed in pairs of bytes.
#ifndef ALLSPAN_DECODE_TILE
#define ALLSPAN_DECODE_TILE
#include "attention/kv.cuh"
#include "attention/scores.cuh"

#ifndef HALVES
#define HALVES 2
#endif
#ifndef TILE
#define TILE (FORMAT == 0 ? 16 : 32)
#endif
constexpr int kTile = TILE, kSixteens = kTile / 16, kHalves = HALVES, kHeads = 8 * kHalves;
constexpr int kPitch = pitch(kRow), kTileBytes = kTile * kPitch;  // of K or of V
constexpr int kMergedRow = D + 4;                                 // floats; rows begin in different banks
// Keys, values, scales; once they are not needed, what a warp has of a pair.
constexpr int kReadBytes = 2 * kTileBytes + (kScaled ? 16 * kTile : 0), kMergedBytes = kHeads * (kMergedRow + 2) * 4;
constexpr int kStageBytes = ((kReadBytes > kMergedBytes ? kReadBytes : kMergedBytes) + 127) / 128 * 128;
constexpr int kQueryRow = D * 2 + 16, kQuerySlot = kHeads * kQueryRow;  // bytes; rows begin in different banks
static_assert(kTile % (kIsCodes ? 32 : 16) == 0, "whole products");

constexpr int kPairs = kBits == 4 ? 4 : 2;           // of a word of codes
constexpr float kBias = kFormat == kInt8 ? 128 : 0;  // by which codes are larger when they are multiplied
constexpr float kCodeOne = kFormat == kInt8 || kFormat == kUint4 ? 1.0f / (1 << 24) : 1;  // … and what 1 is then
// Weights are up to 2^kLift: half precision has fewer small numbers than large ones.
constexpr int kLift = kIsCodes || FP16 ? 15 : 0;
constexpr float kLifted = 1 << kLift;

// Code i of the low 16 bits beside code i of the high ones; those of 4 bits with an odd i are 16 times as large.
__device__ __forceinline__ void unpack_codes(uint32_t* pairs, uint32_t word) {
  if (kFormat == kUint4) {
    const uint32_t high = word >> 8;
    pairs[0] = word & 0x000f000fu, pairs[1] = word & 0x00f000f0u;
    pairs[kPairs - 2] = high & 0x000f000fu, pairs[kPairs - 1] = high & 0x00f000f0u;
  } else if (kFormat == kInt8) {
    pairs[0] = and_xor(word, 0x00ff00ffu, 0x00800080u);
    pairs[1] = and_xor(word >> 8, 0x00ff00ffu, 0x00800080u);
  } else {
    widen_e4m3(pairs, word);
  }
}
__device__ __forceinline__ void product(float* c, const uint32_t* a, const uint32_t* b) {
  if (kIsCodes)
    multiply_halves(c, a, b[0], b[1]);
  else
    multiply(c, a, b[0], b[1]);
}

// Of row `half * 8 + row` of the product of sixteen tokens: which token of the tile it is. Four neighbours are one
// lane's, which takes their zeros and scales at once.
__device__ __forceinline__ int token_of(int sixteen, int half, int row) {
  return kIsCodes ? sixteen / 2 * 32 + row * 4 + sixteen % 2 * 2 + half : sixteen * 16 + half * 8 + row;
}
// Where a token's row lies, so that rows of a product follow each other; those that are copied at once and lie within
// 128 bytes are in different banks.
__device__ __forceinline__ int place_of(int token) {
  if (!kIsCodes) return token;
  constexpr int kAside = kPitch < 128 ? 128 / kPitch - 1 : 0;
  const int row = token / 4 % 8, which = token % 4;
  return token / 32 * 32 + which * 8 + (row ^ (which & kAside));
}
// What this lane names when matrices of sixteen tokens and of chunks 0 and 1 are loaded; and of chunks c and c + 1.
__device__ __forceinline__ uint32_t matrices(uint32_t tile, int sixteen) {
  const int lane = threadIdx.x % 32;
  return tile + chunk<kPitch>(place_of(token_of(sixteen, lane / 8 % 2, lane % 8)), lane / 16);
}
__device__ __forceinline__ uint32_t chunks_on(uint32_t at, int c) { return (at ^ (c % 8 << 4)) + c / 8 * 128; }

// Query heads of a KV head: heads lane / 4 and + 8, in the order in which a lane meets the elements of keys.
struct Queries {
  uint32_t x[kHalves][kSteps][2];
  float by;                  // of what is multiplied, to make scores of it
  float sums[kHalves][2];    // of heads lane % 4 * 2 and + 1, in units of what is multiplied
  float slopes[kHalves][2];  // of those heads, to base 2

  // `group` rows of shared memory; the slopes of their heads.
  __device__ __forceinline__ void take(const char* slot, int group, float scale, const float* of_heads) {
    const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        slopes[h][e] = SLOPES && h * 8 + t * 2 + e < group ? of_heads[h * 8 + t * 2 + e] * kLog2E : 0;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int head = h * 8 + lane / 4;
      const bool is_there = head < group;
      const char* const row = slot + head * kQueryRow;
      uint32_t* const to = x[h][0];
#pragma unroll
      for (int i = 0; i < kSteps * 2; i += kIsCodes ? kPairs : 1) {
        if (kBits == 16) {
          to[i] = is_there ? *reinterpret_cast<const uint32_t*>(row + i * 16 + t * 4) : 0u;
        } else if (kBits == 8) {
          const uint2 two = is_there ? *reinterpret_cast<const uint2*>(row + i * 16 + t * 8) : make_uint2(0, 0);
          to[i] = two.x, to[i + 1] = two.y;
        } else {
          const uint4 four = is_there ? *reinterpret_cast<const uint4*>(row + i * 16 + t * 16) : make_uint4(0, 0, 0, 0);
          to[i] = four.x, to[i + 1] = four.y, to[i + kPairs - 2] = four.z, to[i + kPairs - 1] = four.w;
        }
      }
    }
    settle(scale);
  }

 private:
  // What came, as the products take it.
  __device__ __forceinline__ void settle(float scale) {
    by = scale;
    if (!kIsCodes) return;
    const int lane = threadIdx.x % 32;
    uint32_t largest = 0;
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int i = 0; i < kSteps * 2; ++i) largest = larger_pairs(largest, x[h][0][i] & 0x7fff7fffu);
    float top = fmaxf(wide_low(largest), wide_high(largest));
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const int exponent = min(max(static_cast<int>(__float_as_uint(top) >> 23), 15), 254);  // 127 is 2^0
    const float raise = __int_as_float((268 - exponent) << 23);                            // to 2^14 … 2^15
    by = scale * __int_as_float((exponent - 14) << 23) / kCodeOne;
    float all[kHalves];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      uint32_t* const to = x[h][0];
      all[h] = 0;
#pragma unroll
      for (int w = 0; w < kSteps * 2; w += kPairs) {
        uint32_t word[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) word[i] = to[w + i];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {  // elements i and i + kPairs
          const uint32_t pair = __byte_perm(word[i / 2], word[i / 2 + kPairs / 2], i % 2 ? 0x7632 : 0x5410);
          const float low = wide_low(pair) * raise, high = wide_high(pair) * raise;
          all[h] += low + high;
          const float less = kBits == 4 && i % 2 ? 1.0f / 16 : 1;
          to[w + i] = pack_halves(low * less, high * less);
        }
      }
      if (kScaled) {
        all[h] += __shfl_xor_sync(~0u, all[h], 1);
        all[h] += __shfl_xor_sync(~0u, all[h], 2);
#pragma unroll
        for (int e = 0; e < 2; ++e) sums[h][e] = __shfl_sync(~0u, all[h], (lane % 4 * 2 + e) * 4) * kCodeOne;
      }
    }
  }
};

// Of rows (tokens) lane / 4 and + 8, columns (heads) lane % 4 * 2 and + 1.
typedef float Product[4];

__device__ __forceinline__ void multiply_keys(Product (*s)[kSixteens], const Queries& q, uint32_t keys) {
#pragma unroll
  for (int j = 0; j < kSixteens; ++j) {
    const uint32_t at = matrices(keys, j);
    Product part[kHalves][2] = {};  // two, as each product of a sum waits for the one before
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      uint32_t r[4];  // rows 0 to 7 and 8 to 15 of chunk c; of chunk c + 1
      load4(r, chunks_on(at, c));
      if (!kIsCodes) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) product(part[h][c / 2 % 2], r, q.x[h][c / 2]);
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t low[kPairs], high[kPairs];
          unpack_codes(low, r[2 * k]), unpack_codes(high, r[2 * k + 1]);
#pragma unroll
          for (int i = 0; i < kPairs; i += 2) {
            const uint32_t a[4] = {low[i], high[i], low[i + 1], high[i + 1]};
            const int step = (c + k) * (kPairs / 2) + i / 2;
#pragma unroll
            for (int h = 0; h < kHalves; ++h) product(part[h][step % 2], a, q.x[h][step % kSteps]);
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[h][j][e] = part[h][0][e] + part[h][1][e];
  }
}

// What the tokens so far come to, for heads lane % 4 * 2 and + 1; totals and shifts are of this lane's tokens only.
struct State {
  Product out[kHalves][kSteps];  // times 2^kLift and what 1 is, elements in the order of products
  float top[kHalves][2], total[kHalves][2];
  float shift[kHalves][2];  // zeros times weights, to be taken away

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) out[h][m][0] = out[h][m][1] = out[h][m][2] = out[h][m][3] = 0;
      top[h][0] = top[h][1] = -kInf, total[h][0] = total[h][1] = shift[h][0] = shift[h][1] = 0;
    }
  }

  // The tile's scores, of which `there` tokens are there, one or more; values, then scales lie after its keys.
  __device__ __forceinline__ void add(Product (*s)[kSixteens], const Queries& q, const char* keys, int there,
                                      float cap) {
    const int lane = threadIdx.x % 32;
    float lack[kSixteens][2], once[kSixteens][2];                      // of values: zeros; 1 / (scale * 2^kLift)
    const float from_own = lane / 4 * (kIsCodes ? 4 : 1) + 1 - there;  // from the query to this lane's first token
    if (kScaled) scale_scores(s, q, reinterpret_cast<const float*>(keys + 2 * kTileBytes), lack, once, from_own, cap);
    if (!kScaled && kIsBent) {
#pragma unroll
      for (int j = 0; j < kSixteens; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float distance = from_own + token_of(j, e / 2, 0);
#pragma unroll
          for (int h = 0; h < kHalves; ++h) s[h][j][e] = logit_of(s[h][j][e], q.by, cap, q.slopes[h][e % 2], distance);
        }
    }
    if (there < kTile) {
#pragma unroll
      for (int j = 0; j < kSixteens; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (token_of(j, e / 2, lane / 4) >= there) {
            if (kScaled) lack[j][e / 2] = once[j][e / 2] = 0;  // a page's tokens to come have any scale
#pragma unroll
            for (int h = 0; h < kHalves; ++h) s[h][j][e] = -kInf;
          }
    }
    const float by = kScaled || kIsBent ? 1 : q.by;
    uint32_t weights[kHalves][kSixteens][2];
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float base[2], keep[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float high = -kInf;
#pragma unroll
        for (int j = 0; j < kSixteens; ++j) high = fmaxf(high, fmaxf(s[h][j][e], s[h][j][e + 2]));
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
        high = fmaxf(high * by, top[h][e]);
        base[e] = (high == -kInf ? 0 : high);
        keep[e] = power(top[h][e] - base[e]);
        base[e] -= kLift, top[h][e] = high;
        total[h][e] *= keep[e], shift[h][e] *= keep[e];
      }
      if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
        for (int m = 0; m < kSteps; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) out[h][m][e] *= keep[e % 2];
      }
#pragma unroll
      for (int j = 0; j < kSixteens; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float w[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            w[e] = power(fmaf(s[h][j][half * 2 + e], by, -base[e]));
            total[h][e] += kScaled ? w[e] * once[j][half] : w[e];
          }
          const uint32_t pair = kIsCodes ? pack_halves(w[0], w[1]) : pack(w[0], w[1]);
          if (kScaled) {  // what is taken away is weighted by what it was weighted by
            shift[h][0] += half_wide(pair & 0xffff) * lack[j][half];
            shift[h][1] += half_wide(pair >> 16) * lack[j][half];
          }
          weights[h][j][half] = transpose(pair);
        }
    }
    multiply_values(smem(keys + kTileBytes), weights);
  }

  // `group` of the warp's heads, to be merged with those of other warps.
  __device__ __forceinline__ void put_down(char* stage, int group) {
    const int lane = threadIdx.x % 32, g = lane / 4;
    float* const merged = reinterpret_cast<float*>(stage);                           // [kHeads][kMergedRow]
    float2* const states = reinterpret_cast<float2*>(merged + kHeads * kMergedRow);  // [kHeads]
    constexpr float kOne = 1 / (kCodeOne * kLifted);
#pragma unroll
    for (int h = 0; h < kHalves; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = total[h][e], less = shift[h][e];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) {
          sum += __shfl_xor_sync(~0u, sum, o);
          if (kScaled) less += __shfl_xor_sync(~0u, less, o);
        }
        less *= 1 / kLifted;
        const int head = h * 8 + lane % 4 * 2 + e;
        if (head >= group) continue;
        if (g == 0) states[head] = make_float2(top[h][e], kScaled ? sum : sum * (1 / kLifted));
        float* const to = merged + head * kMergedRow;
#pragma unroll
        for (int m = 0; m < kSteps; ++m) {
          const float low = out[h][m][e] * kOne - less;
          const float high = out[h][m][e + 2] * (kFormat == kUint4 ? kOne / 16 : kOne) - less;
          if (!kIsCodes) {
            to[m * 16 + g] = low, to[m * 16 + 8 + g] = high;
          } else if (kBits == 8) {
            *reinterpret_cast<float2*>(to + m * 16 + g * 2) = make_float2(low, high);
          } else {
            *reinterpret_cast<float2*>(to + m / 2 * 32 + g * 4 + m % 2 * 2) = make_float2(low, high);
          }
        }
      }
  }

 private:
  // Scores to base 2, the logarithm of the values' scales in them.
  static __device__ __forceinline__ void scale_scores(Product (*s)[kSixteens], const Queries& q, const float* scales,
                                                      float (*lack)[2], float (*once)[2], float from_own, float cap) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kSixteens; j += 2) {
      const float* const at = scales + token_of(j, 0, lane / 4);
      const float4 four[4] = {*reinterpret_cast<const float4*>(at), *reinterpret_cast<const float4*>(at + kTile),
                              *reinterpret_cast<const float4*>(at + 2 * kTile),
                              *reinterpret_cast<const float4*>(at + 3 * kTile)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto of = [&](int which) {
          return i == 0 ? four[which].x : i == 1 ? four[which].y : i == 2 ? four[which].z : four[which].w;
        };
        const int sixteen = (j + i / 2) % kSixteens, half = i % 2;
        const float zero = of(0) + kBias, factor = of(1) * q.by;
        const float scale = fabsf(of(3)) < 1e-30f ? 1e-30f : of(3);  // NaN remains
        const float more = logarithm(scale), distance = from_own + token_of(sixteen, half, 0);
        lack[sixteen][half] = of(2) + kBias, once[sixteen][half] = reciprocal(scale * kLifted);
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[h][sixteen][half * 2 + e];
            x = fmaf(-zero, q.sums[h][e], x);
            x = kIsBent ? logit_of(x, factor, cap, q.slopes[h][e], distance) + more : fmaf(x, factor, more);
          }
      }
    }
  }

  __device__ __forceinline__ void multiply_values(uint32_t values, const uint32_t (*weights)[kSixteens][2]) {
#pragma unroll
    for (int j = 0; j < kSixteens; ++j) {
      const uint32_t at = matrices(values, j);
#pragma unroll
      for (int c = 0; c < kChunks; c += 2) {
        uint32_t r[4];  // columns of chunk c for tokens 0 to 7 and 8 to 15; of chunk c + 1
        load4_transposed(r, chunks_on(at, c));
        if (!kIsCodes) {
          const uint32_t a[4] = {r[0], r[2], r[1], r[3]};
#pragma unroll
          for (int h = 0; h < kHalves; ++h) product(out[h][c / 2], a, weights[h][j]);
        } else {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            uint32_t first[kPairs], second[kPairs];
            unpack_codes(first, r[2 * k]), unpack_codes(second, r[2 * k + 1]);
#pragma unroll
            for (int i = 0; i < kPairs; i += 2) {
              const uint32_t a[4] = {first[i], first[i + 1], second[i], second[i + 1]};
#pragma unroll
              for (int h = 0; h < kHalves; ++h)
                product(out[h][((c + k) * (kPairs / 2) + i / 2) % kSteps], a, weights[h][j]);
            }
          }
        }
      }
    }
  }
};
#endif
