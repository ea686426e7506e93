// The Python face of the window and the plan ring. Addresses are checked by allspan.worker.parallel.window.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/ops.h"
#include "runtime/host_sums.h"
#include "runtime/plan_ring.h"
#include "runtime/runtime.h"
#include "runtime/window.h"

namespace nb = nanobind;
using namespace allspan;

AllReduce all_reduce_of(nb::handle window) {
  if (nb::isinstance<HostSums>(window)) {
    HostSums& hosts = nb::cast<HostSums&>(window);
    return
        [&hosts](Worker& worker, float* x, int64_t count) { hosts.all_reduce(worker, x, static_cast<size_t>(count)); };
  }
  Window& ranks = nb::cast<Window&>(window);
  return [&ranks](Worker& worker, float* x, int64_t count) { ranks.all_reduce(worker, x, static_cast<size_t>(count)); };
}

void bind_collectives(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::exception<WaitTimeout>(module, "WaitTimeout", PyExc_TimeoutError);
  nb::class_<Window>(module, "Window")
      .def(nb::init<uintptr_t, int, int, int, size_t, int, double, int>(), nb::arg("base"), nb::arg("rank"),
           nb::arg("size"), nb::arg("lanes"), nb::arg("slot_bytes"), nb::arg("spins"), nb::arg("timeout"),
           nb::arg("first"))
      .def_static("bytes", &Window::bytes, nb::arg("size"), nb::arg("lanes"), nb::arg("slot_bytes"))
      .def(
          "all_reduce",
          [](Window& window, uintptr_t x, size_t count) { window.all_reduce(reinterpret_cast<float*>(x), count); },
          nb::arg("x"), nb::arg("count"), Release())
      .def(
          "all_reduce",
          [](Window& window, Runtime& runtime, uintptr_t x, size_t count) {
            runtime.pool().team([&](Worker& worker) { window.all_reduce(worker, reinterpret_cast<float*>(x), count); });
          },
          nb::arg("runtime"), nb::arg("x"), nb::arg("count"), Release())
      .def(
          "exchange_rows",
          [](Window& window, uintptr_t x, size_t rows, const std::vector<size_t>& widths, uintptr_t out) {
            window.exchange_rows(reinterpret_cast<const char*>(x), rows, widths, reinterpret_cast<char*>(out));
          },
          nb::arg("x"), nb::arg("rows"), nb::arg("widths"), nb::arg("out"), Release())
      .def(
          "all_gather_rows",
          [](Window& window, uintptr_t x, size_t rows, size_t width, uintptr_t out) {
            window.all_gather_rows(reinterpret_cast<const char*>(x), rows, width, reinterpret_cast<char*>(out));
          },
          nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("out"), Release())
      .def("barrier", &Window::barrier, Release());
  nb::class_<HostSums>(module, "HostSums")
      .def(
          "__init__",
          [](HostSums* made, Window* window, const std::vector<uintptr_t>& calls, uintptr_t comm, uintptr_t type,
             size_t handle_bytes, size_t status_bytes, std::vector<std::vector<int>> peers, int rank, int host,
             int spins, double timeout) {
            const MpiCalls mpi{calls.at(0), calls.at(1), calls.at(2), comm, type, handle_bytes, status_bytes};
            new (made) HostSums(window, mpi, std::move(peers), rank, host, spins, timeout);
          },
          nb::arg("window").none(), nb::arg("calls"), nb::arg("comm"), nb::arg("type"), nb::arg("handle_bytes"),
          nb::arg("status_bytes"), nb::arg("peers"), nb::arg("rank"), nb::arg("host"), nb::arg("spins"),
          nb::arg("timeout"), nb::keep_alive<1, 2>())
      .def(
          "all_reduce",
          [](HostSums& hosts, uintptr_t x, size_t count) { hosts.all_reduce(reinterpret_cast<float*>(x), count); },
          nb::arg("x"), nb::arg("count"), Release())
      .def(
          "all_reduce",
          [](HostSums& hosts, Runtime& runtime, uintptr_t x, size_t count) {
            runtime.pool().team([&](Worker& worker) { hosts.all_reduce(worker, reinterpret_cast<float*>(x), count); });
          },
          nb::arg("runtime"), nb::arg("x"), nb::arg("count"), Release());
  nb::class_<PlanRing>(module, "PlanRing")
      .def(nb::init<uintptr_t, int, int, size_t, double, double, int>(), nb::arg("base"), nb::arg("rank"),
           nb::arg("size"), nb::arg("slot_bytes"), nb::arg("spin"), nb::arg("timeout"), nb::arg("first"))
      .def_static("bytes", &PlanRing::bytes, nb::arg("size"), nb::arg("slot_bytes"))
      .def(
          "publish",
          [](PlanRing& ring, nb::bytes data) {
            const char* start = data.c_str();
            const size_t bytes = data.size();
            nb::gil_scoped_release release;
            ring.publish(start, bytes);
          },
          nb::arg("data"))
      .def(
          "receive",
          [](PlanRing& ring, double timeout) -> nb::object {
            std::string message;
            bool arrived;
            {
              nb::gil_scoped_release release;
              arrived = ring.receive(timeout, message);
            }
            if (!arrived) return nb::none();
            return nb::bytes(message.data(), message.size());
          },
          nb::arg("timeout"));
}
