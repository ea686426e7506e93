// float32 to fp8 e4m3 (4 bits of exponent, 3 of mantissa, no infinity) without the instruction that sm_89 has for it:
// halves round to even, what is too large becomes ±448, NaN stays NaN.
#ifndef ALLSPAN_E4M3
#define ALLSPAN_E4M3

__device__ __forceinline__ unsigned narrow_e4m3(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7f;
  if (size >= 0x43e00000) return sign | 0x7e;  // 448
  // Below the least normal number, 2^-6, all are multiples of 2^-9; the eighth of them is that number.
  if (size < 0x3c800000) return sign | static_cast<unsigned>(__float2int_rn(__uint_as_float(size) * 512.0f));
  return sign | ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
}
#endif
