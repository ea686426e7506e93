// Weights of tokens, block by block of their logits.
//
// A token's weight is exp(z), z = (logit - highest) / temperature, rounded to a multiple of a power of two so coarse
// that every sum of weights is exact in a double (at most 2^53 units). So no result depends on the order of a sum, on
// the width of a vector or on how the work was cut up; and filters may look at the few tokens that matter.
// exp is a polynomial (Cephes expf, S. Moshier) in float without fused multiply-adds, the same in every build.
#pragma once

#include <cstdint>
#include <limits>

namespace allspan::sampling {

constexpr int64_t kBlock = 64;  // logits; each block's highest is kept
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// z = (x - highest) / temperature; weights are rounded by adding `rounder` and taking it away again.
struct Scale {
  float highest, temperature;
  double rounder;
};

// The highest of each block of x [n]; false when one is NaN or +infinity.
bool block_maxima(const float* x, int64_t n, float* maxima);
// z and weights of a block x [n <= kBlock]; both are filled up to kBlock, with weights of 0.
void weigh_block(const float* x, int64_t n, const Scale& scale, float* z, double* weights);
// The sum of the weights of each block of x [n].
void block_weights(const float* x, int64_t n, const Scale& scale, double* sums);
// Exact, so in any order.
double sum(const double* values, int64_t n);
// The sum of weights[i] · z[i], each product rounded as the weights are.
double sum_products(const double* weights, const float* z, int64_t n, double rounder);
// The least and the largest of values [n > 0].
void range(const double* values, int64_t n, double& low, double& high);

}  // namespace allspan::sampling
