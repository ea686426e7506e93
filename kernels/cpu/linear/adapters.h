// What low-rank adapters add to the products of linear layers.
#pragma once

#include "kernels.h"
#include "linear/packed_spec.h"
#include "moe/route.h"
#include "runtime/pool.h"

namespace allspan {

// Places of `count` rows by the slots of their tokens' adapters, [tokens]; `rows` are the rows' tokens, or null for all
// in order. A row of no token has no adapter.
void route_adapters(Worker& worker, const int32_t* adapters, int64_t tokens, const int32_t* rows,
                    const Routing& routing, int64_t count);

struct AdapterArgs {
  const PackedSpec* spec;
  const LinearKernels* kernels;
  const Kernels* elementwise;
  const float* x;         // [rows, parts · inputs]: each part of the product has columns of its own
  const uint8_t* weight;  // [num_places, panels, panel_bytes]
  Routing routing;        // of one choice a row
  float* out;             // [rows, features]
};

// out[row] += the product of the row and its adapter, of every row that has one.
void add_adapters(Worker& worker, const AdapterArgs& args);

}  // namespace allspan
