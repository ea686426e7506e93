#include "moe/experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace allspan {
namespace {

constexpr int64_t kMostRows = 128;             // of a tile
constexpr int64_t kAlone = 2;                  // so few tokens every thread packs for itself
constexpr int64_t kRowBlockBytes = 512 << 10;  // packed rows that stay in the second-level cache
constexpr int64_t kSumRows = 512;              // tokens whose sums a thread holds at once
constexpr int64_t kShares = 4;                 // of a thread's part of a sum, which another may take

// The packed rows of a step's slots. Of few tokens they lie by token, in memory of the thread; of more by slot, in the
// order of routing.slots.
class PackedRows {
 public:
  // of_token: slots of a token have the same input.
  PackedRows(Worker& worker, const ExpertArgs& a, int64_t rows, bool of_token)
      : row_bytes_(a.kernels->row_bytes(*a.spec)), slots_(a.routing.slots), top_k_(a.top_k) {
    by_token_ = of_token && rows <= kAlone;
    if (by_token_) {
      packed_ = static_cast<char*>(worker.scratch(rows * row_bytes_));
      for (int64_t row = 0; row < rows; ++row) pack(a, row, packed_ + row * row_bytes_);
      return;
    }
    const int64_t count = a.routing.starts[a.routing.num_places];
    packed_ = static_cast<char*>(worker.shared(std::max<int64_t>(1, count) * row_bytes_));
    if (of_token)
      worker.split(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) pack_token(a, row);
      });
    else
      worker.split(count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) pack(a, slots_[i], packed_ + i * row_bytes_);
      });
  }

  // The rows of neighbouring slots of one expert, of which the first is number i in the order of routing.slots. Of at
  // most two tokens those of an expert are all, or one.
  const char* at(int64_t i) const { return packed_ + (by_token_ ? slots_[i] / top_k_ : i) * row_bytes_; }
  int64_t row_bytes() const { return row_bytes_; }

 private:
  static void pack(const ExpertArgs& a, int64_t row, char* to) {
    a.kernels->pack_row(*a.spec, a.x + row * a.spec->inputs, to);
  }
  // Packs a token once, to the first of its slots, and copies it to the others.
  void pack_token(const ExpertArgs& a, int64_t row) {
    const char* first = nullptr;
    for (int64_t slot = row * top_k_; slot < (row + 1) * top_k_; ++slot) {
      const int32_t place = a.routing.places[slot];
      if (place < 0) continue;
      const int32_t* const begin = slots_ + a.routing.starts[place];
      const int64_t at = std::lower_bound(begin, slots_ + a.routing.starts[place + 1], slot) - slots_;
      char* const to = packed_ + at * row_bytes_;
      if (first)
        std::memcpy(to, first, row_bytes_);
      else
        pack(a, row, to);
      first = first ? first : to;
    }
  }

  const int64_t row_bytes_;
  const int32_t* slots_;
  const int64_t top_k_;
  bool by_token_;
  char* packed_;
};

// Slots [begin, end) in the order of routing.slots, all of one expert.
struct Block {
  int64_t place, begin, end;
};

// Cuts every expert's slots into blocks of at most `most`, in memory of the thread.
int64_t blocks_of(const Routing& routing, int64_t most, std::vector<Block>& blocks) {
  blocks.clear();
  for (int64_t p = 0; p < routing.num_places; ++p)
    for (int64_t begin = routing.starts[p]; begin < routing.starts[p + 1]; begin += most)
      blocks.push_back({p, begin, std::min<int64_t>(begin + most, routing.starts[p + 1])});
  return static_cast<int64_t>(blocks.size());
}

// The sums of a tile to its slots' rows of out: the epilogue over all rows in place, then row by row.
void finish(const ExpertArgs& a, float* sums, int64_t first, int64_t count, int64_t panel, int64_t panels) {
  const int64_t step = is_gated(a.epilogue) ? 2 : 1;
  for (int64_t p = 0; p < panels; p += step) {
    const Columns columns = columns_of(*a.spec, panel + p);
    const float* bias = a.bias ? a.bias + columns.first : nullptr;
    float* const from = sums + p * kFeatures;
    if (bias || is_gated(a.epilogue))
      a.elementwise->finish({a.epilogue, from, kTileStride, bias, bias ? bias + a.spec->parts[0] : nullptr, from,
                             kTileStride, count, columns.count});
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(a.out + a.routing.slots[first + row] * a.out_stride + columns.first, from + row * kTileStride,
                  columns.count * sizeof(float));
  }
}

// Some panels of one block: their products to their slots' rows of out.
void product_of(const ExpertArgs& args, const PackedRows& rows, const Block& block, int64_t panel, int64_t panels,
                int64_t tile) {
  const PackedSpec& spec = *args.spec;
  ExpertArgs a = args;
  if (a.bias) a.bias += block.place * spec.features;
  const uint8_t* weight = a.weight + (block.place * spec.panels + panel) * spec.panel_bytes;
  alignas(64) float sums[kMostRows * kTileStride];
  for (int64_t first = block.begin; first < block.end; first += tile) {
    const int64_t count = std::min(tile, block.end - first);
    if (spec.blocks > 0)
      a.kernels->product(spec, rows.at(first), count, weight, panels, sums, first == block.begin);
    else
      std::memset(sums, 0, count * kTileStride * sizeof(float));
    finish(a, sums, first, count, panel, panels);
  }
}

