// The most likely tokens of rows, behind scan and weigh (scan.cu): a block a row, which looks at few of its tokens,
// those of the groups that may hold such. Memory bounds it.

#include "sampling/weights.cuh"

namespace {

// Tokens in shared memory, and groups of the row. Ten bytes for each of CAPACITY.
struct Room {
  float* logits;
  int* ids;
  unsigned short* groups;
  __device__ explicit Room(char* at)
      : logits(reinterpret_cast<float*>(at)),
        ids(reinterpret_cast<int*>(at) + CAPACITY),
        groups(reinterpret_cast<unsigned short*>(at + CAPACITY * 8)) {}
  // By all threads that have one; s.count is how many there would be.
  __device__ void put(float x, int id, Shared& s) const {
    const int at = atomicAdd(&s.count, 1);
    if (at < CAPACITY) logits[at] = x, ids[at] = id;
  }
};

// Into the room, all tokens of the row among which are the `wanted` most likely, and those equal to the last of
// them, but for tokens that weigh nothing: `wanted` groups, at least, reach the bin that is the last one taken. Returns
// whether they fit; s.count of them.
__device__ bool gather(const float* x, int vocab, const float* groups, int num_groups, int wanted, const Scale& scale,
                       const Room& room, Shared& s) {
  clear_bins(s, kBins);
  if (threadIdx.x == 0) s.count = s.groups = 0;
#pragma unroll 4
  for (int g = threadIdx.x; g < num_groups; g += kThreads) {
    const int bin = scale.bin(scale.y(groups[g]));
    if (bin < kBins - 1) atomicAdd(&s.low[bin], 1u);
  }
  __syncthreads();
  constexpr int kEach = (kBins + kThreads - 1) / kThreads;
  u64 each[kEach];
  for (int i = 0; i < kEach; ++i) {
    const int bin = threadIdx.x * kEach + i;
    each[i] = bin < kBins ? s.low[bin] : 0;
  }
  const int last = min(first_bin(each, 0, Goal{static_cast<double>(wanted), false}, s), kBins - 2);
#pragma unroll 4
  for (int g = threadIdx.x; g < num_groups; g += kThreads) {
    if (scale.bin(scale.y(groups[g])) > last) continue;
    const int at = atomicAdd(&s.groups, 1);
    if (at < CAPACITY) room.groups[at] = static_cast<unsigned short>(g);
  }
  __syncthreads();
  const int count = s.groups;
  if (count > CAPACITY) return false;
  const bool aligned = is_aligned(x, vocab);
  for (int i = threadIdx.x; i < count * (kGroup / 4); i += kThreads) {
    const int from = room.groups[i / (kGroup / 4)] * kGroup + i % (kGroup / 4) * 4;
    const float4 four = load_four(x, from, vocab, aligned);
    const float values[4] = {four.x, four.y, four.z, four.w};
    for (int j = 0; j < 4; ++j) {
      if (scale.bin(scale.y(values[j])) <= last) room.put(values[j], from + j, s);
    }
  }
  __syncthreads();
  return s.count <= CAPACITY;
}

}  // namespace

// grid: (rows). For rows with limits[row] >= 0 and a token, of logits [rows, vocab] with their groups, highest logits
// and weights at temperature 1: found [rows, 4 + 2 * places]: the sum of the weights (as two words), the highest logit,
// the token's; the ids of the limits[row] most likely ones, of equals the lowest first; their logits, after all places.
// Floats as their bits.
extern "C" __global__ void __launch_bounds__(THREADS)
    likely(const float* logits, int vocab, int parts, const int* limits, const int* tokens, int columns,
           const float* groups, const float* highest, const u64* sums, int places, int* found) {
  begin();
  const int row = blockIdx.x, limit = limits[row], token = tokens[static_cast<long long>(row) * columns];
  if (limit < 0 || token < 0) return;
  __shared__ Shared s;
  DYNAMIC_SHARED(memory);
  const Room room(memory);
  const float* const x = logits + static_cast<long long>(row) * vocab;
  int* const to = found + static_cast<long long>(row) * (4 + 2 * places);
  u64 mine = 0;
  for (int p = threadIdx.x; p < parts; p += kThreads) mine += sums[static_cast<long long>(row) * parts + p];
  mine = sum_of(mine, s);
  if (threadIdx.x == 0) {
    to[0] = static_cast<int>(mine), to[1] = static_cast<int>(mine >> 32);
    to[2] = __float_as_int(highest[row]), to[3] = __float_as_int(x[token]);
  }
  if (limit == 0) return;
  const Scale scale(highest[row], 1.0f, vocab);
  const int num_groups = parts * (kPart / kGroup);
  // Too few weigh anything, or too many are as likely as the last: by all tokens.
  const bool fits =
      gather(x, vocab, groups + static_cast<long long>(row) * num_groups, num_groups, limit, scale, room, s) &&
      s.count >= limit;
  const Items items = fits ? Items{room.logits, room.ids, s.count} : Items{x, nullptr, vocab};
  __syncthreads();
  const u64 last = choose(items, scale, Kept(), kRank, Goal{static_cast<double>(limit), false}, 0, s);
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  items.each([&](float v, int id, int) {
    const u64 key = key_of(kRank, v, id, scale, Kept());
    if (key <= last) s.keys[atomicAdd(&s.count, 1)] = key;
  });
  __syncthreads();
  for (int i = threadIdx.x; i < limit; i += kThreads) {
    int rank = 0;
    for (int j = 0; j < limit; ++j) rank += s.keys[j] < s.keys[i];
    to[4 + rank] = static_cast<int>(s.keys[i]);
    to[4 + places + rank] = __float_as_int(x[static_cast<int>(s.keys[i])]);
  }
}
