// Collectives and the plan ring between the ranks of one host, in memory that they share (an MPI window, mapped by the
// caller). Waiting spins briefly, then yields, then sleeps, and always has a deadline. Sums are taken in rank order, so
// every rank holds the same bits.
//
// Each rank owns kSlots slots and one counter of the chunks it has put there. A collective is a sequence of chunks: a
// rank copies chunk k+1 into its slot, waits until all peers have put chunk k, and reads it. A rank that puts chunk k
// has read chunk k-2; when it knows that its peers have put chunk k-1 it also knows that they have read k-3, so with
// four slots the one that chunk k+1 overwrites is free without a second barrier.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "ops.h"

namespace nb = nanobind;

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kLine = 64;
constexpr size_t kSlots = 4;
constexpr size_t kElement = 4;  // bytes of a float32 or int32

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

struct WaitTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct alignas(kLine) Counter {
  std::atomic<uint64_t> value{0};
};

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
    if (start_ == Clock::time_point{}) start_ = Clock::now();
    if ((tries_ & 15) != 0 && !slow_) {
      std::this_thread::yield();
      return true;
    }
    const double waited = Seconds(Clock::now() - start_).count();
    slow_ = waited > 0.02;
    if (slow_) {
      std::this_thread::sleep_for(std::chrono::microseconds(waited > 1.0 ? 1000 : 100));
    } else {
      std::this_thread::yield();
    }
    return waited < timeout_;
  }

 private:
  int spins_;
  int tries_ = 0;
  bool slow_ = false;
  double timeout_;
  Clock::time_point start_{};
};

// Names the ranks whose counter is below `wanted`.
WaitTimeout late(const Counter* counters, int size, uint64_t wanted, int rank, double timeout, const char* what) {
  std::string ranks;
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank && counters[peer].value.load(std::memory_order_relaxed) < wanted) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
    }
  }
  return WaitTimeout("rank " + std::to_string(rank) + " waited " + std::to_string(static_cast<int>(timeout)) +
                     " s for rank " + ranks + " in " + what);
}

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

class Window {
 public:
  Window(uintptr_t base, int rank, int size, size_t slot_bytes, int spins, double timeout)
      : rank_(rank), size_(size), slot_bytes_(slot_bytes), spins_(spins), timeout_(timeout) {
    if (base % kLine != 0 || slot_bytes % kLine != 0) throw std::invalid_argument("a window is aligned to 64 bytes");
    put_ = reinterpret_cast<Counter*>(base);
    slots_ = reinterpret_cast<char*>(base) + size * sizeof(Counter);
  }

  static size_t bytes(int size, size_t slot_bytes) { return size * (sizeof(Counter) + kSlots * slot_bytes); }

  void all_reduce(uintptr_t address, size_t count) {
    auto* x = reinterpret_cast<float*>(address);
    const size_t per_chunk = slot_bytes_ / kElement;
    stream(reinterpret_cast<const char*>(x), count * kElement, ceil_div(count, per_chunk), "all_reduce",
           [&](size_t chunk) {
             const size_t first = chunk * per_chunk;
             sum(x + first, std::min(per_chunk, count - first));
           });
  }

  // x [m, widths[rank]]; out [rows rank, rank + size … of m, sum(widths)].
  void exchange_rows(uintptr_t x, size_t m, const std::vector<size_t>& widths, uintptr_t out) {
    size_t total = 0, widest = 0;
    for (size_t width : widths) total += width, widest = std::max(widest, width);
    const size_t per_chunk = slot_bytes_ / kElement;
    stream(reinterpret_cast<const char*>(x), m * widths.at(rank_) * kElement, ceil_div(m * widest, per_chunk),
           "exchange_rows", [&](size_t chunk) {
             size_t column = 0;
             for (int peer = 0; peer < size_; ++peer) {
               const size_t width = widths[peer];
               pieces(
                   chunk, per_chunk, m, width,
                   [&](size_t row, size_t col, const char* from, size_t n) {
                     if (row % size_ != static_cast<size_t>(rank_)) return;
                     const size_t to = row / size_ * total + column + col;
                     std::memcpy(reinterpret_cast<char*>(out) + to * kElement, from, n * kElement);
                   },
                   peer);
               column += width;
             }
           });
  }

  // x [m_rank, width], row j of rank r is row r + j * size of out [m, width].
  void all_gather_rows(uintptr_t x, size_t m, size_t width, uintptr_t out) {
    const size_t per_chunk = slot_bytes_ / kElement;
    const auto rows_of = [&](size_t peer) { return peer < m ? ceil_div(m - peer, size_) : 0; };
    stream(reinterpret_cast<const char*>(x), rows_of(rank_) * width * kElement, ceil_div(rows_of(0) * width, per_chunk),
           "all_gather_rows", [&](size_t chunk) {
             for (int peer = 0; peer < size_; ++peer) {
               pieces(
                   chunk, per_chunk, rows_of(peer), width,
                   [&](size_t row, size_t col, const char* from, size_t n) {
                     const size_t to = (row * size_ + peer) * width + col;
                     std::memcpy(reinterpret_cast<char*>(out) + to * kElement, from, n * kElement);
                   },
                   peer);
             }
           });
  }

