// CUDA C++ on a processor: put before a kernel's source, it makes of it a program in which each thread of a block is a
// fiber. Blocks run one after the other, so nothing here tells of races between them, but for launches that run beside
// each other (`Launch`). What a block meets is checked: shared memory starts as NaNs, asynchronous copies arrive no
// sooner than they are waited for, the lanes of a warp must come to the same collective, and a block whose threads wait
// for each other in vain is an error.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.h"

// Where the linker has put static shared memory, if there is any.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_allspan_shared[], __stop_allspan_shared[];

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

constexpr int kPast = 256;  // bytes behind shared memory that are looked at
constexpr int kWarp = 32, kStack = 128 * 1024, kMail = 64;

struct Copy {
  char* to;
  const char* from;
  int bytes, size;
};

inline void land(const Copy& copy) {
  std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

struct Barrier {
  int waiting = 0;
  long turn = 0;
};

// What a warpgroup set going: see hopper_words.h.
struct Product {
  float* sums;
  std::function<void()> finish;
};

struct Warp {
  Barrier barrier;
  int alive = 0;
  alignas(16) char mail[2][kWarp][kMail];
  int kind[2][kWarp];
  std::vector<uint16_t> operands[2];
};

struct Thread {
  Fiber fiber;
  dim3 index;
  int lane = 0;
  Warp* warp = nullptr;
  int parity = 0;
  bool done = false;
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  bool is_unfenced = false;  // copies of its own came that products of others may not see yet
  long meeting = -1;         // of its cluster, to which it has come and for which it has not waited yet
  int products = 0;
  std::vector<Product> started;
  std::vector<std::vector<Product>> batches;
  std::vector<std::shared_ptr<int>> tiles{std::make_shared<int>(0)};  // on their way out, by batches
  std::map<float*, std::vector<float>> sums;                          // what sums that are being added to will be
};

// A store to another GPU's memory that has not arrived.
struct Late {
  char* to;
  uint32_t word;
};

struct Block {
  Fiber scheduler;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::vector<char> stacks;
  std::vector<char> shared;
  char* base = nullptr;
  size_t size = 0;
  Barrier barrier, turns[16];
  std::vector<std::function<void()>> later;  // what goes on by itself, and comes two rounds after it began
  int alive = 0;
  bool moved = false;
  std::string error;
  std::function<void()> body;
  std::vector<Late> late;
};

inline Block block;
inline Thread* me = nullptr;
inline dim3 block_index, block_size, grid_size;
inline bool beside_others = false;

// The blocks that run beside each other because they are a cluster.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<char*> bases;
  Barrier barrier;
  int alive = 0;
};
inline Cluster cluster;

inline void yield() { change(me->fiber, block.scheduler); }

[[noreturn]] inline void fail(const std::string& what) {
  if (block.error.empty()) block.error = what;
  for (;;) yield();
}

inline void wait(Barrier& barrier, const int& alive) {
  const long turn = barrier.turn;
  block.moved = true;
  if (++barrier.waiting >= alive) {
    barrier.waiting = 0, ++barrier.turn;
    return;
  }
  while (barrier.turn == turn) {
    yield();
    if (barrier.turn == turn && barrier.waiting >= alive) barrier.waiting = 0, ++barrier.turn;  // others have ended
  }
  block.moved = true;
}

// Every lane of the warp gives `mine` and gets a look at what each gave. `kind` tells collectives apart.
template <class T>
const T* exchange(const T& mine, int kind) {
  static_assert(sizeof(T) <= kMail && std::is_trivially_copyable_v<T>);
  Warp& warp = *me->warp;
  const int parity = me->parity ^= 1;
  std::memcpy(warp.mail[parity][me->lane], &mine, sizeof mine);
  warp.kind[parity][me->lane] = kind;
  wait(warp.barrier, warp.alive);
  const size_t neighbour = (&warp - block.warps.data()) * kWarp + (me->lane ^ 1);
  if (neighbour < block.threads.size() && !block.threads[neighbour]->done && warp.kind[parity][me->lane ^ 1] != kind)
    fail("lanes of a warp are at different collectives");
  return reinterpret_cast<const T*>(warp.mail[parity][0]);
}

template <class T>
const T& of_lane(const T* all, int lane) {
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(all) + lane * kMail);
}

inline void start() {
  block.body();
  if (!me->sums.empty()) fail("a thread ends before its products");
  me->done = true;
  --me->warp->alive, --block.alive, --cluster.alive;
  block.moved = true;
  for (;;) yield();
}

