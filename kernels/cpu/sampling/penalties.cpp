#include <algorithm>
#include <cfloat>

#include "sampling/sampling.h"

namespace allspan::sampling {

void penalise_repeated(float* logits, const int64_t* ids, int64_t count, double penalty) {
  for (int64_t i = 0; i < count; ++i) {
    float& logit = logits[ids[i]];
    const double value = logit < 0 ? logit * penalty : logit / penalty;
    logit = static_cast<float>(std::min<double>(value, FLT_MAX));
  }
}

void penalise_counted(float* logits, const int64_t* ids, int64_t count, const int32_t* counts, float presence,
                      float frequency) {
  for (int64_t i = 0; i < count; ++i) logits[ids[i]] -= presence + frequency * static_cast<float>(counts[ids[i]]);
}

}  // namespace allspan::sampling
