// What goes with products of many rows, which cuBLAS multiplies, and with packed embeddings; weights lie in rows
// (kernels/rows.py). All of it is bound by memory: 16 bytes a thread, one pass.
//
// Compiled with BITS and FLOATS (codes.cuh) and GROUPED (numbers for each group, else float32 for all inputs);
// of products with FROM_CODES (sums of codes in int32, else 16-bit elements, or, with FROM_BF16, bfloat16 whatever
// these are), SCALED (sums of e4m3 codes, which take the scales of their row and feature here: cuBLAS is faster
// without, and they are bfloat16, as half precision ends too early) and WIDTH, features of a thread (8, or 1 where rows
// are not aligned).
#include "linear/codes.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif
#ifndef FROM_CODES
#define FROM_CODES 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#ifndef FROM_BF16
#define FROM_BF16 !FP16
#endif
#ifndef WIDTH
#define WIDTH 8
#endif

// What is `base` more than a code, times `scale`, less `offset`, is the weight.
__device__ __forceinline__ void numbers_of(const void* numbers, long long at, float base, float& scale, float& offset) {
  float least = 0;
  if (BITS == 16) {
    scale = 1;
  } else if (GROUPED) {
    const uint32_t pair = static_cast<const uint32_t*>(numbers)[at];
    scale = scale_of(pair), least = offset_of(pair);
  } else {
    const float2 pair = static_cast<const float2*>(numbers)[at];
    scale = pair.x, least = pair.y;
  }
  offset = base * scale + least;
}

// The 8 inputs of a set that a chunk holds, of a feature.
__device__ __forceinline__ void weights_of(const uint4& chunk, const void* numbers, int features, int groups,
                                           int group_sets, int feature, int slab, int set, float* values) {
  uint32_t pairs[4];
  decode(chunk, set, pairs);
  float scale, offset;
  // Of what fills the last slab, the last one.
  const long long group = GROUPED ? min((slab * kSets + set) / group_sets, groups - 1) : 0;
  numbers_of(numbers, group * features + feature, kBase, scale, offset);
  scale *= kUnit;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    values[j * 2] = scale * wide(pairs[j] & 0xffff) - offset;
    values[j * 2 + 1] = scale * wide(pairs[j] >> 16) - offset;
  }
}

__device__ __forceinline__ uint4 packed(const float* v) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// out: 16-bit elements [features, slabs · 32 · kSets], inputs in their order.
extern "C" __global__ void dequantise(const uint4* weight, const void* numbers, uint4* out, int features, int groups,
                                      int group_sets, int slabs) {
  const long long chunks = static_cast<long long>(features) * slabs * 4;
  for (long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; at < chunks;
       at += static_cast<long long>(gridDim.x) * blockDim.x) {
    const int feature = static_cast<int>(at / (slabs * 4)), slab = static_cast<int>(at / 4 % slabs);
    const uint4 chunk = stream16(weight + at);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float values[8];
      weights_of(chunk, numbers, features, groups, group_sets, feature, slab, set, values);
      out[(at / 4 * kSets + set) * 4 + at % 4] = packed(values);
    }
  }
}

// A block a token: out [tokens, inputs] = feature id - first_row, or 0.
extern "C" __global__ void embed(const int* ids, const uint4* weight, const void* numbers, void* out, int features,
                                 int groups, int group_sets, int inputs, int slabs, int lead, int first_row,
                                 int out_floats) {
  const int feature = ids[blockIdx.x] - first_row;
  const bool is_ours = feature >= 0 && feature < features;
  const long long row = static_cast<long long>(blockIdx.x) * inputs;
  for (int at = threadIdx.x; at < slabs * 4; at += blockDim.x) {
    const uint4 chunk = is_ours ? weight[static_cast<long long>(feature) * slabs * 4 + at] : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float values[8] = {};
      if (is_ours) weights_of(chunk, numbers, features, groups, group_sets, feature, at / 4, set, values);
      const int input = (at / 4 * kSets + set) * 32 + at % 4 * 8 - lead;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (input + e < 0 || input + e >= inputs) continue;
        if (out_floats)
          static_cast<float*>(out)[row + input + e] = values[e];
        else
          static_cast<bf16*>(out)[row + input + e] = narrow(values[e]);
      }
    }
  }
}

constexpr uint32_t kInfinite = FP16 ? 0x7c00 : 0x7f80;  // of 16 bits

// Of eight elements: magnitudes, as whole numbers, are in order, with NaN above all.
__device__ __forceinline__ uint32_t largest(const uint4& eight) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) most = max(most, max(word(eight, j) & 0x7fff, word(eight, j) >> 16 & 0x7fff));
  return most;
}

