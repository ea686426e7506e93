#include "linear/adapters.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace allspan {
namespace {

constexpr uintptr_t kLine = 64;      // bytes of a cache line
constexpr int64_t kBlockRows = 252;  // of an item, whose x stays in the first-level cache; a multiple of the next
constexpr int64_t kTileRows = 12;    // a multiple of what kernels take at once
constexpr int64_t kItemPanels = 16;  // whose columns of a row are read and written as one stretch of memory

// A panel of one part of the product, and its columns of out.
struct Panel {
  int64_t part, first, count;
};

// Neighbouring rows of one adapter, in the order of routing.slots.
struct Block {
  int64_t place, begin, end;
};

std::vector<Panel> panels_of(const AdapterArgs& a) {
  std::vector<Panel> panels;
  for (int64_t part = 0; part < a.parts; ++part) {
    const int64_t end = a.ends[part];
    for (int64_t first = part ? a.ends[part - 1] : 0; first < end; first += kAdapterColumns)
      panels.push_back({part, first, std::min(kAdapterColumns, end - first)});
  }
  return panels;
}

// Blocks of at most `most` rows.
std::vector<Block> blocks_of(const Routing& routing, int64_t most) {
  std::vector<Block> blocks;
  for (int64_t p = 0; p < routing.num_places; ++p)
    for (int64_t begin = routing.starts[p]; begin < routing.starts[p + 1]; begin += most)
      blocks.push_back({p, begin, std::min<int64_t>(begin + most, routing.starts[p + 1])});
  return blocks;
}

// Whether an adapter has numbers in a panel of first matrices whose columns are those from `column` on: what lies
// behind its rank may be anything, and nothing of its products is read.
bool is_used(const AdapterArgs& a, int64_t place, int64_t column) {
  const int64_t end = std::min(column + kFeatures, a.parts * a.rank);
  for (int64_t next; column < end; column = next) {
    const int64_t part = column / a.rank;
    next = (part + 1) * a.rank;
    if (column - part * a.rank < a.ranks[place * a.parts + part]) return true;
  }
  return false;
}

}  // namespace

void route_adapters(Worker& worker, const int32_t* adapters, int64_t tokens, const int32_t* rows,
                    const Routing& routing, int64_t count) {
  if (worker.id == 0) {
    for (int64_t row = 0; row < count; ++row) {
      const int64_t token = rows ? rows[row] : row;
      const int32_t place = token >= 0 && token < tokens ? adapters[token] : -1;
      routing.places[row] = place < routing.num_places ? std::max(place, -1) : -1;
      routing.weights[row] = 1.0f;
    }
    sort_slots(routing, count);
  }
  worker.barrier();
}

void embed_adapters(const AdapterTable& table, const int32_t* ids, const int32_t* adapters, int64_t rows, float* out) {
  const int64_t bytes = table.count * table.width * (table.type == Type::kFloat32 ? 4 : 2);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = adapters[row];
    const bool has_one = place >= 0 && place < table.places;  // else a table without rows: zeros
    table.kernels->embedding(ids + row, table.weight + (has_one ? place * bytes : 0), table.type, table.first,
                             has_one ? table.count : 0, table.width, out + row * table.width, 1);
  }
}

void add_adapters(Worker& worker, const AdapterArgs& a) {
  if (a.routing.starts[a.routing.num_places] == 0 || a.panels == 0) return;
  std::vector<Panel> panels;
  std::vector<Block> blocks;
  worker.guard([&] {
    panels = panels_of(a);
    blocks = blocks_of(a.routing, kBlockRows);
  });
  const int64_t bytes = (a.type == Type::kFloat32 ? 4 : 2) * a.rank * kAdapterColumns;
  const int64_t width = a.ends[a.parts - 1], count = static_cast<int64_t>(panels.size());
  const auto add = [&](const Block& block, int64_t first, int64_t last) {
    for (int64_t row = block.begin; row < block.end; row += kTileRows)
      for (int64_t p = first; p < last; ++p) {
        const Panel& panel = panels[p];
        a.kernels->add_adapter({a.x + panel.part * a.rank, a.parts * a.rank,
                                a.weight + (block.place * a.panels + p) * bytes, a.type,
                                a.ranks[block.place * a.parts + panel.part], a.out + panel.first, width, panel.count,
                                a.routing.slots + row, std::min(kTileRows, block.end - row)});
      }
  };
  worker.stretch(static_cast<int64_t>(blocks.size()) * count, kItemPanels, [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      const int64_t block = begin / count, first = block * count;
      stop = std::min(end, first + count);
      add(blocks[block], begin - first, stop - first);
    }
  });
}

