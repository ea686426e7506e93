// Products with codes: one table of kernels an instruction set, which linear_int.cpp chooses from.
#pragma once

#include "linear/packed_spec.h"

namespace allspan {

// Every quantised format, by Format - kChannel8, with a8, and those up to q6_k with a16.
constexpr int kCodeFormats = 21, kA16Formats = 11;
struct IntegerTable {
  LinearKernels a8[kCodeFormats], a16[kA16Formats];
};

extern const IntegerTable kIntegerGeneric;
#if defined(__x86_64__)
extern const IntegerTable kIntegerAvx2;
extern const IntegerTable kIntegerAvx512;
extern const IntegerTable kIntegerAvx512Vnni;
extern const LinearKernels kIntegerAmx[2][2];  // channel8 and channel4, with a8 and a16
#elif defined(__aarch64__)
extern const IntegerTable kIntegerNeon, kIntegerNeonDot, kIntegerNeonBf16;
extern const IntegerTable kIntegerSve256, kIntegerSve512;
#endif

}  // namespace allspan
