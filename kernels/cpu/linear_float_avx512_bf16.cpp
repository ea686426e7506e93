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
  // The same but for subnormal numbers, which become 0 here, and count as 0 in products.
  static int64_t put(const float* x, int64_t count, uint16_t* out) {
    const int64_t end = count / 32 * 32;
    for (int64_t i = 0; i < end; i += 32)
      _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(load(x + i + 16), load(x + i)));
    return end;
  }
  static V weights(const uint8_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static V inputs(const char* x, int) { return set1(*reinterpret_cast<const float*>(x)); }
  static V add(V w, V x, V sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(w), (__m512bh)_mm512_castps_si512(x));
  }
};

}  // namespace

const allspan::LinearKernels allspan::kBfloat16Avx512Bf16 = bfloat16_kernels<Bfloat16Dot>("avx512_bf16");
