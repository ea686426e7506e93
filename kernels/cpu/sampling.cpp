// From rows of logits to tokens and log-probabilities: what worker/sampling/reference.py does in numpy, bit for bit.
//
// A token's weight is exp(z), z = (logit - highest) / temperature, rounded to a multiple of a power of two so coarse
// that every sum of weights is exact in a double (at most 2^53 units). So no result depends on the order of a sum, on
// the width of a vector or on how the work was cut up; and filters may look at the few tokens that matter.
// exp is a polynomial (Cephes expf, S. Moshier) in float without fused multiply-adds, the same in every build.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "runtime.h"

namespace nb = nanobind;

// Compiled once for each, chosen when the module is loaded.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define ALLSPAN_EACH_ISA __attribute__((target_clones("avx2", "default")))
#else
#define ALLSPAN_EACH_ISA
#endif

namespace allspan {

constexpr int64_t kBlock = 64;  // logits; each block's highest is kept
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// z = (x - highest) / temperature; weights are rounded by adding `rounder` and taking it away again.
struct Scale {
  float highest, temperature;
  double rounder;
};

// Eight at a time where there are such registers (GCC and Clang make two of four otherwise).
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
constexpr int kLanes = 8;

// The highest of each block of x [n]; false when one is NaN or +infinity.
ALLSPAN_EACH_ISA bool block_maxima(const float* x, int64_t n, float* maxima) {
  const Floats limit = Floats{} + FLT_MAX;
  Ints bad = {};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    float padded[kBlock];
    const float* block = x + begin;
    if (n - begin < kBlock) {
      std::fill(padded, padded + kBlock, kLowest);
      std::copy(block, x + n, padded);
      block = padded;
    }
    Floats highest[2] = {Floats{} + kLowest, Floats{} + kLowest};
    for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
      for (int half = 0; half < 2; ++half) {
        Floats values;
        std::memcpy(&values, block + i + half * kLanes, sizeof values);
        highest[half] = values > highest[half] ? values : highest[half];
        bad |= ~(values <= limit);
      }
    }
    highest[0] = highest[0] > highest[1] ? highest[0] : highest[1];
    float lanes[kLanes];
    std::memcpy(lanes, &highest[0], sizeof lanes);
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int lane = 0; lane < width; ++lane) lanes[lane] = std::max(lanes[lane], lanes[lane + width]);
    maxima[begin / kBlock] = lanes[0];
  }
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= bad[lane];
  return any == 0;
}

