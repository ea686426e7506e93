// The ops of kernels/cpu/linear.
#include "bindings/adapters.h"
#include "bindings/ops.h"

namespace nb = nanobind;

namespace allspan {
namespace {

Task linear(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const Tensor weight = args.weights(args.at(1), "weight", {kAny, x.shape[1]});
  const Tensor out = args.floats(args.at(3), "out", {x.shape[0], weight.shape[0]});
  const float* bias = args.is_none(2) ? nullptr : args.floats(args.at(2), "bias", {weight.shape[0]}).floats();
  const LinearArgs linear{x.floats(), weight.data,   bias,       out.floats(),   weight.shape[0],
                          x.shape[1], weight.type(), x.shape[1], weight.shape[0]};
  return {x.shape[0], [linear, &runtime](Worker& worker, int64_t rows) { runtime.linear(worker, linear, rows); }};
}

// x at 0; weight, bias and spec from `weight_at` on; `out_at`, which is wider than the product where several share it.
PackedLinearArgs take_product(Runtime& runtime, OpArguments& args, const PackedSpec& spec, int weight_at, int out_at,
                              int64_t column, Epilogue epilogue) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, spec.inputs});
  const Tensor weight = args.bytes(args.at(weight_at), "weight", {spec.panels, spec.panel_bytes});
  const bool has_bias = !args.is_none(weight_at + 1), gated = is_gated(epilogue);
  const Tensor out = args.floats(args.at(out_at), "out", {x.shape[0], kAny});
  args.require(!gated || spec.interleaved, "a gated product needs interleaved parts");
  const int64_t width = gated ? spec.parts[0] : spec.features;
  args.require(column >= 0 && column + width <= out.shape[1], "the product leaves out's columns");
  PackedLinearArgs product{};
  product.kernels = &linear_kernels(runtime.isa(), spec);
  product.elementwise = &runtime.kernels();
  product.x = x.floats();
  product.x_stride = spec.inputs;
  product.weight = static_cast<const uint8_t*>(weight.data);
  product.bias = has_bias ? args.floats(args.at(weight_at + 1), "bias", {spec.features}).floats() : nullptr;
  product.out = out.floats() + column;
  product.out_stride = out.shape[1];
  product.epilogue = epilogue;
  return product;
}

// x, weight, bias, spec, first column of out, of a gated product its activation, out.
Task packed_product(Runtime& runtime, OpArguments& args, Epilogue epilogue) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(3));
  const int64_t rows = args.floats(args.at(0), "x", {kAny, spec->inputs}).shape[0];
  const int out_at = is_gated(epilogue) ? 6 : 5;
  const PackedLinearArgs product = take_product(runtime, args, *spec, 1, out_at, args.number<int64_t>(4), epilogue);
  return {rows,
          [product, spec](Worker& worker, int64_t rows) {
            PackedLinearArgs own = product;
            own.spec = spec.get();
            packed_linear(worker, own, rows);
          },
          [spec, weight = product.weight](Worker& worker) { expect_packed(worker, *spec, weight); }};
}

// x, (first matrices, spec, panels, ranks, ends), routing, (weight, bias, spec, epilogue), room, out.
Task adapted_linear(Runtime& runtime, OpArguments& args) {
  struct Held {
    PackedSpec spec;
    LayerAdapters adapters;
  };
  const auto held = std::make_shared<Held>(Held{args.spec(12), take_layer_adapters(runtime, args, 0, 1, 6)});
  const PackedSpec& spec = held->spec;
  LayerAdapters& adapters = held->adapters;
  args.require(adapters.spec.inputs == spec.inputs, "the first matrices have not the weight's inputs");
  int64_t end = 0;
  args.require(adapters.second.parts == static_cast<int64_t>(spec.parts.size()), "ends has not the weight's parts");
  for (int64_t part = 0; part < adapters.second.parts; ++part)
    args.require(adapters.second.ends[part] == (end += spec.parts[part]), "ends has not the weight's parts");
  adapters.columns = adapter_columns_of(spec);
  const std::string name = nb::cast<std::string>(args.at(13));
  const Epilogue epilogue = name == "store" ? Epilogue::kStore
                            : name == "add" ? Epilogue::kAdd
                                            : gated_epilogue(args, 13);
  // The activation of parts that lie one behind the other comes when both are there.
  const bool is_apart = is_gated(epilogue) && !spec.interleaved;
  const PackedLinearArgs product =
      take_product(runtime, args, spec, 10, is_apart ? 14 : 15, 0, is_apart ? Epilogue::kStore : epilogue);
  const int64_t rows = args.floats(args.at(0), "x", {kAny, spec.inputs}).shape[0];
  const int64_t width = is_apart ? spec.features / 2 : 0;
  args.require(!is_apart || 2 * width == spec.features, "a gated product has two parts");
  float* const out = is_apart ? args.floats(args.at(15), "out", {rows, width}).floats() : nullptr;
  const Kernels& kernels = runtime.kernels();
  return {rows,
          [=, &kernels](Worker& worker, int64_t count) {
            PackedLinearArgs own = product;
            own.spec = &held->spec, own.adapters = &held->adapters;
            packed_linear(worker, own, count);
            if (is_apart)
              worker.split(count, rows_per_part(width), [&](int64_t begin, int64_t end) {
                kernels.gated_mul(own.out + begin * own.out_stride, epilogue, out + begin * width, end - begin, width);
              });
          },
          [held, weight = product.weight](Worker& worker) { expect_packed(worker, held->spec, weight); }};
}

Task packed_linear_op(Runtime& runtime, OpArguments& args) { return packed_product(runtime, args, Epilogue::kStore); }
Task packed_linear_add(Runtime& runtime, OpArguments& args) { return packed_product(runtime, args, Epilogue::kAdd); }
Task packed_gated_linear(Runtime& runtime, OpArguments& args) {
  return packed_product(runtime, args, gated_epilogue(args, 5));
}

Task packed_embedding_op(Runtime& runtime, OpArguments& args) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(2));
  args.require(spec->parts.size() == 1, "an embedding has one part");
  const Tensor weight = args.bytes(args.at(1), "weight", {spec->panels, spec->panel_bytes});
  const int64_t first_row = args.number<int64_t>(3);
  const Tensor out = args.floats(args.at(4), "out", {kAny, spec->inputs});
  const Input* ids = args.input(0, "ids", out.shape[0], 0);
  const LinearKernels& kernels = linear_kernels(runtime.isa(), *spec);
  return {out.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            packed_embedding(worker, *spec, kernels, static_cast<const uint8_t*>(weight.data), ids->data, rows,
                             first_row, out.floats());
          }};
}

}  // namespace

std::vector<OpRow> linear_ops() {
  return {
      {"linear", 4, linear},
      {"packed_linear", 6, packed_linear_op},
      {"packed_linear_add", 6, packed_linear_add},
      {"packed_gated_linear", 7, packed_gated_linear},
      {"adapted_linear", 16, adapted_linear},
      {"packed_embedding", 5, packed_embedding_op},
  };
}

}  // namespace allspan
