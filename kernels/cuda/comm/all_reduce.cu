// Sums over the GPUs of one host, in memory that each opens to the others (its arena), and what comes after a sum: the
// residual stream and its norm. The sum of an element runs over the ranks in their order, in float32, and is rounded
// once, whatever the size and whoever computes it: the same bits on every rank, fused or not.
//
// push_reduce (short messages; bound by one trip over NVLink, some 1 µs, and a launch): every rank writes its x into an
// inbox of each peer and waits for theirs. There are no flags: an inbox is full of ones before (a NaN that is never
// sent), so that a word that is something else has arrived; after reading it is filled with ones again (Lamport, as
// FasterTransformer and TensorRT-LLM do it). A block reads nothing but what the same block of its peers sends, after it
// has sent its own, so blocks may start in any order.
//
// share_reduce (long messages, more than two ranks; bound by 2 (ranks - 1) / ranks of the message over NVLink): every
// rank sums a slice of all, which it reads from its peers, and then reads the other slices where they were summed.
// Flags that grow by one a round tell that a block's part is there.
//
// gather_columns (logits; bound by the peers' columns over NVLink): every rank gives its columns to be read, and reads
// those of its peers.
//
// There are two inboxes and two stagings, taken in turn. A rank that is in round r has finished round r - 1, for which
// it got something of every peer, so every peer has finished r - 2 and left what was used there as it must be. The
// number of the round is on the device: a captured graph goes on counting.
//
// A peer that does not come within `patience` nanoseconds ends the waiting for good: its rank + 1 goes to `error`, in
// the host's memory, and no later round waits for anybody.
//
// Macros: RANKS (the most there are; 1: what is to be summed is summed already, push_reduce does the rest), WIDE (x is
// float32, else of 16 bits), NORM, PER (packets of a row that a thread holds).
#include "ptx/ptx.cuh"

constexpr unsigned kNothing = 0xffffffff, kNaN = 0x7fff7fff;
constexpr int kElements = WIDE ? 4 : 8, kMostBlocks = 128, kMostThreads = RANKS > 4 ? 512 : 1024;
constexpr size_t kFlagBytes = 2 * 8 * kMostBlocks * 4;

#if WIDE
typedef float Element;
__device__ __forceinline__ float as_float(Element x) { return x; }
__device__ __forceinline__ Element as_element(float x) { return x; }
#else
typedef bf16 Element;
__device__ __forceinline__ float as_float(Element x) { return wide(x); }
__device__ __forceinline__ Element as_element(float x) { return narrow(x); }
#endif

union Packet {
  uint4 all;
  unsigned words[4];
  Element elements[kElements];
};

// What the ranks share. An arena holds flags, two inboxes of RANKS times `inbox` bytes, two stagings of `staging`
// bytes.
struct Shared {
  char* arenas[8];  // by constant index alone, or they are not in registers
  char* own;
  unsigned* state;  // round, blocks that have read it, whether a peer was given up
  int* error;
  size_t inbox, staging;
  unsigned long long patience;
  int rank, ranks;
};

struct World : Shared {
  unsigned round = 0;
  bool given_up = false;
  unsigned long long since = 0;
  int looks = 0;

  __device__ explicit World(const Shared& shared) : Shared(shared) {}
  __device__ bool is_peer(int other) const { return other != rank && other < ranks; }
  __device__ void begin() { round = __ldcg(state) + 1, given_up = __ldcg(state + 2); }
  // Once all threads of the block have begun: the last block lets the next launch count on.
  __device__ void leave() const {
    if (threadIdx.x == 0 && atomicInc(state + 1, gridDim.x - 1) == gridDim.x - 1) *state = round;
  }
  __device__ char* inbox_at(char* arena, int from) const {
    return arena + kFlagBytes + ((round & 1) * RANKS + from) * inbox;
  }
  __device__ char* staging_at(char* arena) const {
    return arena + kFlagBytes + 2 * RANKS * inbox + (round & 1) * staging;
  }
  __device__ unsigned* flag_at(char* arena, int phase, int from) const {
    return reinterpret_cast<unsigned*>(arena) + (phase * RANKS + from) * kMostBlocks + blockIdx.x;
  }
  // Whether to look once more for what `peer` is to write.
  __device__ bool wait_for_peer(int peer) {
    if (given_up) return false;
    pause();
    if (++looks % 64) return true;
    const unsigned long long now = nanoseconds();
    if (!since) since = now;
    if (now - since < patience) return true;
    given_up = true, state[2] = 1, *error = peer + 1;
    __threadfence_system();
    return false;
  }
};

// The packet that begins at x[first]; past `count` elements there are zeros.
__device__ __forceinline__ Packet load(const Element* x, long long first, long long count) {
  Packet packet;
  if (first + kElements <= count) {
    packet.all = *reinterpret_cast<const uint4*>(x + first);
  } else {
#pragma unroll
    for (int e = 0; e < kElements; ++e) packet.elements[e] = first + e < count ? x[first + e] : Element(0);
  }
  return packet;
}
__device__ __forceinline__ void store(Element* x, long long first, long long count, const Packet& packet) {
  if (first + kElements <= count) {
    *reinterpret_cast<uint4*>(x + first) = packet.all;
  } else {
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      if (first + e < count) x[first + e] = packet.elements[e];
  }
}

