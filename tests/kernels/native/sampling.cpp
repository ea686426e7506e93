// Sampling: against what is plain to say of each draw, and a digest of many, which are the same on every CPU.
#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"

namespace {

namespace sampling = allspan::sampling;
using sampling::Logits;
using sampling::Settings;

constexpr int64_t kDraws = 4000, kVocabulary = 1000;
constexpr float kNone = -__builtin_inff();

// Tokens drawn from one row of logits at positions 0, 1, …
std::vector<int32_t> draws(allspan::Runtime* runtime, const Floats& row, const Settings& settings, int64_t count) {
  const int64_t n = static_cast<int64_t>(row.size());
  Floats logits;
  for (int64_t i = 0; i < count; ++i) logits.insert(logits.end(), row.begin(), row.end());
  std::vector<int64_t> settings_of(count, 0), positions(count), targets(count, -1);
  for (int64_t i = 0; i < count; ++i) positions[i] = i;
  std::vector<int32_t> tokens(count);
  sampling::sample_rows(runtime, {logits.data(), count, n}, settings_of.data(), positions.data(), targets.data(),
                        &settings, tokens.data(), 1);
  return tokens;
}

Doubles softmax(const Floats& row, double temperature) {
  const double highest = *std::max_element(row.begin(), row.end());
  Doubles shares;
  double total = 0;
  for (float logit : row) total += std::exp((logit - highest) / temperature);
  for (float logit : row) shares.push_back(std::exp((logit - highest) / temperature) / total);
  return shares;
}

int64_t rank_of(const Floats& row, int32_t token) {
  return std::count_if(row.begin(), row.end(), [&](float logit) { return logit > row[token]; });
}

void check_draws(Checks& checks, allspan::Runtime* runtime, const Floats& row, uint64_t& digest) {
  const auto each = [&](const Settings& settings, int64_t count, const char* what, const auto& allows) {
    bool holds = true;
    for (int32_t token : draws(runtime, row, settings, count)) {
      holds = holds && token >= 0 && token < kVocabulary && allows(token);
      digest = (digest ^ static_cast<uint64_t>(token)) * 0x100000001b3;
    }
    checks.require(holds, what);
  };
  const Doubles shares = softmax(row, 0.7);
  const auto before = [&](int32_t token) {
    double sum = 0;
    for (double share : shares) sum += share > shares[token] ? share : 0;
    return sum;
  };
  const double highest = *std::max_element(shares.begin(), shares.end());
  each({1, 1, 1, 1, kNone, 0, 0}, 3, "greedy rows draw the highest", [&](int32_t t) { return rank_of(row, t) == 0; });
  each({2, 1, 1, 0.7f, kNone, 5, 1}, 200, "top-k", [&](int32_t t) { return rank_of(row, t) < 5; });
  each({3, 0.5, 1, 0.7f, kNone, 0, 1}, 200, "top-p", [&](int32_t t) { return before(t) < 0.5 + 1e-6; });
  each({4, 1, 1, 0.7f, std::log(0.1f), 0, 1}, 200, "min-p", [&](int32_t t) { return shares[t] >= 0.0999 * highest; });
  each({5, 0.9, 0.8, 0.7f, std::log(0.01f), 50, 1}, 200, "all filters",
       [&](int32_t t) { return rank_of(row, t) < 50; });
  each({6, 1, 1, 0.7f, kNone, 0, 1}, 200, "no filter", [&](int32_t) { return true; });
}

void check_shares(Checks& checks, allspan::Runtime* runtime) {
  const Floats row = {0.5f, 2.0f, -1.0f, 1.0f, kNone, 0.0f};
  const Doubles shares = softmax(row, 1);
  Doubles drawn(row.size());
  for (int32_t token : draws(runtime, row, {7, 1, 1, 1, kNone, 0, 1}, kDraws)) drawn[token] += 1;
  for (size_t i = 0; i < row.size(); ++i) {
    const double expected = shares[i] * kDraws, spread = std::sqrt(expected * (1 - shares[i]));
    checks.require(std::fabs(drawn[i] - expected) <= 5 * spread, "a token is drawn as often as its share says");
  }
}

void check_rows_without_tokens(Checks& checks, allspan::Runtime* runtime) {
  Floats rows(3 * kVocabulary, kNone);
  rows[kVocabulary + 7] = __builtin_nanf("");
  rows[2 * kVocabulary + 9] = -3;
  int32_t best[3];
  sampling::best_tokens(runtime, {rows.data(), 3, kVocabulary}, best);
  checks.require(best[0] == sampling::kAllMasked, "a row that is masked as a whole says so");
  checks.require(best[1] == sampling::kNotFinite, "a row with a NaN says so");
  checks.require(best[2] == 9, "the one token that is left is the best");
}

void check_log_softmax(Checks& checks, allspan::Runtime* runtime, const Floats& row) {
  constexpr int64_t kPlaces = 3;
  int32_t out[2 + 2 * kPlaces] = {17};
  const int64_t count = kPlaces;
  sampling::log_softmax_rows(runtime, {row.data(), 1, kVocabulary}, &count, kPlaces, out);
  const Doubles shares = softmax(row, 1);
  Floats got;
  Doubles expected;
  const auto expect = [&](int64_t place, int32_t token) {
    float value;
    std::memcpy(&value, out + place, sizeof value);
    got.push_back(value);
    expected.push_back(std::log(shares[token]));
  };
  expect(1, 17);
  for (int64_t i = 0; i < kPlaces; ++i) {
    checks.require(rank_of(row, out[2 + i]) == i, "the most likely tokens come best first");
    expect(2 + kPlaces + i, out[2 + i]);
  }
  checks.close(got, expected, 1e-6);
}

}  // namespace

uint64_t check_sampling(Checks& checks) {
  uint64_t digest = 0;
  checks.each("sampling", [&](const Checks::Run& run) {
    digest = 0xcbf29ce484222325;
    Random random(99);
    for (int round = 0; round < 3; ++round) {
      const Floats row = random.reals(kVocabulary, 8);
      for (allspan::Runtime* runtime : {run.runtime, static_cast<allspan::Runtime*>(nullptr)})
        check_draws(checks, runtime, row, digest);
      check_log_softmax(checks, run.runtime, row);
    }
    check_shares(checks, run.runtime);
    check_rows_without_tokens(checks, run.runtime);
  });
  return digest;
}