// A block a row of x [rows, inputs], a multiple of 8: x ≈ code · scale, in the order of a slab. int8: scale = most /
// 127, and `sums` are those of the row's codes; e4m3: scale = most / 448. A row with a NaN or an infinity gets the
// scale NaN. Of a row longer than `held` elements what is behind those is read twice.
extern "C" __global__ void __launch_bounds__(256)
    quantise(const uint4* x, uint2* codes, float* scales, float* sums, int inputs, int slabs, int held) {
  DYNAMIC_SHARED(shared);
  uint4* const row = reinterpret_cast<uint4*>(shared);
  __shared__ float most_of[8], sum_of[8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kept = min(inputs, held) / 8;
  const uint4* const from = x + static_cast<long long>(blockIdx.x) * (inputs / 8);
  uint32_t most_bits = 0;
#pragma unroll 4
  for (int at = threadIdx.x; at < inputs / 8; at += blockDim.x) {
    const uint4 eight = from[at];
    if (at < kept) row[at] = eight;  // to be read by the same thread
    most_bits = max(most_bits, largest(eight));
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) most_bits = max(most_bits, __shfl_xor_sync(~0u, most_bits, o));
  if (lane == 0) most_of[warp] = __uint_as_float(most_bits);
  __syncthreads();
  most_bits = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) most_bits = max(most_bits, __float_as_uint(most_of[w]));
  const float most = wide(most_bits), largest = FLOATS ? 448.0f : 127.0f;
  const bool usable = most_bits < kInfinite && most >= 1e-30f;
  const float factor = usable ? largest / most : 0.0f;
  float sum = 0;
  uint2* const to = codes + static_cast<long long>(blockIdx.x) * slabs * 8;
  for (int at = threadIdx.x; at < slabs * 8; at += blockDim.x) {
    const int slab = at / 8, set = at / 4 % 2, t = at % 4;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (at < inputs / 8 && usable) eight = at < kept ? row[at] : from[at];
    uint32_t halves[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = wide(word(eight, j) & 0xffff) * factor, high = wide(word(eight, j) >> 16) * factor;
      if (FLOATS) {
        halves[j / 2] |= pack_e4m3(low, high) << (j % 2 * 16);
      } else {
        const int a = __float2int_rn(low), b = __float2int_rn(high);
        sum += static_cast<float>(a + b);
        halves[j / 2] |= ((a & 0xff) | (b & 0xff) << 8) << (j % 2 * 16);
      }
    }
    to[slab * 8 + t * 2 + set] = make_uint2(halves[0], halves[1]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (lane == 0) sum_of[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  scales[blockIdx.x] = most_bits >= kInfinite ? __uint_as_float(0x7fffffff) : usable ? most / largest : 0.0f;
  if (sums) {
    sum = 0;
    for (int w = 0; w < 8; ++w) sum += sum_of[w];
    sums[blockIdx.x] = sum;
  }
}

// 16 threads for 128 inputs of a row of x [rows, inputs], a multiple of 8: x ≈ code · scale, codes e4m3 in the order of
// a slab [all_rows, groups · 128], scales float32 [groups, all_rows]; rows from `rows` on are zeros. scale = most /
// 448; of a NaN or an infinity it is NaN.
extern "C" __global__ void __launch_bounds__(256)
    quantise_groups(const uint4* x, uint2* codes, float* scales, int rows, int inputs, int groups, int all_rows) {
  const long long at = static_cast<long long>(blockIdx.x) * 16 + threadIdx.x / 16;  // of all groups, row by row
  const int row = static_cast<int>(at / groups), group = static_cast<int>(at % groups), t = threadIdx.x % 16;
  const int eight = group * 16 + t;
  const bool is_there = row < rows && eight < inputs / 8;
  const uint4 values = is_there ? x[static_cast<long long>(row) * (inputs / 8) + eight] : make_uint4(0, 0, 0, 0);
  uint32_t most_bits = largest(values);
#pragma unroll
  for (int o = 8; o; o >>= 1) most_bits = max(most_bits, __shfl_xor_sync(~0u, most_bits, o));
  const float most = wide(most_bits);
  const bool usable = most_bits < kInfinite && most >= 1e-30f;
  const float factor = usable ? 448.0f / most : 0.0f;
  uint32_t halves[2] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t pair = usable ? word(values, j) : 0;
    halves[j / 2] |= pack_e4m3(wide(pair & 0xffff) * factor, wide(pair >> 16) * factor) << (j % 2 * 16);
  }
  if (row >= all_rows) return;
  // 16 of a group are two slabs: chunk `t % 4`, set `t / 4 % 2` of each.
  codes[(static_cast<long long>(row) * groups + group) * 16 + t / 8 * 8 + t % 4 * 2 + t / 4 % 2] =
      make_uint2(halves[0], halves[1]);
  if (t == 0)
    scales[static_cast<long long>(group) * all_rows + row] = most_bits >= kInfinite ? __uint_as_float(0x7fffffff)
                                                             : usable               ? most / 448.0f
                                                                                    : 0.0f;
}

constexpr bool kHasFactors = FROM_CODES || SCALED;
constexpr float kProductBase = FROM_CODES ? -128.0f : 0.0f;  // of codes as cuBLAS had them
constexpr int kPieces = FROM_CODES ? 2 : 1;                  // of 16 bytes, that eight features of a product have
constexpr int kRows = FROM_CODES ? 2 : 4;  // whose products a thread asks for before it looks at the first

// What WIDTH features take, whatever the row.
struct Features {
  float scale[WIDTH], offset[WIDTH], bias[WIDTH];

  __device__ __forceinline__ Features(const void* numbers, const float* all, int feature) {
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) {
      if (kHasFactors) numbers_of(numbers, feature + e, kProductBase, scale[e], offset[e]);
      bias[e] = all ? all[feature + e] : 0;
    }
  }
};

__device__ __forceinline__ void ask(const void* products, long long at, uint4* pieces) {
  if (WIDTH == 8) {
    const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const char*>(products) + at * kPieces * 2);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = stream16(from + i);
  } else {
    pieces[0].x = FROM_CODES ? static_cast<const uint32_t*>(products)[at] : static_cast<const bf16*>(products)[at];
  }
}

