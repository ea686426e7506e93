// The ops of low-rank adapters.
#include "bindings/adapters.h"

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

// ids, adapters, weight, first_row, out.
Task embed_adapters_op(Runtime& runtime, OpArguments& args) {
  const Tensor weight = args.weights(args.at(2), "weight", {kAny, kAny, kAny});
  const int64_t width = weight.shape[2];
  const AdapterTable table = {&runtime.kernels(),     static_cast<const char*>(weight.data),
                              weight.type(),          weight.shape[0],
                              weight.shape[1],        width,
                              args.number<int64_t>(3)};
  const Tensor out = args.floats(args.at(4), "out", {kAny, width});
  const Input* ids = args.input(0, "ids", out.shape[0], 0);
  const Input* adapters = args.input(1, "adapters", out.shape[0], 0);
  return {out.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              embed_adapters(table, ids->data + begin, adapters->data + begin, end - begin,
                             out.floats() + begin * width);
            });
          }};
}

// The second matrices of adapters, (panels, ranks, ends) from `weights_at` on, for `rows` rows; x and out are null.
AdapterArgs take_second(Runtime& runtime, OpArguments& args, int weights_at, int routing_at, int64_t rows) {
  const Tensor panels = args.weights(args.at(weights_at), "panels", {kAny, kAny, kAny, kAdapterColumns});
  const int64_t places = panels.shape[0], rank = panels.shape[2];
  const Tensor ranks = args.ints(args.at(weights_at + 1), "ranks", {places, kAny});
  const int64_t parts = ranks.shape[1];
  const Tensor ends = args.ints(args.at(weights_at + 2), "ends", {parts});
  args.require(parts > 0, "there are no parts");
  int64_t end = 0, count = 0;
  for (int64_t part = 0; part < parts; ++part) {
    args.require(ends.ints()[part] >= end, "ends decreases");
    count += (ends.ints()[part] - end + kAdapterColumns - 1) / kAdapterColumns;
    end = ends.ints()[part];
  }
  args.require(count == panels.shape[1], "panels are not as many as ends says");
  args.within(ranks.ints(), places * parts, "ranks", rank + 1);
  return {&runtime.kernels(),
          nullptr,
          static_cast<const char*>(panels.data),
          panels.type(),
          ranks.ints(),
          ends.ints(),
          rows,
          parts,
          count,
          rank,
          take_routing(args, routing_at, rows, 1, places),
          nullptr};
}
// x, (panels, ranks, ends), (places, weights, slots, starts), out.
Task add_adapters_op(Runtime& runtime, OpArguments& args) {
  const int64_t rows = args.floats(args.at(0), "x", {kAny, kAny}).shape[0];
  AdapterArgs add = take_second(runtime, args, 1, 4, rows);
  add.x = args.floats(args.at(0), "x", {rows, add.parts * add.rank}).floats();
  add.out = args.floats(args.at(8), "out", {rows, add.ends[add.parts - 1]}).floats();
  return {rows, [add](Worker& worker, int64_t) { add_adapters(worker, add); }};
}

}  // namespace

LayerAdapters take_layer_adapters(Runtime& runtime, OpArguments& args, int x_at, int weights_at, int routing_at) {
  const PackedSpec spec = args.spec(weights_at + 1);
  const int64_t rows = args.floats(args.at(x_at), "x", {kAny, spec.inputs}).shape[0];
  const AdapterArgs second = take_second(runtime, args, weights_at + 2, routing_at, rows);
  const int64_t places = second.routing.num_places;
  const Tensor first = args.bytes(args.at(weights_at), "a", {places, spec.panels, spec.panel_bytes});
  args.require(spec.parts.size() == 1 && spec.features == second.parts * second.rank && spec.format <= Format::kBf16,
               "a has not a feature for each rank of each part, in float32 or bfloat16");
  return {second, spec, &linear_kernels(runtime.isa(), spec), static_cast<const uint8_t*>(first.data), {}};
}

std::vector<OpRow> adapter_ops() {
  return {
      {"route_adapters", 6, route_adapters_op},
      {"embed_adapters", 5, embed_adapters_op},
      {"add_adapters", 9, add_adapters_op},
  };
}

}  // namespace allspan
