// The shape of a block of skinny.cu: its macros, and where things lie in shared memory.
#pragma once
#include "linear/decode.cuh"

#ifndef GROUP_SETS
#define GROUP_SETS 0
#endif
#ifndef TILES
#define TILES 1
#endif
#ifndef PARTS
#define PARTS 2
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef WHOLE
#define WHOLE 0
#endif
constexpr int kThreads = WARPS * 32, kStages = STAGES;
constexpr bool kGrouped = GROUP_SETS > 0, kHasSums = BITS < 16 && !FLOATS, kIsResident = RESIDENT, kIsWhole = WHOLE;
constexpr int kGroupSets = kGrouped ? GROUP_SETS : kSets;
constexpr int kGroups = kSets / kGroupSets;  // that a k tile has a part of
constexpr int kScaleSets = kHasBytes ? 1 : kGroupSets;
constexpr int kCodeBytes = PARTS * 2 * 512, kXBytes = kIsResident ? 0 : kSets * TILES * 512;
constexpr int kQparams = kGrouped ? kGroups * PARTS * 16 : 0, kQparamCopies = (kQparams + 31) / 32;
constexpr int kStageBytes = kCodeBytes + kXBytes + kQparams * 4;
constexpr int kTileRows = kIsWhole ? 4 : 8, kRows = TILES * kTileRows;
constexpr float kLack = kIsWhole ? (BITS == 4 ? 0 : -128) : kBase;  // what is multiplied, less the code
constexpr float kTimes = kIsWhole ? 1 : kUnit;
static_assert(!kIsWhole || (kHasSums && kIsResident));
constexpr int kPitch = PARTS * 16 + 4;  // floats of a row of sums: a warp's stores meet no bank twice

// Byte of the qparams of feature at % 16 of part at / 16: those that a lane needs lie together.
__device__ __forceinline__ int place_of_pair(int at) {
  return (at / (PARTS * 16) * (PARTS * 16) + at % 8 * (PARTS * 2) + at / 16 % PARTS * 2 + at / 8 % 2) * 4;
}
__device__ __forceinline__ int pairs_at(int group, int g) {
  return kCodeBytes + kXBytes + (group * 16 + g * 2) * PARTS * 4;
}
struct alignas(PARTS == 2 ? 16 : 8) Pairs {
  uint32_t of[PARTS][2];
};
