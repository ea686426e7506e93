// Products with the weights of the experts that tokens were routed to, shared out over the threads of a run.
#pragma once

#include "kernels.h"
#include "linear/packed_spec.h"
#include "moe/route.h"
#include "runtime/pool.h"

namespace allspan {

struct ExpertArgs {
  const PackedSpec* spec;
  const LinearKernels* kernels;
  const Kernels* elementwise;
  const float* x;         // expert_product: [rows, inputs], or like expert_sum [rows, top_k, inputs]
  const uint8_t* weight;  // [num_places, panels, panel_bytes]
  const float* bias;      // [num_places, features] or null
  Routing routing;
  int64_t top_k;
  float* out;  // expert_product: [rows, top_k, …], slots out_stride apart; expert_sum: [rows, features]
  int64_t out_stride;
  Epilogue epilogue;    // of expert_sum kStore or kAdd
  bool has_slots_rows;  // of expert_product: every slot has a row of x
};

// out[slot] = the product of the slot's token and its expert, of every slot that this rank has an expert of.
void expert_product(Worker& worker, const ExpertArgs& args, int64_t rows);
// out[row] = or += the sum of the products of its slots, times their weights, in the order of the experts.
void expert_sum(Worker& worker, const ExpertArgs& args, int64_t rows);

}  // namespace allspan