// NaNs to those who read floats, and large numbers to others.
inline void spoil(char* at, char* end) {
  for (; end - at >= 4; at += 4) std::memcpy(at, "\xff\xff\xff\x7f", 4);
}

inline void begin_block() {
  const int count = static_cast<int>(block_size.x * block_size.y * block_size.z);
  block.threads.clear();
  block.warps.assign((count + kWarp - 1) / kWarp, Warp());
  block.barrier = Barrier(), block.alive = count;
  std::fill(std::begin(block.turns), std::end(block.turns), Barrier());
  block.stacks.resize(static_cast<size_t>(count) * kStack);
  spoil(block.shared.data(), block.shared.data() + block.shared.size());
  spoil(__start_allspan_shared, __stop_allspan_shared);
  for (int i = 0; i < count; ++i) {
    auto thread = std::make_unique<Thread>();
    thread->index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
    thread->lane = i % kWarp, thread->warp = &block.warps[i / kWarp];
    ++thread->warp->alive;
    begin(thread->fiber, &block.stacks[static_cast<size_t>(i) * kStack], kStack, start);
    block.threads.push_back(std::move(thread));
  }
}

// Lets `count` of the block's threads, from the `first` on, run until they wait.
inline void go_on(size_t first, size_t count, bool is_alone = true) {
  const size_t all = block.threads.size();
  block.moved = false;
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = *block.threads[(first + i) % all];
    if (thread.done) continue;
    me = &thread;
    change(block.scheduler, me->fiber);
    if (!block.error.empty()) throw std::runtime_error(block.error);
  }
  if (is_alone && count == all && !block.moved)
    throw std::runtime_error("the threads of a block wait for each other in vain");
}

inline void check_past() {
  for (char* at = block.base + (block.size + 3) / 4 * 4; at < block.base + block.size + kPast - 4; at += 4)
    if (std::memcmp(at, "\xff\xff\xff\x7f", 4))
      throw std::runtime_error("a block writes past its " + std::to_string(block.size) + " bytes of shared memory");
}

inline void run_block() {
  begin_block();
  const int count = static_cast<int>(block.threads.size());
  // What only works when the first threads are the fastest, or all as fast as each other, is told in some of the
  // blocks.
  const unsigned turn = block_index.x % 6;
  std::vector<std::function<void()>> due;
  block.later.clear();
  for (long round = 0, idle = 0; block.alive > 0; ++round) {
    block.moved = false;
    for (const auto& come : due) come();
    due = std::move(block.later);
    block.later.clear();
    for (int i = 0; i < count; ++i) {
      me = block.threads[turn % 2 ? count - 1 - i : i].get();
      const unsigned warpgroup = me->index.x / (4 * kWarp);
      if (me->done || round % (1 + (warpgroup + turn) % 3 * 6)) continue;
      change(block.scheduler, me->fiber);
      if (!block.error.empty()) throw std::runtime_error(block.error);
    }
    idle = block.moved ? 0 : idle + 1;
    if (idle > 100) throw std::runtime_error("the threads of a block wait for each other in vain");
  }
  check_past();
}

inline void take_memory(size_t shared) {
  block.shared.assign(shared + kPast + 128, 0);
  block.size = shared;
  block.base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block.shared.data()) + 127) & ~uintptr_t{127});
}

// `count` blocks from block_index on, whose kernel has no static shared memory: there is one of it. They take turns, of
// different lengths.
inline void run_cluster(unsigned count, size_t shared) {
  const dim3 first = block_index;
  while (cluster.blocks.size() < count) cluster.blocks.push_back(std::make_unique<Block>());
  cluster.bases.clear(), cluster.barrier = Barrier(), cluster.alive = 0;
  const auto enter = [&](unsigned rank) {
    std::swap(block, *cluster.blocks[rank]);
    block_index.x = first.x + rank;
  };
  const std::function<void()> body = block.body;
  for (unsigned rank = 0; rank < count; ++rank) {
    enter(rank);
    block.body = body, block.error.clear();
    take_memory(shared);
    begin_block();
    cluster.bases.push_back(block.base), cluster.alive += block.alive;
    enter(rank);
  }
  std::string error;
  for (unsigned long round = 0, idle = 0; cluster.alive > 0 && error.empty() && idle <= 100; ++round, ++idle) {
    for (unsigned rank = 0; rank < count && error.empty(); ++rank) {
      if (round % (1 + (rank + first.x) % 3 * 3)) continue;
      enter(rank);
      try {
        if (block.alive) go_on(0, block.threads.size(), false);
        if (block.moved) idle = 0;
        if (!block.alive) check_past();
      } catch (const std::exception& what) {
        error = what.what();
      }
      enter(rank);
    }
  }
  block_index = first;
  if (error.empty() && cluster.alive > 0) error = "the threads of a cluster wait for each other in vain";
  if (!error.empty()) throw std::runtime_error(error);
}

