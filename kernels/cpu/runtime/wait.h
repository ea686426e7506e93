// Waiting for other ranks through memory that they share: briefly spinning, then yielding, then sleeping, and always
// with a deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace allspan {

constexpr size_t kLine = 64;  // bytes of a cache line

// DeadlineExceeded in Python, TimeoutError on the way there.
struct WaitTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// On a cache line of its own: only its owner writes it.
struct alignas(kLine) Counter {
  std::atomic<uint64_t> value{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// One wait: `spins` tries, then yielding, after 20 ms sleeping. `again()` is false when the time is up.
class Wait {
 public:
  Wait(int spins, double timeout) : spins_(spins), timeout_(timeout) {}

  bool again() {
    if (tries_++ < spins_) {
      relax();
      return true;
    }
    return slowly();
  }

 private:
  bool slowly();

  int spins_;
  int tries_ = 0;
  bool sleeps_ = false;
  double timeout_;
  std::chrono::steady_clock::time_point start_{};
};

// Names the ranks of a host whose counter is below `wanted`; `first` is the number of its first one in the world.
std::string late(const Counter* counters, int size, uint64_t wanted, int rank, double timeout, const char* what,
                 int first);
// "rank 1 waited 30 s for rank 0, 2 in all_reduce".
std::string waited(int rank, double timeout, const std::string& ranks, const char* what);

}  // namespace allspan
