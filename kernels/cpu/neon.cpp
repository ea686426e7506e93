// For aarch64, all of which has NEON.
#include "simd_neon.h"

#include "kernels.inc"

const allspan::Kernels allspan::kNeon = make_kernels("neon");
