#include "linear/packer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace allspan {
namespace {

constexpr int64_t kMostBlock = 512;

int bits_of(Format format) {
  switch (format) {
    case Format::kF32:
      return 32;
    case Format::kBf16:
      return 16;
    case Format::kChannel8:
    case Format::kGroup8:
    case Format::kQ8_0:
      return 8;
    case Format::kQ6K:
      return 6;
    case Format::kQ3K:
    case Format::kIq2Xxs:
    case Format::kIq2Xs:
    case Format::kIq2S:
      return 3;
    case Format::kQ2K:
      return 2;
    case Format::kQ5_0:
    case Format::kQ5_1:
    case Format::kQ5K:
      return 5;
    default:
      return 4;
  }
}

// body(panel, first row, rows of it) for each panel that the rows fill; the panel is zeros.
template <class Body>
void each_panel(Pool& pool, int64_t rows, const PackTarget& target, Body body) {
  const PackedSpec& spec = *target.spec;
  int64_t base = target.first, step = 1;
  if (spec.interleaved) {
    base = 2 * base + target.part;
    step = 2;
  } else {
    for (int64_t part = 0; part < target.part; ++part) base += (spec.parts[part] + kFeatures - 1) / kFeatures;
  }
  pool.run(static_cast<int>((rows + kFeatures - 1) / kFeatures), [&](int task, int) {
    uint8_t* panel = target.weight + (base + step * task) * spec.panel_bytes;
    std::memset(panel, 0, spec.panel_bytes);
    body(panel, task * kFeatures, std::min(kFeatures, rows - task * kFeatures));
  });
}

// Words of a row of `words` → every 16th word of the panel.
void scatter_words(const char* row, int64_t words, uint8_t* panel, int64_t feature) {
  for (int64_t i = 0; i < words; ++i) std::memcpy(panel + (i * kFeatures + feature) * 4, row + i * 4, 4);
}

void put(uint8_t* at, int64_t index, uint32_t word) { std::memcpy(at + index * 4, &word, 4); }

// Bits 0 and 1 of the codes, and bit 2 behind them.
void put_few_bits(int bits, const uint32_t* quads, int64_t feature, uint8_t* group) {
  for (int64_t half = 0; half < 2; ++half) {
    uint32_t pairs = 0;
    for (int64_t j = 0; j < 4; ++j) pairs |= (quads[half * 4 + j] & 0x03030303u) << (2 * j);
    put(group, half * kFeatures + feature, pairs);
  }
  for (int64_t q = 0; bits == 3 && q < 8; ++q) {
    const uint32_t four = (quads[q] >> 2 & 0x01010101u) * 0x01020408u >> 24;
    group[128 + q * 8 + feature / 2] |= static_cast<uint8_t>(four << (feature % 2 * 4));
  }
}

// 32 codes of a feature to where a panel has the feature's share of their group.
void put_codes(int bits, const uint8_t* codes, int64_t feature, uint8_t* group) {
  uint32_t quads[8];
  std::memcpy(quads, codes, sizeof quads);
  if (bits == 8) {
    for (int64_t q = 0; q < 8; ++q) put(group, q * kFeatures + feature, quads[q]);
    return;
  }
  if (bits < 4) return put_few_bits(bits, quads, feature, group);
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int64_t q = 0; q < 4; ++q) put(group, q * kFeatures + feature, (quads[q] & kLow) | (quads[q + 4] & kLow) << 4);
  uint8_t* rest = group + 256;
  if (bits == 5) {
    // The product gathers the bits of four bytes in its highest.
    for (int64_t q = 0; q < 8; ++q) {
      const uint32_t four = (quads[q] >> 4 & 0x01010101u) * 0x01020408u >> 24;
      rest[q * 8 + feature / 2] |= static_cast<uint8_t>(four << (feature % 2 * 4));
    }
  } else if (bits == 6) {
    for (int64_t half = 0; half < 2; ++half) {
      uint32_t pairs = 0;
      for (int64_t j = 0; j < 4; ++j) pairs |= (quads[half * 4 + j] >> 4 & 0x03030303u) << (2 * j);
      put(rest, half * kFeatures + feature, pairs);
    }
  }
}

