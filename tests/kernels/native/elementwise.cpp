#include <cmath>
#include <cstring>

#include "check.h"

using allspan::Epilogue;
using allspan::LinearArgs;
using allspan::Type;

namespace {

constexpr int64_t kWidths[] = {1, 3, 4, 7, 16, 31, 33, 100};
constexpr float kPoison = 1e30f;

std::string sized(const char* op, std::initializer_list<int64_t> sizes) {
  std::string text = op;
  for (int64_t size : sizes) text += ' ' + std::to_string(size);
  return text;
}

void check_norm(Checks& checks, int64_t rows, int64_t width) {
  Random random(width);
  const Floats x = random.reals(rows * width), residual = random.reals(rows * width), weight = random.reals(width);
  for (const bool adds : {false, true}) {
    Doubles sums(x.begin(), x.end()), expected(x.size());
    for (size_t i = 0; adds && i < sums.size(); ++i) sums[i] += residual[i];
    for (int64_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i) squares += sums[row * width + i] * sums[row * width + i];
      for (int64_t i = 0; i < width; ++i)
        expected[row * width + i] = sums[row * width + i] / std::sqrt(squares / width + 1e-5) * weight[i];
    }
    checks.each(sized(adds ? "add_rms_norm" : "rms_norm", {rows, width}), [&](Checks::Run& run) {
      Floats out(x.size(), kPoison), kept = residual;
      run.kernels().rms_norm(x.data(), adds ? kept.data() : nullptr, weight.data(), 1e-5f, out.data(), rows, width);
      checks.close(out, expected, 1e-5);
      if (adds) checks.close(kept, sums, 1e-6);
    });
  }
}

void check_add_and_gated(Checks& checks, int64_t rows, int64_t width) {
  Random random(width + 1);
  Floats gate_up = random.reals(rows * 2 * width, 16);
  gate_up[0] = -200;  // far out, where an exponential overflows or vanishes
  gate_up[gate_up.size() / 2] = 200;
  Doubles active(rows * width), sums(rows * width), bent(rows * width);
  for (int64_t i = 0; i < rows * width; ++i) {
    const double gate = gate_up[i / width * 2 * width + i % width],
                 up = gate_up[(i / width * 2 + 1) * width + i % width];
    active[i] = gate / (1 + std::exp(-gate)) * up;
    bent[i] = gate / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
    sums[i] = static_cast<double>(gate_up[i]) + gate_up[rows * width + i];
  }
  checks.each(sized("gated_mul, add", {rows, width}), [&](Checks::Run& run) {
    Floats out(rows * width, kPoison);
    run.kernels().gated_mul(gate_up.data(), Epilogue::kGatedSilu, out.data(), rows, width);
    checks.close(out, active, 1e-5);
    run.kernels().gated_mul(gate_up.data(), Epilogue::kGatedGelu, out.data(), rows, width);
    checks.close(out, bent, 1e-5);
    Floats residual(gate_up.begin() + rows * width, gate_up.end());
    run.kernels().add(gate_up.data(), residual.data(), rows * width);
    checks.close(residual, sums, 1e-6);
  });
}

void check_rotary(Checks& checks, int64_t heads, int64_t dim, int64_t rot) {
  Random random(dim);
  const int64_t rows = 3, half = rot / 2;
  const std::vector<int32_t> positions = {4, 0, 7};
  Floats cos_sin(8 * rot);
  for (int64_t position = 0; position < 8; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = position / std::pow(100.0, static_cast<double>(i) / half);
      cos_sin[position * rot + i] = static_cast<float>(std::cos(angle));
      cos_sin[position * rot + half + i] = static_cast<float>(std::sin(angle));
    }
  }
  const Floats x = random.reals(rows * heads * dim);
  Doubles expected(x.begin(), x.end());
  for (int64_t head = 0; head < rows * heads; ++head) {
    const float* cos = cos_sin.data() + positions[head / heads] * rot;
    for (int64_t i = 0; i < half; ++i) {
      const double low = x[head * dim + i], high = x[head * dim + half + i];
      expected[head * dim + i] = low * cos[i] - high * cos[half + i];
      expected[head * dim + half + i] = high * cos[i] + low * cos[half + i];
    }
  }
  checks.each(sized("rotary", {heads, dim, rot}), [&](Checks::Run& run) {
    Floats turned = x;
    run.kernels().rotary(turned.data(), heads, dim, positions.data(), cos_sin.data(), rot, rows);
    checks.close(turned, expected, 1e-6);
  });
}

