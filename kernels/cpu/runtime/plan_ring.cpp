#include "runtime/plan_ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace allspan {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// False when a signal interrupted the sleep.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
#ifdef __linux__
  seconds = std::max(seconds, 0.0);
  timespec span{static_cast<time_t>(seconds),
                static_cast<long>((seconds - static_cast<double>(static_cast<time_t>(seconds))) * 1e9)};
  return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &span, nullptr, 0) == 0 || errno != EINTR;
#else
  std::this_thread::sleep_for(Seconds(std::min(seconds, 0.001)));
  return true;
#endif
}

void futex_wake(std::atomic<uint32_t>& word) {
#ifdef __linux__
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

PlanRing::PlanRing(uintptr_t base, int rank, int size, size_t slot_bytes, double spin, double timeout, int first)
    : rank_(rank), size_(size), first_(first), slot_bytes_(slot_bytes), spin_(spin), timeout_(timeout) {
  if (base % kLine != 0 || slot_bytes % kLine != 0) throw std::invalid_argument("a ring is aligned to 64 bytes");
  head_ = reinterpret_cast<Head*>(base);
  tails_ = reinterpret_cast<Counter*>(base + sizeof(Head));
  parts_ = reinterpret_cast<char*>(base + sizeof(Head) + size * sizeof(Counter));
}

size_t PlanRing::bytes(int size, size_t slot_bytes) {
  return sizeof(Head) + size * sizeof(Counter) + kSlots * (sizeof(Part) + slot_bytes);
}

void PlanRing::publish(const char* data, size_t bytes) {
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

bool PlanRing::receive(double timeout, std::string& message) {
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

void PlanRing::wait_for_room() const {
  Wait wait(64, timeout_);
  for (int peer = 1; peer < size_; ++peer) {
    while (tails_[peer].value.load(std::memory_order_acquire) + kSlots <= position_) {
      if (!wait.again()) {
        throw WaitTimeout(late(tails_, size_, position_ - kSlots + 1, rank_, timeout_, "publish", first_));
      }
    }
  }
}

bool PlanRing::wait_for_part(double timeout) const {
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

}  // namespace allspan