void put_block(const PackedSpec& spec, const uint8_t* codes, int64_t feature, uint8_t* at) {
  const int bits = bits_of(spec.format);
  for (int64_t group = 0; group < spec.block / kGroup; ++group)
    put_codes(bits, codes + group * kGroup, feature, at + group * kGroup * kFeatures * bits / 8);
}

// Rounded to nearest even; NaN, infinity and what is too large for float16 (infinity) included.
uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // a subnormal half: adding 0.5 leaves the unit 2^-24 in the lowest bit
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0x0fff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

float to_float(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  float value;
  if (exponent == 31) {
    value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else {
    value = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
  }
  return half & 0x8000 ? -value : value;
}

struct Range {
  float scale, offset;
};

// Of values that share a scale. With `exact_zero` it is moved by up to half a step, so that 0 has a code of its own: of
// the inputs that a model makes huge most features take next to nothing, and that must not become noise.
Range range_of(const float* values, int64_t count, float most, bool exact_zero) {
  constexpr int kLanes = 16;
  float least[kLanes], largest[kLanes], poison[kLanes];
  std::fill_n(least, kLanes, std::numeric_limits<float>::infinity());
  std::fill_n(largest, kLanes, -std::numeric_limits<float>::infinity());
  std::fill_n(poison, kLanes, 0.0f);
  const auto see = [&](int lane, float value) {
    least[lane] = value < least[lane] ? value : least[lane];
    largest[lane] = value > largest[lane] ? value : largest[lane];
    poison[lane] += value * 0.0f;  // NaN for a NaN or an infinity
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) see(lane, values[i + lane]);
  for (; i < count; ++i) see(0, values[i]);
  for (int lane = 1; lane < kLanes; ++lane) {
    least[0] = std::min(least[0], least[lane]);
    largest[0] = std::max(largest[0], largest[lane]);
    poison[0] += poison[lane];
  }
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  if (std::isnan(poison[0])) return {kNan, kNan};
  const float scale = (largest[0] - least[0]) / most;
  if (scale == 0.0f) return {1.0f, -least[0]};
  const float zero = std::nearbyint(-least[0] / scale);
  return {scale, exact_zero && zero >= 0.0f && zero <= most ? zero * scale : -least[0]};
}

void codes_of(const float* values, int64_t count, Range range, float most, uint8_t* codes) {
  constexpr float kRound = 8388608.0f;  // 2^23: adding it rounds to a whole number, halves to even
  for (int64_t i = 0; i < count; ++i) {
    float code = (values[i] + range.offset) / range.scale;
    code = code > 0.0f ? code : 0.0f;
    code = code < most ? code : most;
    code += kRound;
    uint32_t bits;
    std::memcpy(&bits, &code, 4);
    codes[i] = static_cast<uint8_t>(bits);
  }
}

void put_scales(uint8_t* at, int64_t feature, Range range, bool halves) {
  if (!halves) {
    std::memcpy(at + feature * 4, &range.scale, 4);
    std::memcpy(at + (kFeatures + feature) * 4, &range.offset, 4);
    return;
  }
  const uint16_t scale = to_half(range.scale), offset = to_half(range.offset);
  std::memcpy(at + feature * 2, &scale, 2);
  std::memcpy(at + (kFeatures + feature) * 2, &offset, 2);
}

void quantise_groups(const PackedSpec& spec, const float* values, int64_t columns, int64_t feature, uint8_t* panel) {
  const float most = bits_of(spec.format) == 8 ? 255.0f : 15.0f;
  for (int64_t block = 0; block < spec.blocks; ++block) {
    const int64_t count = std::min(spec.block, columns - block * spec.block);
    if (count <= 0) return;
    const float* from = values + block * spec.block;
    Range range = range_of(from, count, most, false);
    range.scale = range.scale < 0x1p-24f ? 0x1p-24f : range.scale;
    range = {to_float(to_half(range.scale)), to_float(to_half(range.offset))};
    alignas(64) uint8_t codes[kMostBlock] = {};
    codes_of(from, count, range, most, codes);
    uint8_t* at = panel + block * spec.block_bytes;
    put_scales(at, feature, range, true);
    put_block(spec, codes, feature, at + 4 * kFeatures);
  }
}

void quantise_channel(const PackedSpec& spec, const float* values, int64_t columns, int64_t before, int64_t feature,
                      uint8_t* panel) {
  const float most = bits_of(spec.format) == 8 ? 255.0f : 15.0f;
  const Range range = range_of(values, columns, most, most == 255.0f);
  put_scales(panel, feature, range, false);
  for (int64_t block = 0; block < spec.blocks; ++block) {
    alignas(64) uint8_t codes[kGroup] = {};
    const int64_t count = std::min(kGroup, spec.inputs - block * kGroup);
    codes_of(values + before + block * kGroup, count, range, most, codes);
    put_block(spec, codes, feature, panel + spec.head_bytes + block * spec.block_bytes);
  }
}

// Codes of 4 bits: all low halves of `count` bytes, then all high ones.
void halves(const uint8_t* bytes, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = bytes[i] & 15;
    codes[count + i] = bytes[i] >> 4;
  }
}

