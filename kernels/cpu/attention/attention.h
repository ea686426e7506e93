// Attention over paged KV, shared out over the threads of a run.
#pragma once

#include "kernels.h"
#include "runtime/pool.h"

namespace allspan {

// Which tokens, pages and heads belong together, as in OpSet.attention; already checked.
struct AttentionBatch {
  int64_t requests;
  const int32_t *qo_indptr, *page_indptr, *page_indices, *kv_lens, *kv_head_of;
};

void attention(Worker& worker, const Kernels& kernels, const AttentionArgs& args, const AttentionBatch& batch);

}  // namespace allspan
