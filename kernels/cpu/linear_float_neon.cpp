// For aarch64, all of which has NEON.
#include "linear_float.h"
#include "simd_neon.h"

#include "linear_float.inc"

const allspan::LinearKernels allspan::kFloat32Neon = float32_kernels("neon");
const allspan::LinearKernels allspan::kBfloat16Neon = bfloat16_kernels<PairsDot>("neon");
