// A forward pass as a list of tasks, which one call runs from front to back on a runtime's threads: no Python between
// ops, no thread woken or put to sleep.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>

#include "bindings/ops.h"

namespace nb = nanobind;

allspan::AllReduce all_reduce_of(nb::handle window);  // collectives.cpp

namespace allspan {
namespace {

using Clock = std::chrono::steady_clock;

// What the ops of one name took, in nanoseconds.
struct OpTimes {
  int64_t count = 0, shortest = 0, longest = 0, total = 0;

  void add(int64_t taken) {
    shortest = count ? std::min(shortest, taken) : taken;
    longest = std::max(longest, taken);
    total += taken;
    ++count;
  }
};

// Kinds of rows, of which a step says how many it has: its tokens, those whose attention this rank computes, and rows
// of logits. worker/program/native_program.py has the same order.
enum { kTokens, kOwn, kLogits, kKinds };

int checked(int kind) {
  if (kind < 0 || kind >= kKinds) throw nb::value_error("program: no such kind of rows");
  return kind;
}

class Program {
 public:
  // window: a Window for the all-reduce, or None. Both must outlive the program.
  Program(Runtime& runtime, int slots, nb::object window)
      : runtime_(runtime), window_(std::move(window)), bound_(slots), input_of_(slots) {}

  // A buffer (at its full capacity), weight or cache tensor, which stays where it is; None where there is none.
  void bind(int slot, nb::object value) {
    bound_.at(slot) = std::move(value);
    is_made_ = false;
  }
  // The step's own numbers, given by name to begin(): int32 [rows of that kind], or an AttentionMeta of so many.
  void declare_input(int slot, std::string name, int rows) {
    input_of_.at(slot) = name;
    inputs_[name].rows = checked(rows);
  }
  // arguments: (is a slot, value).
  void add(const std::string& name, std::vector<std::pair<bool, nb::object>> arguments, int rows) {
    ops_.push_back({&find_op(name), std::move(arguments), checked(rows), {}, nullptr, {}});
    is_made_ = false;
  }

  // Takes a step's inputs, with its rows of each kind, and checks them. Raises ValueError or TypeError naming what is
  // wrong.
  void begin(const nb::dict& given, const std::vector<int64_t>& counts) {
    if (!is_made_) make();
    if (counts.size() != kKinds) throw nb::value_error("program: needs a count of each kind of rows");
    std::copy(counts.begin(), counts.end(), counts_);
    const Arguments args("program");
    for (auto& [name, input] : inputs_) {
      const nb::object value = nb::borrow(given[name.c_str()]);
      if (input.is_batch) {
        *input.batch = take_batch(args, value);
      } else {
        const int64_t rows = counts_[input.rows];
        *input.numbers = {args.ints(value, name.c_str(), {rows}).ints(), rows};
      }
    }
    check();
  }
  // As begin(), with the tensors of the last step, which hold other numbers by now.
  void again() {
    if (!is_made_) make();
    check();
  }

  // Runs ops [first, last) of the step that begin() was told of; with the GIL released.
  void run(size_t first, size_t last) {
    nb::gil_scoped_release release;
    last = std::min(last, ops_.size());
    runtime_.pool().team([&](Worker& worker) {
      for (size_t i = first; i < last && !worker.failed(); ++i) {
        Op& op = ops_[i];
        const int64_t rows = counts_[op.rows];
        if (rows == 0) continue;
        const bool timed = worker.id == 0 && is_profiling_;
        const Clock::time_point started = timed ? Clock::now() : Clock::time_point{};
        if (op.task.expect || i == first) {
          worker.expect(nullptr, nullptr);
          if (op.later) op.later->expect(worker);
        }
        op.task.run(worker, rows);
        if (timed) op.times.add(std::chrono::nanoseconds(Clock::now() - started).count());
        if (worker.id == 0) progress_.fetch_add(1, std::memory_order_relaxed);
      }
    });
  }

  int64_t progress() const { return progress_; }
  void start_profile() {
    for (Op& op : ops_) op.times = {};
    is_profiling_ = true;
  }
  void stop_profile() { is_profiling_ = false; }
  // (op, count, shortest, longest, total) in nanoseconds.
  nb::list profile() const {
    nb::list rows;
    for (const Op& op : ops_)
      if (op.times.count)
        rows.append(nb::make_tuple(op.row->name, op.times.count, op.times.shortest, op.times.longest, op.times.total));
    return rows;
  }

 private:
  struct Op {
    const OpRow* row;
    std::vector<std::pair<bool, nb::object>> arguments;
    int rows;  // their kind
    Task task;
    const Task* later;  // the next one that says what it will read
    OpTimes times;
  };
  struct StepInput {
    int rows = kTokens;  // their kind
    bool is_batch = false;
    int64_t limit = 0;
    BatchLimits batch_limits{};
    std::unique_ptr<Input> numbers = std::make_unique<Input>();
    std::unique_ptr<BatchInput> batch = std::make_unique<BatchInput>();
  };

