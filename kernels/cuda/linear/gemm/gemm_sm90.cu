// Products of many rows of x with a weight, and what becomes of them, for sm_90a: out = x · weightᵀ (· scales of rows
// and features + bias), stored as 16-bit elements, added to float32, or activation(first half) · second half.
//
// A persistent block makes tiles of 128 rows by 256 features: one thread asks for tiles of x and weight ahead, a ring
// of them; two warpgroups with 64 rows each multiply. What they have goes out through a little shared memory of each
// warp, while the ring fills for the next tile; one of them begins two stages earlier, so that each has the tensor
// cores while the other is at its outputs. Of a gated product, a tile has 128 features of each half. Bound by the
// tensor cores, or what power they may draw.
//
// Compiled with E4M3 (elements of x and weight; else of 16 bits) and EPILOGUE (decode.cuh; 0: stored). ADAPTED: with
// what low-rank adapters add to a gated product of 16-bit elements, see of_tiles.cuh.
#include "linear/decode.cuh"
#include "ptx/ptx_sm90.cuh"
#ifndef ADAPTED
#define ADAPTED 0
#endif
#if ADAPTED
#include "adapters/of_tiles.cuh"
#endif

#ifndef E4M3
#define E4M3 0
#endif
#ifndef EPILOGUE
#define EPILOGUE 0
#endif
constexpr int kRows = 128, kFeatures = 256, kStages = 4, kLead = 2, kGroup = 128, kThreads = 3 * kGroup;
constexpr int kTile = 128 * 128;                                    // bytes: 128 rows of 128, swizzled
constexpr int kStage = (kRows + kFeatures) / 128 * kTile;           // of x, then of the weight
constexpr int kAcross = EPILOGUE >= kGatedSilu ? 128 : 256;         // outputs of a tile
constexpr int kColumns = EPILOGUE == kAdd ? 32 : 64;                // outputs in 128 bytes
constexpr int kPiece = 16 * 128;                                    // bytes that a warp stores at once: its 16 rows
constexpr int kPieces = kAcross / kColumns, kTiles = kColumns / 8;  // and tiles of 8 features in a piece

// What the tensor cores read, but for its address: rows of 128 bytes along k, swizzled; eight take 1,024 bytes.
constexpr uint64_t kAlong = static_cast<uint64_t>(1) << 62 | static_cast<uint64_t>(1024 >> 4) << 32 | 1 << 16;
__device__ __forceinline__ uint64_t matrix(uint32_t at) { return kAlong | (at & 0x3ffff) >> 4; }

__device__ __forceinline__ float activated(float x, float up) {
  limit(x, up, EPILOGUE);
  return __fdividef(x, 1.0f + power(logit_of(x, EPILOGUE) * -1.4426950408889634f)) * up;
}

struct Shared {
  uint32_t stages, pieces, full, empty, columns_full, columns_empty;  // barriers, of stages one each
  char* pieces_at;
  float2* columns;  // scales and biases of the features of a tile

  __device__ explicit Shared(char* all) {
    char* const begin = all + (1024 - smem(all) % 1024) % 1024;
    char* const end = begin + kStages * kStage + 8 * 2 * kPiece;
    stages = smem(begin), pieces_at = begin + kStages * kStage, pieces = stages + kStages * kStage;
    columns = reinterpret_cast<float2*>(end);
    full = smem(end) + kFeatures * 8, empty = full + kStages * 8, columns_full = empty + kStages * 8;
    columns_empty = columns_full + 8;
  }
};

struct Ring {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

// The order of tiles: `band` tiles of rows meet all features before the next ones do, so that what a wave of blocks
// reads is about as much of x as of the weight.
struct Tiles {
  int row_tiles, feature_tiles, band;

