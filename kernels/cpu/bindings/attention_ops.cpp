// The ops of kernels/cpu/attention, and rotary_append, which writes its pages.
#include "bindings/ops.h"

namespace allspan {
namespace {

// k_cache, v_cache, k_scales, v_scales from argument `first` on.
CacheArgs take_cache(OpArguments& args, int first, int64_t kv_heads, int64_t dim) {
  const Tensor k = args.pages(args.at(first), "k_cache", kv_heads, dim);
  const Tensor v = args.pages(args.at(first + 1), "v_cache", k.shape[1], dim);
  args.require(k.dtype == v.dtype, "k_cache and v_cache differ in dtype");
  args.require(k.shape[0] == v.shape[0] && k.shape[2] == v.shape[2], "k_cache and v_cache differ in shape");
  args.require(k.shape[2] > 0, "k_cache has pages of no tokens");
  CacheArgs cache{k.data, v.data, nullptr, nullptr, k.shape[0], k.shape[1], k.shape[2], dim, k.type(), dim};
  if (cache.type != Type::kFloat32 && cache.type != Type::kBfloat16) {
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

// qkv, heads, (q_norm, k_norm, eps), (positions, cos_sin, q_scales), (has_hadamard, center), (k_cache, v_cache,
// k_scales, v_scales), slots: token by token, so that a token's heads are taken from memory once.
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
  const float* q_scales = args.is_none(7) ? nullptr : args.floats(args.at(7), "q_scales", {cos_sin.shape[0]}).floats();
  const bool has_hadamard = args.number<int64_t>(8) != 0;
  const float* center = args.is_none(9) ? nullptr : args.floats(args.at(9), "center", {kv_heads, dim}).floats();
  const CacheArgs cache = take_cache(args, 10, kv_heads, dim);
  const Input* positions = args.input(5, "positions", qkv.shape[0], cos_sin.shape[0]);
  const Input* slots = args.input(14, "slots", qkv.shape[0], cache.pages * cache.page_size);
  const Kernels& kernels = runtime.kernels();
  const int64_t width = qkv.shape[1] * dim;
  const auto token = [=, &kernels](int64_t row) {
    float *q = qkv.floats() + row * width, *k = q + heads * dim, *v = k + kv_heads * dim;
    const int32_t* position = positions->data + row;
    if (q_norm) kernels.rms_norm(q, nullptr, q_norm, eps, q, heads, dim);
    if (k_norm) kernels.rms_norm(k, nullptr, k_norm, eps, k, kv_heads, dim);
    kernels.rotary(q, heads + kv_heads, dim, position, cos_sin.floats(), rot, 1);
    if (q_scales)
      for (int64_t i = 0; i < heads * dim; ++i) q[i] *= q_scales[*position];
    if (has_hadamard) {
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
  const Tensor out = args.floats(args.at(7), "out", {q.shape[0], kAny, q.shape[2]});
  args.require(out.shape[1] <= q.shape[1], "out has more heads than q");
  const CacheArgs cache = take_cache(args, 1, kAny, q.shape[2]);
  const int64_t heads = out.shape[1];
  const float* sinks = args.is_none(5) ? nullptr : args.floats(args.at(5), "sinks", {heads}).floats();
  const BatchInput* batch = args.batch(6, q.shape[0], {heads, cache.kv_heads, cache.pages, cache.page_size});
  return {q.shape[0], [=, &runtime](Worker& worker, int64_t rows) {
            if (rows > 0)
              runtime.attention(worker,
                                {q.floats(), q.shape[1] * q.shape[2], out.floats(), cache, heads, batch->scale,
                                 batch->window, batch->soft_cap, batch->slopes, sinks},
                                batch->batch);
          }};
}

}  // namespace

std::vector<OpRow> attention_ops() {
  return {
      {"append_kv", 7, append_kv},
      {"rotary_append", 15, rotary_append},
      {"attention", 8, attention_op},
  };
}

}  // namespace allspan
