// What low-rank adapters add to the products of linear layers.
#pragma once

#include <vector>

#include "kernels.h"
#include "linear/packed_spec.h"
#include "moe/route.h"
#include "runtime/pool.h"

namespace allspan {

// Places of `count` rows by the slots of their tokens' adapters, [tokens]; `rows` are the rows' tokens, or null for all
// in order. A row of no token has no adapter.
void route_adapters(Worker& worker, const int32_t* adapters, int64_t tokens, const int32_t* rows,
                    const Routing& routing, int64_t count);

// Rows of the adapters of an embedding.
struct AdapterTable {
  const Kernels* kernels;
  const char* weight;  // [places, count, width], of `type`
  Type type;
  int64_t places, count, width;
  int64_t first;  // the token of row 0
};
// out [rows, width]: zeros for a token without a row or an adapter.
void embed_adapters(const AdapterTable& table, const int32_t* ids, const int32_t* adapters, int64_t rows, float* out);

struct AdapterArgs {
  const Kernels* kernels;
  const float* x;      // [rows, parts · rank]: each part of the product has columns of its own
  const char* weight;  // [num_places, panels, rank, kAdapterColumns], of `type`
  Type type;
  const int32_t* ranks;  // [num_places, parts], at most `rank`
  const int32_t* ends;   // [parts]: where the columns of each part end
  int64_t rows;          // of x at most
  int64_t parts, panels, rank;
  Routing routing;  // of one choice a row
  float* out;       // [rows, ends[parts - 1]]
};

// out[row] += the product of the row and its adapter, of every row that has one.
void add_adapters(Worker& worker, const AdapterArgs& args);

// Both matrices of the adapters of a layer whose weight is packed.
struct LayerAdapters {
  AdapterArgs second;  // x: what shrink() makes
  PackedSpec spec;     // of a first matrix: one part, `rank` features for each part of the layer
  const LinearKernels* kernels;
  const uint8_t* first;  // [num_places, spec.panels, spec.panel_bytes]
  // Where the columns of a panel of the layer's weight lie: in the panel `panel` of second matrices, from `column` on.
  struct Columns {
    int64_t part, panel, column;
  };
  std::vector<Columns> columns;  // of each panel of the layer's weight

  bool has_rows() const { return second.routing.starts[second.routing.num_places] > 0; }
  // Floats of a row of x.
  int64_t width() const { return second.parts * second.rank; }
  // What an adapter has for a panel of the layer's weight: the rank of its part, and the first of its numbers, in rows
  // of kAdapterColumns.
  int64_t rank(int64_t place, int64_t panel) const { return second.ranks[place * second.parts + columns[panel].part]; }
  const char* weights(int64_t place, int64_t panel) const {
    const Columns& at = columns[panel];
    return second.weight + ((place * second.panels + at.panel) * second.rank * kAdapterColumns + at.column) * element();
  }
  int64_t element() const { return second.type == Type::kFloat32 ? 4 : 2; }
};
// `LayerAdapters::columns` of a weight that has the adapters' parts.
std::vector<LayerAdapters::Columns> adapter_columns_of(const PackedSpec& weight);

// low[row] = the product of the row, packed by the adapters' kernels and row_bytes apart, and the first matrix of its
// adapter, of every row that has one; the other numbers are anything. Each thread goes on once there is nothing left to
// begin, and has room for kMostTile rows.
void shrink(Worker& worker, const LayerAdapters& adapters, const char* packed, int64_t row_bytes, char* room,
            float* low);
constexpr int64_t kMostTile = 32;

// Some panels of a product's sums, of `rows` rows from `row` on.
struct SumsTile {
  int64_t row, rows, panel, panels;
  float* sums;  // [rows, panels · kFeatures], rows `stride` apart
  int64_t stride;
};
// Asks for what add_to_sums() will read.
void expect_sums(const LayerAdapters& adapters, const SumsTile& tile);
// Adds the products of the rows of low and their second matrices.
void add_to_sums(const LayerAdapters& adapters, const float* low, const SumsTile& tile);

}  // namespace allspan
