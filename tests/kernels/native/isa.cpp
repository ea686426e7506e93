// Which variants are chosen for CPUs that are not here: by what cpuid says of them.
#include "isa/isa.h"

#include "check.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

using allspan::X86Features;

constexpr uint32_t kBasic = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
constexpr uint32_t kAvx512 = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
constexpr uint32_t kBf16 = 1u << 5, kAmx = 1u << 22 | 1u << 24 | 1u << 25;
constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x600e6;

bool granted() { return true; }
bool denied() { return false; }

std::string chosen(const X86Features& cpu, bool (*tiles)() = granted) {
  std::string names;
  for (const Variant& variant : allspan::choose_variants(cpu, tiles)) names += std::string(" ") + variant.name;
  return names;
}

}  // namespace

void check_isa(Checks& checks) {
  const auto expect = [&](const char* cpu, const std::string& got, const std::string& expected) {
    checks.require(got == expected, std::string(cpu) + ":" + got + " instead of" + expected);
  };
  const X86Features haswell{kBasic, bit_AVX2, 0, 0, 0, kYmm};
  const X86Features skylake{kBasic, kAvx512, 0, 0, 0, kZmm};
  const X86Features cascade_lake{kBasic, kAvx512, bit_AVX512VNNI, 0, 0, kZmm};  // no VBMI, like the next
  const X86Features cooper_lake{kBasic, kAvx512, bit_AVX512VNNI, 0, kBf16, kZmm};
  const X86Features ice_lake{kBasic, kAvx512, bit_AVX512VNNI | bit_AVX512VBMI, 0, 0, kZmm};
  const X86Features zen4{kBasic, kAvx512, bit_AVX512VNNI | bit_AVX512VBMI, 0, kBf16, kZmm};
  const X86Features sapphire_rapids{kBasic, kAvx512, bit_AVX512VNNI | bit_AVX512VBMI, kAmx, kBf16, kTiles};
  const std::string avx512 = " avx512 avx2 generic", bf16 = " avx512_bf16 avx512_vnni" + avx512;
  expect("none", chosen({}), " generic");
  expect("Haswell", chosen(haswell), " avx2 generic");
  expect("Skylake-SP", chosen(skylake), avx512);
  expect("Cascade Lake", chosen(cascade_lake), " avx512_vnni" + avx512);
  expect("Cooper Lake", chosen(cooper_lake), bf16);
  expect("Ice Lake", chosen(ice_lake), " avx512_vnni" + avx512);
  expect("Zen 4", chosen(zen4), bf16);
  expect("Sapphire Rapids", chosen(sapphire_rapids), " amx" + bf16);
  expect("Sapphire Rapids, tiles refused", chosen(sapphire_rapids, denied), bf16);
  X86Features unsaved = sapphire_rapids;
  unsaved.saved_state = kZmm;
  expect("tiles that are not saved", chosen(unsaved), bf16);
  unsaved.saved_state = kYmm;
  expect("AVX-512 registers that are not saved", chosen(unsaved), " avx2 generic");
  unsaved.saved_state = 0;
  expect("AVX registers that are not saved", chosen(unsaved), " generic");
}

#else

void check_isa(Checks&) {}

#endif