static inline float exponential(float z) {
  const float x = z > -87.0f ? z : -87.0f;
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// z and weights of a block x [n <= kBlock]; both are filled up to kBlock, with weights of 0.
ALLSPAN_EACH_ISA void weigh_block(const float* x, int64_t n, const Scale& scale, float* z, double* weights) {
  for (int64_t i = 0; i < n; ++i) z[i] = x[i] - scale.highest;
  for (int64_t i = n; i < kBlock; ++i) z[i] = kLowest;
  if (scale.temperature != 1.0f)
    for (int64_t i = 0; i < kBlock; ++i) z[i] = z[i] / scale.temperature;
  for (int64_t i = 0; i < kBlock; ++i) {
    const double weight = exponential(z[i]);
    weights[i] = (weight + scale.rounder) - scale.rounder;
  }
}

typedef double Doubles __attribute__((vector_size(32)));

// Exact, so in any order.
ALLSPAN_EACH_ISA double sum(const double* values, int64_t n) {
  constexpr int kWidth = 4;
  Doubles sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
    for (int part = 0; part < 4; ++part) {
      Doubles each;
      std::memcpy(&each, values + i + part * kWidth, sizeof each);
      sums[part] += each;
    }
  sums[0] += sums[1] + sums[2] + sums[3];
  double total = sums[0][0] + sums[0][1] + sums[0][2] + sums[0][3];
  for (; i < n; ++i) total += values[i];
  return total;
}

ALLSPAN_EACH_ISA void range(const double* values, int64_t n, double& low, double& high) {
  constexpr int kWidth = 4;
  Doubles least = Doubles{} + values[0], most = least;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    Doubles each;
    std::memcpy(&each, values + i, sizeof each);
    least = each < least ? each : least;
    most = each > most ? each : most;
  }
  low = std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
  high = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
  for (; i < n; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
}

// The sum of weights[i] · z[i], each product rounded as the weights are.
ALLSPAN_EACH_ISA double sum_products(const double* weights, const float* z, int64_t n, double rounder) {
  constexpr int kWidth = 8;
  double sums[kWidth] = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (int lane = 0; lane < kWidth; ++lane) sums[lane] += (weights[i + lane] * z[i + lane] + rounder) - rounder;
  for (; i < n; ++i) sums[0] += (weights[i] * z[i] + rounder) - rounder;
  return sum(sums, kWidth);
}

// The sum of the weights of each block of x [n].
ALLSPAN_EACH_ISA void block_weights(const float* x, int64_t n, const Scale& scale, double* sums) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    float z[kBlock];
    const int64_t count = std::min(kBlock, n - begin);
    for (int64_t i = 0; i < count; ++i) z[i] = x[begin + i] - scale.highest;
    for (int64_t i = count; i < kBlock; ++i) z[i] = kLowest;
    if (scale.temperature != 1.0f)
      for (int64_t i = 0; i < kBlock; ++i) z[i] = z[i] / scale.temperature;
    for (int64_t i = 0; i < kBlock; ++i) z[i] = exponential(z[i]);
    double lanes[kLanes] = {};
    for (int64_t i = 0; i < kBlock; i += kLanes)
      for (int l = 0; l < kLanes; ++l) lanes[l] += (z[i + l] + scale.rounder) - scale.rounder;
    double sum = 0;
    for (int l = 0; l < kLanes; ++l) sum += lanes[l];
    sums[begin / kBlock] = sum;
  }
}

namespace {

// What a row asks for; laid out like SETTINGS in worker/sampling/settings.py.
struct Settings {
  uint64_t seed;
  double top_p, typical_p;
  float temperature, min_z;
  int32_t top_k, is_random;
};
static_assert(sizeof(Settings) == 40, "as in settings.py");

constexpr int32_t kNotFinite = -1, kAllMasked = -2;  // worker/sampling/failure.py

struct Entry {
  float logit;
  int32_t id;
};

// Tokens that may still be drawn, in the order of their ids.
struct Tokens {
  std::vector<float> z;
  std::vector<double> weights;
  std::vector<int32_t> ids;
  int64_t count = 0;

