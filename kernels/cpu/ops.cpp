#include "ops.h"

#include <algorithm>

namespace nb = nanobind;

namespace allspan {
namespace {

// Elements that are worth a thread of their own.
constexpr int64_t kGrain = 1 << 14;
int64_t rows_per_part(int64_t width) { return 1 + kGrain / (width + 1); }

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

Task norm_rows(Runtime& runtime, const Tensor& x, float* residual, const Tensor& weight, float eps, const Tensor& out) {
  const int64_t width = weight.shape[0], each = x.rank == 3 ? x.shape[1] : 1;
  const Kernels& kernels = runtime.kernels();
  return {x.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows * each, rows_per_part(width), [&](int64_t begin, int64_t end) {
              const int64_t at = begin * width;
              kernels.rms_norm(x.floats() + at, residual ? residual + at : nullptr, weight.floats(), eps,
                               out.floats() + at, end - begin, width);
            });
          }};
}

Task rms_norm(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
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

Task head_norm(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny, kAny});
  const Tensor weight = args.floats(args.at(1), "weight", {x.shape[2]});
  return norm_rows(runtime, x, nullptr, weight, args.number<float>(2), x);
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

Task linear(Runtime& runtime, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const Tensor weight = args.weights(args.at(1), "weight", {kAny, x.shape[1]});
  const Tensor out = args.floats(args.at(3), "out", {x.shape[0], weight.shape[0]});
  const float* bias = args.is_none(2) ? nullptr : args.floats(args.at(2), "bias", {weight.shape[0]}).floats();
  const LinearArgs linear{x.floats(), weight.data, bias, out.floats(), weight.shape[0], x.shape[1], weight.type()};
  return {x.shape[0], [linear, &runtime](Worker& worker, int64_t rows) { runtime.linear(worker, linear, rows); }};
}

// x, weight, bias, spec, first column of out, out: out is wider than the product where several share it.
Task packed_product(Runtime& runtime, OpArguments& args, Epilogue epilogue) {
  const auto spec = std::make_shared<PackedSpec>(args.spec(3));
  const Tensor x = args.floats(args.at(0), "x", {kAny, spec->inputs});
  const Tensor weight = args.bytes(args.at(1), "weight", {spec->panels, spec->panel_bytes});
  const float* bias = args.is_none(2) ? nullptr : args.floats(args.at(2), "bias", {spec->features}).floats();
  const int64_t column = args.number<int64_t>(4);
  const Tensor out = args.floats(args.at(5), "out", {x.shape[0], kAny});
  const bool gated = epilogue == Epilogue::kGatedSilu;
  args.require(!gated || spec->interleaved, "a gated product needs interleaved parts");
  args.require(gated || !spec->interleaved, "interleaved parts need a gated product");
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
  return packed_product(runtime, args, Epilogue::kGatedSilu);
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

// k_cache, v_cache, k_scales, v_scales from argument `first` on.
CacheArgs take_cache(OpArguments& args, int first, int64_t kv_heads, int64_t dim) {
  const Tensor k = args.pages(args.at(first), "k_cache", kv_heads, dim);
  const Tensor v = args.pages(args.at(first + 1), "v_cache", k.shape[1], dim);
  args.require(k.dtype == v.dtype, "k_cache and v_cache differ in dtype");
  args.require(k.shape[0] == v.shape[0] && k.shape[2] == v.shape[2], "k_cache and v_cache differ in shape");
  args.require(k.shape[2] > 0, "k_cache has pages of no tokens");
  CacheArgs cache{k.data, v.data, nullptr, nullptr, k.shape[0], k.shape[1], k.shape[2], dim, k.type()};
  if (cache.type == Type::kInt8 || cache.type == Type::kUint4) {
    cache.k_scales =
        args.floats(args.at(first + 2), "k_scales", {cache.pages, cache.kv_heads, 2, cache.page_size}).floats();
    cache.v_scales =
        args.floats(args.at(first + 3), "v_scales", {cache.pages, cache.kv_heads, 2, cache.page_size}).floats();
  } else {
    args.require(args.is_none(first + 2) && args.is_none(first + 3), "scales are given for pages of plain floats");
  }
  return cache;
}

Task append_kv(Runtime& runtime, OpArguments& args) {
  const Tensor k = args.floats(args.at(0), "k", {kAny, kAny, kAny});
  const Tensor v = args.floats(args.at(1), "v", {k.shape[0], k.shape[1], k.shape[2]});
  const CacheArgs cache = take_cache(args, 2, k.shape[1], k.shape[2]);
  const Input* slots = args.input(6, "slots", k.shape[0], cache.pages * cache.page_size);
  const int64_t width = k.shape[1] * k.shape[2];
  const Kernels& kernels = runtime.kernels();
  return {k.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              kernels.append_kv(cache, k.floats() + begin * width, v.floats() + begin * width, slots->data + begin,
                                end - begin);
            });
          }};
}

