// Compiled with the flags of avx512.cpp and -mavx512bf16; reached only after isa.cpp has found what they need.
#include "linear_float.h"
#include "simd_avx512.h"

#include "linear_float.inc"

namespace {

// A step is one dot product of pairs, which rounds and flushes subnormal numbers in its own way.
struct Bfloat16Dot {
  typedef uint16_t Input;
  static constexpr int kHalves = 1;
  static constexpr int64_t kInputBytes = 4;
  static uint16_t input(float x) { return round_to_bf16(x); }
  static V weights(const uint8_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static V inputs(const char* x, int) { return set1(*reinterpret_cast<const float*>(x)); }
  static V add(V w, V x, V sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(w), (__m512bh)_mm512_castps_si512(x));
  }
};

}  // namespace

const allspan::LinearKernels allspan::kBfloat16Avx512Bf16 = bfloat16_kernels<Bfloat16Dot>("avx512_bf16");
