// The ops of kernels/cpu/linear.
#include "bindings/ops.h"

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

// x, weight, bias, spec, first column of out, of a gated product its activation, out: out is wider than the product
// where several share it.
Task packed_product(Runtime& runtime, OpArguments& args, Epilogue epilogue) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(3));
  const Tensor x = args.floats(args.at(0), "x", {kAny, spec->inputs});
  const Tensor weight = args.bytes(args.at(1), "weight", {spec->panels, spec->panel_bytes});
  const float* bias = args.is_none(2) ? nullptr : args.floats(args.at(2), "bias", {spec->features}).floats();
  const int64_t column = args.number<int64_t>(4);
  const Tensor out = args.floats(args.at(is_gated(epilogue) ? 6 : 5), "out", {x.shape[0], kAny});
  const bool gated = is_gated(epilogue);
  args.require(!gated || spec->interleaved, "a gated product needs interleaved parts");
  const int64_t width = gated ? spec->parts[0] : spec->features;
  args.require(column >= 0 && column + width <= out.shape[1], "the product leaves out's columns");
  PackedLinearArgs product{};
  product.kernels = &linear_kernels(runtime.isa(), *spec);
  product.elementwise = &runtime.kernels();
  product.x = x.floats();
  product.x_stride = spec->inputs;
  product.weight = static_cast<const uint8_t*>(weight.data);
  product.bias = bias;
  product.out = out.floats() + column;
  product.out_stride = out.shape[1];
  product.epilogue = epilogue;
  return {x.shape[0],
          [product, spec](Worker& worker, int64_t rows) mutable {
            PackedLinearArgs args = product;
            args.spec = spec.get();
            packed_linear(worker, args, rows);
          },
          [spec, weight = product.weight](Worker& worker) { expect_packed(worker, *spec, weight); }};
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
      {"packed_embedding", 5, packed_embedding_op},
  };
}

}  // namespace allspan
