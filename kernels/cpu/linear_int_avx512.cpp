// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq; reached only after isa.cpp has found them.
#define ALLSPAN_VNNI 0
#include "simd_int_avx512.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerAvx512 = make_table("avx512");
