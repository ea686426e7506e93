// Compiled with -march=armv8.2-a+dotprod+i8mm; reached only after isa.cpp has found its instructions.
#define ALLSPAN_DOT 2
#include "simd_int_neon.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerNeonMixed = make_table("neon_bf16");
