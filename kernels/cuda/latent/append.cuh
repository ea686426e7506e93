// What becomes of the queries and the latent of a new token between the products that made them and attention: rotary
// embedding of the queries, and of the latent's row its norm, the rotary embedding of its key and the append to the
// cache. Each step's outcome is rounded to 16 bits, as it would be in memory. Compiled with FORMAT (elements.cuh:
// kBfloat16 for pages of 16 bits, kInt8, kE4m3, both with scales).
#ifndef ALLSPAN_LATENT_APPEND
#define ALLSPAN_LATENT_APPEND
#define WHOLE 1
#include "rows/elements.cuh"

#ifndef FORMAT
#define FORMAT kBfloat16
#endif
constexpr int kAppendThreads = 256, kMostWidth = 1024, kEach = kMostWidth / kAppendThreads, kPairs = kEach / 2;

// kv: [tokens, latent + rot], kv_stride elements apart; weight: [latent]; cos_sin: [positions, rot]. Pages: strides in
// elements; scales [pages, 2, page size]. A slot of -1 writes no page.
struct Append {
  bf16* kv;
  const float* weight;
  const int* positions;
  const float* cos_sin;
  void* cache;
  float* scales;
  const int* slots;
  long long kv_stride, page_stride, token_stride;
  int latent, rot, page_size;
  float eps;
};

struct Pair {
  float low, high;

  __device__ __forceinline__ Pair turned(float cosine, float sine) const {
    return {rounded<kBfloat16>(low * cosine - high * sine), rounded<kBfloat16>(high * cosine + low * sine)};
  }
};

// The pair i of a token's queries, counted through all heads: q has heads of `size` elements, of which the last rot
// turn.
__device__ __forceinline__ void turn_query(bf16* q, int size, int i, int rot, float cosine, float sine) {
  const int half = rot / 2;
  bf16* const at = q + i / half * size + (size - rot) + i % half;
  const Pair pair = Pair{wide(at[0]), wide(at[half])}.turned(cosine, sine);
  at[0] = narrow(pair.low), at[half] = narrow(pair.high);
}

// By a thread block of kAppendThreads. What memory holds already is asked for when one is made.
class TokenAppend {
 public:
  __device__ __forceinline__ explicit TokenAppend(const Append& append) : a_(append) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kAppendThreads + threadIdx.x;
      weight_[i] = at < a_.latent ? a_.weight[at] : 0;
    }
  }

  // Asks where a token is and goes.
  __device__ __forceinline__ void place(int token) {
    own_ = a_.kv + token * a_.kv_stride;
    slot_ = a_.slots[token];
    angles_ = a_.cos_sin + static_cast<long long>(a_.positions[token]) * a_.rot;
    const int half = a_.rot / 2;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = i * kAppendThreads + threadIdx.x;
      if (at < half) cosines_[i] = angles_[at], sines_[i] = angles_[half + at];
    }
  }
  __device__ __forceinline__ const float* angles() const { return angles_; }
  // Asks for its latent and its key, once the kernel ahead has ended.
  __device__ __forceinline__ void load() {
    const int half = a_.rot / 2;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kAppendThreads + threadIdx.x;
      x_[i] = at < a_.latent ? wide(own_[at]) : 0;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = i * kAppendThreads + threadIdx.x;
      if (at < half) pairs_[i] = {wide(own_[a_.latent + at]), wide(own_[a_.latent + half + at])};
    }
  }

  // Writes it. room: shared memory, a number for each warp.
  __device__ __forceinline__ void run(float* room) {
    const int half = a_.rot / 2, width = a_.latent + a_.rot;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum = fmaf(x_[i], x_[i], sum);
    const float by = rsqrtf(over_block(sum, room, [](float a, float b) { return a + b; }) / a_.latent + a_.eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x_[i] = rounded<kBfloat16>(x_[i] * by * weight_[i]);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (i * kAppendThreads + threadIdx.x < half) pairs_[i] = pairs_[i].turned(cosines_[i], sines_[i]);
    if (FORMAT != kBfloat16) find_scale(room, half);
    const long long page = slot_ < 0 ? 0 : slot_ / a_.page_size, offset = slot_ < 0 ? 0 : slot_ % a_.page_size;
    const long long to = page * a_.page_stride + offset * a_.token_stride;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = i * kAppendThreads + threadIdx.x;
      if (at < a_.latent) put(at, to, x_[i]);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = i * kAppendThreads + threadIdx.x;
      if (at < half) put(a_.latent + at, to, pairs_[i].low), put(a_.latent + half + at, to, pairs_[i].high);
    }
    if (FORMAT != kBfloat16 && slot_ >= 0 && threadIdx.x == 0) {
      float* const its = a_.scales + page * 2 * a_.page_size + offset;
      its[0] = zero_, its[a_.page_size] = is_sound_ ? scale_ : kNaN;
    }
  }

 private:
  template <class F>
  __device__ __forceinline__ static float over_block(float x, float* room, F&& join) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x = join(x, __shfl_xor_sync(~0u, x, o));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    x = room[0];
#pragma unroll
    for (int i = 1; i < kAppendThreads / 32; ++i) x = join(x, room[i]);
    __syncthreads();
    return x;
  }

  __device__ __forceinline__ void find_scale(float* room, int half) {
    float least = kInf, most = -kInf, odd = 0;
    const auto see = [&](float x) {
      least = fminf(least, x), most = fmaxf(most, x);
      odd = fmaf(x, 0.0f, odd);  // NaN from the first on that is not finite
    };
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (i * kAppendThreads + threadIdx.x < a_.latent) see(x_[i]);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      if (i * kAppendThreads + threadIdx.x < half) see(pairs_[i].low), see(pairs_[i].high);
    least = over_block(least, room, [](float a, float b) { return fminf(a, b); });
    most = over_block(odd == 0 ? most : kInf, room, [](float a, float b) { return fmaxf(a, b); });
    if (FORMAT == kInt8) {
      scale_ = fmaxf((most - least) / 255.0f, 1e-5f);
      zero_ = rintf(-128.0f - least / scale_);
      is_sound_ = most - least < kInf && fabsf(zero_) < kInf;
    } else {
      const float top = fmaxf(most, -least);
      scale_ = fmaxf(top / 448.0f, 1e-5f);
      is_sound_ = top < kInf;
    }
    if (!is_sound_) zero_ = 0;
    inverse_ = 1.0f / scale_;
  }

  __device__ __forceinline__ void put(int at, long long to, float x) {
    own_[at] = narrow(x);
    if (slot_ < 0) return;
    if (FORMAT == kBfloat16) {
      static_cast<bf16*>(a_.cache)[to + at] = narrow(x);
    } else {
      const float n = is_sound_ ? quotient(x, scale_, inverse_) : 0;
      static_cast<unsigned char*>(a_.cache)[to + at] = static_cast<unsigned char>(
          FORMAT == kInt8 ? __float2int_rn(is_sound_ ? fminf(fmaxf(n + zero_, -128.0f), 127.0f) : 0) & 0xff
                          : pack_e4m3(n, 0) & 0xff);
    }
  }

  const Append& a_;
  bf16* own_;
  const float* angles_;
  int slot_;
  float weight_[kEach], x_[kEach], cosines_[kPairs], sines_[kPairs];
  Pair pairs_[kPairs];
  float zero_ = 0, scale_ = 1, inverse_ = 1;
  bool is_sound_ = true;
};
#endif
