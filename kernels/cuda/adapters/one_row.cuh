// The second product of low-rank adapters within the product of their layer, for one row of x, by the warps that have
// the layer's: each has every kWarps-th rank, in the columns where its sums lie, lane by lane. A lane asks for its
// number of a rank early, and keeps nothing else: what comes later costs as little as can be.
#pragma once
#include "ptx/ptx.cuh"

struct OneRow {
  const bf16* panels;  // [places][panels_of_place][rank][64]
  const int* ranks;    // [places][parts]
  const int* ends;     // [parts]
  const int* of_row;   // its place
  const float* sums;   // [splits][parts · rank], whose splits are added up
  int places, panels_of_place, rank, parts, splits;
};

template <int kWarps>
class OneRowColumns {
 public:
  // of_splits [kWarps][parts][splits], in shared memory. What the routing says may be read early: see route.cu.
  __device__ __forceinline__ OneRowColumns(const OneRow& its, float* of_splits)
      : its_(its), of_splits_(of_splits + threadIdx.x / 32 * its.parts * its.splits), place_(__ldcg(its.of_row)) {
    if (place_ >= its.places) place_ = -1;
  }
  // Asks for this lane's number: in column c of the layer, or of a gated product column c of a half; −1: in none.
  __device__ __forceinline__ void ask(bool is_gated, int half, int c) {
    own_ = 0, numbers_ = its_.panels;
    if (c < 0 || place_ < 0) return;
    int before = 0, from = 0;  // panels and columns of earlier parts
    if (is_gated) {
      part_ = half, before = half * (its_.panels_of_place / 2);
    } else {
      for (part_ = 0; part_ + 1 < its_.parts; ++part_) {
        const int until = its_.ends[part_];
        if (c < until) break;
        before += (until - from + 63) / 64, from = until;
      }
    }
    const int panel = place_ * its_.panels_of_place + before + (c - from) / 64;
    numbers_ += static_cast<long long>(panel) * its_.rank * 64 + (c - from) % 64;
    own_ = its_.ranks[place_ * its_.parts + part_];
    if (warp() < its_.rank) number_ = numbers_[warp() * 64];
  }
  // Once the first product is there: copies this warp's rank of it.
  __device__ __forceinline__ void copy_sums() const {
    if (warp() >= its_.rank || place_ < 0) return;
    for (int p = 0; p < its_.parts; ++p)
      for (int s = threadIdx.x % 32; s < its_.splits; s += 32)
        copy4(smem(of_splits_ + p * its_.splits + s), its_.sums + (s * its_.parts + p) * its_.rank + warp(), true);
  }
  // What this warp's ranks add, once the copies are there.
  __device__ __forceinline__ void add_to(float* sum) const {
    const int own = min(own_, its_.rank);
    if (warp() >= own) return;
    float low = 0;
    for (int s = 0; s < its_.splits; ++s) low += of_splits_[part_ * its_.splits + s];
    float more = low * wide(number_);
    for (int r = warp() + kWarps; r < own; r += kWarps) {
      low = 0;
      for (int s = 0; s < its_.splits; ++s) low += its_.sums[(s * its_.parts + part_) * its_.rank + r];
      more = fmaf(low, wide(numbers_[r * 64]), more);
    }
    *sum += more;
  }

 private:
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  const OneRow& its_;
  float* const of_splits_;
  const bf16* numbers_;
  int place_, part_, own_;
  bf16 number_;
};
