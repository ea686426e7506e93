// The latents of a step's new tokens as pages hold them, and the merging of what attention over those gives with what
// attention over the tokens before gives. Compiled with FORMAT (elements.cuh: kBfloat16, kInt8 or kE4m3).
#include "ptx/ptx.cuh"

#ifndef FORMAT
#define FORMAT 1
#endif

// Row i of a request's new ones, qo_indptr[r] to qo_indptr[r + 1], is token kv_lens[r] - its queries + i. latents:
// [rows, latent]; keys: of each of `heads` heads of a row, `key_size` elements apart, the last `rot`. Rows of no
// request are zeros. Strides of pages in elements.
extern "C" __global__ void __launch_bounds__(128)
    latent_rows(const void* cache, const float* scales, long long page_stride, long long token_stride, int page_shift,
                const int* qo_indptr, const int* indptr, const int* indices, const int* kv_lens, int requests,
                int latent, int rot, int heads, int key_size, bf16* latents, bf16* keys) {
  const int row = blockIdx.x;
  let_next_begin();
  wait_for_ahead();
  int low = 0, high = requests;  // the last request that begins here or before
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (qo_indptr[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  const int first = qo_indptr[low], last = qo_indptr[low + 1];
  const bool is_there = requests > 0 && row >= first && row < last;
  const int token = is_there ? kv_lens[low] - (last - row) : 0, in_page = token & ((1 << page_shift) - 1);
  const int page = is_there && token >= 0 ? indices[indptr[low] + (token >> page_shift)] : 0;
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
      bf16* const to = keys + static_cast<long long>(row) * heads * key_size + (key_size - rot) + (i - latent);
      for (int h = 0; h < heads; ++h) to[h * key_size] = x;
    }
  }
}

// out and other: [rows, size], logarithms to base 2 of their sums of weights in lse and other_lse [rows]: out becomes
// what both together are. A warp has a row. Rows of no request hold anything.
extern "C" __global__ void __launch_bounds__(128)
    latent_merge(bf16* out, const float* lse, const bf16* other, const float* other_lse, int rows, int size) {
  const int row = blockIdx.x * 4 + threadIdx.x / 32;
  let_next_begin();
  wait_for_ahead();
  if (row >= rows || !(other_lse[row] > -kInf)) return;
  const float high = fmaxf(lse[row], other_lse[row]), a = power(lse[row] - high), b = power(other_lse[row] - high);
  const float once = 1 / (a + b);
  for (int i = threadIdx.x % 32; i < size; i += 32) {
    const long long at = static_cast<long long>(row) * size + i;
    out[at] = narrow(((a == 0 ? 0 : a * wide(out[at])) + b * wide(other[at])) * once);
  }
}