// Of every rank's packet; `mine` in its place.
__device__ __forceinline__ Packet sum(const World& world, const Packet* packets, const Packet& mine) {
  Packet result;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    float total = 0.0f;
#pragma unroll
    for (int from = 0; from < RANKS; ++from) {
      const float x = as_float(from == world.rank ? mine.elements[e] : packets[from].elements[e]);
      if (from < world.ranks) total = from ? total + x : x;
    }
    result.elements[e] = as_element(total);
  }
  return result;
}

__device__ __forceinline__ void send(const World& world, long long at, Packet packet) {
#pragma unroll
  for (int w = 0; w < 4; ++w)
    if (packet.words[w] == kNothing) packet.words[w] = kNaN;
#pragma unroll
  for (int to = 0; to < RANKS; ++to)
    if (world.is_peer(to)) store16_far(world.inbox_at(world.arenas[to], world.rank) + at * 16, packet.all);
}

// Waits for every peer's packet, and leaves the inbox as it was.
__device__ __forceinline__ void receive(World& world, long long at, Packet* packets) {
  int missing;
  do {
    missing = -1;
#pragma unroll
    for (int from = 0; from < RANKS; ++from)
      if (world.is_peer(from)) packets[from].all = load16_far(world.inbox_at(world.own, from) + at * 16);
#pragma unroll
    for (int from = 0; from < RANKS; ++from)
      if (world.is_peer(from))
#pragma unroll
        for (int w = 0; w < 4; ++w)
          if (packets[from].words[w] == kNothing) missing = from;
  } while (missing >= 0 && world.wait_for_peer(missing));
  Packet nothing;
#pragma unroll
  for (int w = 0; w < 4; ++w) nothing.words[w] = kNothing;
#pragma unroll
  for (int from = 0; from < RANKS; ++from)
    if (world.is_peer(from)) store16_far(world.inbox_at(world.own, from) + at * 16, nothing.all);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  return x;
}

// Over the threads of a block, of whole warps. `sums`: 32 floats that nobody reads any more.
__device__ __forceinline__ float block_sum(float x, float* sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = warp_sum(x);
  if (lane == 0) sums[warp] = x;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x / 32) ? sums[lane] : 0.0f);
}

// x: `count` elements in rows of `packets` packets. With NORM (whole rows): residual += sum; out = residual /
// sqrt(mean(residual²) + eps) · weight; else x = sum.
extern "C" __global__ void __launch_bounds__(kMostThreads)
    push_reduce(const Shared shared, Element* x, long long rows, int packets, long long count, float* residual,
                const float* weight, float eps, Element* out) {
  DYNAMIC_SHARED(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  World world(shared);
  if (RANKS > 1) {
    world.begin();
    for (long long row = blockIdx.x; row < rows; row += gridDim.x)
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const int column = threadIdx.x + i * blockDim.x;
        const long long at = row * packets + column;
        if (column < packets && at * kElements < count) send(world, at, load(x, at * kElements, count));
      }
    __syncthreads();
    world.leave();
  }
  int turn = 0;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    float values[NORM ? PER : 1][kElements], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const int column = threadIdx.x + i * blockDim.x;
      const long long at = row * packets + column;
      if (column >= packets || at * kElements >= count) continue;
      const Packet mine = load(x, at * kElements, count);
      Packet from[RANKS], total = mine;
      if (NORM) {  // asked for before the waiting
#pragma unroll
        for (int e = 0; e < kElements; e += 4) {
          const float4 r = *reinterpret_cast<const float4*>(residual + at * kElements + e);
          values[NORM ? i : 0][e] = r.x, values[NORM ? i : 0][e + 1] = r.y;
          values[NORM ? i : 0][e + 2] = r.z, values[NORM ? i : 0][e + 3] = r.w;
        }
      }
      if (RANKS > 1) {
        receive(world, at, from);
        total = sum(world, from, mine);
      }
      if (NORM) {
        float* const r = values[NORM ? i : 0];
#pragma unroll
        for (int e = 0; e < kElements; ++e) r[e] += as_float(total.elements[e]), squares += r[e] * r[e];
#pragma unroll
        for (int e = 0; e < kElements; e += 4)
          *reinterpret_cast<float4*>(residual + at * kElements + e) = make_float4(r[e], r[e + 1], r[e + 2], r[e + 3]);
      } else {
        store(x, at * kElements, count, total);
      }
    }
    if (NORM) {
      const float width = static_cast<float>(packets * kElements);
      const float scale = rsqrtf(block_sum(squares, sums + 32 * turn) / width + eps);
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        const int column = threadIdx.x + i * blockDim.x;
        if (column >= packets) continue;
        Packet packet;
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          packet.elements[e] = as_element(values[NORM ? i : 0][e] * scale * weight[column * kElements + e]);
        *reinterpret_cast<uint4*>(out + (row * packets + column) * kElements) = packet.all;
      }
    }
  }
}

