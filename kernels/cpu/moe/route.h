// Which experts each token goes to, and the tokens of each expert.
#pragma once

#include <cstdint>

#include "runtime/pool.h"

namespace allspan {

enum class Score { kSoftmax, kSigmoid, kSoftmaxOfChosen };
enum class GroupScore { kMax, kTwoBest };

// allspan.kernels.router_spec.RouterSpec.
struct RouterSpec {
  int64_t top_k;
  Score score;
  int64_t groups, kept_groups;
  GroupScore group_score;
  bool normalises;
  float epsilon, scale;
};

// allspan.kernels.ops.Routing, of [rows, top_k] choices.
struct Routing {
  int32_t* places;
  float* weights;
  int32_t* slots;
  int32_t* starts;     // [num_places + 1]
  int64_t num_places;  // experts that this rank holds
};

struct RouteArgs {
  const float* logits;    // [rows, experts]
  const float* bias;      // [experts] or null
  const int32_t* places;  // [copies, experts]
  int64_t copies, experts;
  RouterSpec spec;
  Routing routing;
  int64_t* load;        // [experts] or null: tokens of each expert are added
  const int32_t* rows;  // [rows] or null: negative where a row is padding
};

void route(Worker& worker, const RouteArgs& args, int64_t rows);
// Fills slots and starts from the places of `count` choices: a stable sort.
void sort_slots(const Routing& routing, int64_t count);

}  // namespace allspan
