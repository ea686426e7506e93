// Sampling called from Python: the arguments are checked here, and the work is done without the GIL.
#include "sampling/sampling.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>

namespace nb = nanobind;

namespace allspan {
namespace {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* message) {
  if (!holds) throw nb::value_error(message);
}

void sample_rows(Runtime* runtime, Array<const float, 2> logits, Array<const int64_t, 1> rows,
                 Array<const int64_t, 1> positions, Array<const int64_t, 1> targets, Array<const uint8_t, 2> settings,
                 Array<int32_t, 2> out) {
  const int64_t m = logits.shape(0), n = logits.shape(1), columns = out.shape(1);
  require(n > 0 && n < INT32_MAX, "sample_rows: logits have no columns, or too many");
  require(rows.shape(0) == logits.shape(0) && positions.shape(0) == logits.shape(0) &&
              targets.shape(0) == logits.shape(0) && out.shape(0) == logits.shape(0) && columns > 0,
          "sample_rows: rows, positions, targets and out must be as long as logits");
  require(settings.shape(1) == sizeof(sampling::Settings),
          "sample_rows: settings are not laid out as abi/sampling.py says");
  for (int64_t i = 0; i < m; ++i) {
    require(rows(i) >= 0 && rows(i) < static_cast<int64_t>(settings.shape(0)), "sample_rows: rows has no settings");
    require(targets(i) < n, "sample_rows: a target is no token");
  }
  const sampling::Logits given{logits.data(), m, n};
  const auto* table = reinterpret_cast<const sampling::Settings*>(settings.data());
  nb::gil_scoped_release release;
  sampling::sample_rows(runtime, given, rows.data(), positions.data(), targets.data(), table, out.data(), columns);
}

void best_tokens(Runtime* runtime, Array<const float, 2> logits, Array<int32_t, 1> out) {
  const int64_t m = logits.shape(0), n = logits.shape(1);
  require(n > 0 && n < INT32_MAX, "best_tokens: logits have no columns, or too many");
  require(out.shape(0) == logits.shape(0), "best_tokens: out must be as long as logits");
  const sampling::Logits given{logits.data(), m, n};
  nb::gil_scoped_release release;
  sampling::best_tokens(runtime, given, out.data());
}

void log_softmax_rows(Runtime* runtime, Array<const float, 2> logits, Array<const int64_t, 1> counts,
                      Array<int32_t, 2> out) {
  const int64_t m = logits.shape(0), n = logits.shape(1), columns = out.shape(1), places = (columns - 2) / 2;
  require(counts.shape(0) == logits.shape(0) && out.shape(0) == logits.shape(0) && columns >= 2,
          "log_softmax_rows: counts and out must be as long as logits");
  for (int64_t i = 0; i < m; ++i) {
    require(counts(i) <= std::min(n, places), "log_softmax_rows: a count is larger than the place for it");
    require(out(i, 0) < n, "log_softmax_rows: a token is none");
  }
  const sampling::Logits given{logits.data(), m, n};
  nb::gil_scoped_release release;
  sampling::log_softmax_rows(runtime, given, counts.data(), places, out.data());
}

void check_ids(const Array<const int64_t, 1>& ids, size_t vocabulary) {
  for (size_t i = 0; i < ids.shape(0); ++i)
    require(ids(i) >= 0 && static_cast<size_t>(ids(i)) < vocabulary, "penalties: an id is no token");
}

void penalise_repeated(Array<float, 1> logits, Array<const int64_t, 1> ids, double penalty) {
  check_ids(ids, logits.shape(0));
  sampling::penalise_repeated(logits.data(), ids.data(), ids.shape(0), penalty);
}

void penalise_counted(Array<float, 1> logits, Array<const int64_t, 1> ids, Array<const int32_t, 1> counts,
                      float presence, float frequency) {
  check_ids(ids, std::min(logits.shape(0), counts.shape(0)));
  sampling::penalise_counted(logits.data(), ids.data(), ids.shape(0), counts.data(), presence, frequency);
}

}  // namespace
}  // namespace allspan

void bind_sampling(nb::module_& module) {
  using namespace allspan;
  module.def("sample_rows", &sample_rows, nb::arg("runtime").none(), nb::arg("logits").noconvert(), nb::arg("rows"),
             nb::arg("positions"), nb::arg("targets"), nb::arg("settings"), nb::arg("out").noconvert());
  module.def("best_tokens", &best_tokens, nb::arg("runtime").none(), nb::arg("logits").noconvert(),
             nb::arg("out").noconvert());
  module.def("log_softmax_rows", &log_softmax_rows, nb::arg("runtime").none(), nb::arg("logits").noconvert(),
             nb::arg("counts"), nb::arg("out").noconvert());
  module.def("penalise_repeated", &penalise_repeated, nb::arg("logits").noconvert(), nb::arg("ids"),
             nb::arg("penalty"));
  module.def("penalise_counted", &penalise_counted, nb::arg("logits").noconvert(), nb::arg("ids"), nb::arg("counts"),
             nb::arg("presence"), nb::arg("frequency"));
}
