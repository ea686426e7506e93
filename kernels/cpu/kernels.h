// What an instruction set offers to ops.cpp: kernels on raw pointers, each for a part of an op that one thread does.
// What a kernel writes for a row depends on that row alone, bit for bit, however the rows are cut into parts.
#pragma once

#include <cstdint>

namespace allspan {

enum class Type { kFloat32, kBfloat16, kInt8, kUint4, kFloat8 };  // those from kInt8 on for KV only

// Two elements of kUint4, the first in the low half.
struct Nibbles {
  uint8_t pair;
};

// An element of kFloat8: e4m3 (float8_e4m3fn), of which NaN is not used.
struct Float8 {
  uint8_t code;
};

struct LinearArgs {
  const float* x;      // [n, k]
  const void* weight;  // [columns, k], of `type`
  const float* bias;   // [columns] or null
  float* out;          // [n, columns]
  int64_t columns, k;
  Type type;
  int64_t x_stride, out_stride;  // floats from row to row: k and columns, or more
};

struct CacheArgs {
  void *k, *v;  // [pages, kv_heads, page_size, dim], of `type`; kUint4 rounds each token up to whole bytes; v may be
                // null to append_kv
  float *k_scales, *v_scales;  // [pages, kv_heads, 2, page_size]: zeros, then scales; null for plain floats
  int64_t pages, kv_heads, page_size, dim;
  Type type;
  int64_t value_dim;  // attention takes so many elements of each row of v: dim, or of latents, where v is k, fewer
};

struct AttentionArgs {
  const float* q;    // [n, heads, dim], tokens q_stride floats apart
  int64_t q_stride;  // heads * dim, or more where q is the front of a wider buffer
  float* out;        // [n, heads, cache.value_dim]
  CacheArgs cache;
  int64_t heads;
  float scale;
  int64_t window;       // tokens that a query sees, its own included; 0: all
  float soft_cap;       // logits are cap · tanh(scale · q · k / cap); 0: not capped
  const float* slopes;  // [heads]: added to logits, times how far the key is ahead of the query; or null
  const float* sinks;   // [heads]: logits of the softmax's denominator alone; or null
};

// Some queries of one request, with all heads that read one KV head; some splits of the tokens that they see.
struct AttentionTile {
  const int32_t* pages;  // of the request
  const int32_t* heads;  // query heads
  int64_t head_count;
  int64_t kv_head;
  int64_t first_query;  // row of q
  int64_t query_count;
  int64_t first_visible;  // tokens up to the first query's own; every later query has one more
  int64_t begin;          // the first token that any of the queries sees: 0 without a window
  int64_t first_split, last_split;
  float* partial;  // null: these are all splits, and out is written. Else states go here, state_floats() apart: splits
                   // from that of `begin` on are merged into one, later ones stay apart
};

enum class Epilogue {
  kStore,         // out = product
  kAdd,           // out += product
  kGatedSilu,     // out = silu(first part) · second part, which are interleaved
  kGatedGelu,     // out = gelu(first part) · second part, by tanh
  kGatedClamped,  // clamped_swiglu of kernels/ops.py
};

constexpr bool is_gated(Epilogue epilogue) { return epilogue >= Epilogue::kGatedSilu; }

// A tile of a product's sums, and where they go.
struct TileArgs {
  Epilogue epilogue;
  const float* sums;  // [rows, width], rows sums_stride apart; gated: 16 of the first part, 16 of the second, in turn
  int64_t sums_stride;
  const float *bias, *second_bias;  // [width] or null; of the first and the second part
  float* out;                       // [rows, width], rows out_stride apart
  int64_t out_stride, rows, width;
};

constexpr int64_t kBlockTokens = 64;   // of KV: the softmax is folded in once a block, counted from the first token
constexpr int64_t kSplitTokens = 256;  // of KV: sums begin afresh; a multiple of kBlockTokens
constexpr int64_t kStateLanes = 16;

constexpr int64_t kAdapterColumns = 64;  // of a panel of an adapter's second matrix

// Some rows, all of one adapter, and one panel.
struct AdapterTile {
  const float* x;  // [.., x_stride]
  int64_t x_stride;
  const void* panel;  // [R, kAdapterColumns], of `type`
  Type type;          // kFloat32 or kBfloat16
  int64_t rank;       // of R
  float* out;         // [.., out_stride]
  int64_t out_stride;
  int64_t columns;      // of the panel
  const int32_t* rows;  // of x and out
  int64_t count;
};

constexpr int64_t kAdapterPanels = 4;     // most of an AdapterSums
constexpr int64_t kAdapterFeatures = 16;  // of one of them

// Some neighbouring rows of one adapter, and neighbouring panels of a product's sums.
struct AdapterSums {
  Type type;           // kFloat32 or kBfloat16
  int64_t rows, rank;  // the rank is the same for all panels
  int64_t panels;
  const float* x[kAdapterPanels];  // of the first row, for each panel: what the columns of its part are made of
  int64_t x_stride;
  const void* weights[kAdapterPanels];  // [rank, kAdapterColumns], from the panel's first column on
  float* sums;                          // [rows, panels · kAdapterFeatures], rows `stride` apart
  int64_t stride;
};

struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs& args, int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end);
  // scratch: attention_scratch_floats(rows, dim), aligned to 64 bytes.
  void (*attention)(const AttentionArgs& args, const AttentionTile& tile, float* scratch);
  // Writes out for one (query, head) row of a tile, from `states` states at tile.partial.
  void (*merge_attention)(const AttentionArgs& args, const AttentionTile& tile, int64_t states, int64_t row);
  void (*append_kv)(const CacheArgs& cache, const float* k, const float* v, const int32_t* slots, int64_t count);
  void (*embedding)(const int32_t* ids, const void* weight, Type type, int64_t first_row, int64_t rows, int64_t width,
                    float* out, int64_t count);
  // residual (may be null): residual += x first, and its norm is taken.
  void (*rms_norm)(const float* x, float* residual, const float* weight, float eps, float* out, int64_t rows,
                   int64_t width);
  void (*layer_norm)(const float* x, const float* weight, float eps, float* out, int64_t rows, int64_t width);
  void (*add)(const float* x, float* residual, int64_t count);
  // out[i] = the sum of parts[…][i], neighbours first: ((a + b) + (c + d)) + e; `out` may be one of them. One: a copy.
  void (*add_parts)(const float* const* parts, int64_t count, float* out, int64_t n);
  void (*rotary)(float* x, int64_t heads, int64_t dim, const int32_t* positions, const float* cos_sin, int64_t rot,
                 int64_t rows);
  // center [heads, dim] or null.
  void (*hadamard)(float* x, int64_t heads, int64_t dim, const float* center, int64_t rows);
  // activation: one of those that are gated.
  void (*gated_mul)(const float* gate_up, Epilogue activation, float* out, int64_t rows, int64_t width);
  void (*soft_cap)(float* x, float cap, int64_t count);
  void (*finish)(const TileArgs& tile);
  // out[row] += x[row] · panel, the sum over the rank in its order.
  void (*add_adapter)(const AdapterTile& tile);
  // The same for sums of a layer's product, all columns of their panels: those that the layer has not are nobody's.
  void (*add_adapter_sums)(const AdapterSums& sums);
};

// What attention keeps of a (query, head) row: sums of its values, and per lane two sums of weights; the highest score.
constexpr int64_t state_width(int64_t dim) { return (dim + 15) / 16 * 16; }
constexpr int64_t state_floats(int64_t rows, int64_t dim) {
  return (rows * (state_width(dim) + 2 * kStateLanes + 1) + 15) / 16 * 16;
}
constexpr int64_t kMostPanel = 64;  // columns of the values of a block, which are laid out in panels of them

// Queries and two states of every row; keys, values, zeros and scales of a block; scores and weights of 16 rows.
constexpr int64_t attention_scratch_floats(int64_t rows, int64_t dim) {
  const int64_t values = (dim + kMostPanel - 1) / kMostPanel * kMostPanel;
  return rows * (state_width(dim) + 1) + 16 + 2 * state_floats(rows, dim) +
         kBlockTokens * (state_width(dim) + values + 4 + 2 * 16);
}

extern const Kernels kGeneric;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#elif defined(__aarch64__)
extern const Kernels kNeon;
extern const Kernels kSve256;
extern const Kernels kSve512;
#endif

}  // namespace allspan
