#include "linear/adapters.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

namespace allspan {
namespace {

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

std::vector<Block> blocks_of(const Routing& routing) {
  std::vector<Block> blocks;
  for (int64_t p = 0; p < routing.num_places; ++p)
    for (int64_t begin = routing.starts[p]; begin < routing.starts[p + 1]; begin += kBlockRows)
      blocks.push_back({p, begin, std::min<int64_t>(begin + kBlockRows, routing.starts[p + 1])});
  return blocks;
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
    blocks = blocks_of(a.routing);
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

void add_adapters_to(const AdapterArgs& a, const AdapterColumns& columns, int64_t row, int64_t rows, float* sums,
                     int64_t stride) {
  static const auto kInOrder = [] {
    std::array<int32_t, kTileRows> numbers;
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
  }();
  const int64_t element = a.type == Type::kFloat32 ? 4 : 2, bytes = element * a.rank * kAdapterColumns;
  const int32_t* const places = a.routing.places + row;
  for (int64_t begin = 0, end; begin < rows; begin = end) {
    const int64_t place = places[begin];
    for (end = begin + 1; end < rows && end - begin < kTileRows && places[end] == place;) ++end;
    if (place < 0) continue;
    a.kernels->add_adapter({a.x + (row + begin) * a.parts * a.rank + columns.part * a.rank, a.parts * a.rank,
                            a.weight + (place * a.panels + columns.panel) * bytes + columns.first * element, a.type,
                            a.ranks[place * a.parts + columns.part], sums + begin * stride, stride, columns.count,
                            kInOrder.data(), end - begin});
  }
}

}  // namespace allspan
