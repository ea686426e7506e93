// What requests ask of their logits before a token is drawn: penalties, biases and masks, in place, in this order and
// with numpy's bits. One read and one write of the rows that ask, and of what is held for them: of each token how often
// it has come.

#include "../abi/sampling.cuh"
#include "ptx/ptx.cuh"

constexpr uint32_t kInPrompt = 0x80000000u;  // of a word of counts; below it, how often a token stands in the output

// grid: (parts of 4 * THREADS * LOADS logits, changes). counts [, vocab]; biases [, vocab]; masks [, words of 32], a
// bit of each token that is allowed. flags [rows]: 4, or'd with 1 for a logit that is NaN or +inf, with 2 for a finite
// one.
extern "C" __global__ void __launch_bounds__(THREADS)
    change(float* logits, int vocab, const Change* changes, const uint32_t* counts, const float* biases,
           const uint32_t* masks, int* flags) {
  const Change its = changes[blockIdx.y];
  float* const x = logits + static_cast<long long>(its.row) * vocab;
  const uint32_t* const words = counts + static_cast<long long>(its.words) * vocab;
  const float* const bias = biases + static_cast<long long>(its.bias) * vocab;
  const uint32_t* const mask = masks + static_cast<long long>(its.mask) * ((vocab + 31) / 32);
  const bool is_penalised = its.presence != 0 || its.frequency != 0;
  int seen = 4;
#pragma unroll 4
  for (int i = 0; i < LOADS * 4; ++i) {
    const long long at = (static_cast<long long>(blockIdx.x) * LOADS * 4 + i) * THREADS + threadIdx.x;
    if (at >= vocab) break;
    const float before = x[at];
    float value = before;
    seen |= before <= 3.402823466e38f ? (before > -kInf ? 2 : 0) : 1;
    if (its.words >= 0) {
      const uint32_t word = words[at], count = word & ~kInPrompt;
      if (its.repetition != 1.0 && (its.output_only ? count : word)) {
        const double wide = value;
        value = static_cast<float>(
            fmin(wide < 0 ? wide * its.repetition : wide / its.repetition, static_cast<double>(3.402823466e38f)));
      }
      if (is_penalised && count)
        value = __fsub_rn(value,
                          __fadd_rn(its.presence, __fmul_rn(its.frequency, __int2float_rn(static_cast<int>(count)))));
    }
    if (its.bias >= 0) value = __fadd_rn(value, bias[at]);
    if (its.mask >= 0 && !(mask[at / 32] >> (at % 32) & 1)) value = -kInf;
    if (value != before) x[at] = value;
  }
  for (int o = 16; o > 0; o /= 2) seen |= __shfl_xor_sync(~0u, seen, o);
  if (threadIdx.x % 32 == 0) atomicOr(flags + its.row, seen);
}

// entries [count] of a row of counts and a token, negative (~token) for one in the prompt.
extern "C" __global__ void __launch_bounds__(THREADS)
    note_tokens(uint32_t* counts, int vocab, const int2* entries, int count) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  const int2 each = entries[i];
  uint32_t* const words = counts + static_cast<long long>(each.x) * vocab;
  if (each.y < 0) {
    atomicOr(words + ~each.y, kInPrompt);
  } else {
    atomicAdd(words + each.y, 1u);
  }
}

// entries [count] of a row of counts and a place in `tokens`, which the last step made; negative ones are none.
extern "C" __global__ void __launch_bounds__(THREADS)
    note_sampled(uint32_t* counts, int vocab, const int2* entries, int count, const int* tokens) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= count) return;
  const int token = tokens[entries[i].y];
  if (token >= 0) atomicAdd(counts + static_cast<long long>(entries[i].x) * vocab + token, 1u);
}

// entries [count] of a row of logits and a token that must not be drawn.
extern "C" __global__ void __launch_bounds__(THREADS)
    ban_tokens(float* logits, int vocab, const int2* entries, int count) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < count) logits[static_cast<long long>(entries[i].x) * vocab + entries[i].y] = -kInf;
}
