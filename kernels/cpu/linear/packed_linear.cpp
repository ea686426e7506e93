#include "linear/packed_linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace allspan {
namespace {

constexpr int64_t kMostRows = 128;             // of a tile: LinearKernels::rows is at most this
constexpr int64_t kAlone = 2;                  // so few rows every thread packs for itself, sooner than it could wait
constexpr int64_t kRowBlockBytes = 512 << 10;  // packed rows that stay in the second-level cache

constexpr int64_t kExpected = 256 << 10;  // bytes that a thread may ask for before a product begins

// Calls body(first panel, panels, columns) for each stretch of a tile's panels whose columns of out lie together.
template <class Body>
void for_stretches(const PackedLinearArgs& a, int64_t panel, int64_t panels, Body body) {
  const int64_t step = is_gated(a.epilogue) ? 2 : 1;
  for (int64_t p = 0; p < panels;) {
    const int64_t begin = p;
    Columns columns = columns_of(*a.spec, panel + p);
    for (p += step; p < panels; p += step) {
      const Columns next = columns_of(*a.spec, panel + p);
      if (next.first != columns.first + columns.count || columns.count % kFeatures) break;
      columns.count += next.count;
    }
    body(begin, columns);
  }
}

// A product's rows of x as its kernels take them, and as those of the first matrices of adapters do: the same, where
// their weights are of one type.
struct PackedRows {
  char* rows = nullptr;
  char* low_rows = nullptr;
  int64_t low_row_bytes = 0;
  char* room = nullptr;  // of a thread, for shrink()
  float* low = nullptr;  // what it makes, [rows, adapters.width()]
};

// Of few rows each thread packs all for itself.
PackedRows pack(Worker& worker, const PackedLinearArgs& a, const LayerAdapters* adapters, int64_t rows) {
  const LinearKernels &kernels = *a.kernels, *first = adapters ? adapters->kernels : nullptr;
  const int64_t row_bytes = kernels.row_bytes(*a.spec);
  PackedRows packed;
  if (adapters) packed.low_row_bytes = first->row_bytes(adapters->spec);
  const bool is_same = adapters && first->pack_row == kernels.pack_row && packed.low_row_bytes == row_bytes &&
                       a.spec->k_offset == adapters->spec.k_offset && a.spec->depth() == adapters->spec.depth();
  const bool is_shared = rows > kAlone;
  const int64_t bytes = rows * row_bytes, more = is_same || !adapters ? 0 : rows * packed.low_row_bytes;
  const int64_t room = is_shared && adapters ? std::min(rows, kMostTile) * packed.low_row_bytes : 0;
  const int64_t low = adapters ? (rows * adapters->width() * sizeof(float) + 63) / 64 * 64 : 0;
  char* const own = static_cast<char*>(worker.scratch(is_shared ? room : bytes + more));
  char* const common = static_cast<char*>(worker.shared(low + (is_shared ? bytes + more : 0)));
  packed.low = reinterpret_cast<float*>(common);
  packed.room = own;
  packed.rows = is_shared ? common + low : own;
  packed.low_rows = is_same ? packed.rows : packed.rows + bytes;
  const auto put = [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      kernels.pack_row(*a.spec, a.x + row * a.x_stride, packed.rows + row * row_bytes);
      if (more > 0)
        first->pack_row(adapters->spec, a.x + row * a.x_stride, packed.low_rows + row * packed.low_row_bytes);
    }
  };
  if (is_shared)
    worker.split(rows, 1, put);
  else
    put(0, rows);
  return packed;
}

// Asks for the lines of out that a tile goes to.
void fetch(const PackedLinearArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  constexpr int64_t kLineFloats = 16;
  const int64_t first = columns_of(*a.spec, panel).first, width = panels * kFeatures / unit_of(*a.spec);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < width; c += kLineFloats)
      __builtin_prefetch(a.out + (row + r) * a.out_stride + first + c, 1);
}

