// The sums of the first product of adapters as of_tiles.cuh takes them: those of parts of the inputs added up, two
// ranks in 32 bits, zeros behind an adapter's rank and in rows without one. A thread has one pair: the launch is what
// counts.
#include "ptx/ptx.cuh"

// sums [splits][rows][2 · rank]; of_rows [rows], places; ranks [places][2]; pairs [rows][2][steps][8].
extern "C" __global__ void __launch_bounds__(256)
    pack_sums(const float* sums, const int* of_rows, const int* ranks, uint32_t* pairs, int rows, int places, int rank,
              int splits) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x, of_half = (rank + 15) / 16 * 8;
  const int row = at / (2 * of_half), half = at / of_half % 2, r = at % of_half * 2;
  let_next_begin();
  wait_for_ahead();
  if (row >= rows) return;
  const int place = of_rows[row];
  const int own = place >= 0 && place < places ? min(ranks[place * 2 + half], rank) : 0;
  float x[2] = {};
#pragma unroll 4
  for (int s = 0; s < splits; ++s)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (r + i < own) x[i] += sums[(static_cast<long long>(s) * rows + row) * 2 * rank + half * rank + r + i];
  pairs[at] = pack(x[0], x[1]);
}
