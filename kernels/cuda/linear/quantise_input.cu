// Rows of x as int8 or e4m3, for products with weights that are multiplied as they are. Bound by memory: 16 bytes a
// thread, one pass. Compiled with FLOATS: e4m3, else int8.
#include "linear/decode.cuh"

constexpr uint32_t kInfinite = FP16 ? 0x7c00 : 0x7f80;  // of 16 bits

// Of eight elements: magnitudes, as integers, are in order, with NaN above all.
__device__ __forceinline__ uint32_t largest(const uint4& eight) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) most = max(most, max(word(eight, j) & 0x7fff, word(eight, j) >> 16 & 0x7fff));
  return most;
}

// A block a row of x [rows, inputs], a multiple of 8: x ≈ code · scale, in the order of a k tile. int8: scale = most /
// 127, and `sums` are those of the row's codes; e4m3: scale = most / 448. A row with a NaN or an infinity gets the
// scale NaN. Of a row longer than `held` elements what is behind those is read twice.
extern "C" __global__ void __launch_bounds__(256)
    quantise(const uint4* x, uint2* codes, float* scales, float* sums, int inputs, int k_tiles, int held) {
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
  uint2* const to = codes + static_cast<long long>(blockIdx.x) * k_tiles * 8;
  for (int at = threadIdx.x; at < k_tiles * 8; at += blockDim.x) {
    const int k_tile = at / 8, set = at / 4 % 2, t = at % 4;
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
    to[k_tile * 8 + t * 2 + set] = make_uint2(halves[0], halves[1]);
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

// `quantise` of rows of up to kNarrow elements, a warp a row, which its lanes hold.
constexpr int kNarrow = 2048, kHeld = kNarrow / 256;
extern "C" __global__ void __launch_bounds__(256)
    quantise_narrow(const uint4* x, uint2* codes, float* scales, float* sums, int rows, int inputs, int k_tiles) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const uint4* const from = x + static_cast<long long>(row) * (inputs / 8);
  uint4 held[kHeld];
  uint32_t most_bits = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = i * 32 + lane;
    held[i] = at < inputs / 8 ? from[at] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) most_bits = max(most_bits, largest(held[i]));
  most_bits = __reduce_max_sync(~0u, most_bits);
  const float most = wide(most_bits), largest = FLOATS ? 448.0f : 127.0f;
  const bool usable = most_bits < kInfinite && most >= 1e-30f;
  const float factor = usable ? largest / most : 0.0f;
  float sum = 0;
  uint2* const to = codes + static_cast<long long>(row) * k_tiles * 8;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int at = i * 32 + lane, set = at / 4 % 2, t = at % 4;
    if (at >= k_tiles * 8) break;
    uint32_t halves[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = usable ? word(held[i], j) : 0;
      const float low = wide(pair & 0xffff) * factor, high = wide(pair >> 16) * factor;
      if (FLOATS) {
        halves[j / 2] |= pack_e4m3(low, high) << (j % 2 * 16);
      } else {
        const int a = __float2int_rn(low), b = __float2int_rn(high);
        sum += static_cast<float>(a + b);
        halves[j / 2] |= ((a & 0xff) | (b & 0xff) << 8) << (j % 2 * 16);
      }
    }
    to[at / 8 * 8 + t * 2 + set] = make_uint2(halves[0], halves[1]);
  }
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  if (lane > 0) return;
  scales[row] = most_bits >= kInfinite ? __uint_as_float(0x7fffffff) : usable ? most / largest : 0.0f;
  sums[row] = sum;
}

// 16 threads for 128 inputs of a row of x [rows, inputs], a multiple of 8: x ≈ code · scale, codes e4m3 in the order of
// a k tile [all_rows, groups · 128], scales float32 [groups, all_rows]; rows from `rows` on are zeros. scale = most /
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
  // 16 of a group are two k tiles: chunk `t % 4`, set `t / 4 % 2` of each.
  codes[(static_cast<long long>(row) * groups + group) * 16 + t / 8 * 8 + t % 4 * 2 + t / 4 % 2] =
      make_uint2(halves[0], halves[1]);
  if (t == 0)
    scales[static_cast<long long>(group) * all_rows + row] = most_bits >= kInfinite ? __uint_as_float(0x7fffffff)
                                                             : usable               ? most / 448.0f
                                                                                    : 0.0f;
}
