#include "moe/experts.h"

#include <cstring>

#include "check.h"
#include "linear/packed_linear.h"
#include "moe/route.h"

using allspan::Epilogue;
using allspan::ExpertArgs;
using allspan::PackedLinearArgs;
using allspan::PackedSpec;
using allspan::RouteArgs;
using allspan::RouterSpec;
using allspan::Routing;
using allspan::Worker;

namespace {

constexpr float kPoison = 1e30f;
constexpr int64_t kExperts = 7, kPlaces = 5, kTopK = 3;  // two of the experts are another rank's

struct Choices {
  std::vector<int32_t> places, slots, starts;
  Floats weights;
  explicit Choices(int64_t rows)
      : places(rows * kTopK, -9), slots(rows * kTopK, -9), starts(kPlaces + 1, -9), weights(rows * kTopK, kPoison) {}
  Routing routing() { return {places.data(), weights.data(), slots.data(), starts.data(), kPlaces}; }
};

// One layer's experts, whose products are held against those of each slot alone.
class Experts {
 public:
  Experts(Checks& checks, const PackedSpec& up, const PackedSpec& down, bool skewed, int64_t rows)
      : checks_(checks), up_(up), down_(down), rows_(rows), random_(rows + 17), choices_(rows) {
    for (const PackedSpec* spec : {&up_, &down_}) {
      Floats values = random_.reals(kPlaces * spec->panels * spec->panel_bytes / 4);
      weights_.emplace_back(values.size() * 4);
      std::memcpy(weights_.back().data(), values.data(), weights_.back().size());
      biases_.push_back(random_.reals(kPlaces * spec->features));
    }
    x_ = random_.reals(rows * up_.inputs);
    mlp_ = random_.reals(rows * kTopK * down_.inputs);
    logits_ = random_.reals(rows * kExperts);
    for (int64_t row = 0; skewed && row < rows; ++row) logits_[row * kExperts + 2] = 50;
  }

  void check(const std::string& name) {
    checks_.each(name, [&](Checks::Run& run) {
      route(run);
      check_slots(run);
      check_sums(run);
    });
  }

 private:
  void route(Checks::Run& run) {
    const int32_t places[kExperts] = {0, -1, 1, 2, 3, -1, 4};
    const RouterSpec spec{kTopK, allspan::Score::kSoftmax, 1, 1, allspan::GroupScore::kMax, true, 0, 1};
    const RouteArgs args{logits_.data(), nullptr, places, 1, kExperts, spec, choices_.routing()};
    run.runtime->pool().team([&](Worker& worker) { allspan::route(worker, args, rows_); });
  }

  ExpertArgs args_of(Checks::Run& run, const PackedSpec& spec, int which, const Floats& x, Floats& out, int64_t columns,
                     Epilogue epilogue) {
    return {&spec,
            &linear_kernels(run.variant->isa, spec),
            &run.kernels(),
            x.data(),
            weights_[which].data(),
            biases_[which].data(),
            choices_.routing(),
            kTopK,
            out.data(),
            columns,
            epilogue};
  }

  // The product of one row and one place.
  Floats alone(Checks::Run& run, const PackedSpec& spec, int which, const float* x, int64_t place, Epilogue epilogue) {
    const int64_t columns = is_gated(epilogue) ? spec.parts[0] : spec.features;
    Floats out(columns, kPoison);
    const PackedLinearArgs args{&spec,
                                &linear_kernels(run.variant->isa, spec),
                                &run.kernels(),
                                x,
                                spec.inputs,
                                weights_[which].data() + place * spec.panels * spec.panel_bytes,
                                biases_[which].data() + place * spec.features,
                                out.data(),
                                columns,
                                epilogue};
    run.runtime->pool().team([&](Worker& worker) { packed_linear(worker, args, 1); });
    return out;
  }

  void check_slots(Checks::Run& run) {
    const int64_t width = up_.parts[0];
    Floats out(rows_ * kTopK * width, kPoison), expected = out;
    const ExpertArgs args = args_of(run, up_, 0, x_, out, width, Epilogue::kGatedSilu);
    run.runtime->pool().team([&](Worker& worker) { expert_product(worker, args, rows_); });
    for (int64_t slot = 0; slot < rows_ * kTopK; ++slot) {
      if (choices_.places[slot] < 0) continue;
      const float* x = x_.data() + slot / kTopK * up_.inputs;
      const Floats one = alone(run, up_, 0, x, choices_.places[slot], Epilogue::kGatedSilu);
      std::copy(one.begin(), one.end(), expected.begin() + slot * width);
    }
    checks_.same(out, expected, "of each slot alone");
  }

  void check_sums(Checks::Run& run) {
    const int64_t columns = down_.features;
    Floats out(rows_ * columns, 3);
    Doubles expected(rows_ * columns, 3);
    const ExpertArgs args = args_of(run, down_, 1, mlp_, out, columns, Epilogue::kAdd);
    run.runtime->pool().team([&](Worker& worker) { expert_sum(worker, args, rows_); });
    for (int64_t slot = 0; slot < rows_ * kTopK; ++slot) {
      if (choices_.places[slot] < 0) continue;
      const float* x = mlp_.data() + slot * down_.inputs;
      const Floats one = alone(run, down_, 1, x, choices_.places[slot], Epilogue::kStore);
      for (int64_t c = 0; c < columns; ++c)
        expected[slot / kTopK * columns + c] += static_cast<double>(choices_.weights[slot]) * one[c];
    }
    checks_.close(out, expected, 1e-5);
  }

  Checks& checks_;
  const PackedSpec up_, down_;
  const int64_t rows_;
  Random random_;
  Choices choices_;
  std::vector<std::vector<uint8_t>> weights_;
  std::vector<Floats> biases_;
  Floats x_, mlp_, logits_;
};

}  // namespace

void check_experts(Checks& checks) {
  // Panels that are not full, fewer panels than threads, and a rank without columns.
  for (const int64_t width : {40, 16, 0})
    for (const int64_t rows : {1, 2, 3, 70})
      for (const bool skewed : {false, true}) {
        const PackedSpec up = PackedSpec::make("f32", "f32", {width, width}, 65, 0, 0, true);
        const PackedSpec down = PackedSpec::make("f32", "f32", {21}, width, 0, 0, false);
        Experts(checks, up, down, skewed, rows)
            .check("experts of " + std::to_string(width) + " columns, " + std::to_string(rows) + " rows");
      }
}
