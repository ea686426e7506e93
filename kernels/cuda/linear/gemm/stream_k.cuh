// How the tiles of a product are shared out over thread blocks: M. Osama et al., Stream-K, arXiv:2301.03598.
#pragma once

// How `tiles` are shared out over thread blocks: each has `waves` whole ones, block b those at b, b + blocks, …; the
// last `rest` are one line of steps along the inputs, of which each block has an equal stretch. No stretch is longer
// than a tile, so it meets two at most.
struct StreamK {
  int tiles, steps, waves, rest, blocks;

  __device__ __forceinline__ int begin(int block) const {
    const int all = rest * steps, each = all / blocks, more = all % blocks;
    return block * each + min(block, more);
  }
  // The block whose stretch has this step of the line.
  __device__ __forceinline__ int owner(int step) const {
    const int all = rest * steps, each = all / blocks, more = all % blocks;
    return step < more * (each + 1) ? step / (each + 1) : more + (step - more * (each + 1)) / each;
  }
};
