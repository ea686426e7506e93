#include "runtime/wait.h"

#include <thread>

namespace allspan {

bool Wait::slowly() {
  using Clock = std::chrono::steady_clock;
  if (start_ == Clock::time_point{}) start_ = Clock::now();
  if ((tries_ & 15) != 0 && !sleeps_) {
    std::this_thread::yield();
    return true;
  }
  const double waited = std::chrono::duration<double>(Clock::now() - start_).count();
  sleeps_ = waited > 0.02;
  if (sleeps_) {
    std::this_thread::sleep_for(std::chrono::microseconds(waited > 1.0 ? 1000 : 100));
  } else {
    std::this_thread::yield();
  }
  return waited < timeout_;
}

std::string waited(int rank, double timeout, const std::string& ranks, const char* what) {
  return "rank " + std::to_string(rank) + " waited " + std::to_string(static_cast<int>(timeout)) + " s for rank " +
         ranks + " in " + what;
}

std::string late(const Counter* counters, int size, uint64_t wanted, int rank, double timeout, const char* what,
                 int first) {
  std::string ranks;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank && counters[peer].value.load(std::memory_order_relaxed) < wanted) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(first + peer);
    }
  }
  return waited(first + rank, timeout, ranks, what);
}

}  // namespace allspan
