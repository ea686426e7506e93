// The ops of attention over latents.
#include "attention/latent.h"
#include "bindings/ops.h"

namespace allspan {
namespace {

// Pages of latents and their scales from argument `first` on; `kept` elements of a latent are values.
CacheArgs take_latents(OpArguments& args, int first, int64_t dim, int64_t kept) {
  const Tensor pages = args.pages(args.at(first), "cache", 1, dim);
  args.require(pages.shape[2] > 0, "cache has pages of no tokens");
  CacheArgs cache{pages.data, pages.data, nullptr, nullptr, pages.shape[0], 1, pages.shape[2], dim, pages.type(), kept};
  if (cache.type != Type::kFloat32 && cache.type != Type::kBfloat16)
    cache.k_scales = cache.v_scales =
        args.floats(args.at(first + 1), "scales", {cache.pages, 1, 2, cache.page_size}).floats();
  else
    args.require(args.is_none(first + 1), "scales are given for pages of plain floats");
  return cache;
}

// q, kv, weight, eps, (positions, cos_sin, q_scales), cache, scales, slots.
Task latent_append(Runtime& runtime, OpArguments& args) {
  const Tensor q = args.rows(args.at(0), "q", {kAny, kAny, kAny});
  const Tensor kv = args.rows(args.at(1), "kv", {q.shape[0], kAny});
  const Tensor weight = args.floats(args.at(2), "weight", {kAny});
  const float eps = args.number<float>(3);
  const Tensor cos_sin = args.floats(args.at(5), "cos_sin", {kAny, kAny});
  const int64_t heads = q.shape[1], q_dim = q.shape[2], dim = kv.shape[1], latent = weight.shape[0];
  const int64_t rot = cos_sin.shape[1];
  args.require(rot % 2 == 0 && rot <= q_dim, "cos_sin's second extent must be even and at most the head size");
  args.require(latent + rot == dim, "kv does not have the elements of weight and of cos_sin");
  const float* q_scales = args.is_none(6) ? nullptr : args.floats(args.at(6), "q_scales", {cos_sin.shape[0]}).floats();
  CacheArgs cache = take_latents(args, 7, dim, latent);
  cache.v = nullptr;  // written once
  const Input* positions = args.input(4, "positions", q.shape[0], cos_sin.shape[0]);
  const Input* slots = args.input(9, "slots", q.shape[0], cache.pages * cache.page_size);
  const Kernels& kernels = runtime.kernels();
  const auto token = [=, &kernels](int64_t row) {
    float *own = q.floats() + row * q.stride, *k = kv.floats() + row * kv.stride;
    const int32_t* position = positions->data + row;
    kernels.rms_norm(k, nullptr, weight.floats(), eps, k, 1, latent);
    kernels.rotary(k + latent, 1, dim, position, cos_sin.floats(), rot, 1);
    kernels.rotary(own + q_dim - rot, heads, q_dim, position, cos_sin.floats(), rot, 1);
    if (q_scales)
      for (int64_t i = 0; i < heads * q_dim; ++i) own[i] *= q_scales[*position];
    kernels.append_kv(cache, k, k, slots->data + row, 1);
  };
  return {q.shape[0], [=](Worker& worker, int64_t rows) {
            worker.split(rows, 4, [&](int64_t begin, int64_t end) {
              for (int64_t row = begin; row < end; ++row) token(row);
            });
          }};
}

// q, (k_up, v_up), cache, scales, meta, absorbed, mixed, out.
Task latent_attention_op(Runtime& runtime, OpArguments& args) {
  const Tensor q = args.rows(args.at(0), "q", {kAny, kAny, kAny});
  const int64_t rows = q.shape[0], heads = q.shape[1];
  const Tensor k_up = args.weights(args.at(1), "k_up", {heads, kAny, kAny});
  const Tensor v_up = args.weights(args.at(2), "v_up", {heads, kAny, k_up.shape[1]});
  const int64_t latent = k_up.shape[1], key = k_up.shape[2], value = v_up.shape[1], rot = q.shape[2] - key;
  args.require(rot >= 0, "k_up has more elements than q's heads");
  args.require(k_up.dtype == v_up.dtype, "k_up and v_up differ in dtype");
  const CacheArgs cache = take_latents(args, 3, latent + rot, latent);
  const Tensor absorbed = args.floats(args.at(6), "absorbed", {rows, heads, latent + rot});
  const Tensor mixed = args.floats(args.at(7), "mixed", {rows, heads, latent});
  const Tensor out = args.floats(args.at(8), "out", {rows, heads, value});
  const BatchInput* batch = args.batch(5, rows, {heads, 1, cache.pages, cache.page_size});
  const LatentArgs latents{q.floats(),     q.stride,     k_up.data,  v_up.data, absorbed.floats(),
                           mixed.floats(), out.floats(), heads,      key,       rot,
                           latent,         value,        k_up.type()};
  const Kernels& kernels = runtime.kernels();
  return {rows, [=, &kernels](Worker& worker, int64_t count) {
            if (count > 0)
              latent_attention(worker, kernels, latents,
                               {nullptr, 0, nullptr, cache, heads, batch->scale, batch->window, batch->soft_cap,
                                batch->slopes, nullptr},
                               batch->batch, count);
          }};
}

}  // namespace

std::vector<OpRow> latent_ops() {
  return {
      {"latent_append", 10, latent_append},
      {"latent_attention", 9, latent_attention_op},
  };
}

}  // namespace allspan
