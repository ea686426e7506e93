// A small pool of threads for the parts of one op. The calling thread works too, so a pool of one has no threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace allspan {

class Pool {
 public:
  // threads >= 1, the caller's included. cpus: empty, or one to pin each thread to; the first is the calling thread's,
  // which is pinned when it first calls run(). Throws std::system_error when a thread cannot be started or pinned.
  Pool(int threads, std::vector<int> cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls body(task, worker) for every task in [0, tasks), worker in [0, threads()), and returns when all have ended.
  // body must not throw. Concurrent callers take turns.
  template <class Body>
  void run(int tasks, Body body) {
    dispatch(tasks, [](void* context, int task, int worker) { (*static_cast<Body*>(context))(task, worker); }, &body);
  }

 private:
  using Call = void (*)(void* context, int task, int worker);

  void dispatch(int tasks, Call call, void* context);
  void take_tasks(int worker);
  void work(int worker);
  bool wait_for_round(unsigned seen);
  void pin_caller();

  const int threads_;
  const std::vector<int> cpus_;
  const int owner_;  // process: a forked child has no threads of ours to join
  std::vector<std::thread> workers_;

  std::mutex callers_;
  std::thread::id pinned_;
  Call call_ = nullptr;
  void* context_ = nullptr;
  int tasks_ = 0;

  // A worker joins a round by raising `active_` and then finding `open_` true; a caller ends a round by lowering
  // `open_` and then waiting until `active_` is 0. So a worker that wakes late costs the caller nothing.
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> active_{0};
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<unsigned> round_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

}  // namespace allspan
