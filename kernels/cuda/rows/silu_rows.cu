// SwiGLU of many rows to int8 or fp8 with a scale for each row, with the bits of rms_norm.cu.
//
// There, a block finds nothing while its row comes, and asks for nothing while it finds and writes: two rows, all that
// the registers of a multiprocessor have room for, do not keep memory busy. Here blocks stay, two on a multiprocessor,
// and the next row is on its way to shared memory while this one is found and written. A thread reads only what it
// asked for itself, so a row still goes through one barrier. Memory bounds it: 5 bytes an element.
//
// SOURCE: kBfloat16; OUT: kInt8 or kE4m3; UNITS: how many units of 8 elements a thread has, of THREADS at most. Rows
// are multiples of a unit.
#include "rows/elements.cuh"

constexpr int kUnit = 8;

// Dynamic shared memory: UNITS · 32 bytes a thread.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    silu_rows(const bf16* source, void* out, float* scales, long long scale_row, int rows, int width) {
  DYNAMIC_SHARED(staged);
  __shared__ unsigned tops[2][32];  // of one row and the next, so that nobody waits to write
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint32_t mine = smem(staged) + threadIdx.x * 16, step = blockDim.x * 16;
  const auto ask_for = [&](long long row) {
    const bf16* const from = source + row * 2 * width;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      const int at = (threadIdx.x + i * blockDim.x) * kUnit;
      if (at >= width) continue;
      copy16(mine + 2 * i * step, from + at, true);
      copy16(mine + (2 * i + 1) * step, from + width + at, true);
    }
    commit();
  };
  let_next_begin();
  wait_for_ahead();
  ask_for(blockIdx.x);
  int turn = 0;
  for (long long row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
    wait_for<0>();
    float x[UNITS][kUnit];
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      if ((threadIdx.x + i * blockDim.x) * kUnit >= width) continue;
      const float4 words[2] = {load_shared16(mine + 2 * i * step), load_shared16(mine + (2 * i + 1) * step)};
      const uint32_t gate[4] = {__float_as_uint(words[0].x), __float_as_uint(words[0].y), __float_as_uint(words[0].z),
                                __float_as_uint(words[0].w)};
      const uint32_t up[4] = {__float_as_uint(words[1].x), __float_as_uint(words[1].y), __float_as_uint(words[1].z),
                              __float_as_uint(words[1].w)};
      float y[kUnit];
      decode<SOURCE, kUnit>(gate, x[i]);
      decode<SOURCE, kUnit>(up, y);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = silu(x[i][j]) * y[j], top = max(top, size_bits(x[i][j]));
    }
    if (row + gridDim.x < rows) ask_for(row + gridDim.x);
    top = __reduce_max_sync(~0u, top);
    if (lane == 0) tops[turn][warp] = top;
    __syncthreads();
    top = __reduce_max_sync(~0u, lane < warps ? tops[turn][lane] : 0u);
    const Scale<OUT> scale(__uint_as_float(top));
    if (threadIdx.x == 0) scales[row * scale_row] = scale.scale;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
      const int at = (threadIdx.x + i * blockDim.x) * kUnit;
      if (at >= width) continue;
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[i][j] = scale(x[i][j]);
      store<OUT, kUnit>(out, row * width + at, width - at, x[i]);
    }
  }
}
