// What becomes of scores before and in the softmax, beside their scale. Compiled with macros that are 1 where a model
// has the feature: WINDOW (a query sees its last tokens alone), SOFT_CAP (logits are capped), SLOPES (ALiBi: a head's
// slope times the distance is added), SINKS (a head's logit without a value joins the softmax).
#ifndef ALLSPAN_SCORES
#define ALLSPAN_SCORES
#include "ptx/ptx.cuh"

#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SOFT_CAP
#define SOFT_CAP 0
#endif
#ifndef SLOPES
#define SLOPES 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
// The scores are logits to base 2 before they are hidden and compared; else they are products, scaled as powers are
// taken.
constexpr bool kIsBent = SOFT_CAP || SLOPES;
constexpr float kLog2E = 1.4426950408889634f;

// Of a soft cap. Differences from 1 are what it costs near 0: 1e-7.
__device__ __forceinline__ float tanh_of(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + power(x * 2.885390081777927f));
}

// The logit of a product; `slope` to base 2, `distance` from the query to the token, 0 or less.
__device__ __forceinline__ float logit_of(float product, float scale, float cap, float slope, float distance) {
  const float x = SOFT_CAP ? cap * tanh_of(product * scale) : product * scale;
  return SLOPES ? fmaf(slope, distance, x) : x;
}

// A sink joins a softmax that has seen a token: its highest logit and its sum grow, and what was summed up before is to
// be multiplied by what is returned.
__device__ __forceinline__ float join_sink(float sink, float& top, float& total) {
  const float logit = sink * kLog2E, high = fmaxf(top, logit), keep = power(top - high);
  total = fmaf(total, keep, power(logit - high)), top = high;
  return keep;
}
#endif
