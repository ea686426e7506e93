// Compiled with the flags of avx512, -mamx-tile and -mamx-bf16; reached only after isa.cpp has found what they need
// and the operating system has granted the tiles.
//
// A tile of weights is 32 inputs of a panel: 16 rows of 64 bytes, as they lie in memory. One instruction multiplies it
// by 32 inputs of up to 16 rows of x and adds the products to 16 x 16 sums.
#include "isa/simd_avx512.h"
#include "linear/linear_float.h"

#include "linear/linear_float.inc"

namespace {

constexpr int64_t kTileRows = 16;                       // of x
constexpr int64_t kTileBytes = kTileRows * kStepBytes;  // of a panel: 32 inputs
constexpr int64_t kInputBytes = 64;                     // of a row of x
// Tiles along the input whose weights (64 KB of four panels) stay near while all rows of the call go over them.
constexpr int64_t kBlockTiles = 16;
constexpr int64_t kAheadTiles = 2;  // one tile of rows alone streams its weights, and fetches them so far ahead
constexpr int64_t kMostCallRows = 128;
constexpr int64_t kSumsBytes = kTileStride * sizeof(float);

// Tiles 0 … 3: sums; 4, 5: x; 6, 7: weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {};
};

void configure(int64_t top, int64_t bottom) {
  TileConfig config;
  const uint8_t upper = static_cast<uint8_t>(top), lower = static_cast<uint8_t>(bottom);
  const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
  std::memcpy(config.rows, rows, sizeof rows);
  _tile_loadconfig(&config);
}

struct TileBlock {
  const char* x;
  int64_t row_bytes;
  const uint8_t* weight;
  int64_t panel_bytes;
  int64_t tiles;  // along the input
  bool resume;    // go on from `sums`
  int64_t ahead;  // bytes from a tile of weights to the one to fetch now; 0: none
};

inline void fetch(const uint8_t* weight) {
  for (int64_t line = 0; line < kTileBytes; line += 64) __builtin_prefetch(weight + line);
}

