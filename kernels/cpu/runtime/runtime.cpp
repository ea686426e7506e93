#include "runtime/runtime.h"

#include <algorithm>
#include <stdexcept>

#include "isa/isa.h"

namespace allspan {
namespace {

const Variant& find(const std::string& isa) {
  for (const Variant& variant : variants())
    if (isa == variant.name) return variant;
  throw std::invalid_argument("isa: " + isa + " cannot run on this CPU");
}

// Work below this many multiply-adds is not worth waking a thread for.
constexpr int64_t kSmallWork = 1 << 16;
// A panel of weights that stays in the second-level cache while every row passes over it.
constexpr int64_t kPanelBytes = 256 << 10;
constexpr int64_t kRowBlock = 96;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Runtime::Runtime(const std::string& isa, int threads, std::vector<int> cpus)
    : isa_(find(isa).isa), kernels_(find(isa).kernels), pool_(threads, std::move(cpus)) {}

void Runtime::linear(Worker& worker, const LinearArgs& args, int64_t rows) {
  if (rows == 0 || args.columns == 0) return;
  const int threads = pool_.threads();
  if (rows * args.columns * args.k <= kSmallWork) {
    worker.each(1, [&](int64_t) { kernels_->linear(args, 0, rows, 0, args.columns); });
    return;
  }
  const int64_t weight_bytes = args.k * (args.type == Type::kFloat32 ? 4 : 2);
  const int64_t panel = std::max<int64_t>(16, kPanelBytes / std::max<int64_t>(1, weight_bytes));
  // Four parts a thread even out what other processes take from some of them.
  const int64_t share = (args.columns + threads * 4 - 1) / (threads * 4);
  const int64_t columns = round_up(std::clamp<int64_t>(share, 16, panel), 4);
  const int64_t column_blocks = (args.columns + columns - 1) / columns;
  const bool few = column_blocks < threads * 2 && rows > kRowBlock;
  const int64_t row_block = few ? kRowBlock : rows;
  const int64_t row_blocks = (rows + row_block - 1) / row_block;
  worker.each(column_blocks * row_blocks, [&](int64_t task) {
    const int64_t row = task % row_blocks * row_block, column = task / row_blocks * columns;
    kernels_->linear(args, row, std::min(rows, row + row_block), column, std::min(args.columns, column + columns));
  });
}

void Runtime::attention(Worker& worker, const AttentionArgs& args, const Batch& batch) {
  allspan::attention(worker, *kernels_, args, batch);
}

}  // namespace allspan
