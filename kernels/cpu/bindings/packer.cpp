// The Python face of packer.h: allspan.kernels.packer.Packer calls these, and has checked that the rows fit the target.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/ops.h"
#include "linear/packer.h"

namespace nb = nanobind;
using nb::handle;

namespace allspan {
namespace {

PackTarget target_of(const Arguments& args, const PackedSpec& spec, handle weight_, int64_t part, int64_t first,
                     int64_t rows) {
  const Tensor weight = args.bytes(weight_, "weight", {spec.panels, spec.panel_bytes});
  args.require(part >= 0 && part < static_cast<int64_t>(spec.parts.size()), "part is none of the spec's");
  args.require(first >= 0 && first * kFeatures + rows <= spec.parts[part], "rows do not fit the part");
  return {&spec, static_cast<uint8_t*>(weight.data), part, first};
}

void floats(Runtime& runtime, handle values_, handle weight_, handle spec_, int64_t part, int64_t first) {
  const OpArguments args("pack_floats", {nb::borrow(spec_)});
  const PackedSpec spec = args.spec(0);
  const Tensor values = args.weights(values_, "values", {kAny, spec.inputs});
  args.require(spec.format == (values.dtype == Dtype::kFloat32 ? Format::kF32 : Format::kBf16),
               "values are not of the format's dtype");
  const PackTarget target = target_of(args, spec, weight_, part, first, values.shape[0]);
  nb::gil_scoped_release release;
  pack_floats(runtime.pool(), values.data, values.shape[0], target);
}

void quantised(Runtime& runtime, handle values_, int64_t before, handle weight_, handle spec_, int64_t part,
               int64_t first) {
  const OpArguments args("pack_quantised", {nb::borrow(spec_)});
  const PackedSpec spec = args.spec(0);
  const Tensor values = args.floats(values_, "values", {kAny, kAny});
  const bool groups = spec.format == Format::kGroup8 || spec.format == Format::kGroup4;
  args.require(groups || spec.format == Format::kChannel8 || spec.format == Format::kChannel4,
               "the format is not one of InstantQuant's");
  args.require(before >= 0 && before + spec.inputs <= values.shape[1], "before does not fit the values");
  const PackTarget target = target_of(args, spec, weight_, part, first, values.shape[0]);
  nb::gil_scoped_release release;
  pack_quantised(runtime.pool(), values.floats(), values.shape[0], values.shape[1], before, target);
}

void blocks(Runtime& runtime, handle blocks_, handle grid_, handle weight_, handle spec_, int64_t part, int64_t first) {
  const OpArguments args("pack_blocks", {nb::borrow(spec_)});
  const PackedSpec spec = args.spec(0);
  const int64_t bytes = gguf_block_bytes(spec.format);
  args.require(bytes > 0 && (spec.format != Format::kGroup4 || spec.group == 32), "the format is none of GGUF's");
  const Tensor given = args.bytes(blocks_, "blocks", {kAny, spec.blocks * bytes});
  const Tensor grid = args.bytes(grid_, "grid", {grid_entries(spec.format), grid_weights(spec.format)});
  const PackTarget target = target_of(args, spec, weight_, part, first, given.shape[0]);
  nb::gil_scoped_release release;
  pack_blocks(runtime.pool(), static_cast<const uint8_t*>(given.data), static_cast<const uint8_t*>(grid.data),
              given.shape[0], target);
}

}  // namespace
}  // namespace allspan

void bind_packer(nb::module_& module) {
  using namespace allspan;
  module.def("pack_floats", &floats, nb::arg("runtime"), nb::arg("values"), nb::arg("weight"), nb::arg("spec"),
             nb::arg("part"), nb::arg("first"));
  module.def("pack_quantised", &quantised, nb::arg("runtime"), nb::arg("values"), nb::arg("before"), nb::arg("weight"),
             nb::arg("spec"), nb::arg("part"), nb::arg("first"));
  module.def("pack_blocks", &blocks, nb::arg("runtime"), nb::arg("blocks"), nb::arg("grid"), nb::arg("weight"),
             nb::arg("spec"), nb::arg("part"), nb::arg("first"));
}
