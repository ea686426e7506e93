// From rows of logits to tokens and log-probabilities: what kernels/reference/sampling.py does in numpy, bit for bit.
#pragma once

#include <cstdint>

#include "../abi/sampling.cuh"
#include "runtime/runtime.h"

namespace allspan::sampling {

// What a row asks for, and what stands in place of a token: see kernels/abi/sampling.py.
using ::kAllMasked;
using ::kNotFinite;
using ::Settings;

// Rows of logits [rows, columns], shared out over the runtime's threads; on the caller's alone where it is null.
struct Logits {
  const float* data;
  int64_t rows, columns;
  const float* row(int64_t i) const { return data + i * columns; }
};

// tokens[i · stride]: what row i draws by its settings with the random number of its position, or `targets[i]` where
// that is not negative; kNotFinite or kAllMasked where the row has no such token.
void sample_rows(Runtime* runtime, const Logits& logits, const int64_t* settings_of, const int64_t* positions,
                 const int64_t* targets, const Settings* settings, int32_t* tokens, int64_t stride);
// best [rows]: the first of the highest logits, or what there is instead.
void best_tokens(Runtime* runtime, const Logits& logits, int32_t* best);
// out [rows, 2 + 2 · places]: the token, which is given; then its log-probability, the ids of the counts[i] most
// likely, best first, and their log-probabilities (floats as their bits), with `places` for each of the last two. Rows
// whose count or token is negative are left alone.
void log_softmax_rows(Runtime* runtime, const Logits& logits, const int64_t* counts, int64_t places, int32_t* out);

// The logits of some tokens divided by `penalty`, or multiplied where they are negative.
void penalise_repeated(float* logits, const int64_t* ids, int64_t count, double penalty);
// The logits of some tokens less `presence` and `frequency` times how often each has been.
void penalise_counted(float* logits, const int64_t* ids, int64_t count, const int32_t* counts, float presence,
                      float frequency);

}  // namespace allspan::sampling
