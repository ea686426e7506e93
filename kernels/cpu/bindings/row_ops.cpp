// The ops of kernels/cpu/rows, and the sum over the ranks.
#include <algorithm>
#include <cmath>

#include "bindings/ops.h"

namespace allspan {
namespace {

Task embedding(Runtime& runtime, OpArguments& args) {
  const Tensor weight = args.weights(args.at(1), "weight", {kAny, kAny});
  const int64_t width = weight.shape[1], first_row = args.number<int64_t>(2);
  const Tensor out = args.floats(args.at(3), "out", {kAny, width});
  const Input* ids = args.input(0, "ids", out.shape[0], 0);
  const Kernels& kernels = runtime.kernels();
  return {out.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              kernels.embedding(ids->data + begin, weight.data, weight.type(), first_row, weight.shape[0], width,
                                out.floats() + begin * width, end - begin);
            });
          }};
}

Task norm_rows(Runtime& runtime, const Tensor& x, float* residual, const Tensor& weight, float eps, const Tensor& out) {
  const int64_t width = weight.shape[0], each = x.rank == 3 ? x.shape[1] : 1;
  const Kernels& kernels = runtime.kernels();
  return {x.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows * each, rows_per_part(width), [&](int64_t begin, int64_t end) {
              if (x.stride != each * width) {  // rows that lie apart
                for (int64_t row = begin; row < end; ++row)
                  kernels.rms_norm(x.floats() + row * x.stride, nullptr, weight.floats(), eps,
                                   out.floats() + row * width, 1, width);
                return;
              }
              const int64_t at = begin * width;
              kernels.rms_norm(x.floats() + at, residual ? residual + at : nullptr, weight.floats(), eps,
                               out.floats() + at, end - begin, width);
            });
          }};
}

Task rms_norm(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.rows(args.at(0), "x", {kAny, kAny});
  const Tensor weight = args.floats(args.at(1), "weight", {x.shape[1]});
  const Tensor out = args.floats(args.at(3), "out", {x.shape[0], x.shape[1]});
  return norm_rows(runtime, x, nullptr, weight, args.number<float>(2), out);
}

Task add_rms_norm(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const Tensor residual = args.floats(args.at(1), "residual", {x.shape[0], x.shape[1]});
  const Tensor weight = args.floats(args.at(2), "weight", {x.shape[1]});
  const Tensor out = args.floats(args.at(4), "out", {x.shape[0], x.shape[1]});
  return norm_rows(runtime, x, residual.floats(), weight, args.number<float>(3), out);
}

Task layer_norm(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const Tensor weight = args.floats(args.at(1), "weight", {x.shape[1]});
  const float eps = args.number<float>(2);
  const Tensor out = args.floats(args.at(3), "out", {x.shape[0], x.shape[1]});
  const int64_t width = x.shape[1];
  const Kernels& kernels = runtime.kernels();
  return {x.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              const int64_t at = begin * width;
              kernels.layer_norm(x.floats() + at, weight.floats(), eps, out.floats() + at, end - begin, width);
            });
          }};
}

Task head_norm(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny, kAny});
  const Tensor weight = args.floats(args.at(1), "weight", {x.shape[2]});
  return norm_rows(runtime, x, nullptr, weight, args.number<float>(2), x);
}

// Sums of a head are made by eight lanes, whatever the instruction set.
Task mean_squares(Runtime&, OpArguments& args) {
  constexpr int64_t kLanes = 8, kKinds = 2;
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny, kAny});
  const int64_t heads = x.shape[1], dim = x.shape[2];
  const Tensor shares = args.floats(args.at(1), "shares", {kKinds, heads});
  const Tensor out = args.floats(args.at(2), "out", {x.shape[0], kKinds});
  return {x.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(heads * dim), [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row) {
                float totals[kKinds] = {};
                for (int64_t head = 0; head < heads; ++head) {
                  const float* from = x.floats() + (row * heads + head) * dim;
                  float lanes[kLanes] = {};
                  for (int64_t i = 0; i < dim; ++i) lanes[i % kLanes] += from[i] * from[i];
                  float sum = 0;
                  for (const float lane : lanes) sum += lane;
                  for (int64_t kind = 0; kind < kKinds; ++kind)
                    totals[kind] += shares.floats()[kind * heads + head] * sum;
                }
                for (int64_t kind = 0; kind < kKinds; ++kind) out.floats()[row * kKinds + kind] = totals[kind];
              }
            });
          }};
}

Task norm_heads(Runtime&, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny, kAny});
  const int64_t width = x.shape[1] * x.shape[2];
  const Tensor means = args.floats(args.at(1), "means", {x.shape[0], 2});
  const Tensor weights[] = {args.floats(args.at(2), "q_weight", {kAny}), args.floats(args.at(3), "k_weight", {kAny})};
  const float eps = args.number<float>(4);
  const int64_t first[] = {0, weights[0].shape[0], weights[0].shape[0] + weights[1].shape[0]};
  args.require(first[2] <= width, "x has fewer heads than there are weights");
  const float* factors[] = {weights[0].floats(), weights[1].floats()};
  return {x.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row)
                for (int64_t kind = 0; kind < 2; ++kind) {
                  const float scale = 1.0f / std::sqrt(means.floats()[row * 2 + kind] + eps);
                  float* to = x.floats() + row * width + first[kind];
                  for (int64_t i = 0; i < first[kind + 1] - first[kind]; ++i) to[i] *= scale * factors[kind][i];
                }
            });
          }};
}

