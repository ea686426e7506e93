// A draw from one row of logits: filters look at the few tokens that matter, and no sum depends on its order.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "sampling/scratch.h"

namespace allspan::sampling {
namespace {

// Philox4x32-10 (Salmon et al., SC 2011), as in kernels/reference/philox.py: a multiple of 2^-53 in [0, 1).
double uniform(uint64_t seed, uint64_t position) {
  uint64_t c[4] = {position & 0xFFFFFFFF, position >> 32, 0, 0};
  uint64_t k0 = seed & 0xFFFFFFFF, k1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = c[0] * 0xD2511F53, p1 = c[2] * 0xCD9E8D57;
    c[0] = (p1 >> 32) ^ c[1] ^ k0;
    c[1] = p1 & 0xFFFFFFFF;
    c[2] = (p0 >> 32) ^ c[3] ^ k1;
    c[3] = p0 & 0xFFFFFFFF;
    k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF;
    k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF;
  }
  return static_cast<double>(c[0] >> 5 << 26 | c[1] >> 6) * 0x1p-53;
}

// The smallest key up to which the weights, in the order of their keys, sum to `wanted` or more (0 < wanted <= their
// sum). Sums by buckets of equal width first, then sorts one bucket.
double cut(const double* keys, const double* weights, int64_t n, double wanted, Scratch& scratch) {
  constexpr int kBuckets = 1024;
  double low, high;
  range(keys, n, low, high);
  const double width = high - low;
  if (!(width > 0)) return low;
  const double scale = n < 128 ? 0 : (kBuckets - 1) / width;
  const auto place = [&](double key) { return static_cast<int>((key - low) * scale); };
  double sums[kBuckets] = {};
  for (int64_t i = 0; i < n; ++i) sums[place(keys[i])] += weights[i];
  double before = 0;
  int chosen = 0;
  while (before + sums[chosen] < wanted) before += sums[chosen++];
  std::vector<std::pair<double, double>>& bucket = scratch.bucket;
  bucket.clear();
  for (int64_t i = 0; i < n; ++i)
    if (place(keys[i]) == chosen) bucket.emplace_back(keys[i], weights[i]);
  std::sort(bucket.begin(), bucket.end());
  size_t at = 0;
  while ((before += bucket[at].second) < wanted) ++at;
  return bucket[at].first;
}

// The k most likely tokens.
void take_top_k(const float* x, int64_t n, int64_t k, const Scale& scale, Scratch& s) {
  gather_largest(x, n, k, s);
  const int64_t count = static_cast<int64_t>(s.entries.size());
  double last = std::numeric_limits<double>::infinity();
  s.keys.resize(std::max<size_t>(s.keys.size(), count));
  // Clamped, for keys have a range; what lies below weighs nothing anyway.
  for (int64_t i = 0; i < count; ++i) s.keys[i] = -static_cast<double>(std::max(s.entries[i].logit, -FLT_MAX));
  if (count > k) {
    s.units.assign(count, 1.0);
    last = cut(s.keys.data(), s.units.data(), count, static_cast<double>(k), s);
  }
  s.tokens.clear(count + 1);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = std::min(kBlock, count - begin);
    const Entry* entries = s.entries.data() + begin;
    float logits[kBlock], z[kBlock];
    double weights[kBlock];
    for (int64_t i = 0; i < size; ++i) logits[i] = entries[i].logit;
    weigh_block(logits, size, scale, z, weights);
    for (int64_t i = 0; i < size; ++i)
      s.tokens.add(z[i], weights[i], entries[i].id, (weights[i] > 0) & (s.keys[begin + i] <= last));
  }
}

// The tokens whose z is at least `floor` and that weigh anything.
void take_from(float floor, const float* x, int64_t n, const Scale& scale, Scratch& s) {
  s.tokens.clear(n + 1);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    if ((s.maxima[begin / kBlock] - scale.highest) / scale.temperature < floor) continue;
    const int64_t size = std::min(kBlock, n - begin);
    float z[kBlock];
    double weights[kBlock];
    weigh_block(x + begin, size, scale, z, weights);
    for (int64_t i = 0; i < size; ++i)
      s.tokens.add(z[i], weights[i], static_cast<int32_t>(begin + i), (z[i] >= floor) & (weights[i] > 0));
  }
}

