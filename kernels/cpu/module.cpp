// The Python face of the CPU kernels: checks shapes, dtypes and indices, lets go of the GIL, and calls the kernels.
// The ops and their arguments are those of kernels/ops.py, with the runtime first.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "runtime.h"
#include "tensor.h"

namespace nb = nanobind;
using nb::handle;

void bind_collectives(nb::module_& module);  // collectives.cpp
void bind_sampling(nb::module_& module);     // sampling.cpp

namespace allspan {
namespace {

// Elements that are worth a thread of their own.
constexpr int64_t kGrain = 1 << 14;
int64_t rows_per_part(int64_t width) { return 1 + kGrain / (width + 1); }

void embedding(Runtime& runtime, handle ids_, handle weight_, int64_t first_row, handle out_) {
  const Arguments args("embedding");
  const Tensor weight = args.weights(weight_, "weight", {kAny, kAny});
  const Tensor ids = args.ints(ids_, "ids", {kAny});
  const int64_t width = weight.shape[1];
  const Tensor out = args.floats(out_, "out", {ids.shape[0], width});
  nb::gil_scoped_release release;
  runtime.split(ids.shape[0], rows_per_part(width), [&](int64_t begin, int64_t end) {
    runtime.kernels().embedding(ids.ints() + begin, weight.data, weight.type(), first_row, weight.shape[0], width,
                                out.floats() + begin * width, end - begin);
  });
}

void norm_rows(Runtime& runtime, const float* x, float* residual, const float* weight, float eps, float* out,
               int64_t rows, int64_t width) {
  runtime.split(rows, rows_per_part(width), [&](int64_t begin, int64_t end) {
    const int64_t at = begin * width;
    runtime.kernels().rms_norm(x + at, residual ? residual + at : nullptr, weight, eps, out + at, end - begin, width);
  });
}

void rms_norm(Runtime& runtime, handle x_, handle weight_, float eps, handle out_) {
  const Arguments args("rms_norm");
  const Tensor x = args.floats(x_, "x", {kAny, kAny});
  const Tensor weight = args.floats(weight_, "weight", {x.shape[1]});
  const Tensor out = args.floats(out_, "out", {x.shape[0], x.shape[1]});
  nb::gil_scoped_release release;
  norm_rows(runtime, x.floats(), nullptr, weight.floats(), eps, out.floats(), x.shape[0], x.shape[1]);
}

void add_rms_norm(Runtime& runtime, handle x_, handle residual_, handle weight_, float eps, handle out_) {
  const Arguments args("add_rms_norm");
  const Tensor x = args.floats(x_, "x", {kAny, kAny});
  const Tensor residual = args.floats(residual_, "residual", {x.shape[0], x.shape[1]});
  const Tensor weight = args.floats(weight_, "weight", {x.shape[1]});
  const Tensor out = args.floats(out_, "out", {x.shape[0], x.shape[1]});
  nb::gil_scoped_release release;
  norm_rows(runtime, x.floats(), residual.floats(), weight.floats(), eps, out.floats(), x.shape[0], x.shape[1]);
}

void head_norm(Runtime& runtime, handle x_, handle weight_, float eps) {
  const Arguments args("head_norm");
  const Tensor x = args.floats(x_, "x", {kAny, kAny, kAny});
  const Tensor weight = args.floats(weight_, "weight", {x.shape[2]});
  nb::gil_scoped_release release;
  norm_rows(runtime, x.floats(), nullptr, weight.floats(), eps, x.floats(), x.shape[0] * x.shape[1], x.shape[2]);
}

void add(Runtime& runtime, handle x_, handle residual_) {
  const Arguments args("add");
  const Tensor x = args.floats(x_, "x", {kAny, kAny});
  const Tensor residual = args.floats(residual_, "residual", {x.shape[0], x.shape[1]});
  nb::gil_scoped_release release;
  runtime.split(x.shape[0] * x.shape[1], kGrain, [&](int64_t begin, int64_t end) {
    runtime.kernels().add(x.floats() + begin, residual.floats() + begin, end - begin);
  });
}

void linear(Runtime& runtime, handle x_, handle weight_, handle bias_, handle out_) {
  const Arguments args("linear");
  const Tensor x = args.floats(x_, "x", {kAny, kAny});
  const Tensor weight = args.weights(weight_, "weight", {kAny, x.shape[1]});
  const Tensor out = args.floats(out_, "out", {x.shape[0], weight.shape[0]});
  const float* bias = bias_.is_none() ? nullptr : args.floats(bias_, "bias", {weight.shape[0]}).floats();
  nb::gil_scoped_release release;
  runtime.linear({x.floats(), weight.data, bias, out.floats(), weight.shape[0], x.shape[1], weight.type()}, x.shape[0]);
}

void rotary(Runtime& runtime, handle q_, handle k_, handle positions_, handle cos_sin_) {
  const Arguments args("rotary");
  const Tensor q = args.floats(q_, "q", {kAny, kAny, kAny});
  const int64_t rows = q.shape[0], dim = q.shape[2];
  const Tensor k = args.floats(k_, "k", {rows, kAny, dim});
  const Tensor positions = args.ints(positions_, "positions", {rows});
  const Tensor cos_sin = args.floats(cos_sin_, "cos_sin", {kAny, kAny});
  const int64_t rot = cos_sin.shape[1];
  args.require(rot % 2 == 0 && rot <= dim, "cos_sin's second extent must be even and at most the head size");
  args.within(positions, "positions", cos_sin.shape[0]);
  nb::gil_scoped_release release;
  runtime.split(rows, rows_per_part((q.shape[1] + k.shape[1]) * dim), [&](int64_t begin, int64_t end) {
    for (const Tensor& t : {q, k})
      runtime.kernels().rotary(t.floats() + begin * t.shape[1] * dim, t.shape[1], dim, positions.ints() + begin,
                               cos_sin.floats(), rot, end - begin);
  });
}

void hadamard(Runtime& runtime, handle x_, handle center_) {
  const Arguments args("hadamard");
  const Tensor x = args.floats(x_, "x", {kAny, kAny, kAny});
  const int64_t heads = x.shape[1], dim = x.shape[2];
  const float* center = center_.is_none() ? nullptr : args.floats(center_, "center", {heads, dim}).floats();
  nb::gil_scoped_release release;
  runtime.split(x.shape[0], rows_per_part(heads * dim), [&](int64_t begin, int64_t end) {
    runtime.kernels().hadamard(x.floats() + begin * heads * dim, heads, dim, center, end - begin);
  });
}

struct CacheHandles {
  handle k, v, k_scales, v_scales;
};

CacheArgs take_cache(const Arguments& args, const CacheHandles& given, int64_t kv_heads, int64_t dim) {
  const Tensor k = args.pages(given.k, "k_cache", kv_heads, dim);
  const Tensor v = args.pages(given.v, "v_cache", k.shape[1], dim);
  args.require(k.dtype == v.dtype, "k_cache and v_cache differ in dtype");
  args.require(k.shape[0] == v.shape[0] && k.shape[2] == v.shape[2], "k_cache and v_cache differ in shape");
  args.require(k.shape[2] > 0, "k_cache has pages of no tokens");
  CacheArgs cache{k.data, v.data, nullptr, nullptr, k.shape[0], k.shape[1], k.shape[2], dim, k.type()};
  if (cache.type == Type::kInt8 || cache.type == Type::kUint4) {
    cache.k_scales =
        args.floats(given.k_scales, "k_scales", {cache.pages, cache.kv_heads, 2, cache.page_size}).floats();
    cache.v_scales =
        args.floats(given.v_scales, "v_scales", {cache.pages, cache.kv_heads, 2, cache.page_size}).floats();
  } else {
    args.require(given.k_scales.is_none() && given.v_scales.is_none(), "scales are given for pages of plain floats");
  }
  return cache;
}

void append_kv(Runtime& runtime, handle k_, handle v_, handle k_cache, handle v_cache, handle k_scales, handle v_scales,
               handle slots_) {
  const Arguments args("append_kv");
  const Tensor k = args.floats(k_, "k", {kAny, kAny, kAny});
  const Tensor v = args.floats(v_, "v", {k.shape[0], k.shape[1], k.shape[2]});
  const CacheArgs cache = take_cache(args, {k_cache, v_cache, k_scales, v_scales}, k.shape[1], k.shape[2]);
  const Tensor slots = args.ints(slots_, "slots", {k.shape[0]});
  args.within(slots, "slots", cache.pages * cache.page_size);
  nb::gil_scoped_release release;
  const int64_t width = k.shape[1] * k.shape[2];
  runtime.split(k.shape[0], rows_per_part(width), [&](int64_t begin, int64_t end) {
    runtime.kernels().append_kv(cache, k.floats() + begin * width, v.floats() + begin * width, slots.ints() + begin,
                                end - begin);
  });
}

// Refuses a batch whose numbers would lead outside the tensors.
void check_batch(const Arguments& args, const Runtime::Batch& b, const CacheArgs& cache, int64_t rows, int64_t pages) {
  args.require(b.qo_indptr[0] == 0 && b.qo_indptr[b.requests] == rows, "qo_indptr does not run from 0 to q's rows");
  args.require(b.page_indptr[0] >= 0 && b.page_indptr[b.requests] <= pages, "page_indptr leaves page_indices");
  for (int64_t r = 0; r < b.requests; ++r) {
    const int64_t queries = int64_t{b.qo_indptr[r + 1]} - b.qo_indptr[r];
    const int64_t held = int64_t{b.page_indptr[r + 1]} - b.page_indptr[r];
    args.require(queries >= 0, "qo_indptr decreases");
    args.require(held >= 0, "page_indptr decreases");
    args.require(b.kv_lens[r] >= queries, "kv_lens has a request with fewer tokens than are new");
    args.require(b.kv_lens[r] <= held * cache.page_size, "kv_lens has a request with more tokens than its pages hold");
  }
}

void attention(Runtime& runtime, handle q_, handle k_cache, handle v_cache, handle k_scales, handle v_scales,
               handle meta, handle out_) {
  const Arguments args("attention");
  const Tensor q = args.floats(q_, "q", {kAny, kAny, kAny});
  const Tensor out = args.floats(out_, "out", {q.shape[0], q.shape[1], q.shape[2]});
  const CacheArgs cache = take_cache(args, {k_cache, v_cache, k_scales, v_scales}, kAny, q.shape[2]);
  const nb::object kv_lens_ = meta.attr("kv_lens"), qo_ = meta.attr("qo_indptr"), indptr_ = meta.attr("page_indptr");
  const nb::object indices_ = meta.attr("page_indices"), heads_ = meta.attr("kv_head_of");
  const Tensor kv_lens = args.ints(kv_lens_, "kv_lens", {kAny});
  const int64_t requests = kv_lens.shape[0];
  const Tensor qo_indptr = args.ints(qo_, "qo_indptr", {requests + 1});
  const Tensor page_indptr = args.ints(indptr_, "page_indptr", {requests + 1});
  const Tensor page_indices = args.ints(indices_, "page_indices", {kAny});
  const Tensor kv_head_of = args.ints(heads_, "kv_head_of", {q.shape[1]});
  const Runtime::Batch batch{requests,       qo_indptr.ints(), page_indptr.ints(), page_indices.ints(),
                             kv_lens.ints(), kv_head_of.ints()};
  check_batch(args, batch, cache, q.shape[0], page_indices.shape[0]);
  args.within(kv_head_of, "kv_head_of", cache.kv_heads);
  args.within(page_indices, "page_indices", cache.pages);
  const float scale = nb::cast<float>(meta.attr("scale"));
  nb::gil_scoped_release release;
  runtime.attention({q.floats(), out.floats(), cache, q.shape[1], scale}, batch);
}

void silu_mul(Runtime& runtime, handle gate_up_, handle out_) {
  const Arguments args("silu_mul");
  const Tensor out = args.floats(out_, "out", {kAny, kAny});
  const int64_t width = out.shape[1];
  const Tensor gate_up = args.floats(gate_up_, "gate_up", {out.shape[0], 2 * width});
  nb::gil_scoped_release release;
  runtime.split(out.shape[0], rows_per_part(width), [&](int64_t begin, int64_t end) {
    runtime.kernels().silu_mul(gate_up.floats() + begin * 2 * width, out.floats() + begin * width, end - begin, width);
  });
}

void gather_rows(Runtime& runtime, handle x_, handle rows_, handle out_) {
  const Arguments args("gather_rows");
  const Tensor x = args.floats(x_, "x", {kAny, kAny});
  const Tensor rows = args.ints(rows_, "rows", {kAny});
  const Tensor out = args.floats(out_, "out", {rows.shape[0], x.shape[1]});
  args.within(rows, "rows", x.shape[0]);
  nb::gil_scoped_release release;
  // An embedding is the same copy, of rows that all exist.
  runtime.kernels().embedding(rows.ints(), x.data, Type::kFloat32, 0, x.shape[0], x.shape[1], out.floats(),
                              rows.shape[0]);
}

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for (const Variant& variant : variants()) names.emplace_back(variant.name);
  return names;
}

}  // namespace
}  // namespace allspan

