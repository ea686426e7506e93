#include "linear_float.h"
#include "simd_generic.h"

#include "linear_float.inc"

const allspan::LinearKernels allspan::kFloat32Generic = float32_kernels("generic");
const allspan::LinearKernels allspan::kBfloat16Generic = bfloat16_kernels<PairsDot>("generic");
