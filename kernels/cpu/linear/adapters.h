// What low-rank adapters add to the products of linear layers.
#pragma once

#include "kernels.h"
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

// Columns [first, first + count) of a part that lie together, and the panel of the adapters' that they begin in.
struct AdapterColumns {
  int64_t part, panel, first, count;
};
// The same for a tile of sums: those of `rows` rows from `row` on, `stride` apart.
void add_adapters_to(const AdapterArgs& args, const AdapterColumns& columns, int64_t row, int64_t rows, float* sums,
                     int64_t stride);

}  // namespace allspan
