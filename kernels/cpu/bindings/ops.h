// The ops of kernels/ops.py as tasks: arguments are checked once, and then a task runs as often as wanted, on every
// thread of a run. Called from Python an op is made and run at once; a program keeps its tasks.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/tensor.h"
#include "linear/packed_linear.h"
#include "runtime/runtime.h"

namespace allspan {

// Numbers that change from step to step: int32 [size].
struct Input {
  const int32_t* data = nullptr;
  int64_t size = 0;
};

// Which tokens and pages belong to which request.
struct BatchInput {
  Runtime::Batch batch{};
  int64_t page_indices = 0;
  int64_t heads = 0;
  float scale = 0;
  int64_t window = 0;
  float soft_cap = 0;
  const float* slopes = nullptr;  // [heads] or null
};

// What an attention op was made for: a batch must not lead outside.
struct BatchLimits {
  int64_t heads, kv_heads, pages, page_size;
};

// Takes an AttentionMeta, whose tensors must outlive what is returned.
BatchInput take_batch(const Arguments& args, nanobind::handle meta);
// Refuses numbers that would lead outside tensors, q's `rows` among them.
void check_batch(const Arguments& args, const BatchInput& input, int64_t rows, const BatchLimits& limits);

// Sums float32 [count] over the ranks, in place.
using AllReduce = std::function<void(Worker& worker, float* x, int64_t count)>;

// Where an op's arguments come from.
class OpArguments : public Arguments {
 public:
  OpArguments(const char* op, std::vector<nanobind::object> values) : Arguments(op), values_(std::move(values)) {}
  virtual ~OpArguments() = default;

  nanobind::handle at(int i) const { return values_.at(i); }
  bool is_none(int i) const { return i >= static_cast<int>(values_.size()) || values_[i].is_none(); }
  template <class T>
  T number(int i) const {
    return nanobind::cast<T>(values_.at(i));
  }
  PackedSpec spec(int i) const;
  // Inputs of the step: valid, and up to date, whenever the task runs. `rows` are those of the tensors that go with
  // them; numbers are within [0, limit) (0: any).
  virtual const Input* input(int i, const char* name, int64_t rows, int64_t limit);
  // Whether there is such an input: of a program's, whose numbers come with each step, is_none() says nothing.
  virtual bool has_input(int i) const { return !is_none(i); }
  virtual const BatchInput* batch(int i, int64_t rows, const BatchLimits& limits);
  // The all-reduce between the ranks, of a program.
  virtual AllReduce all_reduce();

 protected:
  std::vector<nanobind::object> values_;
  std::vector<std::unique_ptr<Input>> inputs_;
  std::unique_ptr<BatchInput> batch_;
};

// The epilogue of an activation's name, one of ACTIVATIONS of kernels/ops.py.
Epilogue gated_epilogue(const OpArguments& args, int i);

struct Task {
  int64_t rows;  // of the tensors given
  // rows at most those.
  std::function<void(Worker& worker, int64_t rows)> run;
  // Null, or tells a worker what it will read first.
  std::function<void(Worker& worker)> expect{};
};

// Elements that are worth a thread of their own.
constexpr int64_t kGrain = 1 << 14;
constexpr int64_t rows_per_part(int64_t width) { return 1 + kGrain / (width + 1); }

struct OpRow {
  const char* name;
  int arguments;  // those in tuples counted one by one
  Task (*make)(Runtime& runtime, OpArguments& args);
  int optional = 0;  // of them, at the end, that may be left out

  bool takes(size_t count) const {
    return static_cast<int>(count) <= arguments && static_cast<int>(count) >= arguments - optional;
  }
};

std::vector<OpRow> row_ops();        // row_ops.cpp
std::vector<OpRow> linear_ops();     // linear_ops.cpp
std::vector<OpRow> expert_ops();     // expert_ops.cpp
std::vector<OpRow> attention_ops();  // attention_ops.cpp
std::vector<OpRow> latent_ops();     // latent_ops.cpp
std::vector<OpRow> adapter_ops();    // adapter_ops.cpp
// All of them.
const std::vector<OpRow>& op_table();
const OpRow& find_op(const std::string& name);

}  // namespace allspan
