#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace allspan {
namespace {

#if defined(__x86_64__)
bool all(uint64_t bits, uint64_t wanted) { return (bits & wanted) == wanted; }

// Register state that the operating system saves on a context switch (XCR0); the CPU's own word is not enough.
uint64_t saved_state() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

// Linux hands out the tiles' 8 KiB of register state to processes that ask.
bool tiles_granted() {
#ifdef __linux__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::vector<Variant> find_variants() {
  std::vector<Variant> found;
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  unsigned eax, ebx, ecx, edx, ecx1 = 0, ebx7 = 0, ecx7 = 0, edx7 = 0, eax71 = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx1, &edx) && all(ecx1, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C) &&
      __get_cpuid_count(7, 0, &eax, &ebx7, &ecx7, &edx7)) {
    if (eax >= 1) __get_cpuid_count(7, 1, &eax71, &ebx, &ecx, &edx);
    const uint64_t state = saved_state();
    const bool avx2 = all(state, kYmm) && all(ebx7, bit_AVX2);
    const bool avx512 = avx2 && all(state, kZmm) && all(ebx7, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
    const bool vnni = avx512 && all(ecx7, bit_AVX512VNNI | bit_AVX512VBMI);
    const bool bf16 = vnni && all(eax71, 1u << 5);
    const bool amx = bf16 && all(state, kTiles) && all(edx7, 1u << 22 | 1u << 24 | 1u << 25) && tiles_granted();
    if (amx) found.push_back({"amx", kIsaAmx, &kAvx512Bf16});
    if (bf16) found.push_back({"avx512_bf16", kIsaAvx512Bf16, &kAvx512Bf16});
    if (vnni) found.push_back({"avx512_vnni", kIsaAvx512Vnni, &kAvx512});
    if (avx512) found.push_back({"avx512", kIsaAvx512, &kAvx512});
    if (avx2) found.push_back({"avx2", kIsaAvx2, &kAvx2});
  }
  found.push_back({"generic", kIsaGeneric, &kGeneric});
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
// Bytes of an SVE register as the operating system has set it for this thread, 0 where there is none. Asked, not
// measured: that would take an instruction of SVE.
int sve_bytes() {
  constexpr int kGetVectorLength = 51, kLengthMask = 0xffff;
  const int answer = prctl(kGetVectorLength, 0, 0, 0, 0);
  return answer < 0 ? 0 : answer & kLengthMask;
}

// Linux names here what the CPU has and the kernel lets programs use (Documentation/arch/arm64/elf_hwcaps.rst).
std::vector<Variant> find_variants() {
  constexpr uint64_t kDotProducts = 1 << 20, kSve = 1 << 22, kMixedBytes = 1 << 13, kBfloat16 = 1 << 14;
  const uint64_t caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
  const bool dot = caps & kDotProducts;
  std::vector<Variant> found;
  if (dot && (caps2 & kMixedBytes) && (caps2 & kBfloat16)) found.push_back({"neon_bf16", kIsaNeonBf16, &kNeon});
  const int bytes = caps & kSve ? sve_bytes() : 0;
  if (bytes == 64) found.push_back({"sve512", kIsaSve512, &kSve512});
  if (bytes == 32) found.push_back({"sve256", kIsaSve256, &kSve256});
  if (dot) found.push_back({"neon_dot", kIsaNeonDot, &kNeon});
  found.push_back({"neon", kIsaNeon, &kNeon});
  found.push_back({"generic", kIsaGeneric, &kGeneric});
  return found;
}
#else
std::vector<Variant> find_variants() { return {{"generic", kIsaGeneric, &kGeneric}}; }
#endif

}  // namespace

const std::vector<Variant>& variants() {
  static const std::vector<Variant> found = find_variants();
  return found;
}

}  // namespace allspan