// The sums of some columns for tokens [begin, end), experts in ascending order. total: [end - begin, columns].
void sum_of(const ExpertArgs& a, const PackedRows& rows, int64_t begin, int64_t end, int64_t panel, int64_t panels,
            int64_t tile, float* total) {
  const PackedSpec& spec = *a.spec;
  const Routing& routing = a.routing;
  const int64_t stride = panels * kFeatures, column = panel * kFeatures;
  alignas(64) float sums[kMostRows * kTileStride];
  std::fill_n(total, (end - begin) * stride, 0.0f);
  for (int64_t p = 0; p < routing.num_places; ++p) {
    const auto of = [&](int64_t token) {  // the first of the expert's slots that is this token's, or a later one's
      return std::lower_bound(routing.slots + routing.starts[p], routing.slots + routing.starts[p + 1],
                              token * a.top_k) -
             routing.slots;
    };
    if (routing.starts[p] == routing.starts[p + 1]) continue;
    const int64_t first_slot = of(begin), end_slot = of(end);
    for (int64_t q = 0; q < panels; q += kTilePanels) {
      const int64_t some = std::min(kTilePanels, panels - q), from_column = column + q * kFeatures;
      const uint8_t* weight = a.weight + (p * spec.panels + panel + q) * spec.panel_bytes;
      const float* bias = a.bias ? a.bias + p * spec.features + from_column : nullptr;
      const int64_t width = bias ? std::min(some * kFeatures, spec.features - from_column) : some * kFeatures;
      for (int64_t first = first_slot; first < end_slot; first += tile) {
        const int64_t count = std::min(tile, end_slot - first);
        if (spec.blocks > 0)
          a.kernels->product(spec, rows.at(first), count, weight, some, sums, first == first_slot);
        else
          std::memset(sums, 0, count * kTileStride * sizeof(float));
        for (int64_t row = 0; row < count; ++row) {
          const int64_t slot = routing.slots[first + row];
          const float factor = routing.weights[slot];
          const float* from = sums + row * kTileStride;
          float* to = total + (slot / a.top_k - begin) * stride + q * kFeatures;
          if (bias)
            for (int64_t c = 0; c < width; ++c) to[c] += factor * (from[c] + bias[c]);
          else
            for (int64_t c = 0; c < width; ++c) to[c] += factor * from[c];
        }
      }
    }
  }
  const int64_t width = std::min(stride, spec.features - column);
  for (int64_t row = begin; row < end; ++row)
    a.elementwise->finish({a.epilogue, total + (row - begin) * stride, stride, nullptr, nullptr,
                           a.out + row * a.out_stride + column, a.out_stride, 1, width});
}

}  // namespace

void expert_product(Worker& worker, const ExpertArgs& a, int64_t rows) {
  const PackedSpec& spec = *a.spec;
  if (rows == 0 || spec.panels == 0) return;
  const PackedRows packed(worker, a, rows, !a.has_slots_rows);
  const int64_t tile = std::min(a.kernels->rows, kMostRows);
  const int64_t most = std::max<int64_t>(1, kRowBlockBytes / packed.row_bytes() / tile) * tile;
  const int64_t unit = unit_of(spec), units = spec.panels / unit;
  const int64_t group = kTilePanels / unit;
  std::vector<Block> blocks;
  worker.guard([&] { blocks_of(a.routing, most, blocks); });
  if (a.kernels->begin) a.kernels->begin();
  worker.stretch(static_cast<int64_t>(blocks.size()) * units, group, [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      const int64_t number = begin / units, first = number * units;
      stop = std::min({end, first + units, begin + group});
      product_of(a, packed, blocks[number], (begin - first) * unit, (stop - begin) * unit, tile);
    }
  });
  if (a.kernels->end) a.kernels->end();
}

void expert_sum(Worker& worker, const ExpertArgs& a, int64_t rows) {
  const PackedSpec& spec = *a.spec;
  if (rows == 0 || spec.panels == 0) return;
  const PackedRows packed(worker, a, rows, false);
  const int64_t tile = std::min(a.kernels->rows, kMostRows);
  const int64_t blocks = (rows + kSumRows - 1) / kSumRows;
  // Of few tokens each thread reads stretches of an expert that are as long as shares of the work may be.
  const int64_t most = rows <= kAlone ? spec.panels / (kShares * worker.threads()) / kTilePanels * kTilePanels : 0;
  const int64_t panels = std::max(kTilePanels, most), groups = (spec.panels + panels - 1) / panels;
  const int64_t held = std::min(rows, kSumRows) * panels * kFeatures;
  if (a.kernels->begin) a.kernels->begin();
  worker.stretch(blocks * groups, 1, [&](int64_t begin, int64_t end) {
    float* total = static_cast<float*>(worker.scratch(held * sizeof(float)));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / groups, panel = item % groups * panels;
      sum_of(a, packed, block * kSumRows, std::min(rows, (block + 1) * kSumRows), panel,
             std::min(panels, spec.panels - panel), tile, total);
    }
  });
  if (a.kernels->end) a.kernels->end();
}

}  // namespace allspan