__device__ __forceinline__ void values_of(const uint4* pieces, const Features& of, float scale, float sum,
                                          float* values) {
#pragma unroll
  for (int e = 0; e < WIDTH; ++e) {
    if (FROM_CODES) {
      const float product = static_cast<float>(static_cast<int>(word(pieces[e / 4], e % 4)));
      values[e] = scale * (of.scale[e] * product - of.offset[e] * sum);
    } else {
      const uint32_t bits = word(pieces[0], e / 2) >> e % 2 * 16 & 0xffff;
      values[e] = FROM_BF16 ? __uint_as_float(bits << 16) : wide(bits);
      if (SCALED) values[e] *= scale * of.scale[e];
    }
    values[e] += of.bias[e];
  }
}

// WIDTH features of a row: 32 or 16 bytes of out, or a single one.
__device__ __forceinline__ void put(float* values, void* out, long long to, bool adds, int out_floats) {
  if (out_floats) {
    float* const into = static_cast<float*>(out) + to;
    if (WIDTH == 8 && reinterpret_cast<size_t>(into) % 16 == 0) {
#pragma unroll
      for (int e = 0; e < 8; e += 4) {
        float4* const four = reinterpret_cast<float4*>(into + e);
        float4 sum = adds ? *four : make_float4(0, 0, 0, 0);
        sum.x += values[e], sum.y += values[e + 1], sum.z += values[e + 2], sum.w += values[e + 3];
        *four = sum;
      }
    } else {
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) into[e] = adds ? into[e] + values[e] : values[e];
    }
  } else if (WIDTH == 8) {
    *reinterpret_cast<uint4*>(static_cast<bf16*>(out) + to) = packed(values);
  } else {
    static_cast<bf16*>(out)[to] = narrow(values[0]);
  }
}

// products [rows, features] → out [rows, out_stride] from `column` on. `scales` and `sums` of the rows of x, and
// `numbers`, are those of products of codes. Blocks of the grid's y go from kRows rows to the next.
extern "C" __global__ void __launch_bounds__(256)
    finish(const void* products, const float* scales, const float* sums, const void* numbers, const float* bias,
           void* out, int rows, int features, int epilogue, int out_floats, int out_stride, int column) {
  const bool is_gated = epilogue == kGated;
  const int outputs = is_gated ? features / 2 : features;
  const int feature = (blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
  if (feature >= outputs) return;
  const Features gates(numbers, bias, feature), ups(numbers, bias, is_gated ? outputs + feature : feature);
  let_next_begin();
  wait_for_ahead();
  for (int first = blockIdx.y * kRows; first < rows; first += gridDim.y * kRows) {
    uint4 pieces[kRows][kPieces], others[kRows][kPieces];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= rows) break;
      const long long at = static_cast<long long>(first + r) * features + feature;
      ask(products, at, pieces[r]);
      if (is_gated) ask(products, at + outputs, others[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = first + r;
      if (row >= rows) break;
      const float scale = kHasFactors ? scales[row] : 1, sum = FROM_CODES ? sums[row] : 0;
      float values[WIDTH];
      values_of(pieces[r], gates, scale, sum, values);
      if (is_gated) {
        float factors[WIDTH];
        values_of(others[r], ups, scale, sum, factors);
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) values[e] = __fdividef(values[e], 1.0f + __expf(-values[e])) * factors[e];
      }
      put(values, out, static_cast<long long>(row) * out_stride + column + feature, epilogue == kAdd, out_floats);
    }
  }
}
