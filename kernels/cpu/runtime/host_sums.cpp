#include "runtime/host_sums.h"

#include <algorithm>
#include <climits>
#include <set>

#include "isa/isa.h"

namespace allspan {
namespace {

constexpr int kTag = 1;
// Floats of a slice that is worth a message of its own: MPI sends so much over TCP without asking first.
constexpr size_t kSliceFloats = 16384;

template <class Handle>
int start_as(const MpiCalls& mpi, bool is_send, float* x, int count, int peer, uintptr_t& request) {
  using Send = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  using Receive = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  const auto type = static_cast<Handle>(mpi.type), comm = static_cast<Handle>(mpi.comm);
  auto* made = reinterpret_cast<Handle*>(&request);
  return is_send ? reinterpret_cast<Send>(mpi.isend)(x, count, type, peer, kTag, comm, made)
                 : reinterpret_cast<Receive>(mpi.irecv)(x, count, type, peer, kTag, comm, made);
}

}  // namespace

HostSums::HostSums(Window* window, const MpiCalls& mpi, std::vector<std::vector<int>> peers, int rank, int host,
                   int spins, double timeout)
    : window_(window),
      mpi_(mpi),
      peers_(std::move(peers)),
      rank_(rank),
      host_(host),
      place_(window ? window->rank() : 0),
      ranks_(window ? window->size() : 1),
      spins_(spins),
      timeout_(timeout),
      kernels_(variants().front().kernels),  // sums have the same bits in all of them
      status_(mpi.status_bytes) {
  if (peers_.empty() || static_cast<int>(peers_.size()) > ranks_) {
    throw std::invalid_argument("sums over hosts have a slice at least and a rank for each");
  }
  for (const auto& each : peers_) {
    if (each.size() != peers_.front().size() || host < 0 || host >= static_cast<int>(each.size())) {
      throw std::invalid_argument("each slice has a rank on every host");
    }
  }
  if (mpi.handle_bytes != sizeof(int) && mpi.handle_bytes != sizeof(uintptr_t)) {
    throw std::invalid_argument("MPI's handles are integers or pointers, not of " + std::to_string(mpi.handle_bytes) +
                                " bytes");
  }
}

void HostSums::all_reduce(Worker& worker, float* x, size_t count) {
  if (window_) window_->all_reduce(worker, x, count);
  if (worker.id == 0 && !worker.failed()) worker.guard([&] { over_hosts(x, count); });
  worker.barrier();
}

void HostSums::all_reduce(float* x, size_t count) {
  if (window_) window_->all_reduce(x, count);
  over_hosts(x, count);
}

void HostSums::over_hosts(float* x, size_t count) {
  if (count == 0) return;
  if (!why_not_.empty()) throw WaitTimeout(why_not_);
  const size_t slices = count / peers_.size() < kSliceFloats ? 1 : peers_.size();
  std::vector<size_t> starts(ranks_ + 1, count);
  for (size_t slice = 0; slice < slices; ++slice) starts[slice] = count * slice / slices;
  const size_t begin = starts[place_], end = starts[place_ + 1];
  if (begin < end) exchange(peers_[place_], x + begin, end - begin);
  if (window_) window_->spread(x, starts);
}

void HostSums::exchange(const std::vector<int>& peers, float* x, size_t count) {
  if (count > INT_MAX) throw std::invalid_argument("a sum of more than 2^31 numbers");
  auto* received = static_cast<float*>(received_.get((peers.size() - 1) * count * sizeof(float)));
  std::vector<const float*> parts;
  std::vector<Request> requests;
  for (int peer : peers) {
    if (peer == rank_) {
      parts.push_back(x);
      continue;
    }
    parts.push_back(received);
    requests.push_back({0, peer});
    if (start(false, received, count, requests.back()) != 0) {
      throw std::runtime_error("MPI_Irecv failed for rank " + std::to_string(peer));
    }
    received += count;
  }
  for (int peer : peers) {
    if (peer == rank_) continue;
    requests.push_back({0, peer});
    if (start(true, x, count, requests.back()) != 0) {
      throw std::runtime_error("MPI_Isend failed for rank " + std::to_string(peer));
    }
  }
  await(requests);
  kernels_->add_parts(parts.data(), static_cast<int64_t>(parts.size()), x, static_cast<int64_t>(count));
}

void HostSums::await(std::vector<Request>& requests) {
  Wait wait(spins_, timeout_);
  for (size_t i = 0; i < requests.size();) {
    if (is_done(requests[i])) {
      ++i;
    } else if (!wait.again()) {
      std::set<int> peers;
      for (size_t j = i; j < requests.size(); ++j) {
        if (!is_done(requests[j])) peers.insert(requests[j].peer);
      }
      std::string late;
      for (int peer : peers) late += (late.empty() ? "" : ", ") + std::to_string(peer);
      // MPI may write to received_ for as long as it lives: the world ends with this.
      why_not_ = waited(rank_, timeout_, late, "all_reduce");
      throw WaitTimeout(why_not_);
    }
  }
}

int HostSums::start(bool is_send, float* x, size_t count, Request& request) const {
  const int n = static_cast<int>(count);
  return mpi_.handle_bytes == sizeof(int) ? start_as<int>(mpi_, is_send, x, n, request.peer, request.handle)
                                          : start_as<uintptr_t>(mpi_, is_send, x, n, request.peer, request.handle);
}

bool HostSums::is_done(Request& request) {
  if (!request.is_done) {
    using Test = int (*)(void* request, int* is_done, void* status);
    int done = 0;
    if (reinterpret_cast<Test>(mpi_.test)(&request.handle, &done, status_.data()) != 0) {
      throw std::runtime_error("MPI_Test failed: rank " + std::to_string(request.peer) + " is gone");
    }
    request.is_done = done != 0;
  }
  return request.is_done;
}

}  // namespace allspan
