#include "runtime/window.h"

#include <algorithm>
#include <cstring>

#include "isa/isa.h"

namespace allspan {
namespace {

constexpr size_t kSlots = 4;
constexpr size_t kElement = 4;  // bytes of a float32 or int32
constexpr size_t kLineFloats = kLine / sizeof(float);
// Floats that are worth a lane of their own: below, one thread is done before a second one has its first flag.
constexpr size_t kLaneFloats = 4096;

size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace

// One lane while its thread uses it.
class Window::Lane {
 public:
  Lane(Window& window, int lane)
      : window_(window),
        put_(reinterpret_cast<Counter*>(window.base_) + lane * window.size_),
        slots_(window.base_ + bytes(window.size_, window.lanes(), 0) +
               lane * window.size_ * kSlots * window.slot_bytes_),
        sequence_(window.lanes_[lane].sequence) {}

  // `peer`'s part of the chunk being read.
  const char* slot(int peer) const { return slot(peer, sequence_); }
  size_t elements_a_chunk() const { return window_.slot_bytes_ / kElement; }

  // Sends `bytes` from `source` in `chunks` chunks (as many on every rank; a rank may run out of bytes early) and calls
  // `read(chunk)` for each once all ranks have put theirs.
  template <class Read>
  void stream(const char* source, size_t bytes, size_t chunks, const char* what, Read read) {
    if (window_.broken_.load(std::memory_order_acquire)) throw WaitTimeout(window_.why_);
    const uint64_t first = sequence_;
    const size_t slot_bytes = window_.slot_bytes_;
    const auto put = [&](size_t chunk) {
      const size_t from = chunk * slot_bytes;
      if (from < bytes) {
        auto* part = reinterpret_cast<const float*>(source + from);
        auto* to = reinterpret_cast<float*>(slot(window_.rank_, first + chunk));
        window_.kernels_->add_parts(&part, 1, to, std::min(slot_bytes, bytes - from) / kElement);
      }
      put_[window_.rank_].value.store(first + chunk + 1, std::memory_order_release);
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

  // Calls `use(row, column, data, n)` for each run of a row that lies in `peer`'s current slot, of its [rows, width].
  template <class Use>
  void pieces(int peer, size_t chunk, size_t rows, size_t width, Use use) const {
    const char* data = slot(peer);
    const size_t first = chunk * elements_a_chunk(), end = std::min(first + elements_a_chunk(), rows * width);
    for (size_t at = first; at < end;) {
      const size_t column = at % width, n = std::min(width - column, end - at);
      use(at / width, column, data + (at - first) * kElement, n);
      at += n;
    }
  }

 private:
  char* slot(int peer, uint64_t sequence) const {
    return slots_ + (peer * kSlots + sequence % kSlots) * window_.slot_bytes_;
  }

  void await(uint64_t sequence, const char* what) const {
    Wait wait(window_.spins_, window_.timeout_);
    for (int peer = 0; peer < window_.size_; ++peer) {
      while (put_[peer].value.load(std::memory_order_acquire) < sequence) {
        if (!wait.again()) {
          window_.give_up(late(put_, window_.size_, sequence, window_.rank_, window_.timeout_, what, window_.first_));
        }
        // Another thread of this rank has given up: nothing will come in this lane either.
        if (window_.broken_.load(std::memory_order_acquire)) throw WaitTimeout(window_.why_);
      }
    }
  }

  Window& window_;
  Counter* put_;
  char* slots_;
  uint64_t& sequence_;
};

Window::Window(uintptr_t base, int rank, int size, int lanes, size_t slot_bytes, int spins, double timeout, int first)
    : base_(reinterpret_cast<char*>(base)),
      rank_(rank),
      size_(size),
      first_(first),
      slot_bytes_(slot_bytes),
      spins_(spins),
      timeout_(timeout),
      kernels_(variants().front().kernels),  // sums have the same bits in all of them
      lanes_(lanes) {
  if (base % kLine != 0 || slot_bytes % kLine != 0) throw std::invalid_argument("a window is aligned to 64 bytes");
  if (lanes < 1 || rank < 0 || rank >= size) throw std::invalid_argument("a window has ranks and lanes");
}

size_t Window::bytes(int size, int lanes, size_t slot_bytes) {
  return static_cast<size_t>(lanes) * size * (sizeof(Counter) + kSlots * slot_bytes);
}

void Window::give_up(const std::string& why) {
  std::lock_guard<std::mutex> lock(breaking_);
  if (!broken_) {
    why_ = why;
    broken_.store(true, std::memory_order_release);
  }
  throw WaitTimeout(why_);
}

void Window::reduce(int number, float* x, size_t count) {
  Lane lane(*this, number);
  const size_t per_chunk = lane.elements_a_chunk();
  std::vector<const float*> parts(size_);
  lane.stream(reinterpret_cast<const char*>(x), count * kElement, ceil_div(count, per_chunk), "all_reduce",
              [&](size_t chunk) {
                float* out = x + chunk * per_chunk;
                for (int peer = 0; peer < size_; ++peer) {
                  parts[peer] = peer == rank_ ? out : reinterpret_cast<const float*>(lane.slot(peer));
                }
                kernels_->add_parts(parts.data(), size_, out, std::min(per_chunk, count - chunk * per_chunk));
              });
}

void Window::all_reduce(Worker& worker, float* x, size_t count) {
  // In whole cache lines, and the same cut on every rank, whose threads may be more.
  const size_t lines = ceil_div(count, kLineFloats);
  const size_t parts = std::clamp<size_t>(count / kLaneFloats, 1, lanes_.size());
  const size_t part = static_cast<size_t>(worker.id);
  if (part < parts) {
    worker.guard([&] {
      if (static_cast<size_t>(worker.threads()) < lanes_.size()) {
        throw std::invalid_argument("a window of " + std::to_string(lanes_.size()) +
                                    " lanes needs as many threads, not " + std::to_string(worker.threads()));
      }
      const size_t begin = lines * part / parts * kLineFloats;
      const size_t end = std::min(count, lines * (part + 1) / parts * kLineFloats);
      reduce(worker.id, x + begin, end - begin);
    });
  }
  worker.barrier();
}

void Window::all_reduce(float* x, size_t count) { reduce(0, x, count); }

void Window::exchange_rows(const char* x, size_t rows, const std::vector<size_t>& widths, char* out) {
  size_t total = 0, widest = 0;
  for (size_t width : widths) total += width, widest = std::max(widest, width);
  Lane lane(*this, 0);
  const size_t mine = static_cast<size_t>(rank_);
  lane.stream(x, rows * widths.at(mine) * kElement, ceil_div(rows * widest, lane.elements_a_chunk()), "exchange_rows",
              [&](size_t chunk) {
                size_t first_column = 0;
                for (int peer = 0; peer < size_; ++peer) {
                  lane.pieces(peer, chunk, rows, widths[peer],
                              [&](size_t row, size_t column, const char* from, size_t n) {
                                if (row % size_ != mine) return;
                                const size_t to = row / size_ * total + first_column + column;
                                std::memcpy(out + to * kElement, from, n * kElement);
                              });
                  first_column += widths[peer];
                }
              });
}

void Window::all_gather_rows(const char* x, size_t rows, size_t width, char* out) {
  const auto rows_of = [&](size_t peer) { return peer < rows ? ceil_div(rows - peer, size_) : 0; };
  Lane lane(*this, 0);
  lane.stream(x, rows_of(rank_) * width * kElement, ceil_div(rows_of(0) * width, lane.elements_a_chunk()),
              "all_gather_rows", [&](size_t chunk) {
                for (int peer = 0; peer < size_; ++peer) {
                  lane.pieces(peer, chunk, rows_of(peer), width,
                              [&](size_t row, size_t column, const char* from, size_t n) {
                                const size_t to = (row * size_ + peer) * width + column;
                                std::memcpy(out + to * kElement, from, n * kElement);
                              });
                }
              });
}

void Window::spread(float* x, const std::vector<size_t>& starts) {
  const auto length = [&](int peer) { return starts.at(peer + 1) - starts.at(peer); };
  size_t longest = 0;
  for (int peer = 0; peer < size_; ++peer) longest = std::max(longest, length(peer));
  Lane lane(*this, 0);
  const size_t per_chunk = lane.elements_a_chunk();
  lane.stream(reinterpret_cast<const char*>(x + starts[rank_]), length(rank_) * kElement, ceil_div(longest, per_chunk),
              "all_reduce", [&](size_t chunk) {
                const size_t from = chunk * per_chunk;
                for (int peer = 0; peer < size_; ++peer) {
                  if (peer == rank_ || length(peer) <= from) continue;
                  std::memcpy(x + starts[peer] + from, lane.slot(peer),
                              std::min(per_chunk, length(peer) - from) * kElement);
                }
              });
}

void Window::barrier() {
  Lane(*this, 0).stream(nullptr, 0, 1, "barrier", [](size_t) {});
}

}  // namespace allspan
