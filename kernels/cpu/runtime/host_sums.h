// Sums over the ranks of several hosts, in two levels: the ranks of a host add up in their window, then equal ranks of
// all hosts send each other the sums of their hosts over MPI and add them in the order of the hosts (add_parts), so
// that every rank holds the same bits. A short sum is sent by the first rank of each host alone; of a long one each
// rank sends a slice, which changes no bit of an element.
//
// MPI's calls come by address and its handles by value: which library it is, is known when Python has loaded one.
#pragma once

#include <string>
#include <vector>

#include "runtime/pool.h"
#include "runtime/window.h"

namespace allspan {

// Addresses of MPI_Isend, MPI_Irecv and MPI_Test; the handles of a communicator (all ranks, for these sums alone) and
// of MPI_FLOAT, of 4 or 8 bytes each as an MPI_Request is; the bytes of an MPI_Status.
struct MpiCalls {
  uintptr_t isend, irecv, test;
  uintptr_t comm, type;
  size_t handle_bytes, status_bytes;
};

class HostSums {
 public:
  // window: of this host's ranks; nullptr: it has one. `peers`: for each slice of a long sum, the rank in the world
  // that has it on each host; as many slices on every host. `rank`: this one's in the world; `host`: its host's place
  // in `peers`. spins, timeout: as for a Window. All ranks make the same calls in the same order, from the thread that
  // may call MPI (in a run that is thread 0).
  HostSums(Window* window, const MpiCalls& mpi, std::vector<std::vector<int>> peers, int rank, int host, int spins,
           double timeout);

  // As Window::all_reduce.
  void all_reduce(Worker& worker, float* x, size_t count);
  void all_reduce(float* x, size_t count);

 private:
  struct Request {
    uintptr_t handle = 0;
    int peer = 0;
    bool is_done = false;
  };

  // x, which holds the host's sum: the world's.
  void over_hosts(float* x, size_t count);
  // This rank's slice of x: exchanges it with its peers on the other hosts and adds.
  void exchange(const std::vector<int>& peers, float* x, size_t count);
  void await(std::vector<Request>& requests);
  int start(bool is_send, float* x, size_t count, Request& request) const;
  bool is_done(Request& request);

  Window* window_;
  MpiCalls mpi_;
  std::vector<std::vector<int>> peers_;
  int rank_, host_, place_, ranks_;  // place_: of this rank in its host, of ranks_
  int spins_;
  double timeout_;
  const Kernels* kernels_;
  Scratch received_;
  std::vector<char> status_;
  std::string why_not_;  // once a wait was in vain
};

}  // namespace allspan
