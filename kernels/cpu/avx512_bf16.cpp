// Compiled with the flags of avx512.cpp and -mavx512bf16; reached only after isa.cpp has found them.
#include "simd_avx512.h"

#include "kernels.inc"

const allspan::Kernels allspan::kAvx512Bf16 = make_kernels("avx512_bf16");
