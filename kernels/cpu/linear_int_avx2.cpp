// Compiled with -mavx2 -mfma -mf16c; reached only after isa.cpp has found them.
#include "simd_int_avx2.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerAvx2 = make_table("avx2");