void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  for (int64_t i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((bits[i / 8] >> (i % 8) & 1) << 4);
}

// Float16 that becomes number `index` of a feature's; `sign` is turned over with it.
void put_half(const uint8_t* half, uint8_t* at, int64_t index, int64_t feature, uint8_t sign = 0) {
  uint8_t* to = at + (index * kFeatures + feature) * 2;
  to[0] = half[0];
  to[1] = half[1] ^ sign;
}

// q4_k and q5_k: d, dmin, and 8 scales and 8 minima of 6 bits in 12 bytes.
void put_super_scales(const uint8_t* raw, int64_t feature, uint8_t* at) {
  put_half(raw, at, 0, feature);
  put_half(raw + 2, at, 1, feature);
  const uint8_t *low = raw + 4, *middle = raw + 8, *last = raw + 12;
  uint8_t *scales = at + 4 * kFeatures + feature, *mins = scales + 8 * kFeatures;
  for (int64_t i = 0; i < 4; ++i) {
    scales[i * kFeatures] = low[i] & 63;
    scales[(i + 4) * kFeatures] = static_cast<uint8_t>((last[i] & 15) | low[i] >> 6 << 4);
    mins[i * kFeatures] = middle[i] & 63;
    mins[(i + 4) * kFeatures] = static_cast<uint8_t>(last[i] >> 4 | middle[i] >> 6 << 4);
  }
}

void decode_q6k(const uint8_t* raw, int64_t feature, uint8_t* at, uint8_t* codes) {
  for (int64_t part = 0; part < 2; ++part) {
    uint8_t* to = codes + part * 128;
    halves(raw + part * 64, 64, to);
    for (int64_t i = 0; i < 128; ++i)
      to[i] |= static_cast<uint8_t>((raw[128 + part * 32 + i % 32] >> (i / 32 * 2) & 3) << 4);
  }
  put_half(raw + 208, at, 0, feature);
  for (int64_t i = 0; i < 16; ++i) at[2 * kFeatures + i * kFeatures + feature] = raw[192 + i];
}

