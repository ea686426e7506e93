// What is the same for all emulated kernels: see runtime.h. The stub of driver.py has the rest.
#include "runtime.h"

#include <random>
#include <stdexcept>
#include <string>

// Where the linker has put static shared memory, if there is any.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_allspan_shared[], __stop_allspan_shared[];

#ifdef __x86_64__
asm(R"(
.pushsection .text
.hidden allspan_change_stack
.globl allspan_change_stack
.type allspan_change_stack, @function
allspan_change_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size allspan_change_stack, . - allspan_change_stack
.popsection
)");
#endif

namespace emulator {

Block block;
Thread* me = nullptr;
dim3 block_index, block_size, grid_size;
bool beside_others = false;
Cluster cluster;

void fail(const char* what) {
  if (!block.error) block.error = what;
  for (;;) yield();
}

void wait(Barrier& barrier, const int& alive) {
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

void land(const Copy& copy) {
  std::memset(copy.to, 0, copy.size);
  std::memcpy(copy.to, copy.from, copy.bytes);
}

void copy(uint32_t to, const void* from, int bytes, int size) {
  if (to % size || reinterpret_cast<uintptr_t>(from) % size)
    fail(size == 16 ? "a copy of 16 bytes is not aligned" : "a copy of 4 bytes is not aligned");
  me->open.push_back({block.base + to, static_cast<const char*>(from), bytes, size});
}

void commit_copies() {
  me->groups.push_back(std::move(me->open));
  me->open.clear();
}

void wait_for_copies(int most) {
  auto& groups = me->groups;
  while (static_cast<int>(groups.size()) > most) {
    for (const auto& copy : groups.front()) land(copy);
    me->is_unfenced |= !groups.front().empty();
    groups.erase(groups.begin());
  }
}

void arrive_at_cluster() {
  Barrier& barrier = cluster.barrier;
  if (me->meeting >= 0) fail("a thread comes to its cluster's meeting twice");
  me->meeting = barrier.turn;
  if (++barrier.waiting >= cluster.alive) barrier.waiting = 0, ++barrier.turn;
  block.moved = true;
}

void wait_for_cluster() {
  Barrier& barrier = cluster.barrier;
  if (me->meeting < 0) fail("a thread waits for its cluster and has not come");
  while (barrier.turn == me->meeting) {
    yield();
    if (barrier.turn == me->meeting && barrier.waiting >= cluster.alive)
      barrier.waiting = 0, ++barrier.turn;  // others have ended
  }
  me->meeting = -1;
  block.moved = true;
}

char* at_block(const char* mine, int rank) {
  const auto at = mine - block.base;
  if (at < 0 || at >= static_cast<long>(block.size)) fail("this is not in dynamic shared memory");
  if (!cluster.blocks.at(rank)->alive && cluster.bases[rank] != block.base)
    fail("a block looks at another's memory that has ended");
  return cluster.bases[rank] + at;
}

void start() {
  emulated_kernel(block.arguments);
  if (!me->sums.empty()) fail("a thread ends before its products");
  me->done = true;
  --me->warp->alive, --block.alive, --cluster.alive;
  block.moved = true;
  for (;;) yield();
}

// NaNs to those who read floats, and large numbers to others.
void spoil(char* at, char* end) {
  for (; end - at >= 4; at += 4) std::memcpy(at, "\xff\xff\xff\x7f", 4);
}

// What went on by itself comes.
void bring() {
  for (const auto& come : block.due) come();
  block.due = std::move(block.later);
  block.later.clear();
}

void begin_block() {
  const int count = static_cast<int>(block_size.x * block_size.y * block_size.z);
  block.threads.clear();
  block.warps.assign((count + kWarp - 1) / kWarp, Warp());
  block.barrier = Barrier(), block.alive = count;
  block.later.clear(), block.due.clear();
  std::fill(std::begin(block.turns), std::end(block.turns), Barrier());
  block.stacks.grow(static_cast<size_t>(count) * kStack);
  spoil(block.shared.data(), block.shared.data() + block.shared.size());
  spoil(__start_allspan_shared, __stop_allspan_shared);
  for (int i = 0; i < count; ++i) {
    auto thread = std::make_unique<Thread>();
    thread->index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
    thread->lane = i % kWarp, thread->warp = &block.warps[i / kWarp];
    ++thread->warp->alive;
    begin(thread->fiber, &block.stacks.bytes[static_cast<size_t>(i) * kStack], kStack, start);
    block.threads.push_back(std::move(thread));
  }
}

// Lets `count` of the block's threads, from the `first` on, run until they wait.
void go_on(size_t first, size_t count, bool is_alone = true) {
  const size_t all = block.threads.size();
  block.moved = false;
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = *block.threads[(first + i) % all];
    if (thread.done) continue;
    me = &thread;
    change(block.scheduler, me->fiber);
    if (block.error) throw std::runtime_error(block.error);
  }
  if (is_alone && count == all && !block.moved)
    throw std::runtime_error("the threads of a block wait for each other in vain");
}

void check_past() {
  for (char* at = block.base + (block.size + 3) / 4 * 4; at < block.base + block.size + kPast - 4; at += 4)
    if (std::memcmp(at, "\xff\xff\xff\x7f", 4))
      throw std::runtime_error("a block writes past its " + std::to_string(block.size) + " bytes of shared memory");
}

void run_block() {
  begin_block();
  const int count = static_cast<int>(block.threads.size());
  // What only works when the first threads are the fastest, or all as fast as each other, is told in some of the
  // blocks.
  const unsigned turn = block_index.x % 6;
  for (long round = 0, idle = 0; block.alive > 0; ++round) {
    block.moved = false;
    bring();
    for (int i = 0; i < count; ++i) {
      me = block.threads[turn % 2 ? count - 1 - i : i].get();
      const unsigned warpgroup = me->index.x / (4 * kWarp);
      if (me->done || round % (1 + (warpgroup + turn) % 3 * 6)) continue;
      change(block.scheduler, me->fiber);
      if (block.error) throw std::runtime_error(block.error);
    }
    idle = block.moved ? 0 : idle + 1;
    if (idle > 100) throw std::runtime_error("the threads of a block wait for each other in vain");
  }
  check_past();
}

void take_memory(size_t shared) {
  block.shared.assign(shared + kPast + 128, 0);
  block.size = shared;
  block.base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(block.shared.data()) + 127) & ~uintptr_t{127});
}

