// Elements of a row: from memory to float32 in registers and back, in accesses of up to 16 bytes a thread.
//
// kBfloat16 is ptx.cuh's 16-bit element: half precision with FP16 = 1. Types are numbers, so that macros can name them
// (dtypes.py). With WHOLE = 0 a row ends anywhere, and elements are taken one by one.
#ifndef ALLSPAN_ELEMENTS
#define ALLSPAN_ELEMENTS
#include "ptx/ptx.cuh"

#define kNaN __int_as_float(0x7fc00000)

enum Type { kFloat32, kBfloat16, kInt8, kE4m3, kNothing };

template <int kType>
constexpr int kBytes = kType == kFloat32    ? 4
                       : kType == kBfloat16 ? 2
                                            : 1;

template <int kSize>
__device__ __forceinline__ void fetch(const void* from, uint32_t* words) {
  if constexpr (kSize == 4) {
    words[0] = *static_cast<const uint32_t*>(from);
  } else if constexpr (kSize == 8) {
    const uint2 w = *static_cast<const uint2*>(from);
    words[0] = w.x, words[1] = w.y;
  } else {
#pragma unroll
    for (int i = 0; i < kSize / 16; ++i) {
      const uint4 w = static_cast<const uint4*>(from)[i];
      words[i * 4] = w.x, words[i * 4 + 1] = w.y, words[i * 4 + 2] = w.z, words[i * 4 + 3] = w.w;
    }
  }
}

template <int kSize>
__device__ __forceinline__ void put(void* to, const uint32_t* words) {
  if constexpr (kSize == 4) {
    *static_cast<uint32_t*>(to) = words[0];
  } else if constexpr (kSize == 8) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < kSize / 16; ++i)
      static_cast<uint4*>(to)[i] = make_uint4(words[i * 4], words[i * 4 + 1], words[i * 4 + 2], words[i * 4 + 3]);
  }
}

// The numbers nearest to x, as they lie in memory; int8: x is within -127 … 127.
template <int kType, int kCount>
__device__ __forceinline__ void encode(const float* x, uint32_t* words) {
  if constexpr (kType == kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = __float_as_uint(x[i]);
  } else if constexpr (kType == kBfloat16) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words[i] = pack(x[2 * i], x[2 * i + 1]);
  } else if constexpr (kType == kE4m3) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      words[i] = pack_e4m3(x[4 * i], x[4 * i + 1]) | pack_e4m3(x[4 * i + 2], x[4 * i + 3]) << 16;
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) words[i] |= (__float2int_rn(x[4 * i + j]) & 0xff) << 8 * j;
    }
  }
}

template <int kType, int kCount>
__device__ __forceinline__ void decode(const uint32_t* words, float* x) {
  if constexpr (kType == kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __uint_as_float(words[i]);
  } else {
    static_assert(kType == kBfloat16);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) x[2 * i] = wide_low(words[i]), x[2 * i + 1] = wide_high(words[i]);
  }
}

// Elements at … of an array, of which `left` are there; the others are 0.
template <int kType, int kCount>
__device__ __forceinline__ void load_words(const void* base, long long at, int left, uint32_t* words) {
  constexpr int kSize = kBytes<kType>;
  if constexpr (WHOLE) {
    fetch<kCount * kSize>(static_cast<const char*>(base) + at * kSize, words);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t bits = 0;
      if (i < left)
        bits = kSize == 4 ? static_cast<const uint32_t*>(base)[at + i] : static_cast<const bf16*>(base)[at + i];
      const int shift = i * kSize % 4 * 8;
      words[i * kSize / 4] = shift ? words[i * kSize / 4] | bits << shift : bits;
    }
  }
}
template <int kType, int kCount>
__device__ __forceinline__ void load(const void* base, long long at, int left, float* x) {
  uint32_t words[kCount * kBytes<kType> / 4];
  load_words<kType, kCount>(base, at, left, words);
  decode<kType, kCount>(words, x);
}

template <int kType, int kCount>
__device__ __forceinline__ void store_words(void* base, long long at, int left, const uint32_t* words) {
  constexpr int kSize = kBytes<kType>;
  if constexpr (WHOLE) {
    put<kCount * kSize>(static_cast<char*>(base) + at * kSize, words);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= left) continue;
      const uint32_t word = words[i * kSize / 4] >> i * kSize % 4 * 8;
      if constexpr (kSize == 4)
        static_cast<uint32_t*>(base)[at + i] = word;
      else if constexpr (kSize == 2)
        static_cast<bf16*>(base)[at + i] = static_cast<bf16>(word);
      else
        static_cast<unsigned char*>(base)[at + i] = static_cast<unsigned char>(word);
    }
  }
}
template <int kType, int kCount>
__device__ __forceinline__ void store(void* base, long long at, int left, const float* x) {
  uint32_t words[kCount * kBytes<kType> / 4];
  encode<kType, kCount>(x, words);
  store_words<kType, kCount>(base, at, left, words);
}

// What an element of this type keeps of x.
template <int kType>
__device__ __forceinline__ float rounded(float x) {
  return kType == kBfloat16 ? wide(narrow(x)) : x;
}

// x / by with the bits of a division, of a finite x and an inverse that is 1 / by; two more steps instead of ten.
// P. Markstein, Computation of elementary functions on the IBM RISC System/6000 processor (1990), theorem 8.
__device__ __forceinline__ float quotient(float x, float by, float inverse) {
  const float near = x * inverse;
  return fmaf(fmaf(-near, by, x), inverse, near);
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
// gelu by tanh is x · logistic(2 · what tanh is of).
__device__ __forceinline__ float gelu(float x) {
  return __fdividef(x, 1.0f + __expf(-x * fmaf(x * x, 0.0713548163f, 1.59576912f)));
}

// See OpSet.gated_mul; a NaN stays one.
__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  gate = gate > 7.0f ? 7.0f : gate;
  up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
  return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
}

// The bits of |x|: ordered as the numbers are, NaN above all.
__device__ __forceinline__ unsigned size_bits(float x) { return __float_as_uint(x) & 0x7fffffff; }

// Numbers of a type are x / scale; the largest of a row or group becomes the type's largest.
template <int kType>
struct Scale {
  static constexpr float kMost = kType == kInt8 ? 127.0f : 448.0f;
  float scale, inverse;

  // NaN where the largest is infinite or no number, so that every read of the row is NaN, too.
  __device__ __forceinline__ explicit Scale(float top) {
    scale = top < kInf ? fmaxf(top / kMost, 1e-30f) : kNaN;
    inverse = 1.0f / scale;
  }
  __device__ __forceinline__ float operator()(float x) const {
    return fminf(fmaxf(quotient(x, scale, inverse), -kMost), kMost);
  }
};
#endif
