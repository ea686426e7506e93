// The ops of kernels/cpu/moe.
#include <cmath>

#include "bindings/routing.h"
#include "moe/experts.h"

namespace nb = nanobind;

namespace allspan {
namespace {

RouterSpec router_spec(const OpArguments& args, int i) {
  const nb::handle given = args.at(i);
  const auto text = [&](const char* name) { return nb::cast<std::string>(given.attr(name)); };
  const auto number = [&](const char* name) { return nb::cast<int64_t>(given.attr(name)); };
  const std::string score = text("score"), group_score = text("group_score");
  args.require(score == "softmax" || score == "sigmoid" || score == "softmax_of_chosen", "score is not known");
  args.require(group_score == "max" || group_score == "two_best", "group_score is not known");
  return {number("top_k"),
          score == "softmax"   ? Score::kSoftmax
          : score == "sigmoid" ? Score::kSigmoid
                               : Score::kSoftmaxOfChosen,
          number("groups"),
          number("kept_groups"),
          group_score == "max" ? GroupScore::kMax : GroupScore::kTwoBest,
          nb::cast<bool>(given.attr("normalises")),
          nb::cast<float>(given.attr("epsilon")),
          nb::cast<float>(given.attr("scale"))};
}

Task route_op(Runtime&, OpArguments& args) {
  RouteArgs route_args{};
  const Tensor logits = args.floats(args.at(0), "logits", {kAny, kAny});
  const int64_t experts = logits.shape[1];
  const Tensor places = args.ints(args.at(2), "places", {kAny, experts});
  route_args.logits = logits.floats();
  route_args.bias = args.is_none(1) ? nullptr : args.floats(args.at(1), "bias", {experts}).floats();
  route_args.places = places.ints();
  route_args.copies = places.shape[0];
  route_args.experts = experts;
  const RouterSpec& spec = route_args.spec = router_spec(args, 3);
  args.require(spec.top_k >= 1 && spec.top_k <= experts, "top_k must be from 1 to the number of experts");
  args.require(spec.groups >= 1 && experts % spec.groups == 0 && spec.kept_groups >= 1 &&
                   spec.kept_groups <= spec.groups && experts / spec.groups * spec.kept_groups >= spec.top_k,
               "the groups that are kept must be some of equal ones, and have top_k experts");
  const int64_t num_places = places_of(args, 4);
  for (int64_t i = 0; i < places.shape[0] * experts; ++i)
    args.require(places.ints()[i] >= -1 && places.ints()[i] < num_places, "places leaves this rank's experts");
  route_args.routing = take_routing(args, 4, logits.shape[0], spec.top_k, num_places);
  route_args.load = args.is_none(8) ? nullptr : args.longs(args.at(8), "load", {experts});
  route_args.rows = args.is_none(9) ? nullptr : args.ints(args.at(9), "rows", {logits.shape[0]}).ints();
  return {logits.shape[0], [=](Worker& worker, int64_t rows) { route(worker, route_args, rows); }};
}

// What products with experts share: x, weight, bias, spec; `columns` are those of the bias.
ExpertArgs take_product(Runtime& runtime, OpArguments& args, const PackedSpec& spec, const float* x, int routing,
                        int64_t rows) {
  ExpertArgs product{};
  const Tensor weight = args.bytes(args.at(1), "weight", {kAny, spec.panels, spec.panel_bytes});
  const int64_t num_places = weight.shape[0];
  product.kernels = &linear_kernels(runtime.isa(), spec);
  product.elementwise = &runtime.kernels();
  product.x = x;
  product.weight = static_cast<const uint8_t*>(weight.data);
  product.bias = args.is_none(2) ? nullptr : args.floats(args.at(2), "bias", {num_places, spec.features}).floats();
  product.top_k = args.ints(args.at(routing), "places", {rows, kAny}).shape[1];
  product.routing = take_routing(args, routing, rows, product.top_k, num_places);
  return product;
}

// Whether x has a row for each choice of a token.
bool has_choices(nb::handle x) { return nb::cast<int>(x.attr("ndim")) == 3; }

Task slot_product(Runtime& runtime, OpArguments& args, bool gated) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(3));
  const bool has_slots_rows = has_choices(args.at(0));
  const Tensor x = has_slots_rows ? args.floats(args.at(0), "x", {kAny, kAny, spec->inputs})
                                  : args.floats(args.at(0), "x", {kAny, spec->inputs});
  const int64_t rows = x.shape[0];
  ExpertArgs product = take_product(runtime, args, *spec, x.floats(), 5, rows);
  args.require(!has_slots_rows || product.top_k == x.shape[1], "x has no row for each choice");
  product.has_slots_rows = has_slots_rows;
  const Tensor out = args.floats(args.at(9), "out", {rows, product.top_k, kAny});
  const int64_t column = gated ? 0 : args.number<int64_t>(4), width = gated ? spec->parts[0] : spec->features;
  args.require(gated == spec->interleaved, "parts are interleaved for a gated product, and for no other");
  args.require(column >= 0 && column + width <= out.shape[2], "the product leaves out's columns");
  product.epilogue = gated ? gated_epilogue(args, 4) : Epilogue::kStore;
  product.out = out.floats() + column;
  product.out_stride = out.shape[2];
  return {rows, [product, spec](Worker& worker, int64_t count) {
            ExpertArgs own = product;
            own.spec = spec.get();
            expert_product(worker, own, count);
          }};
}

