// What runs an emulated kernel: threads as fibers, the blocks and clusters that they are, and what a kernel asks of
// them. emulator.cpp, which is compiled once and linked to every kernel, has the functions that are not templates.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

#pragma GCC visibility push(hidden)  // every kernel has its own

// The kernel that is emulated, with its parameters at these addresses, and the blocks of its clusters.
extern "C" void emulated_kernel(void** arguments);
extern "C" const unsigned emulated_cluster;

namespace emulator {

constexpr int kPast = 256;  // bytes behind shared memory that are looked at
constexpr int kWarp = 32, kStack = 128 * 1024, kMail = 64;

struct Copy {
  char* to;
  const char* from;
  int bytes, size;
};

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

// Memory that is not cleared, so that only those pages of it count that a thread's calls reach.
struct Stacks {
  std::unique_ptr<char[]> bytes;
  size_t size = 0;

  void grow(size_t to) {
    if (to > size) bytes.reset(new char[to]), size = to;
  }
};

struct Block {
  Fiber scheduler;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  Stacks stacks;
  std::vector<char> shared;
  char* base = nullptr;
  size_t size = 0;
  Barrier barrier, turns[16];
  std::vector<std::function<void()>> later, due;  // what goes on by itself, and comes two rounds after it began
  int alive = 0;
  bool moved = false;
  const char* error = nullptr;  // what went wrong
  void** arguments = nullptr;   // of the kernel
  std::vector<Late> late;
};

extern Block block;
extern Thread* me;
extern dim3 block_index, block_size, grid_size;
extern bool beside_others;

// The blocks that run beside each other because they are a cluster.
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<char*> bases;
  Barrier barrier;
  int alive = 0;
};
extern Cluster cluster;

inline void yield() { change(me->fiber, block.scheduler); }
[[noreturn]] void fail(const char* what);
void wait(Barrier& barrier, const int& alive);
void land(const Copy& copy);
void arrive(const Late& store);

// Copies into shared memory at `to`: `bytes` of `size`, zeros behind them; they arrive by wait_for_copies.
void copy(uint32_t to, const void* from, int bytes, int size);
void commit_copies();
void wait_for_copies(int groups);

void arrive_at_cluster();
void wait_for_cluster();
// What lies at `mine` in the dynamic shared memory of another block of the cluster.
char* at_block(const char* mine, int rank);

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

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<A>*>(arguments[I])...);
}
// Calls a kernel with the parameters that `arguments` point at.
template <class... A>
void call(void (*kernel)(A...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>());
}

}  // namespace emulator

#pragma GCC visibility pop
