#include "simd_int_generic.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerGeneric = make_table("generic");
