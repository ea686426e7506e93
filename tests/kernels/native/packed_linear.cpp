#include "linear/packed_spec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "check.h"
#include "linear/packed_linear.h"

using allspan::Activation;
using allspan::Epilogue;
using allspan::Format;
using allspan::kChannelGroup;
using allspan::kFeatures;
using allspan::kGroup;
using allspan::LinearKernels;
using allspan::PackedLinearArgs;
using allspan::PackedSpec;
using allspan::Worker;

namespace {

constexpr float kPoison = 1e30f;
constexpr int64_t kMostRows = 257;

struct Shape {
  std::vector<int64_t> parts;
  int64_t inputs, k_offset, rows;
  bool interleaved;
};

const std::vector<Shape> kShapes = {
    {{16}, 32, 0, 5, false},   {{1}, 1, 0, 1, false},      {{33, 7}, 100, 0, 40, false},
    {{70}, 290, 13, 3, false}, {{21, 21}, 65, 0, 9, true}, {{5}, 40, 0, kMostRows, false},
};

bool is_float(const PackedSpec& spec) { return spec.format <= Format::kBf16; }

uint16_t random_half(Random& random, int exponent) {
  const uint64_t bits = random.next();
  // One in sixteen is subnormal.
  const uint64_t power = bits >> 32 & 15 ? exponent + (bits >> 40 & 1) : 0;
  return static_cast<uint16_t>((bits & 0x83ff) | power << 10);
}

// Numbers of some size before the codes, so that products are of a size too; and codes of any kind.
void fill_scales(const PackedSpec& spec, Random& random, uint8_t* block) {
  if (spec.format == Format::kMxfp4) {  // exponents, one in sixteen of them of a subnormal scale
    for (int64_t i = 0; i < kFeatures; ++i) {
      const uint64_t bits = random.next();
      block[i] = static_cast<uint8_t>(bits >> 32 & 15 ? 120 + (bits >> 40 & 7) : bits >> 40 & 1);
    }
    return;
  }
  constexpr Format kWithOffsets[] = {Format::kGroup8, Format::kGroup4, Format::kQ5_1,
                                     Format::kQ4K,    Format::kQ5K,    Format::kQ2K};
  const bool has_offsets =
      std::find(std::begin(kWithOffsets), std::end(kWithOffsets), spec.format) != std::end(kWithOffsets);
  for (int64_t i = 0; i < kFeatures * (has_offsets ? 2 : 1); ++i) {
    // Offsets are some eight times a scale; those of super-blocks are multiplied by integers, and smaller.
    const uint16_t half = random_half(random, i < kFeatures ? 8 : 11);
    std::memcpy(block + 2 * i, &half, sizeof half);
  }
}

std::vector<uint8_t> make_weight(const PackedSpec& spec, Random& random) {
  std::vector<uint8_t> weight(spec.panels * spec.panel_bytes);
  for (int64_t panel = 0; panel < spec.panels; ++panel) {
    uint8_t* at = weight.data() + panel * spec.panel_bytes;
    for (int64_t i = 0; i < spec.panel_bytes; ++i) at[i] = static_cast<uint8_t>(random.next() >> 32);
    for (int64_t i = 0; i < spec.head_bytes / 4; ++i) {
      const float value = random.real(i < kFeatures ? 0.02f : 0.5f);
      std::memcpy(at + 4 * i, &value, sizeof value);
    }
    for (int64_t block = 0; block < spec.blocks; ++block) {
      uint8_t* from = at + spec.head_bytes + block * spec.block_bytes;
      if (spec.format == Format::kF32) {
        for (int64_t i = 0; i < spec.block_bytes / 4; ++i) {
          const float value = random.real();
          std::memcpy(from + 4 * i, &value, sizeof value);
        }
      } else if (spec.format == Format::kBf16) {
        for (int64_t i = 0; i < spec.block_bytes / 2; ++i) {
          const uint16_t value = to_bfloat16(random.real());
          std::memcpy(from + 2 * i, &value, sizeof value);
        }
      } else if (spec.head_bytes == 0) {
        fill_scales(spec, random, from);
      }
    }
  }
  return weight;
}

// x as the product sees it: kernels/packed_spec.py, and quantise_activations of kernels/reference/packed_linear.py.
void quantise(const float* x, int64_t count, float most, double* seen) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::fmax(largest, std::fabs(x[i]));
  for (int64_t i = 0; i < count; ++i)
    seen[i] = largest < 0x1p-100f ? 0.0 : std::nearbyint(x[i] * (most / largest)) * static_cast<double>(largest / most);
}

