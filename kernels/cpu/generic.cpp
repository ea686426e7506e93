#include "simd_generic.h"

#include "kernels.inc"

const allspan::Kernels allspan::kGeneric = make_kernels("generic");
