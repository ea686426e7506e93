// The latents of requests as pages hold them, one after the other, for keys and values to be made of. Compiled with
// FORMAT (elements.cuh: kBfloat16, kInt8 or kE4m3).
#include "ptx/ptx.cuh"

#ifndef FORMAT
#define FORMAT 1
#endif

// Row indptr[r] + i is token i of request r. latents: [rows, latent]; what turns, the last `rot` elements of a token,
// goes to row * row_stride of `turned` for each of `heads` heads, head_stride elements apart. Rows behind the last
// request's are zeros. Strides of pages in elements.
extern "C" __global__ void __launch_bounds__(128)
    latent_rows(const void* cache, const float* scales, long long page_stride, long long token_stride, int page_shift,
                const int* indptr, const int* page_indptr, const int* indices, int requests, int latent, int rot,
                int heads, long long head_stride, int row_stride, bf16* latents, bf16* turned) {
  const int row = blockIdx.x;
  let_next_begin();
  wait_for_ahead();
  int low = 0, high = requests;  // the last request that begins here or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (indptr[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  const bool is_there = requests > 0 && row < indptr[requests];
  const int token = is_there ? row - indptr[low] : 0, in_page = token & ((1 << page_shift) - 1);
  const int page = is_there ? indices[page_indptr[low] + (token >> page_shift)] : 0;
  const long long from = page * page_stride + in_page * token_stride;
  const float* const its = scales + ((static_cast<long long>(page) * 2 << page_shift) + in_page);
  const float zero = FORMAT == 1 ? 0 : its[0], scale = FORMAT == 1 ? 1 : its[1 << page_shift];
  for (int i = threadIdx.x; i < latent + rot; i += 128) {
    bf16 x;
    if (FORMAT == 1) {
      x = static_cast<const bf16*>(cache)[from + i];
    } else {
      const uint32_t code = static_cast<const unsigned char*>(cache)[from + i];
      uint32_t pairs[2];
      widen_e4m3(pairs, code);
      const float value =
          FORMAT == 2 ? static_cast<float>(static_cast<signed char>(code)) : half_wide(pairs[0] & 0xffff);
      x = narrow((value - zero) * scale);
    }
    if (!is_there) x = 0;
    if (i < latent) {
      latents[static_cast<long long>(row) * latent + i] = x;
    } else {
      bf16* const to = turned + static_cast<long long>(row) * row_stride + (i - latent);
      for (int h = 0; h < heads; ++h) to[h * head_stride] = x;
    }
  }
}
