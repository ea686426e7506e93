#include "attention/latent.h"

#include <algorithm>
#include <cstring>

namespace allspan {
namespace {

constexpr int64_t kRows = 96;      // of a task
constexpr int64_t kColumns = 128;  // of a head's matrix: it stays in the second-level cache for all rows

// x [rows, heads, x_dim], rows x_stride elements apart, times a matrix [columns, k] of each head: the first k elements
// of its rows. out [rows, heads, out_dim], of which the first `columns` elements are written.
struct HeadProduct {
  const float* x;
  const char* weight;
  float* out;
  int64_t heads, x_dim, x_stride, out_dim, columns, k;
  Type type;

  int64_t tasks(int64_t rows) const { return heads * column_blocks() * ((rows + kRows - 1) / kRows); }
  int64_t column_blocks() const { return (columns + kColumns - 1) / kColumns; }
  // Calls body(head, first row, last row) after the task that writes a head's last columns.
  template <class Body>
  void run(const Kernels& kernels, int64_t task, int64_t rows, Body body) const {
    const int64_t row_blocks = (rows + kRows - 1) / kRows, block = task / row_blocks;
    const int64_t head = block / column_blocks(), column = block % column_blocks() * kColumns;
    const int64_t row = task % row_blocks * kRows, last = std::min(rows, row + kRows);
    const int64_t bytes = type == Type::kFloat32 ? 4 : 2, end = std::min(columns, column + kColumns);
    kernels.linear({x + head * x_dim, weight + head * columns * k * bytes, nullptr, out + head * out_dim, columns, k,
                    type, x_stride, heads * out_dim},
                   row, last, column, end);
    if (end == columns) body(head, row, last);
  }
};

}  // namespace

void latent_attention(Worker& worker, const Kernels& kernels, const LatentArgs& a, AttentionArgs attention_args,
                      const AttentionBatch& batch, int64_t rows) {
  const int64_t q_dim = a.key_dim + a.rotary_dim, dim = a.latent_dim + a.rotary_dim;
  const HeadProduct absorb{
      a.q,   static_cast<const char*>(a.k_up), a.absorbed, a.heads, q_dim, a.q_stride, dim, a.latent_dim, a.key_dim,
      a.type};
  worker.each(absorb.tasks(rows), [&](int64_t task) {
    absorb.run(kernels, task, rows, [&](int64_t head, int64_t row, int64_t last) {
      for (; row < last; ++row)
        std::memcpy(a.absorbed + (row * a.heads + head) * dim + a.latent_dim,
                    a.q + row * a.q_stride + head * q_dim + a.key_dim, a.rotary_dim * sizeof(float));
    });
  });
  attention_args.q = a.absorbed;
  attention_args.q_stride = a.heads * dim;
  attention_args.out = a.mixed;
  attention_args.heads = a.heads;
  attention(worker, kernels, attention_args, batch);
  const HeadProduct expand{a.mixed,      static_cast<const char*>(a.v_up),
                           a.out,        a.heads,
                           a.latent_dim, a.heads * a.latent_dim,
                           a.value_dim,  a.value_dim,
                           a.latent_dim, a.type};
  worker.each(expand.tasks(rows),
              [&](int64_t task) { expand.run(kernels, task, rows, [](int64_t, int64_t, int64_t) {}); });
}

}  // namespace allspan
