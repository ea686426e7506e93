// Formats with scales per channel on tiles of bytes: 16 rows x 16 features x 64 inputs an instruction. The sums are
// exact, so the bits are those of the other kernels; few rows take the dot products of AVX-512 VNNI, which waste
// nothing on them, and so do formats with a scale for every 32 inputs: tiles would leave too many sums to scale.
// Compiled with -mamx-tile -mamx-int8 -mavx512vnni; reached only after isa.cpp has found them.
#include "isa/simd_int_avx512.h"

#include "linear/integer/linear_int.inc"

namespace {

constexpr Size kTile = 16;                              // rows of a tile
constexpr Size kDeep = 64;                              // inputs of a tile
constexpr Size kSubs = kChannelGroup / kGroup;          // groups of 32 codes for one scale of x
constexpr Size kCodeBytes = kChannelGroup * kFeatures;  // codes of a panel for them
constexpr Size kFewRows = 4;                            // VNNI takes these sooner
constexpr Size kRows = 64, kScales = 2;  // rows and scales of x whose numbers stay in the first-level cache

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

// A tile's rows of x: in place, or copied where there are fewer than 16, so that nothing is read below them.
struct Rows {
  const char* x;
  Size stride, count;
  alignas(64) char copy[kTile * kDeep];

  Rows(const char* x, Size stride, Size count) : x(x), stride(stride), count(count) {}
  const char* at(Size offset) {
    if (count >= kTile) return x + offset;
    for (Size r = 0; r < count; ++r) _mm512_store_si512(copy + r * kDeep, _mm512_loadu_si512(x + r * stride + offset));
    return copy;
  }
  Size step() const { return count >= kTile ? stride : kDeep; }
};

// Codes of a panel as bytes, for one scale of x: in place where they lie so already.
template <class T>
inline const uint8_t* bytes_of(const uint8_t* codes, Size subs, uint8_t* to) {
  if (T::bits == 8 && subs == kSubs) return codes;
  for (Size s = 0; s < kSubs; ++s) {
    for (int quad = 0; quad < 8; ++quad, to += 64) {
      _mm512_store_si512(to, s < subs ? quad_codes<T>(codes + s * (64 * T::bits), quad) : zero_int());
    }
  }
  return to - kCodeBytes;
}

// Sums of products of up to 32 rows and two panels for one scale of x: [pass][tile of rows][panel][16 rows][16
// features].
template <class T>
using Dots = int32_t[T::passes][2][2][kTile * kFeatures];

template <class T>
inline void dot_tiles(Rows& upper, Rows& lower, bool both, Size scale, const uint8_t* const* codes, Dots<T>& dots) {
  for (int pass = 0; pass < T::passes; ++pass) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (Size half = 0; half < kChannelGroup / kDeep; ++half) {
      const Size at = scale * T::number_bytes + pass * T::pass_bytes + half * kDeep;
      const char *high = upper.at(at), *low = both ? lower.at(at) : nullptr;
      remember();
      _tile_loadd(4, high, upper.step());
      _tile_loadd(6, codes[0] + half * (kDeep * kFeatures), 64);
      _tile_loadd(7, codes[1] + half * (kDeep * kFeatures), 64);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if (both) {
        _tile_loadd(5, low, lower.step());
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, dots[pass][0][0], 64);
    _tile_stored(1, dots[pass][0][1], 64);
    if (both) {
      _tile_stored(2, dots[pass][1][0], 64);
      _tile_stored(3, dots[pass][1][1], 64);
    }
    remember();
  }
}

template <class T>
inline void add_dots(const Dots<T>& dots, const char* groups, Size stride, Size rows, bool begins, float* sums) {
  for (Size r = 0; r < rows; ++r) {
    const V x_scale = broadcast(groups + r * stride);
    for (Size p = 0; p < 2; ++p) {
      const Size at = r % kTile * kFeatures;
      I sum = load_int(dots[0][r / kTile][p] + at);
      if (T::passes == 2) sum = add(shift8(sum), load_int(dots[T::passes - 1][r / kTile][p] + at));
      float* acc = sums + r * kTileStride + p * kFeatures;
      store(acc, fma(to_float(sum), x_scale, begins ? zero() : load(acc)));
    }
  }
}

// Rows of x and two panels, from one scale of x on to another.
struct Part {
  const char *x, *groups;
  Size stride, rows;
  const uint8_t *first, *second;
  Size begin, end, blocks, block_bytes;
};

// While the tiles take the products for one scale, the vectors add those for the one before.
template <class T>
void tile_part(const Part& part, float* sums) {
  alignas(64) Dots<T> dots[2];
  alignas(64) uint8_t codes[2][kCodeBytes];
  const bool both = part.rows > kTile;
  Rows upper(part.x, part.stride, part.rows), lower(part.x + kTile * part.stride, part.stride, part.rows - kTile);
  const auto scale_of = [&](Size scale) { return part.groups + scale * static_cast<Size>(sizeof(Group)); };
  for (Size scale = part.begin; scale < part.end; ++scale) {
    const Size at = scale * kSubs * part.block_bytes, subs = lesser(kSubs, part.blocks - scale * kSubs);
    const uint8_t* from[2] = {bytes_of<T>(part.first + at, subs, codes[0]),
                              bytes_of<T>(part.second + at, subs, codes[1])};
    dot_tiles<T>(upper, lower, both, scale, from, dots[scale % 2]);
    if (scale > part.begin)
      add_dots<T>(dots[(scale - 1) % 2], scale_of(scale - 1), part.stride, part.rows, scale == 1, sums);
  }
  add_dots<T>(dots[(part.end - 1) % 2], scale_of(part.end - 1), part.stride, part.rows, part.end == 1, sums);
}

template <Format F, Mode M>
void product_tiles(const PackedSpec& spec, const void* packed, Size rows, const uint8_t* weight, Size panels,
                   float* sums, bool ahead) {
  if (rows <= kFewRows || spec.blocks == 0) return product<F, M>(spec, packed, rows, weight, panels, sums, ahead);
  using T = Traits<F, M>;
  const Size stride = row_bytes<F, M>(spec), scales = scales_of<T>(spec);
  const char* x = static_cast<const char*>(packed);
  const char* groups = x + scales * T::number_bytes;
  for (Size begin = 0; begin < scales; begin += kScales) {
    for (Size p = 0; p < panels; p += 2) {
      const uint8_t* first = weight + p * spec.panel_bytes + spec.head_bytes;
      const uint8_t* second = p + 1 < panels ? first + spec.panel_bytes : first;
      for (Size r = 0; r < rows; r += 2 * kTile) {
        const Part part = {x + r * stride, groups + r * stride,
                           stride,         lesser(2 * kTile, rows - r),
                           first,          second,
                           begin,          lesser(begin + kScales, scales),
                           spec.blocks,    spec.block_bytes};
        tile_part<T>(part, sums + r * kTileStride + p * kFeatures);
      }
    }
  }
  finish<T>(spec, groups + scales * static_cast<Size>(sizeof(Group)), stride, rows, weight, panels, sums);
}

template <Format F, Mode M>
constexpr LinearKernels with_tiles() {
  LinearKernels kernels = kernels_of<F, M>("amx_int8");
  kernels.rows = kRows;
  kernels.product = product_tiles<F, M>;
  kernels.begin = begin_tiles, kernels.end = end_tiles;
  return kernels;
}

}  // namespace

const LinearKernels allspan::kIntegerAmx[2][2] = {
    {with_tiles<Format::kChannel8, kModeA8>(), with_tiles<Format::kChannel8, kModeA16>()},
    {with_tiles<Format::kChannel4, kModeA8>(), with_tiles<Format::kChannel4, kModeA16>()},
};
