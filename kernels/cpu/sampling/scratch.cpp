#include <algorithm>
#include <cmath>
#include <functional>

#include "sampling/scratch.h"

namespace allspan::sampling {

// Adding and taking away 1.5 · 2^b rounds to multiples of 2^(b-52); n weights of at most 1 then make at most 2^53
// units.
double rounder_for(int64_t n) {
  int bits = 0;
  for (; n > 0; n >>= 1) ++bits;
  return std::ldexp(1.5, bits - 1);
}

int64_t scan(const float* x, int64_t n, Scratch& s) {
  s.maxima.resize((n + kBlock - 1) / kBlock);
  if (!block_maxima(x, n, s.maxima.data())) return kNotFinite;
  const auto highest = std::max_element(s.maxima.begin(), s.maxima.end());
  return *highest == kLowest ? kAllMasked : highest - s.maxima.begin();
}

// Those that reach the k-th largest of the blocks' maxima.
void gather_largest(const float* x, int64_t n, int64_t k, Scratch& s) {
  float bound = kLowest;
  if (k < static_cast<int64_t>(s.maxima.size())) {
    s.copy = s.maxima;
    std::nth_element(s.copy.begin(), s.copy.begin() + (k - 1), s.copy.end(), std::greater<float>());
    bound = s.copy[k - 1];
  }
  s.entries.clear();
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    if (s.maxima[begin / kBlock] < bound) continue;
    for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i)
      if (x[i] >= bound) s.entries.push_back({x[i], static_cast<int32_t>(i)});
  }
}

}  // namespace allspan::sampling
