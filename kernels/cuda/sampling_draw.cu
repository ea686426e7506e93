// The last kernels of sampling.cu: a block a row, which looks at few of its tokens, or goes over it step by step.

#include "sampling.cuh"

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
  const bool aligned = vocab % 4 == 0;
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

// Of the List only what weigh() says weighs anything, to its front; returns how many. At most kThreads at a time, so
// that none is overwritten before it is read.
template <class Keep>
__device__ int compact(float* logits, int* ids, int count, Shared& s, Keep keep) {
  int kept = 0;
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + threadIdx.x;
    const float x = i < count ? logits[i] : 0;
    const int id = i < count ? ids[i] : 0;
    const u64 stays = i < count && keep(x);
    const int at = kept + static_cast<int>(sum_before(stays, s));
    if (stays) logits[at] = x, ids[at] = id;
    kept += static_cast<int>(sum_of(stays, s));
  }
  return kept;
}

// The token of a part at which the running sum of the weights, `before` included, exceeds what is wanted.
template <class Weigh>
__device__ int draw_in_part(const float* x, int vocab, int part, u64 before, const Goal& goal, Shared& s, Weigh weigh) {
  const int first = part * kPart + threadIdx.x * 16;
  const bool aligned = vocab % 4 == 0;
  u64 mine = 0;
  float values[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = load_four(x, first + i * 4, vocab, aligned);
    values[i * 4] = four.x, values[i * 4 + 1] = four.y, values[i * 4 + 2] = four.z, values[i * 4 + 3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) mine += weigh(values[i]);
  u64 sum = before + sum_before(mine, s);
  if (!goal.is_met(sum) && goal.is_met(sum + mine)) {
    int token = first;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      sum += weigh(values[i]);
      if (!goal.is_met(sum)) token = first + i + 1;
    }
    s.bin = token;
  }
  __syncthreads();
  return s.bin;
}

// By the weights of the parts, sums [parts], and more of them in s.low and s.high of as many as there are.
template <class Weigh>
__device__ int draw_by_parts(const float* x, int vocab, const u64* sums, int parts, double share, Shared& s,
                             Weigh weigh) {
  u64 mine = 0;
  for (int p = threadIdx.x; p < parts; p += kThreads) mine += sums[p] + join(s.low[p], s.high[p]);
  const Goal goal = {share * static_cast<double>(sum_of(mine, s)), true};
  // In order, as many parts at a time as there are threads: nearly always once.
  u64 before = 0;
  int part = parts - 1;
  for (int base = 0; base < parts; base += kThreads) {
    const int p = base + threadIdx.x;
    const u64 each[1] = {p < parts ? sums[p] + join(s.low[p], s.high[p]) : 0};
    const u64 all = sum_of(each[0], s);
    if (!goal.is_met(before + all)) {
      before += all;
      continue;
    }
    part = base + first_bin(each, before, goal, s);
    before = s.found;
    __syncthreads();
    break;
  }
  return draw_in_part(x, vocab, part, before, goal, s, weigh);
}

}  // namespace

// grid: (rows). Ends the rows that `scan` has left open; counts are zero again after.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw(const float* logits, int vocab, int parts, const int* owners, const Settings* settings, const int* positions,
         const float* groups, const float* highest, const int* modes, const u64* sums, const Cut* cuts,
         const float2* tokens, int* counts, int* out, int columns) {
  begin();
  const int row = gridDim.x - 1 - blockIdx.x, mode = modes[row];
  if (mode == kDone) return;
  __shared__ Shared s;
  DYNAMIC_SHARED(memory);
  const Room room(memory);
  const Settings its = settings[owners[row]];
  const Scale scale(highest[row], its.temperature, vocab);
  const double share = uniform(its.seed, positions[row]);
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const Items whole = {x, nullptr, vocab};
  Items list = {room.logits, room.ids, 0};
  int token;
  if (mode == kList) {
    const int num_groups = parts * (kPart / kGroup);
    const bool fits =
        gather(x, vocab, groups + static_cast<long long>(row) * num_groups, num_groups, its.top_k, scale, room, s);
    list.count = s.count;
    int limit = its.top_k;
    __syncthreads();
    if (!fits || (list.count > kFew && limit < list.count)) {
      // To those of the top-k: fewer are compared faster, and may fit where the others do not.
      Kept kept;
      const Goal goal = {static_cast<double>(limit), false};
      kept.least = ~static_cast<uint32_t>(choose(fits ? list : whole, scale, kept, kLogit, goal, 0, s));
      const auto is_kept = [&](float v) { return ordered(v) >= kept.least; };
      if (fits) {
        list.count = compact(room.logits, room.ids, list.count, s, is_kept);
      } else {
        if (threadIdx.x == 0) s.count = 0;
        __syncthreads();
        whole.each([&](float v, int id, int) {
          if (is_kept(v)) room.put(v, id, s);
        });
        __syncthreads();
        list.count = s.count;
      }
      if (list.count <= CAPACITY) limit = 0;
      __syncthreads();
    }
    token = draw_from(list.count <= CAPACITY ? list : whole, scale, its, limit, share, s);
  } else if (mode == kPlain) {
    clear_bins(s, kBins);
    token = draw_by_parts(x, vocab, sums + static_cast<long long>(row) * parts, parts, share, s, [&](float v) {
      const float y = scale.y(v);
      return -y >= its.min_z ? scale.weight(y) : 0;
    });
  } else if (mode == kShare && counts[row] <= kInBin) {
    const Cut cut = cuts[row];
    const int count = counts[row];
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const float2 each = tokens[static_cast<long long>(row) * kInBin + i];
      room.logits[i] = each.x, room.ids[i] = __float_as_int(each.y);
    }
    __syncthreads();
    list.count = count;
    Kept kept;
    if (cut.by_share)
      kept.most = static_cast<uint32_t>(choose(list, scale, kept, kY, Goal{cut.wanted, false}, cut.before, s));
    kept.min_z = its.min_z;
    const auto weigh = [&](float v) { return kept.weight(v, scale); };
    clear_bins(s, kBins);
    list.each([&](float v, int id, int) {
      const u64 weight = weigh(v);
      if (weight) add(s.low + id / kPart, s.high + id / kPart, weight);
    });
    __syncthreads();
    token = draw_by_parts(x, vocab, sums + static_cast<long long>(row) * parts, parts, share, s, weigh);
  } else {
    token = draw_from(whole, scale, its, 0, share, s);
  }
  if (threadIdx.x != 0) return;
  if (mode == kShare) counts[row] = 0;
  out[static_cast<long long>(row) * columns] = token;
}

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
