#include "bindings/ops.h"

namespace nb = nanobind;

namespace allspan {

const std::vector<OpRow>& op_table() {
  static const std::vector<OpRow> table = [] {
    std::vector<OpRow> all;
    for (const auto& part : {row_ops(), linear_ops(), expert_ops(), attention_ops(), latent_ops(), adapter_ops()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return table;
}

const OpRow& find_op(const std::string& name) {
  for (const OpRow& row : op_table())
    if (name == row.name) return row;
  throw nb::value_error(("no op " + name).c_str());
}

PackedSpec OpArguments::spec(int i) const {
  const nb::handle given = at(i);
  const auto text = [&](const char* name) { return nb::cast<std::string>(given.attr(name)); };
  const auto number = [&](const char* name) { return nb::cast<int64_t>(given.attr(name)); };
  std::vector<int64_t> parts;
  for (nb::handle part : given.attr("parts")) parts.push_back(nb::cast<int64_t>(part));
  return PackedSpec::make(text("format"), text("activation"), std::move(parts), number("inputs"), number("k_offset"),
                          number("group"), nb::cast<bool>(given.attr("interleaved")));
}

Epilogue gated_epilogue(const OpArguments& args, int i) {
  const std::string name = nb::cast<std::string>(args.at(i));
  if (name == "clamped_swiglu") return Epilogue::kGatedClamped;
  args.require(name == "silu" || name == "gelu_tanh", "activation must be silu, gelu_tanh or clamped_swiglu");
  return name == "silu" ? Epilogue::kGatedSilu : Epilogue::kGatedGelu;
}

const Input* OpArguments::input(int i, const char* name, int64_t rows, int64_t limit) {
  const Tensor tensor = ints(at(i), name, {rows});
  if (limit) within(tensor, name, limit);
  inputs_.push_back(std::make_unique<Input>(Input{tensor.ints(), tensor.shape[0]}));
  return inputs_.back().get();
}

const BatchInput* OpArguments::batch(int i, int64_t rows, const BatchLimits& limits) {
  batch_ = std::make_unique<BatchInput>(take_batch(*this, at(i)));
  check_batch(*this, *batch_, rows, limits);
  return batch_.get();
}

AllReduce OpArguments::all_reduce() { throw nb::value_error("all_reduce: needs the collectives of a program"); }

BatchInput take_batch(const Arguments& args, nb::handle meta) {
  const nb::object kv_lens_ = meta.attr("kv_lens"), qo_ = meta.attr("qo_indptr"), indptr_ = meta.attr("page_indptr");
  const nb::object indices_ = meta.attr("page_indices"), heads_ = meta.attr("kv_head_of");
  const Tensor kv_lens = args.ints(kv_lens_, "kv_lens", {kAny});
  const int64_t requests = kv_lens.shape[0];
  const Tensor qo_indptr = args.ints(qo_, "qo_indptr", {requests + 1});
  const Tensor page_indptr = args.ints(indptr_, "page_indptr", {requests + 1});
  const Tensor page_indices = args.ints(indices_, "page_indices", {kAny});
  const Tensor kv_head_of = args.ints(heads_, "kv_head_of", {kAny});
  const nb::object slopes_ = meta.attr("slopes");
  return {{requests, qo_indptr.ints(), page_indptr.ints(), page_indices.ints(), kv_lens.ints(), kv_head_of.ints()},
          page_indices.shape[0],
          kv_head_of.shape[0],
          nb::cast<float>(meta.attr("scale")),
          nb::cast<int64_t>(meta.attr("window")),
          nb::cast<float>(meta.attr("soft_cap")),
          slopes_.is_none() ? nullptr : args.floats(slopes_, "slopes", {kv_head_of.shape[0]}).floats()};
}

void check_batch(const Arguments& args, const BatchInput& input, int64_t rows, const BatchLimits& limits) {
  const Runtime::Batch& b = input.batch;
  args.require(input.heads == limits.heads, "kv_head_of does not have one entry for each query head");
  args.require(b.qo_indptr[0] == 0 && b.qo_indptr[b.requests] == rows, "qo_indptr does not run from 0 to q's rows");
  args.require(b.page_indptr[0] >= 0 && b.page_indptr[b.requests] <= input.page_indices,
               "page_indptr leaves page_indices");
  for (int64_t r = 0; r < b.requests; ++r) {
    const int64_t queries = int64_t{b.qo_indptr[r + 1]} - b.qo_indptr[r];
    const int64_t held = int64_t{b.page_indptr[r + 1]} - b.page_indptr[r];
    args.require(queries >= 0, "qo_indptr decreases");
    args.require(held >= 0, "page_indptr decreases");
    args.require(b.kv_lens[r] >= queries, "kv_lens has a request with fewer tokens than are new");
    args.require(b.kv_lens[r] <= held * limits.page_size, "kv_lens has a request with more tokens than its pages hold");
  }
  args.require(input.window >= 0, "window is negative");
  args.require(input.soft_cap >= 0, "soft_cap is negative");
  args.within(b.kv_head_of, input.heads, "kv_head_of", limits.kv_heads);
  args.within(b.page_indices, input.page_indices, "page_indices", limits.pages);
}

}  // namespace allspan
