// Which kernels a product with codes takes.
#include "linear/integer/linear_int.h"

#include "isa/isa.h"

namespace allspan {
namespace {

int row_number(const PackedSpec& spec) { return static_cast<int>(spec.format) - static_cast<int>(Format::kChannel8); }

const LinearKernels& row_of(const IntegerTable& table, const PackedSpec& spec) {
  const int format = row_number(spec);
  return spec.activation == Activation::kA16 ? table.a16[format] : table.a8[format];
}

}  // namespace

const LinearKernels& integer_kernels([[maybe_unused]] int isa, const PackedSpec& spec) {
#if defined(__x86_64__)
  if (isa >= kIsaAmx && row_number(spec) < 2) return kIntegerAmx[row_number(spec)][spec.activation == Activation::kA16];
  if (isa >= kIsaAvx512Vnni) return row_of(kIntegerAvx512Vnni, spec);
  if (isa >= kIsaAvx512) return row_of(kIntegerAvx512, spec);
  if (isa >= kIsaAvx2) return row_of(kIntegerAvx2, spec);
#elif defined(__aarch64__)
  if (isa == kIsaNeonBf16) return row_of(kIntegerNeonBf16, spec);
  if (isa == kIsaSve512) return row_of(kIntegerSve512, spec);
  if (isa == kIsaSve256) return row_of(kIntegerSve256, spec);
  if (isa == kIsaNeonDot) return row_of(kIntegerNeonDot, spec);
  if (isa == kIsaNeon) return row_of(kIntegerNeon, spec);
#endif
  return row_of(kIntegerGeneric, spec);
}

}  // namespace allspan
