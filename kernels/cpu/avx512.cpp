// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma; reached only after isa.cpp has found them.
#include "simd_avx512.h"

#include "kernels.inc"

const allspan::Kernels allspan::kAvx512 = make_kernels("avx512");