// At most 16 rows over four panels.
void product_flat(const TileBlock& b, int64_t panels, float* sums) {
  if (b.resume) {
    _tile_loadd(0, sums, kSumsBytes);
    _tile_loadd(1, sums + kFeatures, kSumsBytes);
    _tile_loadd(2, sums + 2 * kFeatures, kSumsBytes);
    _tile_loadd(3, sums + 3 * kFeatures, kSumsBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  // Of fewer panels the last stands in for those that are not there.
  const int64_t last = panels - 1;
  const int64_t second = smaller(1, last) * b.panel_bytes, third = smaller(2, last) * b.panel_bytes;
  const int64_t fourth = last * b.panel_bytes;
  for (int64_t tile = 0; tile < b.tiles; ++tile) {
    const uint8_t* weight = b.weight + tile * kTileBytes;
    _tile_loadd(4, b.x + tile * kInputBytes, b.row_bytes);
    fetch(weight + b.ahead);
    _tile_loadd(6, weight, kStepBytes);
    _tile_dpbf16ps(0, 4, 6);
    fetch(weight + second + b.ahead);
    _tile_loadd(7, weight + second, kStepBytes);
    _tile_dpbf16ps(1, 4, 7);
    fetch(weight + third + b.ahead);
    _tile_loadd(6, weight + third, kStepBytes);
    _tile_dpbf16ps(2, 4, 6);
    fetch(weight + fourth + b.ahead);
    _tile_loadd(7, weight + fourth, kStepBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(1, sums + kFeatures, kSumsBytes);
  _tile_stored(2, sums + 2 * kFeatures, kSumsBytes);
  _tile_stored(3, sums + 3 * kFeatures, kSumsBytes);
}

// 17 to 32 rows over two panels, or the first of them alone.
template <int kPanels>
void product_square(const TileBlock& b, float* sums) {
  const char* below = b.x + kTileRows * b.row_bytes;
  float* sums_below = sums + kTileRows * kTileStride;
  if (b.resume) {
    _tile_loadd(0, sums, kSumsBytes);
    _tile_loadd(2, sums_below, kSumsBytes);
    if (kPanels == 2) _tile_loadd(1, sums + kFeatures, kSumsBytes);
    if (kPanels == 2) _tile_loadd(3, sums_below + kFeatures, kSumsBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t tile = 0; tile < b.tiles; ++tile) {
    const uint8_t* weight = b.weight + tile * kTileBytes;
    _tile_loadd(6, weight, kStepBytes);
    _tile_loadd(4, b.x + tile * kInputBytes, b.row_bytes);
    if (b.ahead) fetch(weight + b.ahead);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, below + tile * kInputBytes, b.row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if (kPanels == 2) {
      _tile_loadd(7, weight + b.panel_bytes, kStepBytes);
      if (b.ahead) fetch(weight + b.panel_bytes + b.ahead);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kSumsBytes);
  _tile_stored(2, sums_below, kSumsBytes);
  if (kPanels == 2) _tile_stored(1, sums + kFeatures, kSumsBytes);
  if (kPanels == 2) _tile_stored(3, sums_below + kFeatures, kSumsBytes);
}

// Rows that are all whole squares, or fewer than one.
void product_part(const PackedSpec& spec, const char* x, int64_t x_bytes, int64_t rows, const uint8_t* weight,
                  int64_t panels, float* sums, bool ahead) {
  constexpr int64_t kSquare = 2 * kTileRows;
  const bool flat = rows <= kTileRows;
  configure(smaller(rows, kTileRows), flat ? rows : rows >= kSquare ? kTileRows : rows - kTileRows);
  const int64_t tiles = spec.panel_bytes / kTileBytes, distance = flat ? kAheadTiles : kBlockTiles;
  TileBlock b{x, x_bytes, weight, spec.panel_bytes, 0, false, 0};
  for (int64_t tile = 0; tile < tiles; tile += b.tiles) {
    // The last tiles of a panel fetch the first of those that come after this call's.
    const int64_t before_last = tiles - tile - distance;
    b.tiles = !flat ? smaller(kBlockTiles, tiles - tile) : before_last > 0 ? before_last : tiles - tile;
    b.resume = tile > 0;
    const int64_t fetched = (distance + (before_last <= 0 && ahead ? (panels - 1) * tiles : 0)) * kTileBytes;
    for (int64_t row = 0; row < rows; row += kSquare) {
      b.ahead = row == 0 ? fetched : 0;
      b.x = x + row * x_bytes + tile * kInputBytes;
      b.weight = weight + tile * kTileBytes;
      float* to = sums + row * kTileStride;
      if (flat) {
        product_flat(b, panels, to);
        continue;
      }
      int64_t panel = 0;
      for (; panel + 2 <= panels; panel += 2, b.weight += 2 * b.panel_bytes)
        product_square<2>(b, to + panel * kFeatures);
      if (panel < panels) product_square<1>(b, to + panel * kFeatures);
    }
  }
}

struct TileDot : OneByOne {
  typedef uint16_t Input;
  static uint16_t input(float x) { return round_to_bf16(x); }
};

void tile_product(const PackedSpec& spec, const void* packed, int64_t rows, const uint8_t* weight, int64_t panels,
                  float* sums, bool ahead) {
  const int64_t x_bytes = row_bytes<TileDot>(spec), squares = rows / (2 * kTileRows) * 2 * kTileRows;
  const char* x = static_cast<const char*>(packed);
  if (squares > 0) product_part(spec, x, x_bytes, squares, weight, panels, sums, ahead && squares == rows);
  if (squares < rows)
    product_part(spec, x + squares * x_bytes, x_bytes, rows - squares, weight, panels, sums + squares * kTileStride,
                 ahead);
}

void release_tiles() { _tile_release(); }

}  // namespace

const allspan::LinearKernels allspan::kBfloat16Amx = {"amx_bf16",        kMostCallRows,  row_bytes<TileDot>,
                                                      pack_row<TileDot>, tile_product,   nullptr,
                                                      release_tiles,     unpack_bfloat16};
