// Merges the parts of rows whose tokens attend.cu or attend_sm90.cu has cut. Of few tiles that are cut into many parts,
// a block for each row and head reads them faster than the one block that is the last to write a part of its tile.
#include "latent/attend/cut.cuh"

#ifndef LATENT
#define LATENT 512
#endif
constexpr int kMostTiles = 64;

// out: [rows, heads, LATENT]; lse: [rows, heads] or null. partial, kv_lens, and what follows: see latent_product.
extern "C" __global__ void __launch_bounds__(LATENT / 4)
    merge_rows(bf16* out, float* lse, int rows, int heads, const float* partial, const int* kv_lens, int tile_rows,
               int grid, int beside, int unit, int least) {
  __shared__ int begins[kMostTiles + 1];
  const int head = blockIdx.x, row = blockIdx.y, column = threadIdx.x * 4;
  const Cutting cutting = {tile_rows, grid, beside, unit, least, heads};
  let_next_begin();
  wait_for_ahead();
  if (threadIdx.x == 0) cutting.line(kv_lens, rows, begins);
  __syncthreads();
  const Parts parts(cutting, cutting.cut(begins, rows), begins, row, head, partial, LATENT);
  if (parts.pieces == 1) return;
  const Merged merged = merge_parts<8>(parts.first, parts.pieces, beside, tile_rows, LATENT, head % tile_rows, column);
  const float once = merged.total == 0 ? 0 : 1 / merged.total;
  const long long at = static_cast<long long>(row) * heads + head;
  *reinterpret_cast<uint2*>(out + at * LATENT + column) =
      make_uint2(pack(merged.sum.x * once, merged.sum.y * once), pack(merged.sum.z * once, merged.sum.w * once));
  if (lse && column == 0) lse[at] = merged.total == 0 ? -kInf : merged.top + log2f(merged.total);
}
