// Views of torch tensors, taken through the C exchange interface that torch offers for DLPack (about 50 ns a tensor, no
// reference kept), and the checks that stand between Python and raw pointers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <initializer_list>

#include "kernels.h"

namespace allspan {

enum class Dtype { kFloat32, kBfloat16, kInt64, kInt32, kInt8, kUint8, kFloat8, kOther };

struct Tensor {
  void* data;
  int rank;
  int64_t shape[4];
  Dtype dtype;
  int64_t stride;  // elements from one of the first extent to the next

  float* floats() const { return static_cast<float*>(data); }
  const int32_t* ints() const { return static_cast<const int32_t*>(data); }
  // Of weights and pages. A byte without a sign holds two elements of kUint4.
  Type type() const {
    if (dtype == Dtype::kFloat32) return Type::kFloat32;
    if (dtype == Dtype::kBfloat16) return Type::kBfloat16;
    if (dtype == Dtype::kFloat8) return Type::kFloat8;
    return dtype == Dtype::kInt8 ? Type::kInt8 : Type::kUint4;
  }
};

constexpr int64_t kAny = -1;

// Takes one op's arguments. Every refusal names the op and the argument: TypeError for what is no contiguous CPU tensor
// of an accepted dtype, ValueError for a wrong shape.
class Arguments {
 public:
  explicit Arguments(const char* op) : op_(op) {}

  // shape: kAny matches any extent.
  Tensor floats(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape) const;
  // The same of rows, each contiguous, that may lie apart.
  Tensor rows(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape) const;
  Tensor ints(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape) const;
  int64_t* longs(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape) const;
  // float32 or bfloat16.
  Tensor weights(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape) const;
  // Pages of [any, kv_heads, any, elements of dim]: float32, bfloat16, int8, or uint8 with two elements a byte.
  Tensor pages(nanobind::handle object, const char* name, int64_t kv_heads, int64_t dim) const;
  // Packed weights.
  Tensor bytes(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape) const;
  // Refuses an index outside [0, limit).
  void within(const int32_t* indices, int64_t count, const char* name, int64_t limit) const;
  void within(const Tensor& indices, const char* name, int64_t limit) const {
    within(indices.ints(), indices.shape[0], name, limit);
  }
  // Raises ValueError "op: message" unless it holds.
  void require(bool holds, const char* message) const;

  const char* op() const { return op_; }

 private:
  // first: the first extent whose elements must lie together.
  Tensor take(nanobind::handle object, const char* name, std::initializer_list<int64_t> shape, int first = 0) const;
  Tensor floats(nanobind::handle object, const char* name, const Tensor& taken) const;
  const char* op_;
};

}  // namespace allspan
