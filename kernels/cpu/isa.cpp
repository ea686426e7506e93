#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace allspan {

#if defined(__x86_64__)
namespace {

bool all(uint64_t bits, uint64_t wanted) { return (bits & wanted) == wanted; }

// Register state that the operating system saves on a context switch (XCR0); the CPU's own word is not enough.
uint64_t saved_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace
#endif

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6;
  unsigned eax, ebx, ecx, edx, ebx7 = 0, ecx7, edx7;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && all(ecx, bit_OSXSAVE | bit_AVX | bit_FMA) &&
      __get_cpuid_count(7, 0, &eax, &ebx7, &ecx7, &edx7)) {
    const uint64_t state = saved_state();
    const uint64_t avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    if (all(state, kZmm) && all(ebx7, avx512 | bit_AVX2)) found.push_back(&kAvx512);
    if (all(state, kYmm) && all(ebx7, bit_AVX2)) found.push_back(&kAvx2);
  }
#endif
  found.push_back(&kGeneric);
  return found;
}

}  // namespace allspan