Task expert_linear(Runtime& runtime, OpArguments& args) { return slot_product(runtime, args, false); }
Task expert_gated_linear(Runtime& runtime, OpArguments& args) { return slot_product(runtime, args, true); }

Task expert_sum_op(Runtime& runtime, OpArguments& args) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(3));
  args.require(spec->parts.size() == 1, "a sum has one part");
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny, spec->inputs});
  const int64_t rows = x.shape[0];
  ExpertArgs sum = take_product(runtime, args, *spec, x.floats(), 4, rows);
  args.require(sum.top_k == x.shape[1], "x has no row for each choice");
  const Tensor out = args.floats(args.at(9), "out", {rows, spec->features});
  sum.epilogue = args.number<bool>(8) ? Epilogue::kAdd : Epilogue::kStore;
  sum.out = out.floats();
  sum.out_stride = spec->features;
  return {rows, [sum, spec](Worker& worker, int64_t count) {
            ExpertArgs own = sum;
            own.spec = spec.get();
            expert_sum(worker, own, count);
          }};
}

Task expert_gather(Runtime&, OpArguments& args) {
  const bool has_slots_rows = has_choices(args.at(0));
  const Tensor out = args.floats(args.at(6), "out", {kAny, kAny, kAny});
  const int64_t rows = out.shape[0], top_k = out.shape[1], width = out.shape[2];
  const Tensor x =
      has_slots_rows ? args.floats(args.at(0), "x", {rows, top_k, width}) : args.floats(args.at(0), "x", {rows, width});
  const Tensor columns = args.ints(args.at(1), "columns", {kAny, width});
  for (int64_t i = 0; i < columns.shape[0] * width; ++i)
    args.require(columns.ints()[i] >= 0 && columns.ints()[i] < width, "columns leaves x");
  const Routing routing = take_routing(args, 2, rows, top_k, columns.shape[0]);
  return {rows, [=](Worker& worker, int64_t count) {
            worker.split(count * top_k, rows_per_part(width), [&](int64_t begin, int64_t end) {
              for (int64_t slot = begin; slot < end; ++slot) {
                const int32_t place = routing.places[slot];
                if (place < 0) continue;
                const float* from = x.floats() + (has_slots_rows ? slot : slot / top_k) * width;
                const int32_t* column = columns.ints() + place * width;
                float* to = out.floats() + slot * width;
                for (int64_t i = 0; i < width; ++i) to[i] = from[column[i]];
              }
            });
          }};
}

Task expert_gated_mul(Runtime& runtime, OpArguments& args) {
  const Tensor gate_up = args.floats(args.at(0), "gate_up", {kAny, kAny, kAny});
  const int64_t rows = gate_up.shape[0], top_k = gate_up.shape[1], width = gate_up.shape[2] / 2;
  args.require(gate_up.shape[2] % 2 == 0, "gate_up has two parts of the same width");
  const Epilogue activation = gated_epilogue(args, 1);
  const int64_t num_places = places_of(args, 2);
  const Routing routing = take_routing(args, 2, rows, top_k, num_places);
  const Tensor out = args.floats(args.at(6), "out", {rows, top_k, width});
  const Kernels& kernels = runtime.kernels();
  return {rows, [=, &kernels](Worker& worker, int64_t count) {
            worker.split(count * top_k, rows_per_part(width), [&](int64_t begin, int64_t end) {
              for (int64_t slot = begin; slot < end; ++slot)
                if (routing.places[slot] >= 0)
                  kernels.gated_mul(gate_up.floats() + slot * 2 * width, activation, out.floats() + slot * width, 1,
                                    width);
            });
          }};
}

Task scale_rows(Runtime&, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const int64_t width = x.shape[1];
  const Tensor logits = args.floats(args.at(1), "logits", {x.shape[0], 1});
  return {x.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row) {
                const float factor = 1.0f / (1.0f + std::exp(-logits.floats()[row]));
                for (int64_t i = 0; i < width; ++i) x.floats()[row * width + i] *= factor;
              }
            });
          }};
}

}  // namespace

std::vector<OpRow> expert_ops() {
  return {
      {"route", 10, route_op, 2},
      {"expert_linear", 10, expert_linear},
      {"expert_gated_linear", 10, expert_gated_linear},
      {"expert_gated_mul", 7, expert_gated_mul},
      {"expert_gather", 7, expert_gather},
      {"expert_sum", 10, expert_sum_op},
      {"scale_rows", 2, scale_rows},
  };
}

}  // namespace allspan
