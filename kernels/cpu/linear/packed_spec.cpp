#include "linear/packed_spec.h"

#include <algorithm>
#include <stdexcept>

namespace allspan {
namespace {

struct FormatRow {
  const char* name;
  Format format;
  int64_t bits, block, head_bytes, scale_bytes;  // block 0: the weight's group
};

// As FORMATS of kernels/packed_spec.py.
constexpr FormatRow kFormats[] = {
    {"f32", Format::kF32, 32, 32, 0, 0},
    {"bf16", Format::kBf16, 16, 32, 0, 0},
    {"channel8", Format::kChannel8, 8, 32, 128, 0},
    {"channel4", Format::kChannel4, 4, 32, 128, 0},
    {"group8", Format::kGroup8, 8, 0, 0, 64},
    {"group4", Format::kGroup4, 4, 0, 0, 64},
    {"q8_0", Format::kQ8_0, 8, 32, 0, 32},
    {"q4_0", Format::kQ4_0, 4, 32, 0, 32},
    {"q5_0", Format::kQ5_0, 5, 32, 0, 32},
    {"q5_1", Format::kQ5_1, 5, 32, 0, 64},
    {"q4_k", Format::kQ4K, 4, 256, 0, 320},
    {"q5_k", Format::kQ5K, 5, 256, 0, 320},
    {"q6_k", Format::kQ6K, 6, 256, 0, 288},
    {"q3_k", Format::kQ3K, 3, 256, 0, 288},
    {"q2_k", Format::kQ2K, 2, 256, 0, 320},
    {"iq4_nl", Format::kIq4Nl, 4, 32, 0, 32},
    {"mxfp4", Format::kMxfp4, 4, 32, 0, 16},
    {"iq4_xs", Format::kIq4Xs, 4, 256, 0, 160},
    {"iq3_s", Format::kIq3S, 4, 256, 0, 160},
    {"iq3_xxs", Format::kIq3Xxs, 4, 256, 0, 160},
    {"iq2_xxs", Format::kIq2Xxs, 3, 256, 0, 160},
    {"iq2_xs", Format::kIq2Xs, 3, 256, 0, 288},
    {"iq2_s", Format::kIq2S, 3, 256, 0, 288},
};

const FormatRow& row_of(const std::string& name) {
  for (const FormatRow& row : kFormats)
    if (name == row.name) return row;
  throw std::invalid_argument("format: '" + name + "' is not known");
}

Activation activation_of(const std::string& name) {
  constexpr const char* kNames[] = {"f32", "bf16", "a8", "a16"};
  for (int i = 0; i < 4; ++i)
    if (name == kNames[i]) return static_cast<Activation>(i);
  throw std::invalid_argument("activation: '" + name + "' is not known");
}

}  // namespace

PackedSpec PackedSpec::make(const std::string& format, const std::string& activation, std::vector<int64_t> parts,
                            int64_t inputs, int64_t k_offset, int64_t group, bool interleaved) {
  const FormatRow& row = row_of(format);
  const auto require = [&](bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument(format + ": " + message);
  };
  PackedSpec spec{};
  spec.format = row.format;
  spec.activation = activation_of(activation);
  const bool plain = spec.activation == Activation::kF32 || spec.activation == Activation::kBf16;
  require(row.bits > 8 ? format == activation : !plain, "activation " + activation + " does not go with it");
  require(row.format <= Format::kQ6K || spec.activation != Activation::kA16, "activation a16 does not go with it");
  require(row.block || (group >= 32 && group <= 512 && group % 32 == 0),
          "group " + std::to_string(group) + " is no multiple of 32 up to 512");
  require(inputs >= 0 && !parts.empty(), "needs inputs and parts");
  require(!interleaved || (parts.size() == 2 && parts[0] == parts[1]), "interleaved parts are two of one size");
  spec.block = row.block ? row.block : group;
  require(k_offset >= 0 && k_offset < spec.block, "k_offset " + std::to_string(k_offset) + " is not within a block");
  spec.inputs = inputs;
  spec.k_offset = k_offset;
  spec.group = row.block ? 0 : group;
  spec.interleaved = interleaved;
  spec.blocks = (k_offset + inputs + spec.block - 1) / spec.block;
  spec.head_bytes = row.head_bytes;
  spec.block_bytes = row.scale_bytes + spec.block * kFeatures * row.bits / 8;
  spec.panel_bytes = row.head_bytes + spec.blocks * spec.block_bytes;
  for (int64_t part : parts) {
    require(part >= 0, "a part has fewer than no features");
    spec.panels += (part + kFeatures - 1) / kFeatures;
    spec.features += part;
  }
  spec.parts = std::move(parts);
  return spec;
}

Columns columns_of(const PackedSpec& spec, int64_t panel) {
  if (spec.interleaved) {
    const int64_t first = panel / 2 * kFeatures, part = spec.parts[0];
    return {panel % 2 * part + first, std::min(kFeatures, part - first)};
  }
  int64_t begin = 0;
  for (int64_t part : spec.parts) {
    const int64_t panels = (part + kFeatures - 1) / kFeatures;
    if (panel < panels) return {begin + panel * kFeatures, std::min(kFeatures, part - panel * kFeatures)};
    panel -= panels;
    begin += part;
  }
  return {begin, 0};
}

}  // namespace allspan
