// All that lies between the product with a layer's q, k and v weights and its attention, or some of it: norm of each
// head, rotary, Hadamard and the writing of pages. The single ops are this kernel, too, so their bits are the same.
//
// LANES lanes of a warp have a row (a head of a token) in registers, two runs of 8 elements each: element i is in run
// i / (8 LANES) of lane i / 8 % LANES. So elements i and i + d / 2, which turn together, are in one lane where the head
// has 16 LANES elements. Each step's outcome is rounded to bfloat16, as it would be in memory. Memory bounds it
// (queries read and written, keys read and written twice, values once); with Hadamard, the shuffles are close behind.
// But a row is only 256 bytes or so, and finding it costs more instructions than turning it: where there are many,
// those lanes have EACH heads of one token, with one look at its angles, all on their way before the first is turned.
//
// FORMAT: the type of the pages, kUint4, or kNothing for no pages. PLAIN: WHOLE heads of 16 LANES elements turn, all of
// them, and no more becomes of them before pages are written: the program is a sixth as long. QUERY_SCALE: queries are
// multiplied with a factor of their position after they have turned.
#include "rows/elements.cuh"

#ifndef QUERY_SCALE
#define QUERY_SCALE 0
#endif
constexpr int kUint4 = 5;
constexpr int kLanes = LANES, kRuns = 2, kThreads = 128, kRows = kThreads / kLanes, kMostDim = kLanes * kRuns * 8;

typedef float Row[kRuns][8];
typedef uint32_t Words[kRuns][4];  // of bfloat16: what a row is between two steps

template <class F>
__device__ __forceinline__ void for_all(Row& x, F&& each) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r)
#pragma unroll
    for (int j = 0; j < 8; ++j) each(x[r][j], r, j);
}
__device__ __forceinline__ void open(const Words& words, Row& x) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r) decode<kBfloat16, 8>(words[r], x[r]);
}
__device__ __forceinline__ void round(const Row& x, Words& words) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r) encode<kBfloat16, 8>(x[r], words[r]);
}
template <class F>
__device__ __forceinline__ float over_lanes(float x, F&& join) {
#pragma unroll
  for (int o = kLanes / 2; o; o >>= 1) x = join(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

// Elements of float32 that go with those of a lane; 0 where the head has ended.
__device__ __forceinline__ void load_beside(const float* from, int dim, int lane, Row& x) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int i = (lane + r * kLanes) * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) x[r][j] = 0;
    if (i < dim) load<kFloat32, 8>(from, i, dim - i, x[r]);
  }
}

// Any pairs of elements, through shared memory.
__device__ __forceinline__ void turn_far(Row& x, const float* angles, int rot, int lane, bf16* staged) {
  const int half = rot / 2;
  for_all(x, [&](float value, int r, int j) { staged[(lane + r * kLanes) * 8 + j] = narrow(value); });
  __syncwarp();
  for_all(x, [&](float& value, int r, int j) {
    const int i = (lane + r * kLanes) * 8 + j;
    if (i >= half * 2) return;
    const int angle = i < half ? i : i - half;
    const float other = wide(staged[i < half ? i + half : angle]), by = angles[half + angle];
    value = value * angles[angle] + other * (i < half ? -by : by);
  });
  __syncwarp();
}

// `by`: 1 / √size, of the matrix.
__device__ __forceinline__ void hadamard(Row& x, int size, float by, int lane) {
#pragma unroll
  for (int half = 1; half < 8; half *= 2) {
    if (half >= size) break;
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j & half) continue;
        const float first = x[r][j], second = x[r][j + half];
        x[r][j] = first + second, x[r][j + half] = first - second;
      }
  }
#pragma unroll
  for (int o = 1; o < kLanes; o *= 2) {
    if (o * 8 >= size) break;
    const float sign = lane & o ? -1.0f : 1.0f;
    for_all(x, [&](float& value, int, int) { value = fmaf(sign, value, __shfl_xor_sync(~0u, value, o)); });
  }
  if (kLanes * 8 < size)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float first = x[0][j], second = x[1][j];
      x[0][j] = first + second, x[1][j] = first - second;
    }
  for_all(x, [&](float& value, int, int) { value *= by; });
}

// Where the pages of a token and head are: elements of the pages, and of the scales.
struct Place {
  long long element, scale;
  int page_size;
};

