#include "check.h"

#include <cmath>
#include <cstdio>
#include <cstring>

uint64_t Random::next() {
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

Floats Random::reals(int64_t count, float limit) {
  Floats values(count);
  for (float& value : values) value = real(limit);
  return values;
}

float from_bfloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

Checks::Checks(const std::vector<const Variant*>& variants) {
  for (const Variant* variant : variants) runs_.push_back({variant, new allspan::Runtime(variant->name, 3, {})});
}

Checks::~Checks() {
  for (Run& run : runs_) delete run.runtime;
}

void Checks::close(const Floats& got, const Doubles& expected, const Doubles& limits) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::fabs(got[i] - expected[i]) <= limits[i] || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
    char text[128];
    std::snprintf(text, sizeof text, "element %zu of %zu is %.9g, not %.9g (limit %.3g)", i, got.size(), got[i],
                  expected[i], limits[i]);
    require(false, text);
    return;
  }
  require(got.size() == expected.size(), "another size");
}

void Checks::close(const Floats& got, const Doubles& expected, double relative) {
  Doubles limits(expected.size());
  for (size_t i = 0; i < limits.size(); ++i) limits[i] = relative * (1 + std::fabs(expected[i]));
  close(got, expected, limits);
}

void Checks::same(const Floats& got, const Floats& expected, const char* as) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &expected[i], sizeof(float)) == 0) continue;
    char text[128];
    std::snprintf(text, sizeof text, "element %zu of %zu is %.9g, not %.9g as %s", i, got.size(), got[i], expected[i],
                  as);
    require(false, text);
    return;
  }
  require(got.size() == expected.size(), "another size");
}

void Checks::require(bool holds, const std::string& message) {
  ++count_;
  if (holds) return;
  // Enough to see what is wrong.
  if (++failures_ <= 40) std::printf("FAILED %s, %s: %s\n", current_, what_.c_str(), message.c_str());
}