// Tokens among which are all that top-p keeps: they make up more than that. A guess first, which is good for what
// models say; then what is sure: lighter tokens, even all together, weigh less than is left out.
void take_for_top_p(double share, double total, const float* x, int64_t n, const Scale& scale, Scratch& s) {
  const double rest = (1 - share) * total;
  take_from(static_cast<float>(std::log(rest / 1000)), x, n, scale, s);
  if (s.tokens.total() < share * total)
    take_from(static_cast<float>(std::log(rest / static_cast<double>(2 * n))), x, n, scale, s);
}

// Keeps the tokens before which, in the order of their keys, less than `wanted` is gathered.
template <class Key>
void keep_most_likely(Scratch& s, double wanted, Key key) {
  Tokens& tokens = s.tokens;
  s.keys.resize(std::max<size_t>(s.keys.size(), tokens.count));
  for (int64_t i = 0; i < tokens.count; ++i) s.keys[i] = key(tokens.z[i]);
  const double last = cut(s.keys.data(), tokens.weights.data(), tokens.count, wanted, s);
  tokens.filter([&](int64_t i) { return s.keys[i] <= last; });
}

// The first place at which the running sum of the weights exceeds `wanted`, less than their sum.
int64_t find(const double* weights, int64_t n, double wanted, double running = 0) {
  int64_t i = 0;
  for (; i + kBlock < n; i += kBlock) {
    const double with_block = running + sum(weights + i, kBlock);
    if (with_block > wanted) break;
    running = with_block;
  }
  for (; i < n; ++i)
    if ((running += weights[i]) > wanted) return i;
  return n - 1;
}

// A draw from all tokens, whose blocks weigh s.sums.
int32_t draw_any(const float* x, int64_t n, double wanted, const Scale& scale, const Scratch& s) {
  double before = 0;
  int64_t block = 0;
  while (before + s.sums[block] <= wanted) before += s.sums[block++];
  const int64_t begin = block * kBlock;
  float z[kBlock];
  double weights[kBlock];
  weigh_block(x + begin, std::min(kBlock, n - begin), scale, z, weights);
  return static_cast<int32_t>(begin + find(weights, kBlock, wanted, before));
}

int32_t draw(const float* x, int64_t n, const Settings& settings, double share, const Scale& scale, Scratch& s) {
  Tokens& tokens = s.tokens;
  double total;
  if (settings.top_k > 0 && settings.top_k < n) {
    take_top_k(x, n, settings.top_k, scale, s);
    total = tokens.total();
  } else {
    s.sums.resize(s.maxima.size());
    block_weights(x, n, scale, s.sums.data());
    total = sum(s.sums.data(), s.sums.size());
    if (settings.top_p >= 1 && settings.typical_p >= 1 && settings.min_z == kLowest)
      return draw_any(x, n, share * total, scale, s);
    if (settings.top_p < 1) {
      take_for_top_p(settings.top_p, total, x, n, scale, s);
    } else {
      take_from(settings.min_z, x, n, scale, s);
    }
  }
  if (settings.top_p < 1) keep_most_likely(s, settings.top_p * total, [](double z) { return -z; });
  if (settings.min_z > kLowest) tokens.filter([&](int64_t i) { return tokens.z[i] >= settings.min_z; });
  if (settings.typical_p < 1) {
    const double surprise = sum_products(tokens.weights.data(), tokens.z.data(), tokens.count, scale.rounder);
    total = tokens.total();
    const double expected = surprise / total;
    keep_most_likely(s, settings.typical_p * total, [&](double z) { return std::fabs(z - expected); });
  }
  return tokens.ids[find(tokens.weights.data(), tokens.count, share * tokens.total())];
}

}  // namespace

int32_t sample(const float* x, int64_t n, int64_t position, const Settings& settings, Scratch& s) {
  const int64_t block = scan(x, n, s);
  if (block < 0) return static_cast<int32_t>(block);
  const float highest = s.maxima[block];
  if (!settings.is_random) return static_cast<int32_t>(std::find(x + block * kBlock, x + n, highest) - x);
  const Scale scale{highest, settings.temperature, rounder_for(n)};
  return draw(x, n, settings, uniform(settings.seed, static_cast<uint64_t>(position)), scale, s);
}

}  // namespace allspan::sampling
