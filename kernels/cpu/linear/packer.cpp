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

uint32_t word_at(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

// Four codes (or bytes of a file) of each of a panel's features. Loops over the features compile to vectors.
struct Quad {
  uint32_t of[kFeatures];
};

// out = make(feature)
template <class Make>
inline void each_feature(Quad& out, Make make) {
  for (int64_t f = 0; f < kFeatures; ++f) out.of[f] = make(f);
}

// Bits `from` and from + 1 of the codes.
void put_pairs(const Quad* quads, int from, uint8_t* at) {
  for (int64_t half = 0; half < 2; ++half, quads += 4) {
    Quad pairs;
    each_feature(pairs, [&](int64_t f) {
      uint32_t word = 0;
      for (int64_t j = 0; j < 4; ++j) word |= (quads[j].of[f] >> from & 0x03030303u) << (2 * j);
      return word;
    });
    std::memcpy(at + half * sizeof pairs, &pairs, sizeof pairs);
  }
}

// Bit `from` of the codes.
void put_single_bits(const Quad* quads, int from, uint8_t* at) {
  for (int64_t q = 0; q < 8; ++q) {
    Quad fours;  // the bits of four bytes gathered in the lowest
    each_feature(fours, [&](int64_t f) {
      uint32_t word = quads[q].of[f] >> from & 0x01010101u;
      word |= word >> 7;
      return (word | word >> 14) & 15;
    });
    for (int64_t i = 0; i < kFeatures / 2; ++i)
      at[q * 8 + i] = static_cast<uint8_t>(fours.of[2 * i] | fours.of[2 * i + 1] << 4);
  }
}

// 32 codes of all of a panel's features to their group of a block.
void put_codes(int bits, const Quad* quads, uint8_t* group) {
  if (bits == 8) {
    std::memcpy(group, quads, 8 * sizeof(Quad));
    return;
  }
  if (bits < 4) {
    put_pairs(quads, 0, group);
    if (bits == 3) put_single_bits(quads, 2, group + 128);
    return;
  }
  constexpr uint32_t kLow = 0x0f0f0f0f;
  for (int64_t q = 0; q < 4; ++q) {
    Quad both;
    each_feature(both, [&](int64_t f) { return (quads[q].of[f] & kLow) | (quads[q + 4].of[f] & kLow) << 4; });
    std::memcpy(group + q * sizeof both, &both, sizeof both);
  }
  if (bits == 5) put_single_bits(quads, 4, group + 256);
  if (bits == 6) put_pairs(quads, 4, group + 256);
}

// Codes of a block of a GGUF file, of all of a panel's features.
struct BlockCodes {
  Quad quads[256 / 4];

  // `count` codes of one feature.
  void set(int64_t feature, const uint8_t* codes, int64_t count) {
    for (int64_t q = 0; q < count / 4; ++q) quads[q].of[feature] = word_at(codes + q * 4);
  }
  // Features from `count` on have codes of 0.
  void cut(int64_t count, int64_t inputs) {
    for (int64_t q = 0; count < kFeatures && q < inputs / 4; ++q)
      std::fill(quads[q].of + count, quads[q].of + kFeatures, 0u);
  }
  void put(const PackedSpec& spec, uint8_t* at) const {
    const int bits = bits_of(spec.format);
    for (int64_t group = 0; group < spec.block / kGroup; ++group)
      put_codes(bits, quads + group * kGroup / 4, at + group * kGroup * kFeatures * bits / 8);
  }
};

// A block of one feature's codes, of 8 or 4 bits, to where a panel has the feature's share of it.
void put_block(const PackedSpec& spec, const uint8_t* codes, int64_t feature, uint8_t* at) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  const int bits = bits_of(spec.format);
  for (int64_t i = 0; i < spec.block; i += kGroup, codes += kGroup, at += kGroup * kFeatures * bits / 8) {
    uint32_t quads[8];
    std::memcpy(quads, codes, sizeof quads);
    if (bits == 8)
      for (int64_t q = 0; q < 8; ++q) put(at, q * kFeatures + feature, quads[q]);
    else
      for (int64_t q = 0; q < 4; ++q) put(at, q * kFeatures + feature, (quads[q] & kLow) | (quads[q + 4] & kLow) << 4);
  }
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

void put_scale(uint8_t* at, int64_t index, int64_t feature, int scale) {
  at[2 * kFeatures + index * kFeatures + feature] = static_cast<uint8_t>(scale);
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
  const int sign_bit = weights == 8 ? 2 : 3;
  for (int64_t i = 0; i < 32; ++i) {
    const uint32_t signs = eight(i);
    for (int64_t half = 0; half < 2; ++half) {
      const uint8_t* four = grid + number(i, half) * weights + (weights == 8 ? half * 4 : 0);
      // The product has bit j of the four signs at the lowest bit of byte j.
      const uint32_t spread = (signs >> (half * 4) & 15) * 0x00204081u & 0x01010101u;
      put(codes, i * 2 + half, word_at(four) | spread << sign_bit);
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

// Scales of a feature's block of a GGUF file, to a panel's block `at`.
void put_block_scales(Format format, const uint8_t* raw, int64_t feature, uint8_t* at) {
  constexpr uint8_t kMinus = 128;
  switch (format) {
    case Format::kMxfp4:
      at[feature] = raw[0];
      return;
    case Format::kGroup4:
    case Format::kQ5_1:
      put_half(raw, at, 0, feature);
      return put_half(raw + 2, at, 1, feature, kMinus);
    case Format::kQ4K:
    case Format::kQ5K:
      return put_super_scales(raw, feature, at);
    case Format::kQ6K:
      put_half(raw + 208, at, 0, feature);
      for (int64_t i = 0; i < 16; ++i) put_scale(at, i, feature, raw[192 + i]);
      return;
    case Format::kQ3K:
      put_half(raw + 108, at, 0, feature);
      for (int64_t i = 0; i < 16; ++i) {
        const int low = raw[96 + i % 8] >> (i / 8 * 4) & 15, high = raw[104 + i % 4] >> (i / 4 * 2) & 3;
        put_scale(at, i, feature, (low | high << 4) - 32);
      }
      return;
    case Format::kQ2K:
      put_half(raw + 80, at, 0, feature);
      put_half(raw + 82, at, 1, feature);
      for (int64_t i = 0; i < 16; ++i) at[4 * kFeatures + i * kFeatures + feature] = raw[i];
      return;
    case Format::kIq4Xs:
      put_half(raw, at, 0, feature);
      for (int64_t i = 0; i < 8; ++i) {
        const int low = raw[4 + i / 2] >> (i % 2 * 4) & 15, high = raw[2 + i / 4] >> (i % 4 * 2) & 3;
        put_scale(at, i, feature, (low | high << 4) - 32);
      }
      return;
    default:
      put_half(raw, at, 0, feature);
  }
}

// Blocks that lie at the same place of a panel's rows, and are those of a panel's features.
struct RawBlocks {
  const uint8_t* of[kFeatures];

  // Four bytes of each block.
  Quad words(int64_t at) const {
    Quad out;
    each_feature(out, [&](int64_t f) { return word_at(of[f] + at); });
    return out;
  }
};

// Codes of 4 bits of `quads` times 4 bytes: all low halves, then all high ones.
void halves(const RawBlocks& raw, int64_t at, int64_t quads, Quad* out) {
  for (int64_t q = 0; q < quads; ++q) {
    const Quad both = raw.words(at + q * 4);
    each_feature(out[q], [&](int64_t f) { return both.of[f] & 0x0f0f0f0fu; });
    each_feature(out[quads + q], [&](int64_t f) { return both.of[f] >> 4 & 0x0f0f0f0fu; });
  }
}

// The bits of the 4 bytes at `at`, the lowest first, become bit 4 of 32 codes.
void add_fifth_bits(const RawBlocks& raw, int64_t at, Quad* out) {
  const Quad bits = raw.words(at);
  for (int64_t q = 0; q < 8; ++q)
    each_feature(out[q], [&](int64_t f) {
      const uint32_t four = bits.of[f] >> (4 * q) & 15;
      return out[q].of[f] | (four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25;
    });
}

// 32 bytes have `bits` of the codes of 8 / bits groups of 32, the lowest of all first; they are added above `to`.
void add_planes(const RawBlocks& raw, int64_t at, int bits, int to, Quad* out) {
  const uint32_t mask = bits == 1 ? 0x01010101u : 0x03030303u;
  for (int64_t q = 0; q < 8; ++q) {
    const Quad word = raw.words(at + q * 4);
    for (int64_t group = 0; group < 8 / bits; ++group)
      each_feature(out[group * 8 + q],
                   [&](int64_t f) { return out[group * 8 + q].of[f] | (word.of[f] >> (group * bits) & mask) << to; });
  }
}

// The codes of types whose bits lie in whole words.
void decode_words(Format format, const RawBlocks& raw, Quad* out) {
  switch (format) {
    case Format::kQ8_0:
      for (int64_t q = 0; q < 8; ++q)
        each_feature(out[q], [&](int64_t f) { return word_at(raw.of[f] + 2 + q * 4) ^ 0x80808080u; });
      return;
    case Format::kQ4_0:
    case Format::kIq4Nl:
      return halves(raw, 2, 4, out);
    case Format::kGroup4:
      return halves(raw, 4, 4, out);
    case Format::kMxfp4:
      return halves(raw, 1, 4, out);
    case Format::kQ5_0:
      halves(raw, 6, 4, out);
      return add_fifth_bits(raw, 2, out);
    case Format::kQ5_1:
      halves(raw, 8, 4, out);
      return add_fifth_bits(raw, 4, out);
    case Format::kQ4K:
    case Format::kQ5K:
      for (int64_t pair = 0; pair < 4; ++pair)
        halves(raw, (format == Format::kQ4K ? 16 : 48) + pair * 32, 8, out + pair * 16);
      if (format == Format::kQ5K) add_planes(raw, 16, 1, 4, out);
      return;
    case Format::kIq4Xs:
      for (int64_t i = 0; i < 8; ++i) halves(raw, 8 + i * 16, 4, out + i * 8);
      return;
    case Format::kQ6K:
      for (int64_t part = 0; part < 2; ++part) {
        halves(raw, part * 64, 16, out + part * 32);
        add_planes(raw, 128 + part * 32, 2, 4, out + part * 32);
      }
      return;
    default:  // q2_k and q3_k
      std::memset(out, 0, 64 * sizeof(Quad));
      for (int64_t part = 0; part < 2; ++part)
        add_planes(raw, (format == Format::kQ3K ? 32 : 16) + part * 32, 2, 0, out + part * 32);
      if (format == Format::kQ3K) add_planes(raw, 0, 1, 2, out);
  }
}

void decode_grid(Format format, const uint8_t* raw, const uint8_t* grid, int64_t feature, uint8_t* at, uint8_t* codes) {
  const bool four = format == Format::kIq3S || format == Format::kIq3Xxs;
  (four ? decode_iq3 : decode_iq2)(format, raw, grid, feature, at, codes);
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
  const int64_t bytes = gguf_block_bytes(spec.format), row_bytes = spec.blocks * bytes, codes_at = scale_bytes(spec);
  const bool has_grid = grid_entries(spec.format) > 0;
  each_panel(pool, rows, target, [&](uint8_t* panel, int64_t first, int64_t count) {
    alignas(64) BlockCodes block_codes;
    RawBlocks raw;  // what the panel has no rows for reads the first one, and is cut
    for (int64_t f = 0; f < kFeatures; ++f) raw.of[f] = blocks + (first + (f < count ? f : 0)) * row_bytes;
    for (int64_t block = 0; block < spec.blocks; ++block) {
      uint8_t* at = panel + block * spec.block_bytes;
      for (int64_t f = 0; f < count; ++f) {
        alignas(64) uint8_t codes[256];
        if (!has_grid) {
          put_block_scales(spec.format, raw.of[f], f, at);
        } else {
          decode_grid(spec.format, raw.of[f], grid, f, at, codes);
          block_codes.set(f, codes, 256);
        }
      }
      if (!has_grid) decode_words(spec.format, raw, block_codes.quads);
      block_codes.cut(count, spec.block);
      block_codes.put(spec, at + codes_at);
      for (const uint8_t*& feature : raw.of) feature += bytes;
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
