// Compiled with -march=armv8.2-a+bf16; reached only after isa.cpp has found its instructions.
#include "linear_float.h"
#include "simd_neon.h"

#include "linear_float.inc"

namespace {

// A step is one dot product of pairs, which rounds to odd and flushes subnormal numbers.
struct Bfloat16Dot : OneByOne {
  typedef uint16_t Input;
  static constexpr int kHalves = 1;
  static constexpr int64_t kInputBytes = 4;
  static uint16_t input(float x) { return round_to_bf16(x); }
  static V weights(const uint8_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static V inputs(const char* x, int) { return set1(*reinterpret_cast<const float*>(x)); }
  static V add(V w, V x, V sum) { return vbfdotq_f32(sum, vreinterpretq_bf16_f32(w), vreinterpretq_bf16_f32(x)); }
};

}  // namespace

const allspan::LinearKernels allspan::kBfloat16NeonBf16 = bfloat16_kernels<Bfloat16Dot>("neon_bf16");
