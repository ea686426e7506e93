// From rows of logits to tokens, one launch for whatever the rows ask. Each row is read once: CLUSTER blocks (a cluster
// where there are several; one block on sm_80) share it, a warp after the other, and keep it in shared memory; what
// does not fit there is read again. What bounds it: reading; for draws of which all tokens are a part (top-p, plain
// ones) as many instructions, about 25 a token, that give its exact weight, and two cycles for each that goes into a
// bin; with few rows the meetings of blocks, 4 at most.
//
//   1 the highest logit. Greedy, known and bad rows end here
//   2 top-k: the highest of each four tokens, counted in bins of y; top-p: the weight of tokens in such bins, and of
//     all; else the weight of those that count
//   3 in all blocks alike, from all blocks' bins: the bin in which the threshold is; its tokens (top-k: and those
//     before it) go to a list
//   4 top-k: the first block draws from the list; top-p: all blocks find the threshold and in which of them the draw
//     falls; that one finds the token
//
// Typical-p without a top-k and lists of more than CAPACITY go over the row again and again, in the first block.

#include "sampling/sample_bins.cuh"
#include "sampling/sample_draw.cuh"

// grid: (rows * CLUSTER). logits [rows, vocab]; stay: quads that each warp keeps; ahead: how many blocks run at once,
// a multiple of CLUSTER, or 0; owners: of which row of `settings`
// each is, -1 of none: nothing is written for it; targets: a known token, or -1, or null; flags: what `change` found,
// or null. listed_logits, listed_ids [rows, CAPACITY]: scratch. out: a token every `columns`.
extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const float* logits, int vocab, int stay, int ahead, const int* owners, const Settings* settings,
           const int* positions, const int* targets, int* flags, float* listed_logits, int* listed_ids, int* out,
           int columns) {
  DYNAMIC_SHARED(memory);
  Meeting& all = *reinterpret_cast<Meeting*>(memory);
  Shared& s = all.s;
  float4* const quads = reinterpret_cast<float4*>(memory + kMeetingBytes);
  begin();
  const int row = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  const float* const x = logits + static_cast<long long>(row) * vocab;
  const Part part(x, vocab, smem(quads), stay, rank);
  part.fetch();
  const int owner = owners[row], target = targets ? targets[row] : -1, flag = flags ? flags[row] : 0;
  const Settings its = settings[max(owner, 0)];
  if (threadIdx.x / 32 == kWarps - 1) all.share = uniform(its.seed, positions[row]);
  for (int i = threadIdx.x; i < kBins; i += kThreads) s.low[i] = s.high[i] = 0;
  if (threadIdx.x == 0) all.listed = all.cut = 0, all.threshold = all.token = ~0u;
  if (CLUSTER > 1) cluster_arrive();
  wait_for<0>();
  part.clean(quads, stay);
  float best;
  const u64 mine = best_of(part, best, s);
  // What the block needs that comes when this one ends is on its way while this one computes.
  if (ahead && blockIdx.x + ahead < gridDim.x) {
    const long long step = static_cast<long long>(ahead / CLUSTER) * vocab;
    const char* const its_first = reinterpret_cast<const char*>(part.from + part.first * 4ll + step);
    for (int i = threadIdx.x % 32 * 128; i < part.stay * 16; i += 32 * 128) prefetch_l2(its_first + i);
  }
  if (CLUSTER > 1) cluster_wait();  // all blocks are there
  if (threadIdx.x < CLUSTER) *at_block(all.best + rank, threadIdx.x) = mine;
  meet();
  u64 most = all.best[0];
#pragma unroll
  for (int r = 1; r < CLUSTER; ++r) most = max(most, all.best[r]);

  // flags: 1 a change has seen a bad logit, 2 a finite one, 4 has been there.
  const float top = unordered(static_cast<uint32_t>(most >> 32));
  Mode mode = kDone;
  int token;
  if (most == kBad || (flag && flag != 6)) {
    token = kNotFinite;
  } else if (top == -kInf) {
    token = target >= 0 ? kNotFinite : kAllMasked;
  } else if (target >= 0) {
    token = target;
  } else {
    token = static_cast<int>(~static_cast<uint32_t>(most));
    mode = mode_of(its, vocab);
  }
  if (rank == 0 && threadIdx.x == 0 && flag) flags[row] = 0;
  if (owner < 0) return;
  int* const to = out + static_cast<long long>(row) * columns;
  const Scale scale(top, its.temperature, vocab);
  const double share = all.share;
  float* const its_logits = listed_logits + static_cast<long long>(row) * CAPACITY;
  int* const its_ids = listed_ids + static_cast<long long>(row) * CAPACITY;
  if (mode == kDone || mode == kWhole) {
    if (rank != 0) return;
    if (mode == kWhole) token = draw_alone(Items{x, nullptr, vocab}, top, its, share, vocab, s);
    if (threadIdx.x == 0) *to = token;
    return;
  }

  u64 each[kEachBin];
  if (mode == kList) {
    const float guess = fminf(guess_of(its.top_k), scale.limit);
    count_into_bins(part, scale, 0, guess, smem(s.low));
    meet();
    gather_bins(each, s);
    const Goal wanted = {static_cast<double>(its.top_k), false};
    int last = first_bin(each, 0, wanted, s);
    if (!s.is_met) {  // all blocks see so
      meet();
      count_into_bins(part, scale, guess, scale.limit, smem(s.low));
      meet();
      gather_bins(each, s);
      last = first_bin(each, 0, wanted, s);
    }
    last = min(last, kBins - 2);
    list_tokens(part, scale, 0, last, its_logits, its_ids, at_block(&all.listed, 0));
    meet();
    if (rank != 0) return;
    const int count = all.listed;
    Items items = {x, nullptr, vocab};
    if (count <= kNear && !(its.typical_p < 1)) {
      token = draw_few(its_logits, its_ids, count, scale, its.top_k, its.top_p, its.min_z, share, all);
      if (threadIdx.x == 0) *to = token;
      return;
    }
    if (count <= CAPACITY) {
      items = {its_logits, its_ids, count};
      if (count <= stay * kWarps * 2) {  // where the row was
        float* const near_logits = reinterpret_cast<float*>(quads);
        int* const near_ids = reinterpret_cast<int*>(near_logits + count);
        for (int i = threadIdx.x; i < count; i += kThreads)
          near_logits[i] = __ldcg(its_logits + i), near_ids[i] = __ldcg(its_ids + i);
        items.logits = near_logits, items.ids = near_ids;
        __syncthreads();
      }
    }
    token = draw_alone(items, top, its, share, vocab, s);
    if (threadIdx.x == 0) *to = token;
    return;
  }

  Kept kept;
  kept.min_z = its.min_z;
  u64 weight = 0;
  if (mode == kPlain) {
    weight = sum_of_part(part, scale, ~0u, its.min_z);
    const u64 sum = sum_of(weight, s);
    if (threadIdx.x < CLUSTER) *at_block(all.sums + rank, threadIdx.x) = sum;
    meet();
  } else {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float guess = fminf(guess_of(vocab, its.top_p), scale.limit);
    const u64 mine_all = sum_of(weigh_into_bins(part, scale, 0, guess, smem(s.low), smem(s.high)), s);
    if (threadIdx.x < CLUSTER) *at_block(all.totals + rank, threadIdx.x) = mine_all;
    meet();
    gather_bins(each, s);
    u64 sum = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) sum += all.totals[r];
    const Goal wanted = {its.top_p * static_cast<double>(sum), false};
    int found = first_bin(each, 0, wanted, s);
    if (!s.is_met) {  // all blocks see so
      const float far = far_of(best, scale, vocab, its.top_p, s);
      meet();
      weigh_into_bins(part, scale, guess, far, smem(s.low), smem(s.high));
      meet();
      gather_bins(each, s);
      found = first_bin(each, 0, wanted, s);
    }
    const u64 before = s.found;
    // min-p may cut before.
    const int floor = scale.bin(-its.min_z), cut = min(found, floor);
    list_near(part, scale, cut, all);
    for (int r = warp; r < CLUSTER; r += kWarps) {
      u64 less = 0;
#pragma unroll 4
      for (int i = lane; i < cut; i += 32) less += join(*at_block(s.low + i, r), *at_block(s.high + i, r));
      less = sum_of_warp(less);
      if (lane == 0) all.sums[r] = less;
    }
    meet();
    int starts[CLUSTER + 1];
    starts[0] = 0;
    bool fits = true;
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const int count = *at_block(&all.cut, r);
      fits &= count <= kNear / 2;
      starts[r + 1] = starts[r] + count;
    }
    if (fits && starts[CLUSTER] <= kNear) {
      uint4* const gathered = reinterpret_cast<uint4*>(s.keys);
      for (int i = threadIdx.x; i < starts[CLUSTER]; i += kThreads) {
        int r = 0;
#pragma unroll
        for (int next = 1; next < CLUSTER; ++next) r += i >= starts[next];
        int start = 0;
#pragma unroll
        for (int next = 1; next < CLUSTER; ++next) start = r == next ? starts[next] : start;
        gathered[i] = *at_block(all.tokens + i - start, r);
      }
      if (CLUSTER > 1) cluster_arrive();  // others may end
      __syncthreads();
      if (found <= floor) kept.most = threshold_of(gathered, starts[CLUSTER], before, wanted, all);
#pragma unroll
      for (int r = 0; r < CLUSTER; ++r) {
        if (warp != r % kWarps) continue;
        u64 its_weight = 0;
        for (int i = starts[r] + lane; i < starts[r + 1]; i += 32) {
          const uint4 token = gathered[i];
          if (token.x <= kept.most && -__uint_as_float(token.x) >= its.min_z) its_weight += join(token.y, token.z);
        }
        its_weight = sum_of_warp(its_weight);
        if (lane == 0) all.sums[r] += its_weight;
      }
    } else {
      list_tokens(part, scale, cut, cut, its_logits, its_ids, at_block(&all.listed, 0));
      meet();
      const int count = *at_block(&all.listed, 0);
      if (CLUSTER > 1) cluster_arrive();
      if (count > CAPACITY) {
        if (rank == 0) {
          token = draw_alone(Items{x, nullptr, vocab}, top, its, share, vocab, s);
          if (threadIdx.x == 0) *to = token;
        }
        if (CLUSTER > 1) cluster_wait();
        return;
      }
      const Items list = {its_logits, its_ids, count};
      if (found <= floor) kept.most = static_cast<uint32_t>(choose(list, scale, kept, kY, wanted, before, s));
      clear_bins(s, CLUSTER);
      list.each([&](float v, int id, int) {
        const u64 its_weight = kept.weight(v, scale);
        const int block = part.block_of(id);
        if (its_weight) add(s.low + block, s.high + block, its_weight);
      });
      __syncthreads();
      if (threadIdx.x < CLUSTER) all.sums[threadIdx.x] += join(s.low[threadIdx.x], s.high[threadIdx.x]);
    }
    __syncthreads();
  }
  // In which block the draw falls.
  u64 sums[CLUSTER];
  u64 total = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    sums[r] = all.sums[r];
    total += sums[r];
  }
  const Goal goal = {share * static_cast<double>(total), true};
  u64 before = 0;
  int chosen = 0;
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const bool is_past = chosen == r && r < CLUSTER - 1 && !goal.is_met(before + sums[r]);
    if (is_past) before += sums[r], chosen = r + 1;
  }
  if (rank == chosen) {
    if (mode != kPlain) weight = sum_of_part(part, scale, kept.most, its.min_z);
    token = draw_here(part, scale, weight, kept.most, its.min_z, before, goal, s);
    if (threadIdx.x == 0) *to = token;
  }
  if (CLUSTER > 1 && mode != kPlain) cluster_wait();
}
