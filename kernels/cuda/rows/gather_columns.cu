// Columns of rows gathered: inputs brought into the order in which a weight has them. A row stays in L1 while its
// columns are read, so writing them bounds it, and at few rows the launch.
#include "ptx/ptx.cuh"

// out [rows, width] = x [rows, from_width] at `columns`: elements of 16 bits. A thread has 8 columns of a row.
extern "C" __global__ void __launch_bounds__(256)
    gather_columns(const bf16* x, const int* columns, bf16* out, int from_width, int width, int pieces) {
  const long long row = blockIdx.x / static_cast<unsigned>(pieces);
  const int at = (blockIdx.x % static_cast<unsigned>(pieces) * blockDim.x + threadIdx.x) * 8;
  const bf16* const from = x + row * from_width;
  bf16* const to = out + row * width + at;
  int column[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) column[j] = at + j < width ? columns[at + j] : 0;
  let_next_begin();
  wait_for_ahead();  // columns are there before any kernel; x is not
  bf16 values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = from[column[j]];
  if (at + 8 <= width && width % 8 == 0) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = values[j * 2] | static_cast<uint32_t>(values[j * 2 + 1]) << 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (at + j < width) to[j] = values[j];
  }
}
