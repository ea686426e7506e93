// Compiled with -msve-vector-bits=256; reached only after isa.cpp has found vectors of just that length.
#include "linear_float.h"
#include "simd_sve.h"

#include "linear_float.inc"

const allspan::LinearKernels allspan::kFloat32Sve256 = float32_kernels("sve256");
const allspan::LinearKernels allspan::kBfloat16Sve256 = bfloat16_kernels<PairsDot>("sve256");
