// Compiled with -msve-vector-bits=512; reached only after isa.cpp has found vectors of just that length.
#include "linear_float.h"
#include "simd_sve.h"

#include "linear_float.inc"

const allspan::LinearKernels allspan::kFloat32Sve512 = float32_kernels("sve512");
const allspan::LinearKernels allspan::kBfloat16Sve512 = bfloat16_kernels<PairsDot>("sve512");