Doubles activations(const PackedSpec& spec, const Floats& x, int64_t rows) {
  Doubles seen(x.begin(), x.end());
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x.data() + row * spec.inputs;
    double* to = seen.data() + row * spec.inputs;
    if (spec.activation == Activation::kBf16) {
      for (int64_t i = 0; i < spec.inputs; ++i) to[i] = from_bfloat16(to_bfloat16(from[i]));
    } else if (spec.activation != Activation::kF32) {
      const bool channel = spec.format == Format::kChannel8 || spec.format == Format::kChannel4;
      const int64_t group = channel ? kChannelGroup : kGroup;
      for (int64_t begin = 0, end; begin < spec.inputs; begin = end) {
        end = std::min(spec.inputs, (begin + spec.k_offset) / group * group + group - spec.k_offset);
        quantise(from + begin, end - begin, spec.activation == Activation::kA16 ? 32512 : 127, to + begin);
      }
    }
  }
  return seen;
}

class Product {
 public:
  Product(Checks& checks, const PackedSpec& spec, const Shape& shape, const std::string& name)
      : checks_(checks), spec_(spec), rows_(shape.rows), name_(name), random_(shape.inputs * 31 + shape.rows) {
    weight_ = make_weight(spec, random_);
    x_ = random_.reals(rows_ * spec.inputs);
    // Groups of all zeros, of one that dwarfs the others, and of next to nothing.
    for (int64_t i = 0; i < std::min<int64_t>(kGroup, spec.inputs); ++i) {
      if (rows_ > 1) x_[spec.inputs + i] = 0;
      if (rows_ > 2) x_[2 * spec.inputs + i] *= i == 3 ? 1e6f : 1e-3f;
      if (rows_ > 3) x_[3 * spec.inputs + i] *= 1e-32f;
    }
    bias_ = random_.reals(spec.features);
  }

  // Returns the products, to be the same bits everywhere where weights are codes.
  Floats check() {
    const std::vector<Floats> weights = check_unpacking();
    expect(weights);
    Floats first;
    checks_.each(name_, [&](Checks::Run& run) {
      const Floats out = run_all(run);
      checks_.close(out, expected_, limits_);
      if (first.empty()) first = out;
      if (!is_float(spec_)) checks_.same(out, first, "the first variant");
      const Floats alone = product(run, x_.data() + (rows_ - 1) * spec_.inputs, 1, Epilogue::kStore, 0);
      checks_.same(alone, Floats(out.end() - spec_.features, out.end()), "in the batch");
      check_epilogues(run, out);
      check_odd_row(run);
    });
    return first;
  }

 private:
  const LinearKernels& kernels(Checks::Run& run) const { return linear_kernels(run.variant->isa, spec_); }

  // Weights as every variant unpacks them; plain ones, against which the others are held, are the generic variant's.
  std::vector<Floats> check_unpacking() {
    const auto unpack = [&](const LinearKernels& by) {
      std::vector<Floats> weights;
      int64_t panel = 0;
      for (size_t part = 0; part < spec_.parts.size(); ++part) {
        for (int64_t feature = 0; feature < spec_.parts[part]; ++feature) {
          const int64_t at =
              spec_.interleaved ? feature / kFeatures * 2 + static_cast<int64_t>(part) : panel + feature / kFeatures;
          weights.emplace_back(spec_.inputs, kPoison);
          by.unpack_feature(spec_, weight_.data() + at * spec_.panel_bytes, feature % kFeatures, weights.back().data());
        }
        panel += (spec_.parts[part] + kFeatures - 1) / kFeatures;
      }
      return weights;
    };
    const std::vector<Floats> plain = unpack(linear_kernels(allspan::kIsaGeneric, spec_));
    checks_.each(name_ + ", unpacked", [&](Checks::Run& run) {
      const std::vector<Floats> weights = unpack(kernels(run));
      for (size_t i = 0; i < weights.size(); ++i) checks_.same(weights[i], plain[i], "the generic variant");
    });
    return plain;
  }

  void expect(const std::vector<Floats>& weights) {
    const Doubles seen = activations(spec_, x_, rows_);
    expected_.assign(rows_ * spec_.features, 0);
    limits_.assign(rows_ * spec_.features, 1e-6);
    for (int64_t feature = 0; feature < spec_.features; ++feature) {
      // Codes and offsets are summed apart: what is left of their difference says nothing of their size.
      double largest = 0;
      for (const float weight : weights[feature]) largest = std::fmax(largest, std::fabs(weight));
      for (int64_t row = 0; row < rows_; ++row) {
        double &sum = expected_[row * spec_.features + feature], &limit = limits_[row * spec_.features + feature];
        for (int64_t i = 0; i < spec_.inputs; ++i) {
          const double x = seen[row * spec_.inputs + i], weight = weights[feature][i];
          sum += x * weight;
          limit += 4e-6 * std::fabs(x) * (is_float(spec_) ? std::fabs(weight) : largest);
        }
      }
    }
  }

