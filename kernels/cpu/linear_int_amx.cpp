// channel8 with a8row on tiles of bytes: 16 rows x 16 features x 64 inputs an instruction. The sums are exact, so the
// bits are those of the other kernels; few rows take the dot products of AVX-512 VNNI, which waste nothing on them.
// Compiled with -mamx-tile -mamx-int8 -mavx512vnni; reached only after isa.cpp has found them.
#define ALLSPAN_VNNI 1
#include "simd_int_avx512.h"

#include "linear_int.inc"

namespace {

constexpr Size kTile = 16;  // rows of a tile
constexpr Size kDeep = 64;  // inputs of a tile
constexpr Size kFewRows = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The compiler's tile instructions do not say that they read and write memory.
inline void remember() { asm volatile("" ::: "memory"); }

// All eight tiles are 16 rows of 64 bytes. What lies below the rows that are there is computed and dropped.
void begin_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  remember();
  _tile_loadconfig(&config);
}
void end_tiles() { _tile_release(); }

// Where a tile of x lies: in place, or copied where there are fewer than 16 rows, so that nothing is read below them.
struct Rows {
  const char* x;
  Size stride, count;
  alignas(64) char copy[kTile * kDeep];

  Rows(const char* x, Size stride, Size count) : x(x), stride(stride), count(count) {}
  const char* at(Size group) {
    if (count >= kTile) return x + group * kGroup;
    for (Size r = 0; r < count; ++r)
      _mm512_store_si512(copy + r * kDeep, _mm512_loadu_si512(x + r * stride + group * kGroup));
    return copy;
  }
  Size step() const { return count >= kTile ? stride : kDeep; }
};

// Up to 32 rows and two panels.
void tile_quad(const char* x, Size stride, Size rows, const uint8_t* first, const uint8_t* second, Size groups,
               float* sums) {
  const bool both = rows > kTile;
  Rows upper(x, stride, rows), lower(x + kTile * stride, stride, rows - kTile);
  alignas(64) uint8_t last[2][1024];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (Size g = 0; g < groups; g += 2) {
    const uint8_t *a = first + g * 512, *b = second + g * 512;
    if (g + 1 == groups) {
      __builtin_memset(last, 0, sizeof last);
      __builtin_memcpy(last[0], a, 512), __builtin_memcpy(last[1], b, 512);
      a = last[0], b = last[1];
    }
    const char *high = upper.at(g), *low = both ? lower.at(g) : nullptr;
    remember();
    _tile_loadd(4, high, upper.step());
    _tile_loadd(6, a, 64);
    _tile_loadd(7, b, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    if (both) {
      _tile_loadd(5, low, lower.step());
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  constexpr Size kStride = kTileStride * sizeof(float);
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kFeatures, kStride);
  if (both) {
    _tile_stored(2, sums + kTile * kTileStride, kStride);
    _tile_stored(3, sums + kTile * kTileStride + kFeatures, kStride);
  }
  remember();
}

void product_tiles(const PackedSpec& spec, const void* packed, Size rows, const uint8_t* weight, Size panels,
                   float* sums, bool ahead) {
  if (rows <= kFewRows || spec.blocks == 0)
    return product<Format::kChannel8, kModeRow>(spec, packed, rows, weight, panels, sums, ahead);
  using T = Traits<Format::kChannel8, kModeRow>;
  const Size stride = row_bytes<Format::kChannel8, kModeRow>(spec);
  const char* x = static_cast<const char*>(packed);
  for (Size p = 0; p < panels; p += 2) {
    const uint8_t* first = weight + p * spec.panel_bytes + spec.head_bytes;
    const uint8_t* second = p + 1 < panels ? first + spec.panel_bytes : first;
    tile_quad(x, stride, rows, first, second, spec.blocks, sums + p * kFeatures);
  }
  finish<T>(spec, x, stride, rows, weight, panels, sums);
}

constexpr LinearKernels make_amx() {
  LinearKernels kernels = kernels_of<Format::kChannel8, kModeRow>("amx_int8");
  kernels.rows = 2 * kTile;
  kernels.product = product_tiles;
  kernels.begin = begin_tiles, kernels.end = end_tiles;
  return kernels;
}

}  // namespace

const LinearKernels allspan::kIntegerAmx = make_amx();