NB_MODULE(_native, module) {
  using namespace allspan;
  // Op sets and threads live until the interpreter ends, which nanobind would report as leaks on every exit.
  nb::set_leak_warnings(false);
  module.doc() = "Compiled CPU kernels; opened through allspan.kernels.table.";
  module.def("variants", &variant_names, "Instruction sets that can run here, best first.");
  nb::class_<Runtime>(module, "Runtime")
      .def(nb::init<const std::string&, int, std::vector<int>>(), nb::arg("isa"), nb::arg("threads"), nb::arg("cpus"));

  module.def("embedding", &embedding, nb::arg("runtime"), nb::arg("ids"), nb::arg("weight"), nb::arg("first_row"),
             nb::arg("out"));
  module.def("rms_norm", &rms_norm, nb::arg("runtime"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
             nb::arg("out"));
  module.def("add_rms_norm", &add_rms_norm, nb::arg("runtime"), nb::arg("x"), nb::arg("residual"), nb::arg("weight"),
             nb::arg("eps"), nb::arg("out"));
  module.def("add", &add, nb::arg("runtime"), nb::arg("x"), nb::arg("residual"));
  module.def("linear", &linear, nb::arg("runtime"), nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
             nb::arg("out"));
  module.def("head_norm", &head_norm, nb::arg("runtime"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"));
  module.def("rotary", &rotary, nb::arg("runtime"), nb::arg("q"), nb::arg("k"), nb::arg("positions"),
             nb::arg("cos_sin"));
  module.def("hadamard", &hadamard, nb::arg("runtime"), nb::arg("x"), nb::arg("center").none());
  module.def("append_kv", &append_kv, nb::arg("runtime"), nb::arg("k"), nb::arg("v"), nb::arg("k_cache"),
             nb::arg("v_cache"), nb::arg("k_scales").none(), nb::arg("v_scales").none(), nb::arg("slots"));
  module.def("attention", &attention, nb::arg("runtime"), nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"),
             nb::arg("k_scales").none(), nb::arg("v_scales").none(), nb::arg("meta"), nb::arg("out"));
  module.def("silu_mul", &silu_mul, nb::arg("runtime"), nb::arg("gate_up"), nb::arg("out"));
  module.def("gather_rows", &gather_rows, nb::arg("runtime"), nb::arg("x"), nb::arg("rows"), nb::arg("out"));
  bind_collectives(module);
  bind_sampling(module);
}
