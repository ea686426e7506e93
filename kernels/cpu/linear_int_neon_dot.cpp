// Compiled with -march=armv8.2-a+dotprod; reached only after isa.cpp has found its instructions.
#define ALLSPAN_DOT 1
#include "simd_int_neon.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerNeonDot = make_table("neon_dot");
