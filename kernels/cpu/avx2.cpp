// Compiled with -mavx2 -mfma; reached only after isa.cpp has found both.
#include "simd_avx2.h"

#include "kernels.inc"

const allspan::Kernels allspan::kAvx2 = make_kernels("avx2");