// Writes integers and their zero and scale; all lanes of a warp come here, those that write nothing, too.
__device__ __forceinline__ void append(const Words& words, void* cache, float* scales, Place to, int dim, int lane,
                                       bool is_there) {
  constexpr float kLow = FORMAT == kInt8 ? -128.0f : 0.0f, kHigh = FORMAT == kInt8 ? 127.0f : 15.0f;
  constexpr bool kIsInteger = FORMAT == kInt8 || FORMAT == kUint4;
  float zero = 0, scale = 1, inverse = 1;
  bool is_sound = true;
  Row x;
  open(words, x);
  if (kIsInteger || (FORMAT == kE4m3 && scales)) {
    float least = kInf, most = -kInf, odd = 0;
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if ((lane + r * kLanes) * 8 + (WHOLE ? 0 : j) >= dim) continue;
        least = fminf(least, x[r][j]), most = fmaxf(most, x[r][j]);
        odd = fmaf(x[r][j], 0.0f, odd);  // NaN from the first on that is not finite
      }
    if (!(odd == 0)) most = kInf;
    least = over_lanes(least, [](float a, float b) { return fminf(a, b); });
    most = over_lanes(most, [](float a, float b) { return fmaxf(a, b); });
    if constexpr (kIsInteger) {
      const float range = most - least;
      scale = fmaxf(range / (kHigh - kLow), 1e-5f);
      zero = rintf(kLow - least / scale);
      is_sound = range < kInf && fabsf(zero) < kInf;
    } else {
      const float top = fmaxf(most, -least);
      scale = fmaxf(top / 448.0f, 1e-12f);
      is_sound = top < kInf;
    }
    if (!is_sound) zero = 0;
    inverse = 1.0f / scale;
    if (is_there && lane == 0) {
      scales[to.scale] = zero;
      scales[to.scale + to.page_size] = is_sound ? scale : kNaN;
    }
  }
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int at = (lane + r * kLanes) * 8;
    if (!is_there || at >= dim) continue;
    const int left = dim - at;
    if constexpr (kIsInteger) {
      float n[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        n[j] = is_sound && j < left ? fminf(fmaxf(quotient(x[r][j], scale, inverse) + zero, kLow), kHigh) : 0;
      if constexpr (FORMAT == kInt8) {
        store<kInt8, 8>(cache, to.element + at, left, n);
      } else {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) word |= static_cast<uint32_t>(__float2int_rn(n[j])) << 4 * j;
        unsigned char* const bytes = static_cast<unsigned char*>(cache) + to.element + at / 2;
        if constexpr (WHOLE)
          put<4>(bytes, &word);
        else
          for (int j = 0; 2 * j < min(left, 8); ++j) bytes[j] = static_cast<unsigned char>(word >> 8 * j);
      }
    } else if constexpr (FORMAT == kE4m3) {
      float n[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) n[j] = !is_sound ? 0 : scales ? quotient(x[r][j], scale, inverse) : x[r][j];
      store<kE4m3, 8>(cache, to.element + at, left, n);
    } else {
      store_words<kBfloat16, 8>(cache, to.element + at, left, words[r]);
    }
  }
}

// A token has `heads` queries in q, `key_heads` in k and `value_heads` in v, each `dim` elements after the one before;
// tokens are *_stride elements apart. Without norms, cos_sin (rot = 0) or hadamard_scale (0; else 1 / √size of the
// matrix) these steps are left out. Pages: strides in elements of the cache; scales [pages, key_heads, 2, page_size].
extern "C" __global__ void __launch_bounds__(kThreads, EACH == 1 ? 8 : 4)
    rotary_append(bf16* q, bf16* k, bf16* v, long long q_stride, long long k_stride, long long v_stride, int tokens,
                  int heads, int key_heads, int value_heads, int dim, const float* q_norm, const float* k_norm,
                  float eps, const int* positions, const float* cos_sin, int rot, float hadamard_scale,
                  const float* center, void* k_cache, void* v_cache, float* k_scales, float* v_scales,
                  long long page_stride, long long head_stride, long long token_stride, int page_size, const int* slots,
                  const float* q_scales) {
  __shared__ bf16 staged[kRows][kMostDim];
  const int lane = threadIdx.x % kLanes;
  // Values come last: they are not turned, so their warps have less to do.
  const unsigned group = blockIdx.x * kRows + threadIdx.x / kLanes;
  const unsigned query_groups = (heads + EACH - 1) / EACH, turning = query_groups + (key_heads + EACH - 1) / EACH;
  const unsigned value_groups = (value_heads + EACH - 1) / EACH;
  const bool is_value = group >= tokens * turning;
  const unsigned mine = is_value ? group - tokens * turning : group, per_token = is_value ? value_groups : turning;
  const bool is_there = group < tokens * (turning + value_groups);
  const int token = is_there ? mine / per_token : 0, place = is_there ? mine - token * per_token : 0;
  const bool is_query = !is_value && place < query_groups, is_key = !is_value && !is_query;
  const int head = (is_key ? place - query_groups : place) * EACH;  // the first, of those of its kind
  const int count = !is_there ? 0 : (is_query ? heads : is_key ? key_heads : value_heads) - head;
  bf16* const at = (is_query ? q + token * q_stride
                    : is_key ? k + token * k_stride
                             : v + token * v_stride) +
                   head * dim;
  let_next_begin();
  wait_for_ahead();
  const bool turns = (PLAIN || rot) && is_there && !is_value, is_near = PLAIN || (WHOLE && rot == kLanes * 16);
  const bool is_scaled = QUERY_SCALE && is_query && is_there;
  const int position = turns || is_scaled ? positions[token] : 0;
  const float q_scale = is_scaled ? q_scales[position] : 1;

  Words words[EACH];
  const auto read = [&](int e) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int i = (lane + r * kLanes) * 8;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[e][r][w] = 0;
      if (e < count && i < dim) load_words<kBfloat16, 8>(at + e * dim, i, dim - i, words[e][r]);
    }
  };
  // All loads come before the first store, which the compiler cannot move them over.
