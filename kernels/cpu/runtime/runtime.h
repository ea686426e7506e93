// What an op set holds: the kernels of one instruction set, the threads, and each thread's scratch memory.
#pragma once

#include <string>
#include <vector>

#include "attention/attention.h"
#include "kernels.h"
#include "runtime/pool.h"

namespace allspan {

class Runtime {
 public:
  // Throws std::invalid_argument when `isa` cannot run here.
  Runtime(const std::string& isa, int threads, std::vector<int> cpus);

  const Kernels& kernels() const { return *kernels_; }
  int isa() const { return isa_; }
  Pool& pool() { return pool_; }

  void linear(Worker& worker, const LinearArgs& args, int64_t rows);
  using Batch = AttentionBatch;
  void attention(Worker& worker, const AttentionArgs& args, const Batch& batch);

  // body(begin, end) over [0, count) in parts of at least `grain`, on as many threads as that gives.
  template <class Body>
  void split(int64_t count, int64_t grain, Body body) {
    if (count < 2 * grain) {
      pool_.run(1, [&](int, int) { body(int64_t{0}, count); });
    } else {
      pool_.team([&](Worker& worker) { worker.split(count, grain, body); });
    }
  }

 private:
  const int isa_;
  const Kernels* kernels_;
  Pool pool_;
};

}  // namespace allspan