std::vector<LayerAdapters::Columns> adapter_columns_of(const PackedSpec& weight) {
  std::vector<LayerAdapters::Columns> columns;
  for (int64_t panel = 0; panel < weight.panels; ++panel) {
    int64_t part = 0, first_panel = 0, first = columns_of(weight, panel).first;
    for (; part + 1 < static_cast<int64_t>(weight.parts.size()) && first >= weight.parts[part]; ++part) {
      first -= weight.parts[part];
      first_panel += (weight.parts[part] + kAdapterColumns - 1) / kAdapterColumns;
    }
    columns.push_back({part, first_panel + first / kAdapterColumns, first % kAdapterColumns});
  }
  return columns;
}

void shrink(Worker& worker, const LayerAdapters& a, const char* packed, int64_t row_bytes, char* room, float* low) {
  const Routing& routing = a.second.routing;
  const int64_t most = std::min(a.kernels->rows, kMostTile), width = a.width();
  std::vector<Block> tiles;
  worker.guard([&] { tiles = blocks_of(routing, most); });
  if (a.kernels->begin) a.kernels->begin();
  worker.share(static_cast<int64_t>(tiles.size()) * a.spec.panels, [&](int64_t item) {
    const Block& tile = tiles[item / a.spec.panels];
    const int64_t panel = item % a.spec.panels, column = panel * kFeatures, count = tile.end - tile.begin;
    if (!is_used(a.second, tile.place, column)) return;
    alignas(64) float sums[kMostTile * kTileStride];
    const int32_t* const rows = routing.slots + tile.begin;
    const char* from = packed + rows[0] * row_bytes;
    if (rows[count - 1] - rows[0] >= count) {  // others lie between them
      for (int64_t i = 0; i < count; ++i) std::memcpy(room + i * row_bytes, packed + rows[i] * row_bytes, row_bytes);
      from = room;
    }
    if (a.spec.blocks > 0)
      a.kernels->product(a.spec, from, count, a.first + (tile.place * a.spec.panels + panel) * a.spec.panel_bytes, 1,
                         sums, tile.begin == routing.starts[tile.place]);
    else  // a rank without inputs
      std::memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(low + rows[i] * width + column, sums + i * kTileStride,
                  std::min(kFeatures, width - column) * sizeof(float));
  });
  if (a.kernels->end) a.kernels->end();
}

void expect_sums(const LayerAdapters& a, const SumsTile& tile) {
  int64_t last = -1;
  for (int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
    const int64_t place = a.second.routing.places[row];
    if (place < 0 || place == std::exchange(last, place)) continue;
    uintptr_t line = 0;
    for (int64_t p = 0; p < tile.panels; ++p) {
      const char* const weights = a.weights(place, tile.panel + p);
      if (reinterpret_cast<uintptr_t>(weights) / kLine ==
          std::exchange(line, reinterpret_cast<uintptr_t>(weights) / kLine))
        continue;
      const int64_t rank = a.rank(place, tile.panel + p);
      for (int64_t j = 0; j < rank; ++j) __builtin_prefetch(weights + j * kAdapterColumns * a.element(), 0, 2);
    }
  }
}

void add_to_sums(const LayerAdapters& a, const float* low, const SumsTile& tile) {
  const int32_t* const places = a.second.routing.places + tile.row;
  const int64_t width = a.width();
  for (int64_t begin = 0, end; begin < tile.rows; begin = end) {
    const int64_t place = places[begin];
    for (end = begin + 1; end < tile.rows && places[end] == place;) ++end;
    if (place < 0) continue;
    for (int64_t p = 0, next; p < tile.panels; p = next) {  // panels of one rank
      AdapterSums sums{};
      sums.rank = a.rank(place, tile.panel + p);
      for (next = p; next < tile.panels && next - p < kAdapterPanels; ++next) {
        const int64_t panel = tile.panel + next;
        if (a.rank(place, panel) != sums.rank) break;
        sums.x[next - p] = low + (tile.row + begin) * width + a.columns[panel].part * a.second.rank;
        sums.weights[next - p] = a.weights(place, panel);
      }
      if (sums.rank == 0) continue;
      sums.type = a.second.type, sums.rows = end - begin, sums.panels = next - p, sums.x_stride = width;
      sums.sums = tile.sums + begin * tile.stride + p * kFeatures, sums.stride = tile.stride;
      a.second.kernels->add_adapter_sums(sums);
    }
  }
}

}  // namespace allspan
