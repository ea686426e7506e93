// For aarch64, all of which has NEON.
#define ALLSPAN_DOT 0
#include "simd_int_neon.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerNeon = make_table("neon");
