// The ops of low-rank adapters.
#include "bindings/routing.h"
#include "linear/adapters.h"

namespace allspan {
namespace {

// adapters, rows, (places, weights, slots, starts).
Task route_adapters_op(Runtime&, OpArguments& args) {
  const int64_t count = args.ints(args.at(2), "places", {kAny, 1}).shape[0];
  const Routing routing = take_routing(args, 2, count, 1, places_of(args, 2));
  const bool has_rows = args.has_input(1);
  const Input* rows = has_rows ? args.input(1, "rows", count, 0) : nullptr;
  const Input* adapters = args.input(0, "adapters", has_rows ? kAny : count, 0);
  return {count, [=](Worker& worker, int64_t n) {
            route_adapters(worker, adapters->data, adapters->size, rows ? rows->data : nullptr, routing, n);
          }};
}

// x, weight, spec, (places, weights, slots, starts), out.
Task add_adapters_op(Runtime& runtime, OpArguments& args) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(2));
  args.require(!spec->interleaved, "the parts of an adapter are not interleaved");
  const int64_t parts = static_cast<int64_t>(spec->parts.size());
  const Tensor x = args.floats(args.at(0), "x", {kAny, parts * spec->inputs});
  const Tensor weight = args.bytes(args.at(1), "weight", {kAny, spec->panels, spec->panel_bytes});
  const Tensor out = args.floats(args.at(7), "out", {x.shape[0], spec->features});
  AdapterArgs add{};
  add.kernels = &linear_kernels(runtime.isa(), *spec);
  add.elementwise = &runtime.kernels();
  add.x = x.floats();
  add.weight = static_cast<const uint8_t*>(weight.data);
  add.routing = take_routing(args, 3, x.shape[0], 1, weight.shape[0]);
  add.out = out.floats();
  return {x.shape[0], [add, spec](Worker& worker, int64_t) {
            AdapterArgs own = add;
            own.spec = spec.get();
            add_adapters(worker, own);
          }};
}

}  // namespace

std::vector<OpRow> adapter_ops() {
  return {
      {"route_adapters", 6, route_adapters_op},
      {"add_adapters", 8, add_adapters_op},
  };
}

}  // namespace allspan