  void barrier() {
    stream(nullptr, 0, 1, "barrier", [](size_t) {});
  }

 private:
  char* slot(int peer, uint64_t sequence) const { return slots_ + (peer * kSlots + sequence % kSlots) * slot_bytes_; }

  // Sends `bytes` from `source` in `chunks` chunks (as many on every rank; a rank may run out of bytes early) and calls
  // `read(chunk)` for each once all ranks have put theirs.
  template <class Read>
  void stream(const char* source, size_t bytes, size_t chunks, const char* what, Read read) {
    const uint64_t first = sequence_;
    const auto put = [&](size_t chunk) {
      const size_t from = chunk * slot_bytes_;
      if (from < bytes) std::memcpy(slot(rank_, first + chunk), source + from, std::min(slot_bytes_, bytes - from));
      put_[rank_].value.store(first + chunk + 1, std::memory_order_release);
    };
    if (chunks > 0) put(0);
    for (size_t chunk = 0; chunk < chunks; ++chunk) {
      if (chunk + 1 < chunks) put(chunk + 1);
      await(first + chunk + 1, what);
      sequence_ = first + chunk;
      read(chunk);
    }
    sequence_ = first + chunks;
  }

  void await(uint64_t sequence, const char* what) const {
    Wait wait(spins_, timeout_);
    for (int peer = 0; peer < size_; ++peer) {
      while (put_[peer].value.load(std::memory_order_acquire) < sequence) {
        if (!wait.again()) throw late(put_, size_, sequence, rank_, timeout_, what);
      }
    }
  }

  // x[n] = slot 0 + slot 1 + …, in this order for every element.
  void sum(float* x, size_t n) const {
    constexpr size_t kBlock = 2048;
    for (size_t start = 0; start < n; start += kBlock) {
      const size_t count = std::min(kBlock, n - start);
      std::memcpy(x + start, slot(0, sequence_) + start * kElement, count * kElement);
      for (int peer = 1; peer < size_; ++peer) {
        const float* __restrict part = reinterpret_cast<const float*>(slot(peer, sequence_)) + start;
        float* __restrict to = x + start;
        for (size_t i = 0; i < count; ++i) to[i] += part[i];
      }
    }
  }

  // Calls `use(row, column, data, n)` for each run of a row that lies in `peer`'s current slot, of its [rows, width].
  template <class Use>
  void pieces(size_t chunk, size_t per_chunk, size_t rows, size_t width, Use use, int peer) const {
    const char* data = slot(peer, sequence_);
    const size_t first = chunk * per_chunk, end = std::min(first + per_chunk, rows * width);
    for (size_t at = first; at < end;) {
      const size_t column = at % width, n = std::min(width - column, end - at);
      use(at / width, column, data + (at - first) * kElement, n);
      at += n;
    }
  }

  Counter* put_;
  char* slots_;
  int rank_, size_;
  size_t slot_bytes_;
  int spins_;
  double timeout_;
  uint64_t sequence_ = 0;  // of the chunk being read
};

// False when a signal interrupted the sleep.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
#ifdef __linux__
  seconds = std::max(seconds, 0.0);
  timespec span{static_cast<time_t>(seconds),
                static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
  return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &span, nullptr, 0) == 0 || errno != EINTR;
#else
  std::this_thread::sleep_for(std::chrono::duration<double>(std::min(seconds, 0.001)));
  return true;
#endif
}

void futex_wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Messages from rank 0 to all others through a ring of slots. A message longer than a slot takes several.
class PlanRing {
 public:
  static constexpr size_t kRing = 64;

  PlanRing(uintptr_t base, int rank, int size, size_t slot_bytes, double spin, double timeout)
      : rank_(rank), size_(size), slot_bytes_(slot_bytes), spin_(spin), timeout_(timeout) {
    if (base % kLine != 0 || slot_bytes % kLine != 0) throw std::invalid_argument("a ring is aligned to 64 bytes");
    head_ = reinterpret_cast<Head*>(base);
    tails_ = reinterpret_cast<Counter*>(base + sizeof(Head));
    parts_ = reinterpret_cast<char*>(base + sizeof(Head) + size * sizeof(Counter));
  }

  static size_t bytes(int size, size_t slot_bytes) {
    return sizeof(Head) + size * sizeof(Counter) + kRing * (sizeof(Part) + slot_bytes);
  }

  void publish(const char* data, size_t bytes) {
    size_t from = 0;
    do {
      const size_t n = std::min(slot_bytes_, bytes - from);
      wait_for_room();
      Part* part = slot(position_);
      part->bytes = static_cast<uint32_t>(n);
      part->last = from + n == bytes;
      if (n > 0) std::memcpy(part + 1, data + from, n);
      head_->published.store(++position_);
      head_->doorbell.fetch_add(1);
      if (head_->sleepers.load() > 0) futex_wake(head_->doorbell);
      from += n;
    } while (from < bytes);
  }

