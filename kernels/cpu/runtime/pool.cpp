#include "runtime/pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace allspan {
namespace {

// Between two runs: long enough to bridge what Python does between two steps, as waking up costs more than that, short
// enough not to be seen as load. Past the first of these a thread offers its CPU to whoever else wants it.
constexpr auto kSpin = std::chrono::microseconds(50), kYield = std::chrono::microseconds(500);
// At a barrier: tries before a thread offers its CPU to whoever else wants it.
constexpr int kBarrierLooks = 4000;
constexpr int kPausesPerLook = 32;
// Asked for between two looks at a barrier: so few that the last thread's coming is seen at once.
constexpr int kExpectedLines = 8;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pause_at_barrier(int looks) {
  pause_briefly();
  if (looks > kBarrierLooks) sched_yield();  // the thread we wait for may need this CPU
}

void pin(pthread_t thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(thread, sizeof set, &set);
  if (error) throw std::system_error(error, std::generic_category(), "cpus: cannot pin to CPU " + std::to_string(cpu));
}

}  // namespace

std::atomic<int64_t>& Worker::turn() { return pool_.turns_[turns_++ % Pool::kTurns].next; }

int64_t Worker::take(int of, int64_t size, int64_t most, int64_t& first) {
  std::atomic<uint64_t>& ends = pool_.taken_[of].ends;
  uint64_t seen = ends.load(std::memory_order_relaxed);
  for (;;) {
    const int64_t front = static_cast<uint32_t>(seen), back = seen >> 32;
    const int64_t got = std::min(most, size - front - back);
    if (got <= 0) return 0;
    const uint64_t step = of == id ? got : static_cast<uint64_t>(got) << 32;
    if (!ends.compare_exchange_weak(seen, seen + step, std::memory_order_relaxed)) continue;
    first = of == id ? front : size - back - got;
    return got;
  }
}

void Worker::fail(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(pool_.failure_);
  if (!pool_.error_) pool_.error_ = std::move(error);
  pool_.failed_ = true;
}

void Worker::barrier() {
  turns_ = 0;
  const bool stretched = std::exchange(stretched_, false);
  if (pool_.threads_ == 1) {
    pool_.taken_[0].ends = 0;
    pool_.failed_at_barrier_ = pool_.failed_;
    return;
  }
  const unsigned sense = ++sense_;
  if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == pool_.threads_) {
    for (Pool::Turn& turn : pool_.turns_) turn.next.store(0, std::memory_order_relaxed);
    if (stretched)
      for (Pool::Taken& taken : pool_.taken_) taken.ends.store(0, std::memory_order_relaxed);
    pool_.arrived_.store(0, std::memory_order_relaxed);
    pool_.failed_at_barrier_ = pool_.failed_;
    pool_.sense_.store(sense, std::memory_order_release);
    return;
  }
  for (int looks = 0; pool_.sense_.load(std::memory_order_acquire) != sense; ++looks) {
    for (int line = 0; line < kExpectedLines && expected_ < expected_end_; ++line, expected_ += 64)
      __builtin_prefetch(expected_, 0, 2);
    pause_at_barrier(looks);
  }
}

void Worker::arrive() {
  ++arrivals_;
  if (pool_.threads_ > 1) pool_.arrivals_.fetch_add(1, std::memory_order_acq_rel);
}

void Worker::await_arrivals() {
  if (pool_.threads_ == 1) return;
  const uint64_t wanted = arrivals_ * pool_.threads_;
  for (int looks = 0; pool_.arrivals_.load(std::memory_order_acquire) < wanted; ++looks) pause_at_barrier(looks);
}

void* Worker::shared(size_t bytes) {
  if (bytes > shared_bytes_) {
    // Every thread asks for the same sizes in the same order, so all of them come here or none does.
    shared_bytes_ = bytes;
    barrier();
    if (id == 0) guard([&] { pool_.shared_memory_ = pool_.shared_.get(bytes); });
    barrier();
  }
  return pool_.shared_memory_;
}

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(threads), cpus_(std::move(cpus)), owner_(getpid()), taken_(threads) {
  for (int worker = 0; worker < threads_; ++worker) team_.push_back(std::unique_ptr<Worker>(new Worker(*this, worker)));
  try {
    for (int worker = 1; worker < threads_; ++worker) {
      workers_.emplace_back([this, worker] { work(worker); });
      if (!cpus_.empty()) pin(workers_.back().native_handle(), cpus_[worker]);
    }
  } catch (...) {
    stopping_ = true;
    {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    throw;
  }
}

Pool::~Pool() {
  stopping_ = true;
  if (getpid() != owner_) {
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void Pool::pin_caller() {
  if (cpus_.empty() || pinned_ == std::this_thread::get_id()) return;
  pin(pthread_self(), cpus_[0]);
  pinned_ = std::this_thread::get_id();
}

void Pool::dispatch(Call call, void* context) {
  std::lock_guard<std::mutex> turn(callers_);
  pin_caller();
  call_ = call;
  context_ = context;
  failed_ = failed_at_barrier_ = false;
  error_ = nullptr;
  if (threads_ > 1) {
    ++round_;
    if (sleepers_ > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
  }
  join_run(0);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::join_run(int worker) {
  Worker& self = *team_[worker];
  self.guard([&] { call_(context_, self); });
  self.barrier();
}

bool Pool::wait_for_round(unsigned seen) {
  const auto started = std::chrono::steady_clock::now();
  for (auto waited = started - started; waited < kYield; waited = std::chrono::steady_clock::now() - started) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (round_ != seen || stopping_) return !stopping_;
      pause_briefly();
    }
    if (waited > kSpin) sched_yield();
  }
  std::unique_lock<std::mutex> lock(sleep_);
  ++sleepers_;
  wake_.wait(lock, [&] { return round_ != seen || stopping_; });
  --sleepers_;
  return !stopping_;
}

void Pool::work(int worker) {
  unsigned seen = 0;
  while (wait_for_round(seen)) {
    ++seen;
    join_run(worker);
  }
}

}  // namespace allspan
