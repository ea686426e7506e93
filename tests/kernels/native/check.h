// What the checks share: numbers that are the same on every machine, and a count of what failed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "isa/isa.h"
#include "runtime/runtime.h"

using allspan::Kernels;
using allspan::Variant;

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

// SplitMix64 (G. Steele et al., 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
  // Between -limit and limit, a multiple of limit · 2^-23.
  float real(float limit = 2) {
    return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * (limit / (1 << 23));
  }
  Floats reals(int64_t count, float limit = 2);

 private:
  uint64_t state_;
};

float from_bfloat16(uint16_t bits);
uint16_t to_bfloat16(float x);  // to nearest, ties to even; x is no NaN

// Some variants with an op set each, and what came of their checks.
class Checks {
 public:
  struct Run {
    const Variant* variant;
    allspan::Runtime* runtime;
    const Kernels& kernels() const { return *variant->kernels; }
  };
  explicit Checks(const std::vector<const Variant*>& variants);
  ~Checks();
  // Calls body(run) for every variant, best first.
  template <class Body>
  void each(const std::string& what, Body body) {
    what_ = what;
    for (Run& run : runs_) {
      current_ = run.variant->name;
      body(run);
    }
  }
  // Fails unless |got - expected| <= limits, or both are NaN: element by element.
  void close(const Floats& got, const Doubles& expected, const Doubles& limits);
  void close(const Floats& got, const Doubles& expected, double relative);
  // Fails unless all bits are the same.
  void same(const Floats& got, const Floats& expected, const char* as);
  void require(bool holds, const std::string& message);
  int64_t count() const { return count_; }
  int64_t failures() const { return failures_; }

 private:
  std::vector<Run> runs_;
  std::string what_;
  const char* current_ = "";
  int64_t count_ = 0, failures_ = 0;
};

// The choice of variants, for CPUs that are not here.
void check_isa(Checks& checks);
void check_elementwise(Checks& checks);
void check_attention(Checks& checks);
// Products with experts, against those of each token and expert alone.
void check_experts(Checks& checks);
// Returns a digest of all products with codes, which are the same bits on every CPU.
uint64_t check_packed(Checks& checks);
// Returns a digest of the tokens drawn, which are the same on every CPU.
uint64_t check_sampling(Checks& checks);
