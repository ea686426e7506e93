// Which instruction sets this CPU has and this operating system has switched on.
#pragma once

#include <cstdint>
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

#if defined(__x86_64__)
// What cpuid says (Intel SDM, volume 2A, CPUID), and XCR0: the register state that the operating system saves.
struct X86Features {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf7_1_eax = 0;
  uint64_t saved_state = 0;
};

// What can run on such a CPU, best first; the last is always "generic". tiles_granted: asked only where all else that
// AMX needs is there.
std::vector<Variant> choose_variants(const X86Features& cpu, bool (*tiles_granted)());
#endif

// What can run here, best first; the last is always "generic".
const std::vector<Variant>& variants();

}  // namespace allspan