// The sums of a tile of `rows` rows and `panels` panels, from `panel` on, to the rows of out from `row` on.
void finish(const PackedLinearArgs& a, const float* sums, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  for_stretches(a, panel, panels, [&](int64_t begin, Columns columns) {
    const float* bias = a.bias ? a.bias + columns.first : nullptr;
    const float* second_bias = a.bias ? bias + a.spec->parts[0] : nullptr;
    a.elementwise->finish({a.epilogue, sums + begin * kFeatures, kTileStride, bias, second_bias,
                           a.out + row * a.out_stride + columns.first, a.out_stride, rows, columns.count});
  });
}

}  // namespace

void packed_linear(Worker& worker, const PackedLinearArgs& a, int64_t rows) {
  const PackedSpec& spec = *a.spec;
  if (rows == 0 || spec.panels == 0) return;
  const LinearKernels& kernels = *a.kernels;
  const LayerAdapters* const adapters = a.adapters && a.adapters->has_rows() ? a.adapters : nullptr;
  const int64_t row_bytes = kernels.row_bytes(spec);
  const PackedRows packed = pack(worker, a, adapters, rows);
  if (adapters) {
    shrink(worker, *adapters, packed.low_rows, packed.low_row_bytes, packed.room, packed.low);
    worker.arrive();
  }
  bool has_low = false;  // whether all of it is there
  const int64_t tile = std::min(kernels.rows, kMostRows);
  // Rows go in tiles, and these in blocks.
  const int64_t tiles = (rows + tile - 1) / tile;
  const int64_t block = std::max<int64_t>(1, kRowBlockBytes / row_bytes / tile), blocks = (tiles + block - 1) / block;
  const auto tiles_of = [&](int64_t first_panel, int64_t last_panel, int64_t first_tile, int64_t end_tile) {
    alignas(64) float sums[kMostRows * kTileStride];
    for (int64_t panel = first_panel; panel < last_panel; panel += kTilePanels) {
      const int64_t panels = std::min(kTilePanels, last_panel - panel);
      const uint8_t* weight = a.weight + panel * spec.panel_bytes;
      for (int64_t t = first_tile; t < end_tile; ++t) {
        const int64_t row = t * tile, count = std::min(tile, rows - row);
        const SumsTile at{row, count, panel, panels, sums, kTileStride};
        if (adapters) expect_sums(*adapters, at);
        if (spec.blocks > 0) {
          if (count > kAlone) fetch(a, row, count, panel, panels);
          kernels.product(spec, packed.rows + row * row_bytes, count, weight, panels, sums, t == first_tile);
        } else {  // a rank without inputs
          std::memset(sums, 0, count * kTileStride * sizeof(float));
        }
        if (adapters) {
          if (!std::exchange(has_low, true)) worker.await_arrivals();
          add_to_sums(*adapters, packed.low, at);
        }
        finish(a, sums, row, count, panel, panels);
      }
    }
  };
  if (kernels.begin) kernels.begin();
  // A thread's stretch of all blocks' panels is most often its own rows.
  const int64_t unit = unit_of(spec), units = spec.panels / unit;
  worker.stretch(blocks * units, kTilePanels / unit, [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      const int64_t in = begin / units, first = in * units;
      stop = std::min(end, first + units);
      tiles_of((begin - first) * unit, (stop - first) * unit, tiles * in / blocks, tiles * (in + 1) / blocks);
    }
  });
  if (kernels.end) kernels.end();
}

void expect_packed(Worker& worker, const PackedSpec& spec, const uint8_t* weight) {
  const int64_t unit = unit_of(spec);
  const auto [first, last] = worker.own(spec.panels / unit);
  const char* const begin = reinterpret_cast<const char*>(weight) + first * unit * spec.panel_bytes;
  worker.expect(begin, begin + std::min(kExpected, (last - first) * unit * spec.panel_bytes));
}

void packed_embedding(Worker& worker, const PackedSpec& spec, const LinearKernels& kernels, const uint8_t* weight,
                      const int32_t* ids, int64_t count, int64_t first_row, float* out) {
  worker.split(count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t feature = ids[i] - first_row;
      float* to = out + i * spec.inputs;
      if (feature < 0 || feature >= spec.features) {
        std::memset(to, 0, spec.inputs * sizeof(float));
      } else {
        const uint8_t* panel = weight + feature / kFeatures * spec.panel_bytes;
        kernels.unpack_feature(spec, panel, feature % kFeatures, to);
      }
    }
  });
}

}  // namespace allspan
