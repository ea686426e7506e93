#include "moe/route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace allspan {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kRowsAPart = 4;

// The largest of values[0 … count), the first of equal ones; values that were taken are NaN.
int64_t largest(const float* values, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (values[i] == values[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

void scores_of(const RouterSpec& spec, const float* logits, int64_t count, float* scores) {
  if (spec.score == Score::kSoftmaxOfChosen) {
    std::copy_n(logits, count, scores);
  } else if (spec.score == Score::kSigmoid) {
    for (int64_t e = 0; e < count; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  } else {
    const float most = *std::max_element(logits, logits + count);
    float sum = 0;
    for (int64_t e = 0; e < count; ++e) sum += scores[e] = std::exp(logits[e] - most);
    for (int64_t e = 0; e < count; ++e) scores[e] /= sum;
  }
}

// Choices of groups that are not kept become -infinity.
void keep_groups(const RouterSpec& spec, int64_t experts, float* choices, float* worth) {
  const int64_t each = experts / spec.groups;
  for (int64_t g = 0; g < spec.groups; ++g) {
    float best = kNone, second = kNone;
    for (int64_t e = g * each; e < (g + 1) * each; ++e) {
      if (choices[e] > best) {
        second = best;
        best = choices[e];
      } else {
        second = std::max(second, choices[e]);
      }
    }
    worth[g] = spec.group_score == GroupScore::kTwoBest && each > 1 ? best + second : best;
  }
  for (int64_t kept = 0; kept < spec.kept_groups; ++kept)
    worth[largest(worth, spec.groups)] = std::numeric_limits<float>::quiet_NaN();
  for (int64_t g = 0; g < spec.groups; ++g)
    if (worth[g] == worth[g]) std::fill_n(choices + g * each, each, kNone);
}

// The experts of one token and their weights. scratch: [2 * experts + groups].
void choose(const RouteArgs& a, const float* logits, int32_t* chosen, float* weights, float* scratch) {
  const RouterSpec& spec = a.spec;
  if (std::any_of(logits, logits + a.experts, [](float logit) { return logit != logit; })) {
    std::iota(chosen, chosen + spec.top_k, 0);
    std::fill_n(weights, spec.top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  float* scores = scratch;
  float* choices = scratch + a.experts;
  scores_of(spec, logits, a.experts, scores);
  for (int64_t e = 0; e < a.experts; ++e) choices[e] = a.bias ? scores[e] + a.bias[e] : scores[e];
  if (spec.groups > 1) keep_groups(spec, a.experts, choices, choices + a.experts);
  for (int64_t j = 0; j < spec.top_k; ++j) {
    const int64_t best = largest(choices, a.experts);
    chosen[j] = static_cast<int32_t>(best);
    weights[j] = scores[best];
    choices[best] = std::numeric_limits<float>::quiet_NaN();
  }
  if (spec.score == Score::kSoftmaxOfChosen) {
    const float most = weights[0];
    float sum = 0;
    for (int64_t j = 0; j < spec.top_k; ++j) sum += weights[j] = std::exp(weights[j] - most);
    for (int64_t j = 0; j < spec.top_k; ++j) weights[j] /= sum;
  }
  float factor = spec.scale;
  if (spec.normalises) {
    float sum = 0;
    for (int64_t j = 0; j < spec.top_k; ++j) sum += weights[j];
    factor = spec.scale / (sum + spec.epsilon);
  }
  for (int64_t j = 0; j < spec.top_k; ++j) weights[j] *= factor;
}

// Experts become places, in ascending order, those of other ranks last.
void place(const RouteArgs& a, int32_t* chosen, float* weights) {
  const int64_t k = a.spec.top_k;
  if (a.load)
    for (int64_t j = 0; j < k; ++j) __atomic_fetch_add(a.load + chosen[j], 1, __ATOMIC_RELAXED);
  const int64_t copy = std::accumulate(chosen, chosen + k, int64_t{0}) % a.copies;
  for (int64_t j = 0; j < k; ++j) chosen[j] = a.places[copy * a.experts + chosen[j]];
  const auto later = [](int32_t place) { return static_cast<uint32_t>(place); };  // -1 behind all
  for (int64_t j = 1; j < k; ++j)
    for (int64_t i = j; i > 0 && later(chosen[i - 1]) > later(chosen[i]); --i) {
      std::swap(chosen[i - 1], chosen[i]);
      std::swap(weights[i - 1], weights[i]);
    }
}

}  // namespace

void sort_slots(const Routing& r, int64_t count) {
  std::fill_n(r.starts, r.num_places + 1, 0);
  for (int64_t slot = 0; slot < count; ++slot)
    if (r.places[slot] >= 0) ++r.starts[r.places[slot]];
  int32_t begin = 0;
  for (int64_t p = 0; p < r.num_places; ++p) begin += std::exchange(r.starts[p], begin);
  r.starts[r.num_places] = begin;
  for (int64_t slot = 0; slot < count; ++slot)
    if (r.places[slot] >= 0) r.slots[r.starts[r.places[slot]]++] = static_cast<int32_t>(slot);
  for (int64_t p = r.num_places; p > 0; --p) r.starts[p] = r.starts[p - 1];
  r.starts[0] = 0;
}

void route(Worker& worker, const RouteArgs& a, int64_t rows) {
  const int64_t k = a.spec.top_k;
  worker.split(rows, kRowsAPart, [&](int64_t begin, int64_t end) {
    float* scratch = static_cast<float*>(worker.scratch((2 * a.experts + a.spec.groups) * sizeof(float)));
    for (int64_t row = begin; row < end; ++row) {
      if (a.rows && a.rows[row] < 0) {
        std::fill_n(a.routing.places + row * k, k, -1);
        std::fill_n(a.routing.weights + row * k, k, 0.0f);
        continue;
      }
      choose(a, a.logits + row * a.experts, a.routing.places + row * k, a.routing.weights + row * k, scratch);
      place(a, a.routing.places + row * k, a.routing.weights + row * k);
    }
  });
  if (worker.id == 0) sort_slots(a.routing, rows * k);
  worker.barrier();
}

}  // namespace allspan