inline void arrive(const Late& store) { std::memcpy(store.to, &store.word, sizeof store.word); }

// A launch that runs beside others. Its blocks take turns, its stores to other GPUs arrive late and in any order, but
// for what a release puts in order. Kernels of such launches have no static shared memory: there is one of it.
class Launch {
 public:
  Launch(std::function<void()> body, dim3 grid, dim3 threads, size_t shared)
      : body_(std::move(body)), grid_(grid), threads_(threads), shared_(shared) {}

  // Lets one block go on; `seed` decides which, and how far. Whether all is done. Throws what went wrong.
  bool turn(unsigned seed) {
    std::mt19937 random(seed);
    beside_others = true;
    if (next_ < grid_.x && (running_.empty() || random() % 2)) begin();
    if (!running_.empty()) {
      const size_t which = random() % running_.size();
      Running& running = running_[which];
      enter(running);
      const size_t all = threads_.x * threads_.y * threads_.z;
      for (size_t passes = 1 + random() % 3; passes && block.alive; --passes)
        go_on(random() % all, random() % 4 ? all : 1 + random() % all);
      enter(running);
      deliver(running.block.late, random);
      if (!running.block.alive) {
        late_.insert(late_.end(), running.block.late.begin(), running.block.late.end());
        running_.erase(running_.begin() + which);
      }
    }
    deliver(late_, random);
    beside_others = false;
    return running_.empty() && next_ == grid_.x && late_.empty();
  }

 private:
  struct Running {
    Block block;
    unsigned index = 0;
  };

  void begin() {
    Running& running = running_.emplace_back();
    running.index = next_++;
    running.block.body = body_;
    enter(running);
    take_memory(shared_);
    begin_block();
    enter(running);
  }

  // Puts the block in place of the one that is there; once more, and it is as before.
  void enter(Running& running) {
    std::swap(block, running.block);
    block_index = {running.index, 0, 0}, block_size = threads_, grid_size = grid_;
  }

  static void deliver(std::vector<Late>& late, std::mt19937& random) {
    if (random() % 3 == 0) return;
    for (size_t count = late.size() - (late.empty() ? 0 : random() % late.size()); count; --count) {
      std::swap(late[random() % late.size()], late.back());
      arrive(late.back());
      late.pop_back();
    }
  }

  std::function<void()> body_;
  dim3 grid_, threads_;
  size_t shared_;
  unsigned next_ = 0;
  std::vector<Running> running_;
  std::vector<Late> late_;
};

template <class... A>
std::function<void()> bind(void (*kernel)(A...), void** arguments) {
  std::tuple<std::decay_t<A>...> values;
  int at = 0;
  std::apply([&](auto&... value) { ((value = *static_cast<std::decay_t<decltype(value)>*>(arguments[at++])), ...); },
             values);
  return [=] { std::apply(kernel, values); };
}

// Runs a kernel, `blocks` of a cluster at once; `arguments` point at its parameters. Returns what went wrong, or "".
template <class... A>
std::string run(void (*kernel)(A...), dim3 grid, dim3 threads, size_t shared, void** arguments, unsigned blocks = 1) {
  block.body = bind(kernel, arguments);
  block.error.clear();
  beside_others = false;
  take_memory(shared);
  block_size = threads, grid_size = grid;
  const auto where = [&] {
    return " (block " + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ")";
  };
  try {
    for (block_index.z = 0; block_index.z < grid.z; ++block_index.z)
      for (block_index.y = 0; block_index.y < grid.y; ++block_index.y)
        for (block_index.x = 0; block_index.x < grid.x; block_index.x += blocks)
          blocks > 1 ? run_cluster(blocks, shared) : run_block();
  } catch (const std::exception& error) {
    return error.what() + where();
  }
  return "";
}

}  // namespace emulator

#include "cuda_words.h"
#include "hopper_words.h"
#include "ptx_words.h"
