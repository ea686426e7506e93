// Messages from rank 0 to all other ranks of a host, through a ring of slots in memory that they share. A message
// longer than a slot takes several. Whoever waits for one spins briefly, then sleeps on a futex.
#pragma once

#include <string>

#include "runtime/wait.h"

namespace allspan {

class PlanRing {
 public:
  static constexpr size_t kSlots = 64;

  // base: zeroed memory of bytes(), aligned to 64, as slot_bytes is. spin, timeout: seconds.
  // `first`: as for a Window.
  PlanRing(uintptr_t base, int rank, int size, size_t slot_bytes, double spin, double timeout, int first);
  static size_t bytes(int size, size_t slot_bytes);

  // Waits, bounded, while a peer is a whole ring behind; WaitTimeout names it.
  void publish(const char* data, size_t bytes);
  // False: nothing came within `timeout` seconds, or a signal arrived.
  bool receive(double timeout, std::string& message);

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
    return reinterpret_cast<Part*>(parts_ + position % kSlots * (sizeof(Part) + slot_bytes_));
  }
  bool arrived() const { return head_->published.load() > position_; }
  void wait_for_room() const;
  bool wait_for_part(double timeout) const;

  Head* head_;
  Counter* tails_;
  char* parts_;
  int rank_, size_, first_;
  size_t slot_bytes_;
  double spin_, timeout_;
  uint64_t position_ = 0;
};

}  // namespace allspan
