// Filling packed weights: what Packer of kernels/packer.py says.
#pragma once

#include "linear/packed_spec.h"
#include "runtime/pool.h"

namespace allspan {

// Panels `first` and on of a part of a weight.
struct PackTarget {
  const PackedSpec* spec;
  uint8_t* weight;  // [spec.panels, spec.panel_bytes]
  int64_t part, first;
};

// values [rows, spec.inputs]: float32 for kF32, bfloat16 for kBf16.
void pack_floats(Pool& pool, const void* values, int64_t rows, const PackTarget& target);

// values [rows, columns], from `before` columns before the spec's first input.
void pack_quantised(Pool& pool, const float* values, int64_t rows, int64_t columns, int64_t before,
                    const PackTarget& target);

// blocks [rows, spec.blocks * gguf_block_bytes(spec.format)]. `grid`: the codes of magnitudes that weights of iq2 and
// iq3 types have together, [grid_entries(spec.format), grid_weights(spec.format)].
void pack_blocks(Pool& pool, const uint8_t* blocks, const uint8_t* grid, int64_t rows, const PackTarget& target);

// 0 for a format without a grid.
int64_t grid_entries(Format format);
int64_t grid_weights(Format format);

// Bytes in a GGUF file of what becomes one block; 0 for a format that no type of GGUF goes into.
int64_t gguf_block_bytes(Format format);

}  // namespace allspan
