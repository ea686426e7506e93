// Collectives between the ranks of one host, in memory that they share (mapped by the caller). Sums are taken in one
// tree over the ranks (Kernels::add_parts), so every rank holds the same bits.
//
// The window has lanes: slots and counters that the threads with one number, one of each rank, have to themselves. In a
// lane each rank owns kSlots slots and a counter of the chunks that it has put there. A collective is a sequence of
// chunks: a rank copies chunk k+1 into its slot, waits until all peers have put chunk k, and reads theirs where they
// lie. A rank that puts chunk k has read chunk k-2; when it knows that its peers have put chunk k-1 it also knows that
// they have read k-3, so with four slots the one that chunk k+1 overwrites is free without a second wait.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "runtime/pool.h"
#include "runtime/wait.h"

namespace allspan {

class Window {
 public:
  // base: memory of bytes(), aligned to 64, of which the first bytes(…, slot_bytes 0) are zero. `spins`: tries before a
  // wait yields; `timeout` in seconds. The same on every rank, as is the order of calls. `first`: what the first rank
  // is called in messages; the others follow.
  Window(uintptr_t base, int rank, int size, int lanes, size_t slot_bytes, int spins, double timeout, int first = 0);
  static size_t bytes(int size, int lanes, size_t slot_bytes);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int lanes() const { return static_cast<int>(lanes_.size()); }

  // Every wait throws WaitTimeout with the ranks awaited when its time is up, and the window is of no use from then on:
  // each call throws the same again.

  // x[i] = the sum of all ranks' x[i], inside a run: all threads of every rank call it, the first lanes() of them share
  // x out, and it ends with a barrier. What goes wrong is kept as by Worker::guard. x is complete when it is called.
  // The bits are those of the other all_reduce, but a rank must not call one and its peer the other.
  void all_reduce(Worker& worker, float* x, size_t count);

  // The others are for one thread.
  void all_reduce(float* x, size_t count);
  // x [rows, widths[rank]]; out [rows rank, rank + size … of `rows`, sum(widths)]. Elements of 4 bytes.
  void exchange_rows(const char* x, size_t rows, const std::vector<size_t>& widths, char* out);
  // x [its share of rows, width]: row j of rank r is row r + j * size of out [rows, width]. Elements of 4 bytes.
  void all_gather_rows(const char* x, size_t rows, size_t width, char* out);
  // Gives all ranks each one's slice of x: that of rank r is [starts[r], starts[r + 1]).
  void spread(float* x, const std::vector<size_t>& starts);
  void barrier();

 private:
  class Lane;
  struct alignas(kLine) Progress {
    uint64_t sequence = 0;  // of the chunk being read
  };

  void reduce(int lane, float* x, size_t count);
  [[noreturn]] void give_up(const std::string& why);

  char* base_;
  int rank_, size_, first_;
  size_t slot_bytes_;
  int spins_;
  double timeout_;
  const Kernels* kernels_;
  std::vector<Progress> lanes_;
  std::atomic<bool> broken_{false};  // set once `why_` is, which nobody changes then
  std::mutex breaking_;
  std::string why_;
};

}  // namespace allspan
