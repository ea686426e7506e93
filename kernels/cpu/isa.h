// Which instruction sets this CPU has and this operating system has switched on.
#pragma once

#include <vector>

#include "kernels.h"

namespace allspan {

// On x86 each holds all below it. On aarch64 the higher is the faster: SVE holds NEON, but not its dot products.
enum Isa : int {
  kIsaGeneric = 0,
  kIsaAvx2 = 1,        // with FMA and F16C
  kIsaAvx512 = 2,      // F, BW, VL, DQ
  kIsaAvx512Vnni = 3,  // dot products of bytes
  kIsaAvx512Bf16 = 4,  // dot products of bfloat16
  kIsaAmx = 5,         // tiles of bfloat16 and bytes
  kIsaNeon = 1,        // all of aarch64
  kIsaNeonDot = 2,     // dot products of bytes
  kIsaSve256 = 3,      // vectors of just 256 or 512 bits: at 128, NEON is as wide
  kIsaSve512 = 4,
  kIsaNeonBf16 = 5,  // dot products of bfloat16, and of bytes with and without a sign
};

struct Variant {
  const char* name;
  Isa isa;
  const Kernels* kernels;
};

// What can run here, best first; the last is always "generic".
const std::vector<Variant>& variants();

}  // namespace allspan