#pragma unroll
  for (int e = 0; e < EACH; ++e) read(e);
  __syncwarp();  // or the compiler has the rows asked for after the angles, which wait for the position
  const int slot = FORMAT != kNothing && is_there && !is_query ? slots[token] : -1;
  const float* const angles = cos_sin + static_cast<long long>(position) * rot;
  float cosine[8] = {}, sine[8] = {};  // asked for before anything waits for the rows
  if (is_near && turns) {              // a lane has both elements of each pair
    load<kFloat32, 8>(angles, lane * 8, 8, cosine);
    load<kFloat32, 8>(angles, kLanes * 8 + lane * 8, 8, sine);
  }

  if ((PLAIN || QUERY_SCALE || q_norm || k_norm || rot || hadamard_scale != 0) &&
      __any_sync(~0u, is_there && !is_value)) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      Row x;
      open(words[e], x);
      if (!PLAIN && (q_norm || k_norm)) {
        const float* const weight = is_query ? q_norm : k_norm;
        float sum = 0;
        for_all(x, [&](float value, int, int) { sum = fmaf(value, value, sum); });
        const float by = rsqrtf(over_lanes(sum, [](float a, float b) { return a + b; }) / dim + eps);
        if (weight) {
          Row w;
          load_beside(weight, dim, lane, w);
          for_all(x, [&](float& value, int r, int j) { value = value * by * w[r][j]; });
          round(x, words[e]);
          open(words[e], x);
        }
      }
      if (is_near) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float low = x[0][j], high = x[1][j];
          x[0][j] = low * cosine[j] - high * sine[j];
          x[1][j] = high * cosine[j] + low * sine[j];
        }
      } else if (rot) {
        turn_far(x, angles, rot, lane, staged[threadIdx.x / kLanes]);
      }
      round(x, words[e]);
      if (is_scaled) {
        open(words[e], x);
        for_all(x, [&](float& value, int, int) { value *= q_scale; });
        round(x, words[e]);
      }
      if (!PLAIN && hadamard_scale != 0) {
        open(words[e], x);
        if (center && is_key && e < count) {
          Row less;
          load_beside(center + static_cast<long long>(head + e) * dim, dim, lane, less);
          for_all(x, [&](float& value, int r, int j) { value -= less[r][j]; });
        }
        hadamard(x, dim & -dim, hadamard_scale, lane);
        round(x, words[e]);
      }
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int i = (lane + r * kLanes) * 8;
        if (e < count && !is_value && i < dim) store_words<kBfloat16, 8>(at + e * dim, i, dim - i, words[e][r]);
      }
      if (is_value) read(e);  // in the one warp that has some beside keys
    }
  }

  if (FORMAT != kNothing && __any_sync(~0u, slot >= 0)) {
    const long long page = slot / page_size, offset = slot % page_size;
    Place to = {page * page_stride + head * head_stride + offset * token_stride,
                (page * key_heads + head) * 2 * page_size + offset, page_size};
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      append(words[e], is_value ? v_cache : k_cache, is_value ? v_scales : k_scales, to, dim, lane,
             slot >= 0 && e < count);
      to.element += head_stride, to.scale += 2 * page_size;
    }
  }
}
