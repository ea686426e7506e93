// The Python face of the CPU kernels. The ops and their arguments are those of kernels/ops.py, with the runtime first.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/ops.h"
#include "isa/isa.h"

namespace nb = nanobind;

void bind_collectives(nb::module_& module);  // collectives.cpp
void bind_packer(nb::module_& module);       // packer.cpp
void bind_program(nb::module_& module);      // program.cpp
void bind_sampling(nb::module_& module);     // sampling.cpp

namespace allspan {
namespace {

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for (const Variant& variant : variants()) names.emplace_back(variant.name);
  return names;
}

// Checks the arguments, lets go of the GIL, and runs the op on the runtime's threads.
void run_op(const OpRow& op, Runtime& runtime, const nb::args& given) {
  std::vector<nb::object> values;
  for (nb::handle value : given) {
    if (nb::isinstance<nb::tuple>(value)) {
      for (nb::handle each : nb::borrow<nb::tuple>(value)) values.push_back(nb::borrow(each));
    } else {
      values.push_back(nb::borrow(value));
    }
  }
  const size_t count = values.size();
  OpArguments args(op.name, std::move(values));
  args.require(op.takes(count), "takes another number of arguments");
  const Task task = op.make(runtime, args);
  nb::gil_scoped_release release;
  runtime.pool().team([&](Worker& worker) { task.run(worker, task.rows); });
}

}  // namespace
}  // namespace allspan

NB_MODULE(_native, module) {
  using namespace allspan;
  // Op sets and threads live until the interpreter ends, which nanobind would report as leaks on every exit.
  nb::set_leak_warnings(false);
  module.doc() = "Compiled CPU kernels; opened through allspan.kernels.table.";
  module.attr("interface") = ALLSPAN_INTERFACE;  // a hash of the bindings' sources, from CMakeLists.txt
  module.def("variants", &variant_names, "Instruction sets that can run here, best first.");
  nb::class_<Runtime>(module, "Runtime")
      .def(nb::init<const std::string&, int, std::vector<int>>(), nb::arg("isa"), nb::arg("threads"), nb::arg("cpus"));
  for (const OpRow& op : op_table())
    module.def(op.name, [&op](Runtime& runtime, const nb::args& args) { run_op(op, runtime, args); });
  bind_collectives(module);
  bind_packer(module);
  bind_program(module);
  bind_sampling(module);
}