// Pairs of bits: of every 32 bytes all lowest ones first.
void in_128s(const uint8_t* bytes, uint8_t* codes) {
  for (int64_t i = 0; i < 256; ++i) codes[i] = bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

void put_scale(uint8_t* at, int64_t index, int64_t feature, int scale) {
  at[2 * kFeatures + index * kFeatures + feature] = static_cast<uint8_t>(scale);
}

void decode_q3k(const uint8_t* raw, int64_t feature, uint8_t* at, uint8_t* codes) {
  in_128s(raw + 32, codes);
  for (int64_t i = 0; i < 256; ++i) codes[i] |= static_cast<uint8_t>((raw[i % 32] >> (i / 32) & 1) << 2);
  put_half(raw + 108, at, 0, feature);
  for (int64_t i = 0; i < 16; ++i) {
    const int low = raw[96 + i % 8] >> (i / 8 * 4) & 15, high = raw[104 + i % 4] >> (i / 4 * 2) & 3;
    put_scale(at, i, feature, (low | high << 4) - 32);
  }
}

void decode_q2k(const uint8_t* raw, int64_t feature, uint8_t* at, uint8_t* codes) {
  in_128s(raw + 16, codes);
  put_half(raw + 80, at, 0, feature);
  put_half(raw + 82, at, 1, feature);
  for (int64_t i = 0; i < 16; ++i) at[4 * kFeatures + i * kFeatures + feature] = raw[i];
}

void decode_iq4xs(const uint8_t* raw, int64_t feature, uint8_t* at, uint8_t* codes) {
  put_half(raw, at, 0, feature);
  for (int64_t i = 0; i < 8; ++i) {
    const int low = raw[4 + i / 2] >> (i % 2 * 4) & 15, high = raw[2 + i / 4] >> (i % 4 * 2) & 3;
    put_scale(at, i, feature, (low | high << 4) - 32);
    halves(raw + 8 + i * 16, 16, codes + i * 32);
  }
}

uint32_t word_at(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

// Seven signs of eight: the last one makes their number even.
uint32_t with_parity(uint32_t seven) {
  seven &= 127;
  return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7;
}

// Scales of 4 bits, two a byte, of which 2 n + 1 counts.
void put_odd_scales(const uint8_t* scales, int64_t count, int64_t feature, uint8_t* at) {
  for (int64_t i = 0; i < count; ++i) put_scale(at, i, feature, 2 * (scales[i / 2] >> (i % 2 * 4) & 15) + 1);
}

// Types whose weights have their magnitudes together, four or eight of them, in a grid: `number(i)` and the signs
// `eight(i)` are those of the weights from 8 i on; of grids of four, number(i, half).
template <class Number, class Signs>
void from_grid(const uint8_t* grid, int64_t weights, Number number, Signs eight, uint8_t* codes) {
  const int64_t sign_bit = weights == 8 ? 2 : 3;
  for (int64_t i = 0; i < 32; ++i) {
    const uint32_t signs = eight(i);
    for (int64_t j = 0; j < 8; ++j) {
      const uint8_t code = grid[number(i, j / weights) * weights + j % weights];
      codes[i * 8 + j] = static_cast<uint8_t>(code | (signs >> j & 1) << sign_bit);
    }
  }
}

void decode_iq3(Format format, const uint8_t* raw, const uint8_t* grid, int64_t feature, uint8_t* at, uint8_t* codes) {
  put_half(raw, at, 0, feature);
  const uint8_t* low = raw + 2;
  if (format == Format::kIq3Xxs) {
    for (int64_t i = 0; i < 8; ++i)
      put_scale(at, i, feature, static_cast<int>(2 * (word_at(raw + 66 + i * 4) >> 28) + 1));
    return from_grid(
        grid, 4, [&](int64_t i, int64_t half) -> int64_t { return low[2 * i + half]; },
        [&](int64_t i) { return with_parity(word_at(raw + 66 + i / 4 * 4) >> (i % 4 * 7)); }, codes);
  }
  put_odd_scales(raw + 106, 8, feature, at);
  from_grid(
      grid, 4,
      [&](int64_t i, int64_t half) -> int64_t {
        const int64_t n = 2 * i + half;
        return low[n] | (raw[66 + n / 8] >> (n % 8) & 1) << 8;
      },
      [&](int64_t i) -> uint32_t { return raw[74 + i]; }, codes);
}

void decode_iq2(Format format, const uint8_t* raw, const uint8_t* grid, int64_t feature, uint8_t* at, uint8_t* codes) {
  put_half(raw, at, 0, feature);
  if (format == Format::kIq2Xxs) {
    const auto words = [&](int64_t i) { return raw + 2 + i / 4 * 8; };
    for (int64_t i = 0; i < 8; ++i)
      put_scale(at, i, feature, static_cast<int>(2 * (word_at(words(i * 4) + 4) >> 28) + 1));
    return from_grid(
        grid, 8, [&](int64_t i, int64_t) -> int64_t { return words(i)[i % 4]; },
        [&](int64_t i) { return with_parity(word_at(words(i) + 4) >> (i % 4 * 7)); }, codes);
  }
  if (format == Format::kIq2Xs) {
    const auto word = [&](int64_t i) { return static_cast<uint32_t>(raw[2 + 2 * i] | raw[3 + 2 * i] << 8); };
    put_odd_scales(raw + 66, 16, feature, at);
    return from_grid(
        grid, 8, [&](int64_t i, int64_t) -> int64_t { return word(i) & 511; },
        [&](int64_t i) { return with_parity(word(i) >> 9); }, codes);
  }
  put_odd_scales(raw + 74, 16, feature, at);
  from_grid(
      grid, 8, [&](int64_t i, int64_t) -> int64_t { return raw[2 + i] | (raw[66 + i / 4] >> (i % 4 * 2) & 3) << 8; },
      [&](int64_t i) -> uint32_t { return raw[34 + i]; }, codes);
}

// A block of a GGUF file: its scales to a panel's block `at`, and its codes.
void decode(Format format, const uint8_t* raw, const uint8_t* grid, int64_t feature, uint8_t* at, uint8_t* codes) {
  constexpr uint8_t kMinus = 128;
  switch (format) {
    case Format::kQ8_0:
      put_half(raw, at, 0, feature);
      for (int64_t i = 0; i < 32; ++i) codes[i] = raw[2 + i] ^ 128;
      return;
    case Format::kQ4_0:
    case Format::kIq4Nl:
      put_half(raw, at, 0, feature);
      return halves(raw + 2, 16, codes);
    case Format::kGroup4:
      put_half(raw, at, 0, feature);
      put_half(raw + 2, at, 1, feature, kMinus);
      return halves(raw + 4, 16, codes);
    case Format::kQ5_0:
      put_half(raw, at, 0, feature);
      halves(raw + 6, 16, codes);
      return add_fifth_bits(raw + 2, codes);
    case Format::kQ5_1:
      put_half(raw, at, 0, feature);
      put_half(raw + 2, at, 1, feature, kMinus);
      halves(raw + 8, 16, codes);
      return add_fifth_bits(raw + 4, codes);
    case Format::kQ4K:
    case Format::kQ5K:
      put_super_scales(raw, feature, at);
      for (int64_t pair = 0; pair < 4; ++pair)
        halves(raw + (format == Format::kQ4K ? 16 : 48) + pair * 32, 32, codes + pair * 64);
      if (format == Format::kQ5K)
        for (int64_t i = 0; i < 256; ++i) codes[i] |= static_cast<uint8_t>((raw[16 + i % 32] >> (i / 32) & 1) << 4);
      return;
    case Format::kQ3K:
      return decode_q3k(raw, feature, at, codes);
    case Format::kQ2K:
      return decode_q2k(raw, feature, at, codes);
    case Format::kMxfp4:
      at[feature] = raw[0];
      return halves(raw + 1, 16, codes);
    case Format::kIq4Xs:
      return decode_iq4xs(raw, feature, at, codes);
    case Format::kIq3S:
    case Format::kIq3Xxs:
      return decode_iq3(format, raw, grid, feature, at, codes);
    case Format::kIq2Xxs:
    case Format::kIq2Xs:
    case Format::kIq2S:
      return decode_iq2(format, raw, grid, feature, at, codes);
    default:
      return decode_q6k(raw, feature, at, codes);
  }
}

int64_t scale_bytes(const PackedSpec& spec) {
  return spec.block_bytes - spec.block * kFeatures * bits_of(spec.format) / 8;
}

}  // namespace

void pack_floats(Pool& pool, const void* values, int64_t rows, const PackTarget& target) {
  const PackedSpec& spec = *target.spec;
  const int64_t row_bytes = spec.inputs * bits_of(spec.format) / 8, words = row_bytes / 4;
  each_panel(pool, rows, target, [&](uint8_t* panel, int64_t first, int64_t count) {
    for (int64_t f = 0; f < count; ++f) {
      const char* row = static_cast<const char*>(values) + (first + f) * row_bytes;
      scatter_words(row, words, panel, f);
      if (row_bytes % 4) std::memcpy(panel + (words * kFeatures + f) * 4, row + words * 4, row_bytes % 4);
    }
  });
}

void pack_quantised(Pool& pool, const float* values, int64_t rows, int64_t columns, int64_t before,
                    const PackTarget& target) {
  const PackedSpec& spec = *target.spec;
  each_panel(pool, rows, target, [&](uint8_t* panel, int64_t first, int64_t count) {
    for (int64_t f = 0; f < count; ++f) {
      const float* row = values + (first + f) * columns;
      if (spec.group)
        quantise_groups(spec, row, columns, f, panel);
      else
        quantise_channel(spec, row, columns, before, f, panel);
    }
  });
}

void pack_blocks(Pool& pool, const uint8_t* blocks, const uint8_t* grid, int64_t rows, const PackTarget& target) {
  const PackedSpec& spec = *target.spec;
  const int64_t bytes = gguf_block_bytes(spec.format), codes_at = scale_bytes(spec);
  each_panel(pool, rows, target, [&](uint8_t* panel, int64_t first, int64_t count) {
    alignas(64) uint8_t codes[256];
    for (int64_t f = 0; f < count; ++f) {
      const uint8_t* row = blocks + (first + f) * spec.blocks * bytes;
      for (int64_t block = 0; block < spec.blocks; ++block) {
        uint8_t* at = panel + block * spec.block_bytes;
        decode(spec.format, row + block * bytes, grid, f, at, codes);
        put_block(spec, codes, f, at + codes_at);
      }
    }
  });
}

int64_t gguf_block_bytes(Format format) {
  switch (format) {
    case Format::kQ8_0:
      return 34;
    case Format::kQ4_0:
      return 18;
    case Format::kGroup4:
      return 20;
    case Format::kQ5_0:
      return 22;
    case Format::kQ5_1:
      return 24;
    case Format::kQ4K:
      return 144;
    case Format::kQ5K:
      return 176;
    case Format::kQ6K:
      return 210;
    case Format::kQ3K:
    case Format::kIq3S:
      return 110;
    case Format::kQ2K:
      return 84;
    case Format::kIq4Nl:
      return 18;
    case Format::kMxfp4:
      return 17;
    case Format::kIq4Xs:
      return 136;
    case Format::kIq3Xxs:
      return 98;
    case Format::kIq2Xxs:
      return 66;
    case Format::kIq2Xs:
      return 74;
    case Format::kIq2S:
      return 82;
    default:
      return 0;
  }
}

int64_t grid_entries(Format format) {
  switch (format) {
    case Format::kIq3Xxs:
    case Format::kIq2Xxs:
      return 256;
    case Format::kIq3S:
    case Format::kIq2Xs:
      return 512;
    case Format::kIq2S:
      return 1024;
    default:
      return 0;
  }
}

int64_t grid_weights(Format format) {
  if (!grid_entries(format)) return 0;
  return format == Format::kIq3S || format == Format::kIq3Xxs ? 4 : 8;
}

}  // namespace allspan
