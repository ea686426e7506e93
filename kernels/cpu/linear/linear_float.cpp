#include "linear/linear_float.h"

#include "isa/isa.h"

namespace allspan {

const LinearKernels& float_kernels(int isa, const PackedSpec& spec) {
  const bool pairs = spec.format == Format::kBf16;
#if defined(__x86_64__)
  if (pairs && isa >= kIsaAmx) return kBfloat16Amx;
  if (pairs && isa >= kIsaAvx512Bf16) return kBfloat16Avx512Bf16;
  if (isa >= kIsaAvx512) return pairs ? kBfloat16Avx512 : kFloat32Avx512;
  if (isa >= kIsaAvx2) return pairs ? kBfloat16Avx2 : kFloat32Avx2;
#elif defined(__aarch64__)
  if (pairs && isa == kIsaNeonBf16) return kBfloat16NeonBf16;
  if (isa == kIsaSve512) return pairs ? kBfloat16Sve512 : kFloat32Sve512;
  if (isa == kIsaSve256) return pairs ? kBfloat16Sve256 : kFloat32Sve256;
  if (isa >= kIsaNeon) return pairs ? kBfloat16Neon : kFloat32Neon;
#else
  (void)isa;
#endif
  return pairs ? kBfloat16Generic : kFloat32Generic;
}

}  // namespace allspan