  __device__ __forceinline__ int count() const { return row_tiles * feature_tiles; }
  __device__ __forceinline__ void find(int tile, int& row_tile, int& feature_tile) const {
    const int first = tile / (band * feature_tiles) * band, in_band = min(band, row_tiles - first);
    const int rest = tile - first * feature_tiles;
    row_tile = first + rest % in_band, feature_tile = rest / in_band;
  }
};

// row_scales [rows] and qparams [features][scale, offset] of e4m3; bias [features] or null. `outputs`: features, or
// half of them. `steps` of 128 bytes along the inputs.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
              const __grid_constant__ TensorMap out, const float* row_scales, const float2* qparams, const float* bias,
              int rows, int features, int outputs, int steps, int band
#if ADAPTED
              ,
              const __grid_constant__ TensorMap panels, const OfTiles adapters
#endif
    ) {
  DYNAMIC_SHARED(memory);
  const Shared shared(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared.full + i * 8, 1);
      barrier_init(shared.empty + i * 8, 8);  // warps that multiply
    }
    barrier_init(shared.columns_full, 32);
    barrier_init(shared.columns_empty, 8);
    fence_shared();  // copies count at them
  }
  __syncthreads();
  wait_for_ahead();
  let_next_begin();
  const Tiles tiles = {(rows + kRows - 1) / kRows, (outputs + kAcross - 1) / kAcross, band};
  const int second = EPILOGUE >= kGatedSilu ? outputs : 128;  // features from one half of a tile's to the other
  const bool has_columns = E4M3 || bias;

  if (threadIdx.x < kGroup) {
    give_registers<40>();
    if (ADAPTED ? threadIdx.x < 32 : threadIdx.x == 0) {
      Ring ring;
      for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x) {
        int row_tile, feature_tile;
        tiles.find(tile, row_tile, feature_tile);
        const int row = row_tile * kRows, feature = feature_tile * kAcross;
        for (int step = 0; step < steps && (!ADAPTED || threadIdx.x == 0); ++step) {
          const uint32_t to = shared.stages + ring.slot * kStage, full = shared.full + ring.slot * 8;
          const int element = step * (E4M3 ? 128 : 64);
          barrier_wait(shared.empty + ring.slot * 8, ring.parity ^ 1);
          barrier_arrive_for(full, kStage);
          copy_tile(to, x, element, row, full);
          copy_tile(to + kTile, weight, element, feature, full);
          copy_tile(to + 2 * kTile, weight, element, feature + second, full);
          // What is there comes to the L2 cache before the tile is added to it.
          if (EPILOGUE == kAdd)
            for (int i = step * 4; i < min(step * 4 + 4, 8 * kPieces); ++i)
              fetch_tile(out, feature + i / 8 * kColumns, row + i % 8 * 16);
          ring.next();
        }
#if ADAPTED
        __syncwarp();
        const uint64_t present = adapters.present(row, rows);
        for (int step = 0; step < adapters.steps() && threadIdx.x == 0; ++step)
          for (uint64_t left = present; left; left &= left - 1) {
            const int first = (__ffsll(left) - 1) * adapters.panels_of_place + feature_tile * 2;
            const int none = adapters.places * adapters.panels_of_place;  // behind the last one: zeros
            const uint32_t to = shared.stages + ring.slot * kStage, full = shared.full + ring.slot * 8;
            barrier_wait(shared.empty + ring.slot * 8, ring.parity ^ 1);
            barrier_arrive_for(full, 2 * OfTiles::kHalf);
            for (int i = 0; i < 8; ++i) {
              const int half = i / 4, its = first + i % 2 + half * (adapters.panels_of_place / 2);
              const bool is_its = i / 2 % 2 == half;
              copy_tile(to + i * OfTiles::kPanel, panels, 0, step * 16, is_its ? its : none, full);
            }
            ring.next();
          }
#endif
      }
    } else if (threadIdx.x / 32 == 1 && has_columns) {
      uint32_t parity = 1;
      for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x, parity ^= 1) {
        int row_tile, feature_tile;
        tiles.find(tile, row_tile, feature_tile);
        float2 found[kFeatures / 32];
#pragma unroll
        for (int i = 0; i < kFeatures / 32; ++i) {
          const int column = threadIdx.x % 32 + i * 32;
          const int feature = feature_tile * kAcross + column % 128 + column / 128 * second;
          const bool is_there = feature < features;
          found[i] = make_float2(E4M3 && is_there ? qparams[feature].x : 1.0f, bias && is_there ? bias[feature] : 0.0f);
        }
        barrier_wait(shared.columns_empty, parity);
#pragma unroll
        for (int i = 0; i < kFeatures / 32; ++i) shared.columns[threadIdx.x % 32 + i * 32] = found[i];
        barrier_arrive(shared.columns_full);
      }
    }
  } else {
    take_registers<232>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - 4, side = warp / 4, lane = threadIdx.x % 32;
    const uint64_t a = matrix(shared.stages + side * kTile / 2), b = matrix(shared.stages + kTile);
    const int piece_at = warp * 2 * kPiece;
    Ring ring;
    uint32_t parity = 0;
    float d[kFeatures / 2];
    const auto release = [&](int slot) {
      if (lane == 0) barrier_arrive(shared.empty + slot * 8);
    };
    if (side == 1 && steps > kLead) barrier_wait(shared.full + kLead * 8, 0);
    for (int tile = blockIdx.x; tile < tiles.count(); tile += gridDim.x, parity ^= 1) {
      int row_tile, feature_tile;
      tiles.find(tile, row_tile, feature_tile);
      const int row0 = row_tile * kRows + warp * 16;
      float scale_of[2] = {1, 1};
      if (E4M3)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + lane / 4 + h * 8;
          scale_of[h] = row < rows ? row_scales[row] : 0;
        }

      int last = 0;
#if ADAPTED
      const uint64_t present = adapters.present(row_tile * kRows, rows);
      LowFragments low;
      low.find_places(adapters, row0, rows);
      low.load(adapters, 0, row0, rows);
      uint64_t left = present;
      int ranks = 0;  // of 16
      // In the same loop: the compiler has products wait for each other where sums go from one to the next.
      const int all_steps = steps + __popcll(present) * adapters.steps();
#else
      const int all_steps = steps;
#endif
      for (int step = 0; step < all_steps; ++step) {
        barrier_wait(shared.full + ring.slot * 8, ring.parity);
        const uint32_t ahead = ring.slot * (kStage >> 4);
#if ADAPTED
        if (step >= steps) {
          if (!left) left = present, low.load(adapters, ++ranks, row0, rows);
          const uint64_t at = (shared.stages + ring.slot * kStage) & 0x3ffff;
          low.multiply_panels(d, __ffsll(left) - 1, OfTiles::kAcross | at >> 4);
          left &= left - 1;
        } else
#endif
        {
          begin_products();
#pragma unroll
          for (int part = 0; part < 4; ++part) {
            if (E4M3)
              multiply_tiles_e4m3(d, a + ahead + part * 2, b + ahead + part * 2, step + part > 0);
            else
              multiply_tiles(d, a + ahead + part * 2, b + ahead + part * 2, step + part > 0);
          }
          end_products();
        }
        wait_products<1>();
        if (step > 0) release(last);
        last = ring.slot;
        ring.next();
      }
      wait_products<0>();
      release(last);
      settle(d);

      if (has_columns) {
        barrier_wait(shared.columns_full, parity);
#pragma unroll
        for (int n = 0; n < kFeatures / 8; ++n) {
          const float4 two = *reinterpret_cast<const float4*>(shared.columns + n * 8 + lane % 4 * 2);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float* const sums = d + n * 4 + h * 2;
            sums[0] = sums[0] * (scale_of[h] * two.x) + two.y, sums[1] = sums[1] * (scale_of[h] * two.z) + two.w;
          }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.columns_empty);
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const int begin = piece_at + piece % 2 * kPiece;
        char* const row_at = shared.pieces_at + begin + lane / 4 * 128;
        if (lane == 0) wait_tiles<1>();  // the last but one had this memory
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* const sums = d + (piece * kTiles + i) * 4 + h * 2;
            if (EPILOGUE == kAdd) {
              const int to = h * 1024 + ((i * 2 + lane % 4 / 2 ^ lane / 4) << 4) + lane % 2 * 8;
              *reinterpret_cast<float2*>(row_at + to) = make_float2(sums[0], sums[1]);
              continue;
            }
            float value[2];
#pragma unroll
            for (int e = 0; e < 2; ++e)
              value[e] = EPILOGUE >= kGatedSilu ? activated(sums[e], sums[kFeatures / 4 + e]) : sums[e];
            const int to = h * 1024 + ((i ^ lane / 4) << 4) + lane % 4 * 4;
            *reinterpret_cast<uint32_t*>(row_at + to) = pack(value[0], value[1]);
          }
        fence_shared();
        __syncwarp();
        const int output = feature_tile * kAcross + piece * kColumns;
        if (lane == 0) {
          const bool is_there = output < outputs && row0 < rows;
          if (EPILOGUE == kAdd && is_there) add_tile(out, output, row0, shared.pieces + begin);
          if (EPILOGUE != kAdd && is_there) store_tile(out, output, row0, shared.pieces + begin);
          end_tiles();
        }
      }
    }
    if (lane == 0) wait_tiles<0>();
  }
}