  // Arguments out of the slots.
  class SlotArguments : public OpArguments {
   public:
    SlotArguments(Program& program, const Op& op) : OpArguments(op.row->name, program.values(op)) {
      for (const auto& [is_slot, value] : op.arguments)
        names_.push_back(is_slot ? program.input_of_[nb::cast<int>(value)] : std::string());
      program_ = &program;
    }
    const Input* input(int i, const char*, int64_t, int64_t limit) override {
      StepInput& found = find(i);
      if (limit) found.limit = found.limit ? std::min(found.limit, limit) : limit;
      return found.numbers.get();
    }
    bool has_input(int i) const override { return !names_.at(i).empty(); }
    const BatchInput* batch(int i, int64_t, const BatchLimits& limits) override {
      StepInput& found = find(i);
      require(!found.is_batch ||
                  (found.batch_limits.heads == limits.heads && found.batch_limits.page_size == limits.page_size &&
                   found.batch_limits.kv_heads == limits.kv_heads),
              "its caches differ in shape from those of another layer");
      found.batch_limits = limits;
      found.is_batch = true;
      return found.batch.get();
    }
    AllReduce all_reduce() override {
      if (program_->window_.is_none()) return [](Worker&, float*, int64_t) {};
      return all_reduce_of(program_->window_);
    }

   private:
    StepInput& find(int i) {
      require(!names_.at(i).empty(), "a number of the step is no input of the program");
      return program_->inputs_[names_[i]];
    }
    std::vector<std::string> names_;
    Program* program_;
  };

  std::vector<nb::object> values(const Op& op) const {
    std::vector<nb::object> values;
    for (const auto& [is_slot, value] : op.arguments) {
      nb::object each = is_slot ? bound_.at(nb::cast<int>(value)) : value;
      values.push_back(each.is_valid() ? each : nb::none());
    }
    return values;
  }

  // Numbers that would lead outside.
  void check() const {
    const Arguments args("program");
    for (const auto& [name, input] : inputs_) {
      if (input.is_batch) {
        if (counts_[kTokens]) check_batch(args, *input.batch, counts_[input.rows], input.batch_limits);
      } else if (input.limit) {
        // A row of x that a step leaves out is there all the same, with an earlier step's numbers.
        const int64_t limit = input.rows == kLogits ? std::min(input.limit, counts_[kTokens]) : input.limit;
        args.within(input.numbers->data, input.numbers->size, name.c_str(), limit);
      }
    }
  }

  void make() {
    for (auto& [name, input] : inputs_) input.limit = 0, input.is_batch = false;
    for (Op& op : ops_) {
      SlotArguments args(*this, op);
      args.require(op.row->takes(op.arguments.size()), "takes another number of arguments");
      op.task = op.row->make(runtime_, args);
    }
    const Task* later = nullptr;
    for (size_t i = ops_.size(); i-- > 0;) {
      Op& op = ops_[i];
      op.later = later;
      if (op.task.expect) later = &op.task;
    }
    is_made_ = true;
  }

  Runtime& runtime_;
  nb::object window_;
  std::vector<nb::object> bound_;
  std::vector<std::string> input_of_;  // by slot; "" for others
  std::map<std::string, StepInput> inputs_;
  std::vector<Op> ops_;
  bool is_made_ = false;
  std::atomic<bool> is_profiling_{false};
  std::atomic<int64_t> progress_{0};
  int64_t counts_[kKinds] = {};  // of this step, by kind
};

}  // namespace
}  // namespace allspan

void bind_program(nb::module_& module) {
  using namespace allspan;
  nb::class_<Program>(module, "Program")
      .def(nb::init<Runtime&, int, nb::object>(), nb::arg("runtime"), nb::arg("slots"), nb::arg("window").none(),
           nb::keep_alive<1, 2>())
      .def("bind", &Program::bind, nb::arg("slot"), nb::arg("value").none())
      .def("declare_input", &Program::declare_input, nb::arg("slot"), nb::arg("name"), nb::arg("rows"))
      .def("add", &Program::add, nb::arg("name"), nb::arg("arguments"), nb::arg("rows"))
      .def("begin", &Program::begin, nb::arg("inputs"), nb::arg("counts"))
      .def("again", &Program::again)
      .def("run", &Program::run, nb::arg("first"), nb::arg("last"))
      .def_prop_ro("progress", &Program::progress)
      .def("start_profile", &Program::start_profile)
      .def("stop_profile", &Program::stop_profile)
      .def("profile", &Program::profile);
  module.def("op_names", [] {
    std::vector<std::string> names;
    for (const OpRow& op : op_table()) names.emplace_back(op.name);
    return names;
  });
}