// `count` blocks from block_index on, whose kernel has no static shared memory: there is one of it. They take turns, of
// different lengths.
void run_cluster(unsigned count, size_t shared) {
  const dim3 first = block_index;
  while (cluster.blocks.size() < count) cluster.blocks.push_back(std::make_unique<Block>());
  cluster.bases.clear(), cluster.barrier = Barrier(), cluster.alive = 0;
  const auto enter = [&](unsigned rank) {
    std::swap(block, *cluster.blocks[rank]);
    block_index.x = first.x + rank;
  };
  void** const arguments = block.arguments;
  for (unsigned rank = 0; rank < count; ++rank) {
    enter(rank);
    block.arguments = arguments, block.error = nullptr;
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
        block.moved = false;
        bring();
        const bool has_come = block.moved;
        if (block.alive) go_on(0, block.threads.size(), false);
        if (block.moved || has_come) idle = 0;
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

void arrive(const Late& store) { std::memcpy(store.to, &store.word, sizeof store.word); }

// A launch that runs beside others. Its blocks take turns, its stores to other GPUs arrive late and in any order, but
// for what a release puts in order. Kernels of such launches have no static shared memory: there is one of it.
class Launch {
 public:
  Launch(void** arguments, dim3 grid, dim3 threads, size_t shared)
      : arguments_(arguments), grid_(grid), threads_(threads), shared_(shared) {}

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
    running.block.arguments = arguments_;
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

  void** arguments_;  // which live as long
  dim3 grid_, threads_;
  size_t shared_;
  unsigned next_ = 0;
  std::vector<Running> running_;
  std::vector<Late> late_;
};

// Runs a kernel; returns what went wrong, or "".
std::string run(dim3 grid, dim3 threads, size_t shared, void** arguments) {
  block.arguments = arguments;
  block.error = nullptr;
  beside_others = false;
  take_memory(shared);
  block_size = threads, grid_size = grid;
  const auto where = [&] {
    return " (block " + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ")";
  };
  try {
    for (block_index.z = 0; block_index.z < grid.z; ++block_index.z)
      for (block_index.y = 0; block_index.y < grid.y; ++block_index.y)
        for (block_index.x = 0; block_index.x < grid.x; block_index.x += emulated_cluster)
          emulated_cluster > 1 ? run_cluster(emulated_cluster, shared) : run_block();
  } catch (const std::exception& error) {
    return error.what() + where();
  }
  return "";
}

}  // namespace emulator

#pragma GCC visibility push(default)

extern "C" const char* emulated_launch(const unsigned* grid, unsigned threads, unsigned long shared, void** given) {
  static std::string error;
  error = emulator::run(dim3{grid[0], grid[1], grid[2]}, dim3{threads, 1, 1}, shared, given);
  return error.c_str();
}

extern "C" void* emulated_begin(const unsigned* grid, unsigned threads, unsigned long shared, void** given) {
  return new emulator::Launch(given, dim3{grid[0], grid[1], grid[2]}, dim3{threads, 1, 1}, shared);
}

extern "C" const char* emulated_turn(void* launch, unsigned seed, int* done) {
  static std::string error;
  auto* const it = static_cast<emulator::Launch*>(launch);
  error.clear(), *done = 0;
  try {
    if ((*done = it->turn(seed))) delete it;
  } catch (const std::exception& what) {
    error = what.what();
  }
  return error.c_str();
}
