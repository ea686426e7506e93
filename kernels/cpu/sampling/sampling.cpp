#include <algorithm>

#include "sampling/scratch.h"

namespace allspan::sampling {
namespace {

// body(row, scratch) for each row, on the runtime's threads when there is one.
template <class Body>
void each_row(Runtime* runtime, int64_t rows, Body body) {
  const auto part = [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t row = begin; row < end; ++row) body(row, scratch);
  };
  if (runtime) {
    runtime->split(rows, 1, part);
  } else {
    part(0, rows);
  }
}

// Of ids of x, or of what was found in their place: the one that counts for both. Of equals a.
int32_t better(const float* x, int32_t a, int32_t b) {
  if (a == kNotFinite || b == kNotFinite) return kNotFinite;
  if (a < 0 || b < 0) return a < 0 ? b : a;
  return x[b] > x[a] ? b : a;
}

}  // namespace

void sample_rows(Runtime* runtime, const Logits& logits, const int64_t* settings_of, const int64_t* positions,
                 const int64_t* targets, const Settings* settings, int32_t* tokens, int64_t stride) {
  const int64_t n = logits.columns;
  each_row(runtime, logits.rows, [&](int64_t i, Scratch& scratch) {
    int32_t& token = tokens[i * stride];
    if (targets[i] < 0) {
      token = sample(logits.row(i), n, positions[i], settings[settings_of[i]], scratch);
    } else {
      token = scan(logits.row(i), n, scratch) < 0 ? kNotFinite : static_cast<int32_t>(targets[i]);
    }
  });
}

// One row is cut up for all threads; of several each thread takes whole ones.
void best_tokens(Runtime* runtime, const Logits& logits, int32_t* best) {
  const int64_t m = logits.rows, n = logits.columns, blocks = (n + kBlock - 1) / kBlock;
  const int64_t parts = !runtime || m >= runtime->pool().threads() ? 1 : runtime->pool().threads();
  std::vector<int32_t> found(m * parts);
  each_row(runtime, m * parts, [&](int64_t task, Scratch& scratch) {
    const float* row = logits.row(task / parts);
    const int64_t part = task % parts;
    const int64_t begin = blocks * part / parts * kBlock, end = std::min(n, blocks * (part + 1) / parts * kBlock);
    int32_t& id = found[task] = kAllMasked;
    if (begin == end) return;
    const int64_t block = scan(row + begin, end - begin, scratch);
    const float* from = row + begin + std::max<int64_t>(block, 0) * kBlock;
    id = static_cast<int32_t>(block < 0 ? block : std::find(from, row + end, scratch.maxima[block]) - row);
  });
  for (int64_t row = 0; row < m; ++row) {
    best[row] = found[row * parts];
    for (int64_t part = 1; part < parts; ++part)
      best[row] = better(logits.row(row), best[row], found[row * parts + part]);
  }
}

void log_softmax_rows(Runtime* runtime, const Logits& logits, const int64_t* counts, int64_t places, int32_t* out) {
  each_row(runtime, logits.rows, [&](int64_t i, Scratch& scratch) {
    int32_t* row = out + i * (2 + 2 * places);
    if (counts[i] >= 0 && row[0] >= 0) log_softmax(logits.row(i), logits.columns, counts[i], places, row, scratch);
  });
}

}  // namespace allspan::sampling
