#include "attention.h"

#include <algorithm>
#include <vector>

namespace allspan {

void attention(Worker& worker, const Kernels& kernels, const AttentionArgs& args, const AttentionBatch& batch) {
  std::vector<AttentionTile> tiles;
  std::vector<std::vector<int32_t>> readers(args.cache.kv_heads);  // query heads by the KV head that they read
  worker.guard([&] {
    for (int64_t head = 0; head < args.heads; ++head)
      readers[batch.kv_head_of[head]].push_back(static_cast<int32_t>(head));
    const bool alone = batch.requests * args.cache.kv_heads < worker.threads();
    for (int64_t request = 0; request < batch.requests; ++request) {
      const int64_t first = batch.qo_indptr[request], queries = batch.qo_indptr[request + 1] - first;
      const int64_t seen_before = batch.kv_lens[request] - queries;
      const int32_t* pages = batch.page_indices + batch.page_indptr[request];
      for (int64_t kv_head = 0; kv_head < args.cache.kv_heads; ++kv_head) {
        const std::vector<int32_t>& heads = readers[kv_head];
        const int64_t readers_count = static_cast<int64_t>(heads.size());
        const int64_t most = alone && queries < 8 ? 1 : kTileRows;
        for (int64_t h = 0; h < readers_count; h += most) {
          const int64_t count = std::min(most, readers_count - h);
          const int64_t step = std::max<int64_t>(1, kTileRows / count);
          for (int64_t q = 0; q < queries; q += step)
            tiles.push_back(
                {pages, heads.data() + h, count, kv_head, first + q, std::min(step, queries - q), seen_before + q + 1});
        }
      }
    }
  });
  float* const scratch = static_cast<float*>(worker.scratch(attention_scratch_floats(args.cache.dim) * sizeof(float)));
  worker.each(static_cast<int64_t>(tiles.size()), [&](int64_t task) { kernels.attention(args, tiles[task], scratch); });
}

}  // namespace allspan
