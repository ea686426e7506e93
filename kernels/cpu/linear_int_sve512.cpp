// Compiled with -msve-vector-bits=512; reached only after isa.cpp has found vectors of just that length.
#include "simd_int_sve.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerSve512 = make_table("sve512");
