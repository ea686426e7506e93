// The threads of an op set. A run is one function that all of them go through together: it shares work out with each()
// and meets at barriers, and nothing is woken or put to sleep between two ops of a step.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace allspan {

class Pool;

// Memory aligned to 64 bytes that only grows; what it held is lost when it does.
class Scratch {
 public:
  void* get(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      const size_t size = (bytes + 4095) / 4096 * 4096;
      memory_.reset(std::aligned_alloc(64, size));
      if (!memory_) throw std::bad_alloc();
      size_ = size;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

// One thread's view of a run. Every thread calls each(), barrier() and shared() in the same order, with the same sizes.
class Worker {
 public:
  const int id;
  int threads() const;

  // Calls body(task) for every task in [0, tasks), each on one thread, and returns on every thread when all have ended.
  template <class Body>
  void each(int64_t tasks, Body body) {
    share(tasks, body);
    barrier();
  }
  // As each(), but a thread goes on when it finds no task left: others may still work.
  template <class Body>
  void share(int64_t tasks, Body body) {
    if (tasks == 1 || threads() == 1) {
      if (id == 0)
        guard([&] {
          for (int64_t task = 0; task < tasks; ++task) body(task);
        });
      return;
    }
    std::atomic<int64_t>& next = turn();
    guard([&] {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task);
    });
  }
  // body(begin, end) over [0, count), at most `grain` at a time. Each thread goes through an equal stretch of its own
  // from front to back, so that it reads memory in order, and then helps the others from their backs. Ends with a
  // barrier.
  template <class Body>
  void stretch(int64_t count, int64_t grain, Body body) {
    stretched_ = true;
    guard([&] {
      for (int turn = 0; turn < threads(); ++turn) {
        const int of = (id + turn) % threads();
        const auto [begin, end] = own(count, of);
        for (int64_t first, got; (got = take(of, end - begin, grain, first)) > 0;)
          body(begin + first, begin + first + got);
      }
    });
    barrier();
  }
  // body(begin, end) over [0, count) in at most one part a thread, each of at least `grain`; ends with a barrier.
  template <class Body>
  void split(int64_t count, int64_t grain, Body body) {
    const int64_t most = threads(), wanted = grain > 0 ? count / grain : count;
    const int64_t parts = wanted < 1 ? 1 : wanted < most ? wanted : most;
    if (id < parts) guard([&] { body(count * id / parts, count * (id + 1) / parts); });
    barrier();
  }
  // [first, last) of this thread's own stretch of `count`.
  std::pair<int64_t, int64_t> own(int64_t count) const { return own(count, id); }
  // What this thread will read first in some later op: it asks for it while it waits at barriers.
  void expect(const char* begin, const char* end) { expected_ = begin, expected_end_ = end; }
  // Waits for all threads. What they wrote before is seen after.
  void barrier();
  // A barrier in two halves: says that this thread has come, and waits until all have. What they wrote before they came
  // is seen after; in between a thread does what needs nothing of the others.
  void arrive();
  void await_arrivals();
  // Whether any thread had failed at the last barrier: the same on all of them.
  bool failed() const;

  // This thread's own memory: one block, valid until the next call.
  void* scratch(size_t bytes) { return scratch_.get(bytes); }
  // The same memory on every thread, valid until the next call; a barrier when it has to grow.
  void* shared(size_t bytes);

  // Runs body; what it throws is kept for the caller of the run, and the run goes on to its next barrier.
  template <class Body>
  void guard(Body body) {
    try {
      body();
    } catch (...) {
      fail(std::current_exception());
    }
  }

 private:
  friend class Pool;
  Worker(Pool& pool, int id) : id(id), pool_(pool) {}
  std::atomic<int64_t>& turn();
  std::pair<int64_t, int64_t> own(int64_t count, int of) const {
    return {count * of / threads(), count * (of + 1) / threads()};
  }
  // Up to `most` of what is left of a thread's stretch: how many, from `first` on.
  int64_t take(int of, int64_t size, int64_t most, int64_t& first);
  void fail(std::exception_ptr error);

  Pool& pool_;
  Scratch scratch_;
  size_t shared_bytes_ = 0;
  unsigned turns_ = 0;
  bool stretched_ = false;  // since the last barrier
  const char *expected_ = nullptr, *expected_end_ = nullptr;
  unsigned sense_ = 0;
  uint64_t arrivals_ = 0;
};

class Pool {
 public:
  // threads >= 1, the caller's included. cpus: empty, or one to pin each thread to; the first is the calling thread's,
  // which is pinned when it first calls run(). Throws std::system_error when a thread cannot be started or pinned.
  Pool(int threads, std::vector<int> cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // body(Worker&) on every thread; returns when all have left it, and throws what the first of them threw. Concurrent
  // callers take turns.
  template <class Body>
  void team(Body body) {
    dispatch([](void* context, Worker& worker) { (*static_cast<Body*>(context))(worker); }, &body);
  }
  // body(task, worker's number) for every task in [0, tasks).
  template <class Body>
  void run(int tasks, Body body) {
    if (tasks <= 1 || threads_ == 1) {
      alone([&] {
        for (int task = 0; task < tasks; ++task) body(task, 0);
      });
      return;
    }
    team([&](Worker& worker) { worker.share(tasks, [&](int64_t task) { body(static_cast<int>(task), worker.id); }); });
  }

 private:
  friend class Worker;
  using Call = void (*)(void* context, Worker& worker);

  void dispatch(Call call, void* context);
  template <class Body>
  void alone(Body body) {
    std::lock_guard<std::mutex> turn(callers_);
    pin_caller();
    body();
  }
  void join_run(int worker);
  void work(int worker);
  bool wait_for_round(unsigned seen);
  void pin_caller();

  static constexpr int kTurns = 4;  // a thread is never more than one barrier ahead of another, nor so many turns

  const int threads_;
  const std::vector<int> cpus_;
  const int owner_;  // process: a forked child has no threads of ours to join
  std::vector<std::unique_ptr<Worker>> team_;
  std::vector<std::thread> workers_;

  std::mutex callers_;
  std::thread::id pinned_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  Scratch shared_;
  void* shared_memory_ = nullptr;

  struct alignas(64) Turn {
    std::atomic<int64_t> next{0};
  };
  Turn turns_[kTurns];
  // What is taken of a thread's stretch: from the front in the low half, from the back in the high one.
  struct alignas(64) Taken {
    std::atomic<uint64_t> ends{0};
  };
  std::vector<Taken> taken_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> sense_{0};
  alignas(64) std::atomic<uint64_t> arrivals_{0};  // of all threads, ever
  std::atomic<bool> failed_{false};
  bool failed_at_barrier_ = false;  // written by the last to arrive, so that all threads read the same
  std::mutex failure_;
  std::exception_ptr error_;

  alignas(64) std::atomic<unsigned> round_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

inline int Worker::threads() const { return pool_.threads_; }
inline bool Worker::failed() const { return pool_.failed_at_barrier_; }

}  // namespace allspan
