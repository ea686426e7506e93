#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <string>
#include <system_error>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace allspan {
namespace {

// Long enough to bridge the gap between two ops of a step, short enough not to be seen as load.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerLook = 32;

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(pthread_t thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(thread, sizeof set, &set);
  if (error) throw std::system_error(error, std::generic_category(), "cpus: cannot pin to CPU " + std::to_string(cpu));
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus) : threads_(threads), cpus_(std::move(cpus)), owner_(getpid()) {
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

void Pool::dispatch(int tasks, Call call, void* context) {
  std::lock_guard<std::mutex> turn(callers_);
  pin_caller();
  if (threads_ == 1 || tasks <= 1) {
    for (int task = 0; task < tasks; ++task) call(context, task, 0);
    return;
  }
  call_ = call;
  context_ = context;
  tasks_ = tasks;
  next_ = 0;
  open_ = true;
  ++round_;
  if (sleepers_ > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  take_tasks(0);
  open_ = false;
  for (int looks = 0; active_ != 0; ++looks) {
    pause_briefly();
    if (looks > 1000) sched_yield();  // the worker we wait for may need this CPU
  }
}

void Pool::take_tasks(int worker) {
  for (;;) {
    const int task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    call_(context_, task, worker);
  }
}

bool Pool::wait_for_round(unsigned seen) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (round_ != seen || stopping_) return !stopping_;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock<std::mutex> lock(sleep_);
  ++sleepers_;
  wake_.wait(lock, [&] { return round_ != seen || stopping_; });
  --sleepers_;
  return !stopping_;
}

void Pool::work(int worker) {
  unsigned seen = 0;
  while (wait_for_round(seen)) {
    seen = round_;
    ++active_;
    if (open_) take_tasks(worker);
    --active_;
  }
}

}  // namespace allspan