  Floats product(Checks::Run& run, const float* x, int64_t rows, Epilogue epilogue, const float* bias,
                 float before = kPoison) {
    const int64_t columns = is_gated(epilogue) ? spec_.parts[0] : spec_.features;
    Floats out(rows * columns, before);
    const PackedLinearArgs args{&spec_,         &kernels(run), &run.kernels(), x,       spec_.inputs,
                                weight_.data(), bias,          out.data(),     columns, epilogue};
    run.runtime->pool().team([&](Worker& worker) { packed_linear(worker, args, rows); });
    return out;
  }
  Floats run_all(Checks::Run& run) { return product(run, x_.data(), rows_, Epilogue::kStore, nullptr); }

  void check_epilogues(Checks::Run& run, const Floats& plain) {
    Doubles biased(plain.begin(), plain.end());
    for (size_t i = 0; i < biased.size(); ++i) biased[i] += bias_[i % spec_.features] + 3.0;
    checks_.close(product(run, x_.data(), rows_, Epilogue::kAdd, bias_.data(), 3), biased, 1e-6);
    if (!spec_.interleaved) return;
    const int64_t part = spec_.parts[0];
    Doubles gated(rows_ * part);
    for (int64_t i = 0; i < rows_ * part; ++i) {
      const double gate = plain[i / part * 2 * part + i % part], up = plain[(i / part * 2 + 1) * part + i % part];
      gated[i] = gate / (1 + std::exp(-gate)) * up;
    }
    checks_.close(product(run, x_.data(), rows_, Epilogue::kGatedSilu, nullptr), gated, 1e-5);
  }

  // A row with an infinity says so, and its neighbours do not.
  void check_odd_row(Checks::Run& run) {
    if (rows_ < 5) return;
    Floats x(x_.begin(), x_.begin() + 5 * spec_.inputs);
    x[spec_.inputs - 1] = std::nanf("");
    x[5 * spec_.inputs - 1] = INFINITY;
    const Floats out = product(run, x.data(), 5, Epilogue::kStore, nullptr);
    for (int64_t i = 0; i < 5 * spec_.features; ++i) {
      const int64_t row = i / spec_.features;
      // A plain infinity times a weight is one, and times 0 a NaN.
      const bool sound = row > 0 && row < 4 ? std::isfinite(out[i])
                         : is_float(spec_)  ? !std::isfinite(out[i])
                                            : std::isnan(out[i]);
      if (!sound)
        return checks_.require(false, "element " + std::to_string(i) + " beside odd rows is " + std::to_string(out[i]));
    }
    checks_.require(true, "");
  }

  Checks& checks_;
  const PackedSpec& spec_;
  const int64_t rows_;
  const std::string name_;
  Random random_;
  std::vector<uint8_t> weight_;
  Floats x_, bias_;
  Doubles expected_, limits_;
};

uint64_t digest(uint64_t so_far, const Floats& values) {  // FNV-1a, of words
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    so_far = (so_far ^ bits) * 0x100000001b3;
  }
  return so_far;
}

struct Scheme {
  const char *format, *activation;
  int64_t group;
};

std::vector<Scheme> schemes() {
  std::vector<Scheme> all = {{"f32", "f32", 0}, {"bf16", "bf16", 0}};
  for (const char* activation : {"a8", "a16"}) {
    for (const char* format : {"channel8", "channel4", "q8_0", "q4_0", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"})
      all.push_back({format, activation, 0});
    for (const char* format : {"group8", "group4"})
      for (const int64_t group : {32, 96}) all.push_back({format, activation, group});
  }
  for (const char* format : {"q3_k", "q2_k", "iq4_nl", "mxfp4", "iq4_xs", "iq3_s", "iq3_xxs", "iq2_xxs", "iq2_s"})
    all.push_back({format, "a8", 0});
  return all;
}

}  // namespace

uint64_t check_packed(Checks& checks) {
  uint64_t all = 0xcbf29ce484222325;
  for (const Scheme& scheme : schemes()) {
    for (const Shape& shape : kShapes) {
      const PackedSpec spec = PackedSpec::make(scheme.format, scheme.activation, shape.parts, shape.inputs,
                                               shape.k_offset, scheme.group, shape.interleaved);
      std::string name = std::string("packed ") + scheme.format + ' ' + scheme.activation;
      if (scheme.group) name += " group " + std::to_string(scheme.group);
      name += ", " + std::to_string(shape.rows) + " rows of " + std::to_string(shape.inputs);
      const Floats out = Product(checks, spec, shape, name).check();
      if (!is_float(spec)) all = digest(all, out);
    }
  }
  return all;
}
