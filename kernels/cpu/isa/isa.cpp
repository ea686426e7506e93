#include "isa/isa.h"

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

X86Features read_features() {
  X86Features found;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &found.leaf1_ecx, &edx) || !all(found.leaf1_ecx, bit_OSXSAVE)) return found;
  found.saved_state = saved_state();
  if (!__get_cpuid_count(7, 0, &eax, &found.leaf7_ebx, &found.leaf7_ecx, &found.leaf7_edx)) return found;
  if (eax >= 1) __get_cpuid_count(7, 1, &found.leaf7_1_eax, &ebx, &ecx, &edx);
  return found;
}

std::vector<Variant> find_variants() { return choose_variants(read_features(), tiles_granted); }
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

#if defined(__x86_64__)
std::vector<Variant> choose_variants(const X86Features& cpu, bool (*tiles_granted)()) {
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  const uint64_t state = cpu.saved_state;
  const bool avx2 = all(cpu.leaf1_ecx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C) && all(cpu.leaf7_ebx, bit_AVX2) &&
                    all(state, kYmm);
  const bool avx512 =
      avx2 && all(cpu.leaf7_ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) && all(state, kZmm);
  const bool vnni = avx512 && all(cpu.leaf7_ecx, bit_AVX512VNNI);
  const bool bf16 = vnni && all(cpu.leaf7_1_eax, 1u << 5);
  const bool amx = bf16 && all(cpu.leaf7_edx, 1u << 22 | 1u << 24 | 1u << 25) && all(state, kTiles) && tiles_granted();
  std::vector<Variant> found;
  if (amx) found.push_back({"amx", kIsaAmx, &kAvx512Bf16});
  if (bf16) found.push_back({"avx512_bf16", kIsaAvx512Bf16, &kAvx512Bf16});
  if (vnni) found.push_back({"avx512_vnni", kIsaAvx512Vnni, &kAvx512});
  if (avx512) found.push_back({"avx512", kIsaAvx512, &kAvx512});
  if (avx2) found.push_back({"avx2", kIsaAvx2, &kAvx2});
  found.push_back({"generic", kIsaGeneric, &kGeneric});
  return found;
}
#endif

const std::vector<Variant>& variants() {
  static const std::vector<Variant> found = find_variants();
  return found;
}

}  // namespace allspan
