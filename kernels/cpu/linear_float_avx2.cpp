// Compiled with -mavx2 -mfma; reached only after isa.cpp has found them.
#include "linear_float.h"
#include "simd_avx2.h"

#include "linear_float.inc"

const allspan::LinearKernels allspan::kFloat32Avx2 = float32_kernels("avx2");
const allspan::LinearKernels allspan::kBfloat16Avx2 = bfloat16_kernels<PairsDot>("avx2");
