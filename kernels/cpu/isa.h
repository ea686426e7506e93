// Which instruction sets this CPU has and this operating system has switched on.
#pragma once

#include <vector>

#include "kernels.h"

namespace allspan {

// Of one architecture, each holds all below it.
enum Isa : int {
  kIsaGeneric = 0,
  kIsaAvx2 = 1,        // with FMA and F16C
  kIsaAvx512 = 2,      // F, BW, VL, DQ
  kIsaAvx512Vnni = 3,  // dot products of bytes
  kIsaAvx512Bf16 = 4,  // dot products of bfloat16
  kIsaAmx = 5,         // tiles of bfloat16 and bytes
  kIsaNeon = 1,        // aarch64
  kIsaNeonDot = 2,     // dot products of bytes, bfloat16
  kIsaSve = 3,
};

struct Variant {
  const char* name;
  Isa isa;
  const Kernels* kernels;
};

// What can run here, best first; the last is always "generic".
const std::vector<Variant>& variants();

}  // namespace allspan