  // Empties it, with room for n more.
  void clear(int64_t n) {
    count = 0;
    if (static_cast<int64_t>(ids.size()) >= n) return;
    z.resize(n);
    weights.resize(n);
    ids.resize(n);
  }
  // Without a branch: which ones are kept is hard to guess. So there is always room for one more than are kept.
  void add(float its_z, double weight, int32_t id, bool keep) {
    z[count] = its_z;
    weights[count] = weight;
    ids[count] = id;
    count += keep;
  }
  template <class Keep>
  void filter(Keep keep) {
    const int64_t before = count;
    count = 0;
    for (int64_t i = 0; i < before; ++i) add(z[i], weights[i], ids[i], keep(i));
  }
  double total() const { return sum(weights.data(), count); }
};

// Memory of one thread, kept for the next row.
struct Scratch {
  std::vector<float> maxima, copy;
  std::vector<double> sums, keys, units;
  std::vector<Entry> entries;
  std::vector<std::pair<double, double>> bucket;
  Tokens tokens;
};

// Philox4x32-10 (Salmon et al., SC 2011), as in worker/sampling/philox.py: a multiple of 2^-53 in [0, 1).
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

// Adding and taking away 1.5 · 2^b rounds to multiples of 2^(b-52); n weights of at most 1 then make at most 2^53
// units.
double rounder_for(int64_t n) {
  int bits = 0;
  for (; n > 0; n >>= 1) ++bits;
  return std::ldexp(1.5, bits - 1);
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

// The entries of x [n] among which are the k largest, and those equal to the k-th: all that reach the k-th largest of
// the blocks' maxima.
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

// Fills in s.maxima. The index of the highest block, or what there is instead.
int64_t scan(const float* x, int64_t n, Scratch& s) {
  s.maxima.resize((n + kBlock - 1) / kBlock);
  if (!block_maxima(x, n, s.maxima.data())) return kNotFinite;
  const auto highest = std::max_element(s.maxima.begin(), s.maxima.end());
  return *highest == kLowest ? kAllMasked : highest - s.maxima.begin();
}

int32_t sample(const float* x, int64_t n, int64_t position, const Settings& settings, Scratch& s) {
  const int64_t block = scan(x, n, s);
  if (block < 0) return static_cast<int32_t>(block);
  const float highest = s.maxima[block];
  if (!settings.is_random) return static_cast<int32_t>(std::find(x + block * kBlock, x + n, highest) - x);
  const Scale scale{highest, settings.temperature, rounder_for(n)};
  return draw(x, n, settings, uniform(settings.seed, static_cast<uint64_t>(position)), scale, s);
}

// out: the token; its log-probability, the ids of the `count` most likely, best first, and their log-probabilities
// (floats as their bits), with `places` for each of the last two.
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

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

// body(row, scratch) for each row, on the runtime's threads when there is one.
template <class Body>
void each_row(Runtime* runtime, int64_t rows, Body body) {
  const auto part = [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t row = begin; row < end; ++row) body(row, scratch);
  };
  if (runtime) {
    runtime->split(rows, 1, part);
  } else {
    part(0, rows);
  }
}

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void sample_rows(Runtime* runtime, Array<const float, 2> logits, Array<const int64_t, 1> rows,
                 Array<const int64_t, 1> positions, Array<const int64_t, 1> targets, Array<const uint8_t, 2> settings,
                 Array<int32_t, 2> out) {
  const int64_t m = logits.shape(0), n = logits.shape(1), columns = out.shape(1);
  require(n > 0 && n < INT32_MAX, "sample_rows: logits have no columns, or too many");
  require(rows.shape(0) == logits.shape(0) && positions.shape(0) == logits.shape(0) &&
              targets.shape(0) == logits.shape(0) && out.shape(0) == logits.shape(0) && columns > 0,
          "sample_rows: rows, positions, targets and out must be as long as logits");
  require(settings.shape(1) == sizeof(Settings), "sample_rows: settings are not laid out as settings.py says");
  for (int64_t i = 0; i < m; ++i) {
    require(rows(i) >= 0 && rows(i) < static_cast<int64_t>(settings.shape(0)), "sample_rows: rows has no settings");
    require(targets(i) < n, "sample_rows: a target is no token");
  }
  const float* x = logits.data();
  const int64_t *row = rows.data(), *position = positions.data(), *target = targets.data();
  const Settings* table = reinterpret_cast<const Settings*>(settings.data());
  int32_t* tokens = out.data();
  nb::gil_scoped_release release;
  each_row(runtime, m, [&](int64_t i, Scratch& scratch) {
    int32_t& token = tokens[i * columns];
    if (target[i] < 0) {
      token = sample(x + i * n, n, position[i], table[row[i]], scratch);
    } else {
      token = scan(x + i * n, n, scratch) < 0 ? kNotFinite : static_cast<int32_t>(target[i]);
    }
  });
}

// Of ids of x, or of what was found in their place: the one that counts for both. Of equals a.
int32_t better(const float* x, int32_t a, int32_t b) {
  if (a == kNotFinite || b == kNotFinite) return kNotFinite;
  if (a < 0 || b < 0) return a < 0 ? b : a;
  return x[b] > x[a] ? b : a;
}

// One row is cut up for all threads; of several each thread takes whole ones.
void best_tokens(Runtime* runtime, Array<const float, 2> logits, Array<int32_t, 1> out) {
  const int64_t m = logits.shape(0), n = logits.shape(1);
  require(n > 0 && n < INT32_MAX, "best_tokens: logits have no columns, or too many");
  require(out.shape(0) == logits.shape(0), "best_tokens: out must be as long as logits");
  const float* x = logits.data();
  int32_t* best = out.data();
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const int64_t parts = !runtime || m >= runtime->pool().threads() ? 1 : runtime->pool().threads();
  nb::gil_scoped_release release;
  std::vector<int32_t> found(m * parts);
  each_row(runtime, m * parts, [&](int64_t task, Scratch& scratch) {
    const float* row = x + task / parts * n;
    const int64_t part = task % parts;
    const int64_t begin = blocks * part / parts * kBlock, end = std::min(n, blocks * (part + 1) / parts * kBlock);
    int32_t& id = found[task] = kAllMasked;
    if (begin == end) return;
    const int64_t block = scan(row + begin, end - begin, scratch);
    const float* from = row + begin + std::max<int64_t>(block, 0) * kBlock;
    id = static_cast<int32_t>(block < 0 ? block : std::find(from, row + end, scratch.maxima[block]) - row);
  });
  for (int64_t row = 0; row < m; ++row) {
    best[row] = found[row * parts];
    for (int64_t part = 1; part < parts; ++part) best[row] = better(x + row * n, best[row], found[row * parts + part]);
  }
}

void log_softmax_rows(Runtime* runtime, Array<const float, 2> logits, Array<const int64_t, 1> counts,
                      Array<int32_t, 2> out) {
  const int64_t m = logits.shape(0), n = logits.shape(1), columns = out.shape(1), places = (columns - 2) / 2;
  require(counts.shape(0) == logits.shape(0) && out.shape(0) == logits.shape(0) && columns >= 2,
          "log_softmax_rows: counts and out must be as long as logits");
  for (int64_t i = 0; i < m; ++i) {
    require(counts(i) <= std::min(n, places), "log_softmax_rows: a count is larger than the place for it");
    require(out(i, 0) < n, "log_softmax_rows: a token is none");
  }
  const float* x = logits.data();
  const int64_t* count = counts.data();
  int32_t* result = out.data();
  nb::gil_scoped_release release;
  each_row(runtime, m, [&](int64_t i, Scratch& scratch) {
    int32_t* row = result + i * columns;
    if (count[i] >= 0 && row[0] >= 0) log_softmax(x + i * n, n, count[i], places, row, scratch);
  });
}

void check_ids(const Array<const int64_t, 1>& ids, size_t vocabulary) {
  for (size_t i = 0; i < ids.shape(0); ++i)
    require(ids(i) >= 0 && static_cast<size_t>(ids(i)) < vocabulary, "penalties: an id is no token");
}

void penalise_repeated(Array<float, 1> logits, Array<const int64_t, 1> ids, double penalty) {
  check_ids(ids, logits.shape(0));
  for (size_t i = 0; i < ids.shape(0); ++i) {
    float& logit = logits(ids(i));
    const double value = logit < 0 ? logit * penalty : logit / penalty;
    logit = static_cast<float>(std::min<double>(value, FLT_MAX));
  }
}

void penalise_counted(Array<float, 1> logits, Array<const int64_t, 1> ids, Array<const int32_t, 1> counts,
                      float presence, float frequency) {
  check_ids(ids, std::min(logits.shape(0), counts.shape(0)));
  for (size_t i = 0; i < ids.shape(0); ++i) logits(ids(i)) -= presence + frequency * static_cast<float>(counts(ids(i)));
}

}  // namespace
}  // namespace allspan

void bind_sampling(nb::module_& module) {
  using namespace allspan;
  module.def("sample_rows", &sample_rows, nb::arg("runtime").none(), nb::arg("logits").noconvert(), nb::arg("rows"),
             nb::arg("positions"), nb::arg("targets"), nb::arg("settings"), nb::arg("out").noconvert());
  module.def("best_tokens", &best_tokens, nb::arg("runtime").none(), nb::arg("logits").noconvert(),
             nb::arg("out").noconvert());
  module.def("log_softmax_rows", &log_softmax_rows, nb::arg("runtime").none(), nb::arg("logits").noconvert(),
             nb::arg("counts"), nb::arg("out").noconvert());
  module.def("penalise_repeated", &penalise_repeated, nb::arg("logits").noconvert(), nb::arg("ids"),
             nb::arg("penalty"));
  module.def("penalise_counted", &penalise_counted, nb::arg("logits").noconvert(), nb::arg("ids"), nb::arg("counts"),
             nb::arg("presence"), nb::arg("frequency"));
}
