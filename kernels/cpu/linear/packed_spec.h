// Packed weights of linear layers, as kernels/packed_spec.py describes them, and what a family of kernels offers to
// packed_linear.cpp, which shares a product out over the threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace allspan {

constexpr int64_t kFeatures = 16;       // output features of a panel
constexpr int64_t kGroup = 32;          // inputs whose codes lie together, and share an activation's scale
constexpr int64_t kChannelGroup = 128;  // those that share one where weights have scales a channel

enum class Format {
  kF32,
  kBf16,
  kChannel8,
  kChannel4,
  kGroup8,
  kGroup4,
  kQ8_0,
  kQ4_0,
  kQ5_0,
  kQ5_1,
  kQ4K,
  kQ5K,
  kQ6K,  // the last one that goes with a16
  kQ3K,
  kQ2K,
  kIq4Nl,
  kMxfp4,
  kIq4Xs,
  kIq3S,
  kIq3Xxs,
  kIq2Xxs,
  kIq2Xs,
  kIq2S,
};
enum class Activation { kF32, kBf16, kA8, kA16 };

// allspan.kernels.packed_spec.PackedSpec, with what follows from it.
struct PackedSpec {
  Format format;
  Activation activation;
  std::vector<int64_t> parts;
  int64_t inputs, k_offset, group;
  bool interleaved;

  int64_t block, blocks, block_bytes, head_bytes, panel_bytes, panels, features;
  // k_offset + inputs, rounded up to whole blocks: the length of a packed row of x.
  int64_t depth() const { return block * blocks; }
  // Throws std::invalid_argument for a spec that makes no sense.
  static PackedSpec make(const std::string& format, const std::string& activation, std::vector<int64_t> parts,
                         int64_t inputs, int64_t k_offset, int64_t group, bool interleaved);
};

// Panels that go together.
inline int64_t unit_of(const PackedSpec& spec) { return spec.interleaved ? 2 : 1; }

// Where a panel's sums go: columns [first, first + count) of the product.
struct Columns {
  int64_t first, count;
};
Columns columns_of(const PackedSpec& spec, int64_t panel);

constexpr int64_t kTilePanels = 4;  // most panels of one call of `product`
constexpr int64_t kTileStride = kTilePanels * kFeatures;

// One family of kernels for some formats and activations, for one instruction set. What `product` writes for a row and
// a feature depends on these two alone, bit for bit: never on how many rows or panels are in the call.
struct LinearKernels {
  const char* name;  // as printed: "avx512_bf16", "amx_int8", …
  // Rows of x that `product` takes best in one call (register blocking); it must take any number up to this.
  int64_t rows;
  // Bytes of one packed row of x: a multiple of 64.
  int64_t (*row_bytes)(const PackedSpec& spec);
  // x float32 [spec.inputs] → packed: converted to the activation's type, zeros in k_offset places and the tail.
  void (*pack_row)(const PackedSpec& spec, const float* x, void* packed);
  // sums[r * kTileStride + 16 * p + c] = row r · feature c of panel p, for `rows` <= this->rows packed rows, which lie
  // row_bytes apart, and `panels` <= kTilePanels panels, which lie spec.panel_bytes apart. `sums` is aligned to 64 and
  // has room for this->rows rows. `ahead`: this weight is met for the first time, so that prefetching pays.
  void (*product)(const PackedSpec& spec, const void* packed, int64_t rows, const uint8_t* weight, int64_t panels,
                  float* sums, bool ahead);
  // Called once by every thread before its first product, and to end with (AMX tiles); may be null.
  void (*begin)();
  void (*end)();
  // weight of feature `feature` of the panel → float32 [spec.inputs]: for embeddings.
  void (*unpack_feature)(const PackedSpec& spec, const uint8_t* panel, int64_t feature, float* out);
};

// The best kernels for the spec at or below an instruction set. Never null: the generic ones take every spec.
const LinearKernels& float_kernels(int isa, const PackedSpec& spec);    // f32, bf16
const LinearKernels& integer_kernels(int isa, const PackedSpec& spec);  // codes
inline const LinearKernels& linear_kernels(int isa, const PackedSpec& spec) {
  return spec.format <= Format::kBf16 ? float_kernels(isa, spec) : integer_kernels(isa, spec);
}

}  // namespace allspan