// qkv, heads, (q_norm, k_norm, eps), (positions, cos_sin), (spread, center), (k_cache, v_cache, k_scales, v_scales),
// slots: token by token, so that a token's heads are taken from memory once.
Task rotary_append(Runtime& runtime, OpArguments& args) {
  const Tensor qkv = args.floats(args.at(0), "qkv", {kAny, kAny, kAny});
  const int64_t dim = qkv.shape[2], heads = args.number<int64_t>(1), rest = qkv.shape[1] - heads;
  args.require(heads >= 0 && rest >= 0 && rest % 2 == 0, "qkv has no room for as many values as keys behind its heads");
  const int64_t kv_heads = rest / 2;
  const float* q_norm = args.is_none(2) ? nullptr : args.floats(args.at(2), "q_norm", {dim}).floats();
  const float* k_norm = args.is_none(3) ? nullptr : args.floats(args.at(3), "k_norm", {dim}).floats();
  const float eps = args.number<float>(4);
  const Tensor cos_sin = args.floats(args.at(6), "cos_sin", {kAny, kAny});
  const int64_t rot = cos_sin.shape[1];
  args.require(rot % 2 == 0 && rot <= dim, "cos_sin's second extent must be even and at most the head size");
  const bool spread = args.number<int64_t>(7) != 0;
  const float* center = args.is_none(8) ? nullptr : args.floats(args.at(8), "center", {kv_heads, dim}).floats();
  const CacheArgs cache = take_cache(args, 9, kv_heads, dim);
  const Input* positions = args.input(5, "positions", qkv.shape[0], cos_sin.shape[0]);
  const Input* slots = args.input(13, "slots", qkv.shape[0], cache.pages * cache.page_size);
  const Kernels& kernels = runtime.kernels();
  const int64_t width = qkv.shape[1] * dim;
  const auto token = [=, &kernels](int64_t row) {
    float *q = qkv.floats() + row * width, *k = q + heads * dim, *v = k + kv_heads * dim;
    const int32_t* position = positions->data + row;
    if (q_norm) kernels.rms_norm(q, nullptr, q_norm, eps, q, heads, dim);
    if (k_norm) kernels.rms_norm(k, nullptr, k_norm, eps, k, kv_heads, dim);
    kernels.rotary(q, heads + kv_heads, dim, position, cos_sin.floats(), rot, 1);
    if (spread) {
      kernels.hadamard(q, heads, dim, nullptr, 1);
      kernels.hadamard(k, kv_heads, dim, center, 1);
    }
    kernels.append_kv(cache, k, v, slots->data + row, 1);
  };
  return {qkv.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, 4, [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row) token(row);
            });
          }};
}

Task attention_op(Runtime& runtime, OpArguments& args) {
  const Tensor q = args.floats(args.at(0), "q", {kAny, kAny, kAny});
  const Tensor out = args.floats(args.at(6), "out", {q.shape[0], kAny, q.shape[2]});
  args.require(out.shape[1] <= q.shape[1], "out has more heads than q");
  const CacheArgs cache = take_cache(args, 1, kAny, q.shape[2]);
  const int64_t heads = out.shape[1];
  const BatchInput* batch = args.batch(5, q.shape[0], {heads, cache.kv_heads, cache.pages, cache.page_size});
  return {q.shape[0], [=, &runtime](Worker& worker, int64_t rows) {
            if (rows > 0)
              runtime.attention(worker, {q.floats(), q.shape[1] * q.shape[2], out.floats(), cache, heads, batch->scale},
                                batch->batch);
          }};
}

Task silu_mul(Runtime& runtime, OpArguments& args) {
  const Tensor out = args.floats(args.at(1), "out", {kAny, kAny});
  const int64_t width = out.shape[1];
  const Tensor gate_up = args.floats(args.at(0), "gate_up", {out.shape[0], 2 * width});
  const Kernels& kernels = runtime.kernels();
  return {out.shape[0], [=, &kernels](Worker& worker, int64_t rows) {
            worker.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
              kernels.silu_mul(gate_up.floats() + begin * 2 * width, out.floats() + begin * width, end - begin, width);
            });
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

Task all_reduce(Runtime&, OpArguments& args) {
  const Tensor x = args.floats(args.at(0), "x", {kAny, kAny});
  const auto reduce = args.all_reduce();
  return {x.shape[0], [=](Worker& worker, int64_t rows) { reduce(worker, x.floats(), rows * x.shape[1]); }};
}

}  // namespace

const std::vector<OpRow>& op_table() {
  static const std::vector<OpRow> table = {
      {"embedding", 4, embedding},
      {"packed_embedding", 5, packed_embedding_op},
      {"rms_norm", 4, rms_norm},
      {"add_rms_norm", 5, add_rms_norm},
      {"head_norm", 3, head_norm},
      {"add", 2, add},
      {"linear", 4, linear},
      {"packed_linear", 6, packed_linear_op},
      {"packed_linear_add", 6, packed_linear_add},
      {"packed_gated_linear", 6, packed_gated_linear},
      {"rotary", 4, rotary},
      {"hadamard", 2, hadamard},
      {"append_kv", 7, append_kv},
      {"rotary_append", 14, rotary_append},
      {"attention", 7, attention_op},
      {"silu_mul", 2, silu_mul},
      {"gather_rows", 3, gather_rows},
      {"all_reduce", 1, all_reduce},
  };
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
  return PackedSpec::make(text("format"), text("activation"), std::move(parts), number("inputs"), number("lead"),
                          number("group"), nb::cast<bool>(given.attr("interleaved")));
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
  return {{requests, qo_indptr.ints(), page_indptr.ints(), page_indices.ints(), kv_lens.ints(), kv_head_of.ints()},
          page_indices.shape[0],
          kv_head_of.shape[0],
          nb::cast<float>(meta.attr("scale"))};
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
  args.within(b.kv_head_of, input.heads, "kv_head_of", limits.kv_heads);
  args.within(b.page_indices, input.page_indices, "page_indices", limits.pages);
}

}  // namespace allspan
