// The adapters' rows of a step's tokens: see `embed_adapters` in kernels/adapter_ops.py. A thread has one number: at
// these widths the launch is what counts.
//
// IS_WIDE: the weight is of float32, else of 16 bits.
#include "ptx/ptx.cuh"

// ids, adapters [rows]; weight [num_places, count, width]; out [rows, width].
extern "C" __global__ void __launch_bounds__(256)
    embed_adapters(const int* ids, const int* adapters, const void* weight, int first_row, int count, int num_places,
                   int rows, int width, float* out) {
  const long long at = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x, row = at / width;
  let_next_begin();
  wait_for_ahead();
  if (row >= rows) return;
  const long long from = static_cast<long long>(ids[row]) - first_row;
  const int place = adapters[row];
  float x = 0.0f;
  if (from >= 0 && from < count && place >= 0 && place < num_places) {
    const long long number = (static_cast<long long>(place) * count + from) * width + at % width;
    if constexpr (IS_WIDE)
      x = static_cast<const float*>(weight)[number];
    else
      x = wide(static_cast<const bf16*>(weight)[number]);
  }
  out[at] = x;
}
