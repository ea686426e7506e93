// Compiled with the flags of avx512.cpp; reached only after isa.cpp has found what they need.
#include "linear_float.h"
#include "simd_avx512.h"

#include "linear_float.inc"

const allspan::LinearKernels allspan::kFloat32Avx512 = float32_kernels("avx512");
const allspan::LinearKernels allspan::kBfloat16Avx512 = bfloat16_kernels<PairsDot>("avx512");
