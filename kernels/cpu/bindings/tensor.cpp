#include "bindings/tensor.h"

#include <string>

namespace nb = nanobind;

namespace allspan {
namespace {

// The parts of DLPack 1.x (github.com/dmlc/dlpack, include/dlpack/dlpack.h) that are used here.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLExchange {
  uint32_t major, minor;
  DLExchange* older;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);
  void* current_stream;
};
constexpr int32_t kCpu = 1;
enum : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kE4m3 = 10 };

struct Torch {
  nb::handle tensor_type;  // never released: torch stays loaded
  const DLExchange* exchange;
};

Torch find_torch() {
  nb::object type = nb::module_::import_("torch").attr("Tensor");
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  const DLExchange* exchange = nullptr;
  if (!capsule.is_none())
    exchange = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (exchange && exchange->major > 1) exchange = exchange->older;
  if (!exchange || !exchange->tensor_from_object)
    throw nb::import_error("allspan.kernels.cpu needs torch >= 2.11 (its DLPack exchange interface)");
  return {type.release(), exchange};
}

const Torch& torch() {
  static const Torch found = find_torch();
  return found;
}

Dtype dtype_of(const DLTensor& t) {
  if (t.type_lanes != 1) return Dtype::kOther;
  if (t.type_code == kFloat && t.type_bits == 32) return Dtype::kFloat32;
  if (t.type_code == kBfloat && t.type_bits == 16) return Dtype::kBfloat16;
  if (t.type_code == kInt && t.type_bits == 64) return Dtype::kInt64;
  if (t.type_code == kInt && t.type_bits == 32) return Dtype::kInt32;
  if (t.type_code == kInt && t.type_bits == 8) return Dtype::kInt8;
  if (t.type_code == kUint && t.type_bits == 8) return Dtype::kUint8;
  if (t.type_code == kE4m3 && t.type_bits == 8) return Dtype::kFloat8;
  return Dtype::kOther;
}

bool contiguous(const DLTensor& t, int first) {
  if (!t.strides) return true;
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= first; --i) {
    if (t.shape[i] == 0) return true;
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

std::string shape_text(const int64_t* shape, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i)
    text += (i ? ", " : "") + (shape[i] == kAny ? std::string("any") : std::to_string(shape[i]));
  return text + "]";
}

std::string class_name(nb::handle object) { return nb::cast<std::string>(object.type().attr("__name__")); }

}  // namespace

void Arguments::require(bool holds, const char* message) const {
  if (!holds) throw nb::value_error((std::string(op_) + ": " + message).c_str());
}

Tensor Arguments::take(nb::handle object, const char* name, std::initializer_list<int64_t> shape, int first) const {
  const std::string where = std::string(op_) + ": " + name;
  const int is_tensor = PyObject_IsInstance(object.ptr(), torch().tensor_type.ptr());
  if (is_tensor < 0) throw nb::python_error();
  if (!is_tensor) throw nb::type_error((where + " is a " + class_name(object) + ", not a torch tensor").c_str());
  DLTensor t;
  if (torch().exchange->tensor_from_object(object.ptr(), &t) != 0) throw nb::python_error();
  if (t.device_type != kCpu) throw nb::type_error((where + " is not on the CPU").c_str());
  if (!contiguous(t, first)) throw nb::type_error((where + " is not contiguous").c_str());
  bool same = t.ndim == static_cast<int32_t>(shape.size());
  for (int i = 0; same && i < t.ndim; ++i) same = shape.begin()[i] == kAny || shape.begin()[i] == t.shape[i];
  if (!same)
    throw nb::value_error(
        (where + " has shape " + shape_text(t.shape, t.ndim) + ", not " + shape_text(shape.begin(), shape.size()))
            .c_str());
  Tensor view{static_cast<char*>(t.data) + t.byte_offset, t.ndim, {0, 0, 0, 0}, dtype_of(t), 1};
  for (int i = 0; i < t.ndim; ++i) view.shape[i] = t.shape[i];
  for (int i = 1; i < t.ndim; ++i) view.stride *= t.shape[i];
  if (first && t.strides && t.ndim && t.shape[0] > 1) view.stride = t.strides[0];
  return view;
}

namespace {

[[noreturn]] void refuse_dtype(const char* op, nb::handle object, const char* name, const char* wanted) {
  const std::string has = nb::cast<std::string>(nb::str(nb::object(object.attr("dtype"))));
  throw nb::type_error((std::string(op) + ": " + name + " is " + has + ", not " + wanted).c_str());
}

}  // namespace

Tensor Arguments::floats(nb::handle object, const char* name, std::initializer_list<int64_t> shape) const {
  return floats(object, name, take(object, name, shape));
}

Tensor Arguments::rows(nb::handle object, const char* name, std::initializer_list<int64_t> shape) const {
  return floats(object, name, take(object, name, shape, 1));
}

Tensor Arguments::floats(nb::handle object, const char* name, const Tensor& taken) const {
  if (taken.dtype != Dtype::kFloat32) refuse_dtype(op_, object, name, "torch.float32");
  return taken;
}

Tensor Arguments::ints(nb::handle object, const char* name, std::initializer_list<int64_t> shape) const {
  const Tensor t = take(object, name, shape);
  if (t.dtype != Dtype::kInt32) refuse_dtype(op_, object, name, "torch.int32");
  return t;
}

int64_t* Arguments::longs(nb::handle object, const char* name, std::initializer_list<int64_t> shape) const {
  const Tensor t = take(object, name, shape);
  if (t.dtype != Dtype::kInt64) refuse_dtype(op_, object, name, "torch.int64");
  return static_cast<int64_t*>(t.data);
}

Tensor Arguments::weights(nb::handle object, const char* name, std::initializer_list<int64_t> shape) const {
  const Tensor t = take(object, name, shape);
  if (t.dtype != Dtype::kFloat32 && t.dtype != Dtype::kBfloat16)
    refuse_dtype(op_, object, name, "torch.float32 or torch.bfloat16");
  return t;
}

Tensor Arguments::pages(nb::handle object, const char* name, int64_t kv_heads, int64_t dim) const {
  const Tensor t = take(object, name, {kAny, kv_heads, kAny, kAny});
  if (t.dtype == Dtype::kInt32 || t.dtype == Dtype::kInt64 || t.dtype == Dtype::kOther)
    refuse_dtype(op_, object, name, "torch.float32, torch.bfloat16, torch.int8, torch.uint8 or torch.float8_e4m3fn");
  take(object, name, {kAny, kv_heads, kAny, t.type() == Type::kUint4 ? (dim + 1) / 2 : dim});
  return t;
}

Tensor Arguments::bytes(nb::handle object, const char* name, std::initializer_list<int64_t> shape) const {
  const Tensor t = take(object, name, shape);
  if (t.dtype != Dtype::kUint8) refuse_dtype(op_, object, name, "torch.uint8");
  return t;
}

void Arguments::within(const int32_t* indices, int64_t count, const char* name, int64_t limit) const {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t value = indices[i];
    if (value < 0 || value >= limit)
      throw nb::value_error((std::string(op_) + ": " + name + "[" + std::to_string(i) + "] is " +
                             std::to_string(value) + ", not in [0, " + std::to_string(limit) + ")")
                                .c_str());
  }
}

}  // namespace allspan