// Tells every peer that this block has done its part, and waits until the same block of each has.
__device__ __forceinline__ void meet(World& world, int phase) {
  __syncthreads();
  if (world.is_peer(threadIdx.x)) {
    const int peer = threadIdx.x;
    char* theirs = world.arenas[0];
#pragma unroll
    for (int i = 1; i < RANKS; ++i)
      if (i == peer) theirs = world.arenas[i];
    release(world.flag_at(theirs, phase, world.rank), world.round);
    const unsigned* const flag = world.flag_at(world.own, phase, peer);
    while (static_cast<int>(acquire(flag) - world.round) < 0 && world.wait_for_peer(peer)) {
    }
  }
  __syncthreads();
}

// x: `count` elements.
extern "C" __global__ void __launch_bounds__(kMostThreads)
    share_reduce(const Shared shared, Element* x, long long count) {
  World world(shared);
  world.begin();
  const long long packets = (count + kElements - 1) / kElements, slice = (packets + world.ranks - 1) / world.ranks;
  const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  char* const mine = world.staging_at(world.own);
#pragma unroll
  for (int to = 0; to < RANKS; ++to) {
    if (!world.is_peer(to)) continue;
    for (long long i = first; i < slice; i += step) {
      const long long at = to * slice + i;
      if (at < packets) store16_far(mine + at * 16, load(x, at * kElements, count).all);
    }
  }
  meet(world, 0);
  for (long long i = first; i < slice; i += step) {
    const long long at = world.rank * slice + i;
    if (at >= packets) break;
    Packet from[RANKS];
#pragma unroll
    for (int peer = 0; peer < RANKS; ++peer)
      if (world.is_peer(peer)) from[peer].all = load16_far(world.staging_at(world.arenas[peer]) + at * 16);
    const Packet total = sum(world, from, load(x, at * kElements, count));
    store16_far(mine + at * 16, total.all);
    store(x, at * kElements, count, total);
  }
  meet(world, 1);
  world.leave();
  for (long long i = first; i < slice; i += step) {
    Packet from[RANKS];
#pragma unroll
    for (int peer = 0; peer < RANKS; ++peer)
      if (world.is_peer(peer) && peer * slice + i < packets)
        from[peer].all = load16_far(world.staging_at(world.arenas[peer]) + (peer * slice + i) * 16);
#pragma unroll
    for (int peer = 0; peer < RANKS; ++peer)
      if (world.is_peer(peer) && peer * slice + i < packets)
        store(x, (peer * slice + i) * kElements, count, from[peer]);
  }
}

// Rank r has the columns first[r] to first[r + 1].
struct Columns {
  int first[9];
};

// x: float32 [rows, this rank's columns]; out: [rows, all columns]. Blocks of all ranks take packets by the same rule,
// so a block reads what the same block of its peers wrote.
#if WIDE
extern "C" __global__ void __launch_bounds__(kMostThreads)
    gather_columns(const Shared shared, const Columns columns, const float* x, float* out, long long rows) {
  World world(shared);
  world.begin();
  constexpr int kBatch = 4;  // on their way at once
  const long long first = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const int all = columns.first[world.ranks];
  const auto put = [&](const Packet& packet, long long at, int begin, int width) {
    const int packets = (width + 3) / 4, column = static_cast<int>(at % packets) * 4;
    float* const row = out + at / packets * all + begin;
    if (column + 4 <= width && (all | begin) % 4 == 0) {
      *reinterpret_cast<uint4*>(row + column) = packet.all;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + e < width) row[column + e] = packet.elements[e];
    }
  };
  const int begin = columns.first[world.rank], width = columns.first[world.rank + 1] - begin;
  const int packets = (width + 3) / 4;
  for (long long at = first; at < rows * packets; at += step) {
    const int column = static_cast<int>(at % packets) * 4;
    const float* const row = x + at / packets * width;
    Packet packet;
    if (width % 4 == 0) {
      packet.all = *reinterpret_cast<const uint4*>(row + column);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) packet.elements[e] = column + e < width ? row[column + e] : 0.0f;
    }
    store16_far(world.staging_at(world.own) + at * 16, packet.all);
    put(packet, at, begin, width);
  }
  meet(world, 0);
  world.leave();
#pragma unroll
  for (int peer = 0; peer < RANKS; ++peer) {
    if (!world.is_peer(peer)) continue;
    const int begin = columns.first[peer], width = columns.first[peer + 1] - begin;
    const long long count = rows * ((width + 3) / 4);
    for (long long at = first; at < count; at += step * kBatch) {
      Packet got[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (at + i * step < count) got[i].all = load16_far(world.staging_at(world.arenas[peer]) + (at + i * step) * 16);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (at + i * step < count) put(got[i], at + i * step, begin, width);
    }
  }
}
#endif
