// Compiled with -msve-vector-bits=256; reached only after isa.cpp has found vectors of just that length.
#include "simd_sve.h"

#include "kernels.inc"

const allspan::Kernels allspan::kSve256 = make_kernels("sve256");