  // False: nothing came within `timeout` seconds, or a signal arrived.
  bool receive(double timeout, std::string& message) {
    if (!wait_for_part(timeout)) return false;
    while (true) {
      const Part* part = slot(position_);
      const bool last = part->last != 0;
      message.append(reinterpret_cast<const char*>(part + 1), part->bytes);
      tails_[rank_].value.store(++position_, std::memory_order_release);
      if (last) return true;
      const auto end = Clock::now() + Seconds(timeout_);
      while (!wait_for_part(Seconds(end - Clock::now()).count())) {
        if (Clock::now() >= end) throw WaitTimeout("rank " + std::to_string(rank_) + " waited for the rest of a plan");
      }
    }
  }

 private:
  struct Head {
    alignas(kLine) std::atomic<uint64_t> published{0};
    alignas(kLine) std::atomic<uint32_t> doorbell{0};
    std::atomic<uint32_t> sleepers{0};
  };
  struct alignas(kLine) Part {
    uint32_t bytes;
    uint32_t last;
  };

  Part* slot(uint64_t position) const {
    return reinterpret_cast<Part*>(parts_ + position % kRing * (sizeof(Part) + slot_bytes_));
  }

  void wait_for_room() const {
    Wait wait(64, timeout_);
    for (int peer = 1; peer < size_; ++peer) {
      while (tails_[peer].value.load(std::memory_order_acquire) + kRing <= position_) {
        if (!wait.again()) throw late(tails_, size_, position_ - kRing + 1, rank_, timeout_, "publish");
      }
    }
  }

  bool arrived() const { return head_->published.load() > position_; }

  bool wait_for_part(double timeout) const {
    if (arrived()) return true;
    const auto start = Clock::now();
    const auto left = [&](double of) { return of - Seconds(Clock::now() - start).count(); };
    for (const double spin = std::min(spin_, timeout); left(spin) > 0;) {
      for (int i = 0; i < 32; ++i) relax();
      if (arrived()) return true;
    }
    head_->sleepers.fetch_add(1);
    bool undisturbed = true;
    while (true) {
      const uint32_t seen = head_->doorbell.load();
      if (arrived() || !undisturbed || left(timeout) <= 0) break;
      undisturbed = futex_wait(head_->doorbell, seen, left(timeout));
    }
    head_->sleepers.fetch_sub(1);
    return arrived();
  }

  Head* head_;
  Counter* tails_;
  char* parts_;
  int rank_, size_;
  size_t slot_bytes_;
  double spin_, timeout_;
  uint64_t position_ = 0;
};

}  // namespace

allspan::AllReduce all_reduce_of(nb::handle window) {
  Window& ranks = nb::cast<Window&>(window);
  return [&ranks](allspan::Worker& worker, float* x, int64_t count) {
    worker.each(1, [&](int64_t) { ranks.all_reduce(reinterpret_cast<uintptr_t>(x), static_cast<size_t>(count)); });
  };
}

void bind_collectives(nb::module_& module) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::exception<WaitTimeout>(module, "WaitTimeout", PyExc_TimeoutError);
  nb::class_<Window>(module, "Window")
      .def(nb::init<uintptr_t, int, int, size_t, int, double>(), nb::arg("base"), nb::arg("rank"), nb::arg("size"),
           nb::arg("slot_bytes"), nb::arg("spins"), nb::arg("timeout"))
      .def_static("bytes", &Window::bytes, nb::arg("size"), nb::arg("slot_bytes"))
      .def("all_reduce", &Window::all_reduce, nb::arg("x"), nb::arg("count"), Release())
      .def("exchange_rows", &Window::exchange_rows, nb::arg("x"), nb::arg("rows"), nb::arg("widths"), nb::arg("out"),
           Release())
      .def("all_gather_rows", &Window::all_gather_rows, nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("out"),
           Release())
      .def("barrier", &Window::barrier, Release());
  nb::class_<PlanRing>(module, "PlanRing")
      .def(nb::init<uintptr_t, int, int, size_t, double, double>(), nb::arg("base"), nb::arg("rank"), nb::arg("size"),
           nb::arg("slot_bytes"), nb::arg("spin"), nb::arg("timeout"))
      .def_static("bytes", &PlanRing::bytes, nb::arg("size"), nb::arg("slot_bytes"))
      .def(
          "publish",
          [](PlanRing& ring, nb::bytes data) {
            const char* start = data.c_str();
            const size_t bytes = data.size();
            nb::gil_scoped_release release;
            ring.publish(start, bytes);
          },
          nb::arg("data"))
      .def(
          "receive",
          [](PlanRing& ring, double timeout) -> nb::object {
            std::string message;
            bool arrived;
            {
              nb::gil_scoped_release release;
              arrived = ring.receive(timeout, message);
            }
            if (!arrived) return nb::none();
            return nb::bytes(message.data(), message.size());
          },
          nb::arg("timeout"));
}