Task add(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const Tensor residual = args.floats(args.at(1), "residual", {x.shape[0], x.shape[1]});
  const int64_t width = x.shape[1];
  const Kernels& kernels = runtime.kernels();
  return {x.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows * width, kGrain, [&](int64_t begin, int64_t end) {
              kernels.add(x.floats() + begin, residual.floats() + begin, end - begin);
            });
          }};
}

Task rotary(Runtime& runtime, OpArguments& args) {
  const Tensor q = args.floats(args.at(0), "q", {kAny, kAny, kAny});
  const int64_t dim = q.shape[2];
  const Tensor k = args.floats(args.at(1), "k", {q.shape[0], kAny, dim});
  const Tensor cos_sin = args.floats(args.at(3), "cos_sin", {kAny, kAny});
  const int64_t rot = cos_sin.shape[1];
  args.require(rot % 2 == 0 && rot <= dim, "cos_sin's second extent must be even and at most the head size");
  const Input* positions = args.input(2, "positions", q.shape[0], cos_sin.shape[0]);
  const Kernels& kernels = runtime.kernels();
  return {q.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part((q.shape[1] + k.shape[1]) * dim), [&](int64_t begin, int64_t end) {
              for (const Tensor& t : {q, k})
                kernels.rotary(t.floats() + begin * t.shape[1] * dim, t.shape[1], dim, positions->data + begin,
                               cos_sin.floats(), rot, end - begin);
            });
          }};
}

Task hadamard(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny, kAny});
  const int64_t heads = x.shape[1], dim = x.shape[2];
  const float* center = args.is_none(1) ? nullptr : args.floats(args.at(1), "center", {heads, dim}).floats();
  const Kernels& kernels = runtime.kernels();
  return {x.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(heads * dim), [&](int64_t begin, int64_t end) {
              kernels.hadamard(x.floats() + begin * heads * dim, heads, dim, center, end - begin);
            });
          }};
}

Task gated_mul(Runtime& runtime, OpArguments& args) {
  const Epilogue activation = gated_epilogue(args, 1);
  const Tensor out = args.floats(args.at(2), "out", {kAny, kAny});
  const int64_t width = out.shape[1];
  const Tensor gate_up = args.floats(args.at(0), "gate_up", {out.shape[0], 2 * width});
  const Kernels& kernels = runtime.kernels();
  return {out.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              kernels.gated_mul(gate_up.floats() + begin * 2 * width, activation, out.floats() + begin * width,
                                end - begin, width);
            });
          }};
}

Task soft_cap(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const float cap = args.number<float>(1);
  args.require(cap > 0, "cap must be above 0");
  const int64_t width = x.shape[1];
  const Kernels& kernels = runtime.kernels();
  return {x.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows * width, kGrain,
                         [&](int64_t begin, int64_t end) { kernels.soft_cap(x.floats() + begin, cap, end - begin); });
          }};
}

Task gather_rows(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const Tensor out = args.floats(args.at(2), "out", {kAny, x.shape[1]});
  const Input* rows_input = args.input(1, "rows", out.shape[0], x.shape[0]);
  const Kernels& kernels = runtime.kernels();
  return {out.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            // An embedding is the same copy, of rows that all exist.
            worker.split(rows, rows_per_part(x.shape[1]), [&](int64_t begin, int64_t end) {
              kernels.embedding(rows_input->data + begin, x.data, Type::kFloat32, 0, x.shape[0], x.shape[1],
                                out.floats() + begin * x.shape[1], end - begin);
            });
          }};
}

Task put_columns(Runtime&, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const int64_t first = args.number<int64_t>(1), width = x.shape[1];
  const Tensor out = args.floats(args.at(2), "out", {x.shape[0], kAny});
  args.require(first >= 0 && first <= out.shape[1] - width, "out has fewer columns than x is to be put in");
  return {x.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row)
                std::copy_n(x.floats() + row * width, width, out.floats() + row * out.shape[1] + first);
            });
          }};
}

Task all_reduce(Runtime&, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const auto reduce = args.all_reduce();
  return {x.shape[0], [=](Worker& worker, int64_t rows) { reduce(worker, x.floats(), rows * x.shape[1]); }};
}

}  // namespace

std::vector<OpRow> row_ops() {
  return {
      {"embedding", 4, embedding},
      {"rms_norm", 4, rms_norm},
      {"add_rms_norm", 5, add_rms_norm},
      {"head_norm", 3, head_norm},
      {"mean_squares", 3, mean_squares},
      {"norm_heads", 5, norm_heads},
      {"add", 2, add},
      {"rotary", 4, rotary},
      {"hadamard", 2, hadamard},
      {"gated_mul", 3, gated_mul},
      {"gather_rows", 3, gather_rows},
      {"put_columns", 3, put_columns},
      {"all_reduce", 1, all_reduce},
      {"layer_norm", 4, layer_norm},
      {"soft_cap", 2, soft_cap},
  };
}

}  // namespace allspan