void check_hadamard(Checks& checks, int64_t heads, int64_t dim) {
  Random random(dim);
  const int64_t rows = 2, size = dim & -dim;
  const Floats x = random.reals(rows * heads * dim), center = random.reals(heads * dim);
  for (const bool centred : {false, true}) {
    Doubles expected(x.size(), 0);
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t first = i / size * size;
      for (int64_t j = 0; j < size; ++j) {
        const double value = x[first + j] - (centred ? center[(first + j) % (heads * dim)] : 0.0);
        expected[i] +=
            (__builtin_popcountll((i - first) & j) % 2 ? -value : value) / std::sqrt(static_cast<double>(size));
      }
    }
    checks.each(sized("hadamard", {heads, dim, centred}), [&](Checks::Run& run) {
      Floats rotated = x;
      run.kernels().hadamard(rotated.data(), heads, dim, centred ? center.data() : nullptr, rows);
      checks.close(rotated, expected, 1e-5);
    });
  }
}

// Weights in either type: `halves` are bfloat16, `floats` the same numbers.
struct Weights {
  std::vector<uint16_t> halves;
  Floats floats;
  Weights(Random& random, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      halves.push_back(to_bfloat16(random.real()));
      floats.push_back(from_bfloat16(halves.back()));
    }
  }
  const void* of(Type type) const {
    return type == Type::kFloat32 ? static_cast<const void*>(floats.data()) : halves.data();
  }
};

void check_linear(Checks& checks, int64_t rows, int64_t k, int64_t columns) {
  Random random(k);
  const Weights weight(random, columns * k);
  const Floats x = random.reals(rows * k), bias = random.reals(columns);
  Doubles expected(rows * columns), limits(rows * columns, 1e-6);
  for (int64_t i = 0; i < rows * columns; ++i) {
    expected[i] = bias[i % columns];
    for (int64_t j = 0; j < k; ++j) {
      const double product = static_cast<double>(x[i / columns * k + j]) * weight.floats[i % columns * k + j];
      expected[i] += product;
      limits[i] += 1e-6 * std::fabs(product);
    }
  }
  for (const Type type : {Type::kFloat32, Type::kBfloat16}) {
    checks.each(
        sized(type == Type::kFloat32 ? "linear float32" : "linear bfloat16", {rows, k, columns}),
        [&](Checks::Run& run) {
          Floats out(rows * columns, kPoison), alone(columns, kPoison);
          const auto linear = [&](const float* from, Floats& to, int64_t count) {
            const LinearArgs args{from, weight.of(type), bias.data(), to.data(), columns, k, type, k, columns};
            run.runtime->pool().team([&](allspan::Worker& worker) { run.runtime->linear(worker, args, count); });
          };
          linear(x.data(), out, rows);
          linear(x.data() + (rows - 1) * k, alone, 1);
          checks.close(out, expected, limits);
          checks.same(alone, Floats(out.end() - columns, out.end()), "in the batch");
        });
  }
}

void check_embedding(Checks& checks, int64_t width) {
  Random random(width);
  const int64_t rows = 5, first_row = 40;
  const Weights weight(random, rows * width);
  const std::vector<int32_t> ids = {44, 39, 40, 45, 0};
  Doubles expected;
  for (const int32_t id : ids)
    for (int64_t i = 0; i < width; ++i)
      expected.push_back(id >= 40 && id < 45 ? weight.floats[(id - first_row) * width + i] : 0.0);
  for (const Type type : {Type::kFloat32, Type::kBfloat16}) {
    checks.each(sized("embedding", {width}), [&](Checks::Run& run) {
      Floats out(expected.size(), kPoison);
      run.kernels().embedding(ids.data(), weight.of(type), type, first_row, rows, width, out.data(),
                              static_cast<int64_t>(ids.size()));
      checks.close(out, expected, 0.0);
    });
  }
}

}  // namespace

void check_elementwise(Checks& checks) {
  for (const int64_t width : kWidths) {
    check_norm(checks, 3, width);
    check_add_and_gated(checks, 3, width);
    check_embedding(checks, width);
  }
  for (const int64_t dim : {1, 2, 4, 12, 16, 20, 24, 33, 64, 80, 96}) check_hadamard(checks, 2, dim);
  check_rotary(checks, 2, 64, 64);
  check_rotary(checks, 3, 48, 10);
  check_rotary(checks, 1, 80, 80);
  check_linear(checks, 1, 1, 1);
  check_linear(checks, 5, 100, 13);
  check_linear(checks, 7, 33, 66);
  check_linear(checks, 131, 17, 5);
}
