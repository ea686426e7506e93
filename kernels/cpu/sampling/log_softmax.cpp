#include <algorithm>
#include <cmath>
#include <cstring>

#include "sampling/scratch.h"

namespace allspan::sampling {

void log_softmax(const float* x, int64_t n, int64_t count, int64_t places, int32_t* out, Scratch& s) {
  const int64_t block = scan(x, n, s);
  if (block < 0) return;
  const Scale scale{s.maxima[block], 1.0f, rounder_for(n)};
  s.sums.resize(s.maxima.size());
  block_weights(x, n, scale, s.sums.data());
  const double normaliser = std::log(sum(s.sums.data(), s.sums.size())) + scale.highest;
  const auto put = [&](int64_t place, float logit) {
    const float value = static_cast<float>(logit - normaliser);
    std::memcpy(out + place, &value, sizeof value);
  };
  put(1, x[out[0]]);
  if (count == 0) return;
  gather_largest(x, n, count, s);
  std::partial_sort(s.entries.begin(), s.entries.begin() + count, s.entries.end(), [](const Entry& a, const Entry& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  });
  for (int64_t i = 0; i < count; ++i) {
    out[2 + i] = s.entries[i].id;
    put(2 + places + i, s.entries[i].logit);
  }
}

}  // namespace allspan::sampling
