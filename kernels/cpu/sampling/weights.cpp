#include "sampling/weights.h"

#include <algorithm>
#include <cfloat>
#include <cstring>

// Compiled once for each, chosen when the module is loaded.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define ALLSPAN_EACH_ISA __attribute__((target_clones("avx2", "default")))
#else
#define ALLSPAN_EACH_ISA
#endif

namespace allspan::sampling {
namespace {

// Eight at a time where there are such registers (GCC and Clang make two of four otherwise).
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
constexpr int kLanes = 8;

}  // namespace

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

ALLSPAN_EACH_ISA double sum_products(const double* weights, const float* z, int64_t n, double rounder) {
  constexpr int kWidth = 8;
  double sums[kWidth] = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (int lane = 0; lane < kWidth; ++lane) sums[lane] += (weights[i + lane] * z[i + lane] + rounder) - rounder;
  for (; i < n; ++i) sums[0] += (weights[i] * z[i] + rounder) - rounder;
  return sum(sums, kWidth);
}

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

}  // namespace allspan::sampling
