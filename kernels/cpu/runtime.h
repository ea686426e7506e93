// What an op set holds: the kernels of one instruction set, the threads, and each thread's scratch memory.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace allspan {

class Runtime {
 public:
  // Throws std::invalid_argument when `isa` cannot run here.
  Runtime(const std::string& isa, int threads, std::vector<int> cpus);

  const Kernels& kernels() const { return *kernels_; }
  int isa() const { return isa_; }
  Pool& pool() { return pool_; }

  void linear(const LinearArgs& args, int64_t rows);
  // qo_indptr, page_indptr, kv_lens, kv_head_of as in OpSet.attention; already checked.
  struct Batch {
    int64_t requests;
    const int32_t *qo_indptr, *page_indptr, *page_indices, *kv_lens, *kv_head_of;
  };
  void attention(const AttentionArgs& args, const Batch& batch);

  // body(begin, end) over [0, count) in parts of at least `grain`, on as many threads as that gives.
  template <class Body>
  void split(int64_t count, int64_t grain, Body body) {
    const int64_t most = static_cast<int64_t>(pool_.threads());
    const int64_t parts = count / (grain > 0 ? grain : 1) < most ? count / (grain > 0 ? grain : 1) : most;
    if (parts <= 1) {
      pool_.run(1, [&](int, int) { body(int64_t{0}, count); });
      return;
    }
    pool_.run(static_cast<int>(parts), [&](int part, int) { body(count * part / parts, count * (part + 1) / parts); });
  }

 private:
  const int isa_;
  const Kernels* kernels_;
  Pool pool_;
  std::mutex attention_;                     // one call at a time uses the scratch
  std::vector<std::vector<float>> scratch_;  // of each worker
};

}  // namespace allspan
