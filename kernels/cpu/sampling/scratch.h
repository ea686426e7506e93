// What one thread keeps while it samples a row.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "sampling/sampling.h"
#include "sampling/weights.h"

namespace allspan::sampling {

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

// Adding it and taking it away rounds weights of n tokens so that their sums are exact.
double rounder_for(int64_t n);
// Fills in s.maxima. The index of the highest block, or what there is instead.
int64_t scan(const float* x, int64_t n, Scratch& s);
// Fills in s.entries with those among which are the k largest of x [n], and those equal to the k-th.
void gather_largest(const float* x, int64_t n, int64_t k, Scratch& s);
// What a row draws, or what there is instead of a token.
int32_t sample(const float* x, int64_t n, int64_t position, const Settings& settings, Scratch& s);
// One row of log_softmax_rows().
void log_softmax(const float* x, int64_t n, int64_t count, int64_t places, int32_t* out, Scratch& s);

}  // namespace allspan::sampling
