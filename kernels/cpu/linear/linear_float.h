// The kernels of float32 and bfloat16 weights; float_kernels() of packed_spec.h chooses among them.
#pragma once

#include "linear/packed_spec.h"

namespace allspan {

extern const LinearKernels kFloat32Generic, kBfloat16Generic;
#if defined(__x86_64__)
extern const LinearKernels kFloat32Avx2, kBfloat16Avx2;
extern const LinearKernels kFloat32Avx512, kBfloat16Avx512;
extern const LinearKernels kBfloat16Avx512Bf16, kBfloat16Amx;
#elif defined(__aarch64__)
extern const LinearKernels kFloat32Neon, kBfloat16Neon;
extern const LinearKernels kBfloat16NeonBf16;
extern const LinearKernels kFloat32Sve256, kBfloat16Sve256;
extern const LinearKernels kFloat32Sve512, kBfloat16Sve512;
#endif

}  // namespace allspan
