// Compiled with -mavx512vnni as well; reached only after isa.cpp has found it.
#define ALLSPAN_VNNI 1
#include "simd_int_avx512.h"

#include "linear_int.inc"

const allspan::IntegerTable allspan::kIntegerVnni = make_table("avx512_vnni");
