#include "attention/attention.h"

#include <algorithm>
#include <limits>

namespace allspan {
namespace {

constexpr int64_t kMostRows = 192;  // of a tile: their states stay in the second-level cache
constexpr int64_t kLeastRows = 24;  // fewer would not make up for laying out the keys and values of a block
constexpr int64_t kBlockRows = 8;   // what that costs, as if it were so many rows
constexpr int64_t kTasksEach = 8;   // of equal size would even out what threads get
constexpr size_t kLine = 64;

// Query heads by the KV head that they read.
struct Groups {
  int32_t* heads;
  int32_t* starts;  // [kv_heads + 1]
  int64_t largest = 1;

  Groups(int32_t* memory, const AttentionArgs& args, const AttentionBatch& batch)
      : heads(memory), starts(memory + args.heads) {
    int32_t count = 0;
    for (int64_t kv_head = 0; kv_head < args.cache.kv_heads; ++kv_head) {
      starts[kv_head] = count;
      for (int64_t head = 0; head < args.heads; ++head)
        if (batch.kv_head_of[head] == kv_head) heads[count++] = static_cast<int32_t>(head);
      largest = std::max<int64_t>(largest, count - starts[kv_head]);
    }
    starts[args.cache.kv_heads] = count;
  }
};

// Goes over a batch tile by tile, the latest queries of a request first, as they take longest. A tile whose tokens are
// many is cut into tasks.
class Tiles {
 public:
  Tiles(const AttentionArgs& args, const AttentionBatch& batch, const Groups& groups, int64_t queries, double task_cost)
      : args_(args), batch_(batch), groups_(groups), queries_(queries), task_cost_(task_cost) {}

  AttentionTile tile{};
  int64_t rows = 0, splits = 0, parts = 0;  // splits: that some query sees
  int64_t partial = 0;                      // where the states of a tile that is cut begin, in floats

  // False past the last tile.
  bool next() {
    partial += partial_floats();
    do {
      if (++kv_head_ >= args_.cache.kv_heads) {
        kv_head_ = 0;
        while (--block_ < 0) {
          if (++request_ >= batch_.requests) return false;
          const int64_t count = batch_.qo_indptr[request_ + 1] - batch_.qo_indptr[request_];
          block_ = (count + queries_ - 1) / queries_;
        }
      }
    } while (groups_.starts[kv_head_] == groups_.starts[kv_head_ + 1]);
    const int64_t begin = batch_.qo_indptr[request_], end = batch_.qo_indptr[request_ + 1];
    const int64_t first = begin + block_ * queries_;
    tile.pages = batch_.page_indices + batch_.page_indptr[request_];
    tile.heads = groups_.heads + groups_.starts[kv_head_];
    tile.head_count = groups_.starts[kv_head_ + 1] - groups_.starts[kv_head_];
    tile.kv_head = kv_head_;
    tile.first_query = first;
    tile.query_count = std::min(queries_, end - first);
    tile.first_visible = batch_.kv_lens[request_] - (end - first) + 1;
    rows = tile.query_count * tile.head_count;
    tile.begin = args_.window ? std::max<int64_t>(0, tile.first_visible - args_.window) : 0;
    before_ = tile.begin / kSplitTokens;
    splits = (last_visible() + kSplitTokens - 1) / kSplitTokens - before_;
    parts = 1;
    if (cost() > 2 * task_cost_) {
      each_ = std::max<int64_t>(1, static_cast<int64_t>(splits * task_cost_ / cost()));
      parts = (splits + each_ - 1) / each_;
    }
    return true;
  }
  double cost() const {
    return static_cast<double>(last_visible() - tile.begin) * static_cast<double>(rows + kBlockRows);
  }
  // States of a tile that is cut: one of the first part, then one a split.
  int64_t states() const { return parts > 1 ? 1 + splits - each_ : 0; }
  int64_t partial_floats() const { return states() * state_floats(rows, args_.cache.value_dim); }
  AttentionTile part(int64_t index, float* states_of_all) const {
    AttentionTile task = tile;
    const int64_t first = parts > 1 ? index * each_ : 0, last = parts > 1 ? std::min(splits, first + each_) : splits;
    task.first_split = before_ + first;
    task.last_split = before_ + last;
    const int64_t state = index == 0 ? 0 : 1 + first - each_;
    task.partial = parts > 1 ? states_of_all + partial + state * state_floats(rows, args_.cache.value_dim) : nullptr;
    return task;
  }

 private:
  int64_t last_visible() const { return tile.first_visible + tile.query_count - 1; }

  const AttentionArgs& args_;
  const AttentionBatch& batch_;
  const Groups& groups_;
  const int64_t queries_;
  const double task_cost_;
  int64_t request_ = -1, block_ = 0, kv_head_ = std::numeric_limits<int64_t>::max() - 1, each_ = 0;
  int64_t before_ = 0;  // splits that no query of the tile sees
};

}  // namespace

void attention(Worker& worker, const Kernels& kernels, const AttentionArgs& args, const AttentionBatch& batch) {
  const int64_t tokens = batch.requests ? batch.qo_indptr[batch.requests] : 0;
  if (tokens == 0 || args.heads == 0) return;
  // Every thread plans for itself: that is sooner done than waited for. How the work is cut does not show in the bits.
  const int64_t most_group = args.heads;
  const int64_t wanted = tokens * args.heads / (4 * worker.threads());
  const int64_t tile_rows = std::clamp(wanted, kLeastRows, kMostRows);
  const size_t plan_bytes = ((args.heads + args.cache.kv_heads + 1) * sizeof(int32_t) + kLine - 1) / kLine * kLine;
  const int64_t scratch_rows = std::max(tile_rows, most_group);
  char* const own = static_cast<char*>(
      worker.scratch(plan_bytes + attention_scratch_floats(scratch_rows, args.cache.dim) * sizeof(float)));
  float* const scratch = reinterpret_cast<float*>(own + plan_bytes);
  const Groups groups(reinterpret_cast<int32_t*>(own), args, batch);
  const int64_t queries = std::max<int64_t>(1, tile_rows / groups.largest);

  double total = 0, task_cost = std::numeric_limits<double>::infinity();
  if (worker.threads() > 1) {
    for (Tiles tiles(args, batch, groups, queries, task_cost); tiles.next();) total += tiles.cost();
    task_cost = total / static_cast<double>(kTasksEach * worker.threads());
  }
  int64_t tasks = 0, cut_rows = 0;
  Tiles counted(args, batch, groups, queries, task_cost);
  while (counted.next()) {
    tasks += counted.parts;
    if (counted.parts > 1) cut_rows += counted.rows;
  }
  float* const states = cut_rows > 0 ? static_cast<float*>(worker.shared(counted.partial * sizeof(float))) : nullptr;

  // A thread's tasks come in ascending order.
  Tiles tiles(args, batch, groups, queries, task_cost);
  int64_t begun = 0;  // tasks up to and with those of the tile
  worker.each(tasks, [&](int64_t task) {
    while (task >= begun) {
      tiles.next();
      begun += tiles.parts;
    }
    kernels.attention(args, tiles.part(task - (begun - tiles.parts), states), scratch);
  });
  if (cut_rows == 0) return;
  Tiles merged(args, batch, groups, queries, task_cost);
  int64_t passed = 0;  // rows up to and with those of the tile
  worker.each(cut_rows, [&](int64_t row) {
    while (row >= passed) {
      merged.next();
      if (merged.parts > 1) passed += merged.rows;
    }
    kernels.merge_attention(args, merged.part(0, states), merged.states(), row - (passed - merged.rows));
  });
}

}  // namespace allspan
