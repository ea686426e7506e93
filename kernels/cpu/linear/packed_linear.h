// Products with packed weights, shared out over the threads of a run.
#pragma once

#include "kernels.h"
#include "linear/adapters.h"
#include "linear/packed_spec.h"
#include "runtime/pool.h"

namespace allspan {

struct PackedLinearArgs {
  const PackedSpec* spec;
  const LinearKernels* kernels;
  const Kernels* elementwise;
  const float* x;  // [rows, spec.inputs], rows x_stride apart
  int64_t x_stride;
  const uint8_t* weight;  // [spec.panels, spec.panel_bytes]
  const float* bias;      // [spec.features] or null
  float* out;             // [rows, features (of one part when gated)], rows out_stride apart
  int64_t out_stride;
  Epilogue epilogue;
  const LayerAdapters* adapters = nullptr;  // what they add is added before the epilogue
};

void packed_linear(Worker& worker, const PackedLinearArgs& args, int64_t rows);
// Tells a worker what it will read first in a product: see Worker::expect.
void expect_packed(Worker& worker, const PackedSpec& spec, const uint8_t* weight);

// out[i] = feature ids[i] - first_row of a weight of one part, or 0 where that is none of its features.
void packed_embedding(Worker& worker, const PackedSpec& spec, const LinearKernels& kernels, const uint8_t* weight,
                      const int32_t* ids, int64_t count, int64_t first_row, float* out);

}  // namespace allspan
