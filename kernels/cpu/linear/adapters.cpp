#include "linear/adapters.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace allspan {
namespace {

constexpr int64_t kMostRows = 128;  // of a tile
constexpr int64_t kAlone = 2;       // so few rows every thread packs for itself
constexpr int64_t kBlockRows = 256;

// Panels of one part of the product.
struct PartPanels {
  int64_t part, panel, panels;
};

// Neighbouring rows of one adapter, in the order of routing.slots.
struct Block {
  int64_t place, begin, end;
};

struct Work {
  std::vector<PartPanels> columns;
  std::vector<Block> blocks;

  void fill(const AdapterArgs& a) {
    columns.clear();
    blocks.clear();
    int64_t panel = 0;
    for (size_t part = 0; part < a.spec->parts.size(); ++part)
      for (const int64_t end = panel + (a.spec->parts[part] + kFeatures - 1) / kFeatures; panel < end;) {
        const int64_t panels = std::min(kTilePanels, end - panel);
        columns.push_back({static_cast<int64_t>(part), panel, panels});
        panel += panels;
      }
    for (int64_t p = 0; p < a.routing.num_places; ++p)
      for (int64_t begin = a.routing.starts[p]; begin < a.routing.starts[p + 1]; begin += kBlockRows)
        blocks.push_back({p, begin, std::min<int64_t>(begin + kBlockRows, a.routing.starts[p + 1])});
  }
};

void add_block(const AdapterArgs& a, const char* packed, int64_t row_bytes, const Block& block, const PartPanels& of) {
  const PackedSpec& spec = *a.spec;
  const int64_t tile = std::min(a.kernels->rows, kMostRows), count = a.routing.starts[a.routing.num_places];
  const uint8_t* weight = a.weight + (block.place * spec.panels + of.panel) * spec.panel_bytes;
  alignas(64) float sums[kMostRows * kTileStride];
  for (int64_t first = block.begin; first < block.end; first += tile) {
    const int64_t rows = std::min(tile, block.end - first);
    // Rows of one part lie together, below each other.
    const char* x = packed + (of.part * count + first) * row_bytes;
    a.kernels->product(spec, x, rows, weight, of.panels, sums, first == block.begin);
    const Columns begin = columns_of(spec, of.panel), end = columns_of(spec, of.panel + of.panels - 1);
    for (int64_t row = 0; row < rows; ++row)
      a.elementwise->finish({Epilogue::kAdd, sums + row * kTileStride, kTileStride, nullptr, nullptr,
                             a.out + a.routing.slots[first + row] * spec.features + begin.first, spec.features, 1,
                             end.first + end.count - begin.first});
  }
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

void add_adapters(Worker& worker, const AdapterArgs& a) {
  const PackedSpec& spec = *a.spec;
  const int64_t count = a.routing.starts[a.routing.num_places], parts = static_cast<int64_t>(spec.parts.size());
  if (count == 0 || spec.panels == 0 || spec.blocks == 0) return;
  const int64_t row_bytes = a.kernels->row_bytes(spec);
  const auto pack = [&](char* to, int64_t row) {
    for (int64_t part = 0; part < parts; ++part)
      a.kernels->pack_row(spec, a.x + (a.routing.slots[row] * parts + part) * spec.inputs,
                          to + (part * count + row) * row_bytes);
  };
  char* packed;
  if (count <= kAlone) {
    packed = static_cast<char*>(worker.scratch(count * parts * row_bytes));
    for (int64_t row = 0; row < count; ++row) pack(packed, row);
  } else {
    packed = static_cast<char*>(worker.shared(count * parts * row_bytes));
    worker.split(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) pack(packed, row);
    });
  }
  Work work;
  worker.guard([&] { work.fill(a); });
  const int64_t columns = static_cast<int64_t>(work.columns.size());
  if (a.kernels->begin) a.kernels->begin();
  worker.stretch(static_cast<int64_t>(work.blocks.size()) * columns, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      add_block(a, packed, row_bytes, work.blocks[begin / columns], work.columns[begin % columns]);
  });
  if (a.kernels->end) a.kernels->end();
}

}  // namespace allspan
