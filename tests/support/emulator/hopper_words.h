// The functions of kernels/cuda/ptx/ptx_sm90.cuh, for emulator.h. Matrices are found in shared memory as the PTX manual
// defines it, so that a wrong descriptor reads something else. Sums are NaN until they are waited for, and what a
// product reads must still be there then.
#pragma once

#include "ptx_words.h"

#define ALLSPAN_PTX_SM90

struct PhaseBarrier {
  uint16_t count, missing : 14, phase : 1, is_unfenced : 1;  // the last: tells of copies that need a fence still
  int bytes : 24, magic : 8;                                 // bytes: of tiles that have not come
};
static_assert(sizeof(PhaseBarrier) == 8);
inline PhaseBarrier& phase_barrier(uint32_t at, bool must_be = true) {
  if (at % 8) emulator::fail("a barrier is not aligned");
  auto& barrier = *reinterpret_cast<PhaseBarrier*>(emulator::block.base + at);
  if (must_be && barrier.magic != 0x5a) emulator::fail("there is no barrier where one is used");
  return barrier;
}
inline void barrier_init(uint32_t at, int count) {
  const auto many = static_cast<uint16_t>(count);
  phase_barrier(at, false) = {many, many, 0, 0, 0, 0x5a};
}
inline void barrier_count(uint32_t at, bool is_unfenced, int arrivals = 1, int bytes = 0) {
  PhaseBarrier& barrier = phase_barrier(at);
  barrier.is_unfenced |= is_unfenced;
  barrier.missing -= arrivals, barrier.bytes += bytes;
  if (barrier.missing == 0 && barrier.bytes == 0) barrier.missing = barrier.count, barrier.phase ^= 1;
  emulator::block.moved = true;
}
inline void barrier_arrive(uint32_t at) {
  barrier_count(at, emulator::me->is_unfenced);
  emulator::yield();  // those that waited may be faster than what this thread does next
}
inline void barrier_arrive_with_copies(uint32_t at) {
  commit();
  auto& groups = emulator::me->groups;
  emulator::block.later.push_back([at, came = std::move(groups)] {
    for (const auto& group : came)
      for (const auto& copy : group) emulator::land(copy);
    barrier_count(at, true);
  });
  groups.clear();
}
inline void barrier_wait(uint32_t at, uint32_t parity) {
  do {
    emulator::yield();
  } while (phase_barrier(at).phase == parity);
  emulator::me->is_unfenced |= phase_barrier(at).is_unfenced;
  emulator::block.moved = true;
}

inline void barrier_arrive_for(uint32_t at, int bytes) { barrier_count(at, emulator::me->is_unfenced, 1, bytes); }

struct alignas(64) TensorMap {
  char* base;
  uint64_t row_bytes;
  uint32_t elements, rows;            // of the matrix
  uint32_t tile_elements, tile_rows;  // of a tile
  uint32_t element_bytes, is_made;    // 0x5a5a
  uint64_t place_bytes;
  uint32_t places;
  char rest[128 - 3 * 8 - 7 * 4];
};
static_assert(sizeof(TensorMap) == 128);
// Of each 4 bytes of a tile: where they are in shared memory and in the matrix, or null where it has none.
template <class Visit>
void visit_tile(const TensorMap& map, int element, int row, int place, uint32_t at, Visit&& visit) {
  if (map.is_made != 0x5a5a) emulator::fail("a parameter is no tensor map");
  if (map.tile_elements * map.element_bytes != 128 || at % 1024)
    emulator::fail("a tile is not aligned or not 128 wide");
  for (uint32_t r = 0; r < map.tile_rows; ++r)
    for (uint32_t byte = 0; byte < 128; byte += 4) {
      const long long x = element + static_cast<long long>(byte / map.element_bytes),
                      y = row + static_cast<long long>(r);
      uint32_t to = at + r * 128 + byte;
      to ^= to >> 3 & 112;
      const bool is_there = x >= 0 && x < map.elements && y >= 0 && y < map.rows && place >= 0 &&
                            static_cast<uint32_t>(place) < map.places;
      const int bytes = is_there ? static_cast<int>(std::min<long long>(4, (map.elements - x) * map.element_bytes)) : 0;
      visit(emulator::block.base + to,
            is_there ? map.base + place * map.place_bytes + y * map.row_bytes + x * map.element_bytes : nullptr, bytes);
    }
}
inline void copy_tile(uint32_t to, const TensorMap& map, int element, int row, int place, uint32_t barrier) {
  emulator::block.later.push_back([=] {
    visit_tile(map, element, row, place, to, [](char* into, const char* from, int bytes) {
      std::memset(into, 0, 4);
      if (from) std::memcpy(into, from, bytes);
    });
    barrier_count(barrier, false, 0, -static_cast<int>(map.tile_rows) * 128);
  });
}
inline void copy_tile(uint32_t to, const TensorMap& map, int element, int row, uint32_t barrier) {
  copy_tile(to, map, element, row, 0, barrier);
}
inline void fetch_map(const TensorMap&) {}
inline void fetch_tile(const TensorMap&, int, int) {}
template <class Put>
void send_tile(const TensorMap& map, int element, int row, uint32_t from, Put&& put) {
  if (emulator::me->is_unfenced) emulator::fail("a tile is stored that has no fence behind it");
  auto count = emulator::me->tiles.back();
  ++*count;
  emulator::block.later.push_back([=] {
    visit_tile(map, element, row, 0, from, [&](const char* there, char* to, int bytes) {
      if (to) put(to, there, bytes);
    });
    --*count;
    emulator::block.moved = true;
  });
}
inline void store_tile(const TensorMap& map, int element, int row, uint32_t from) {
  send_tile(map, element, row, from, [](char* to, const char* there, int bytes) { std::memcpy(to, there, bytes); });
}
inline void add_tile(const TensorMap& map, int element, int row, uint32_t from) {
  send_tile(map, element, row, from, [](char* to, const char* there, int) {
    float sum, more;
    std::memcpy(&sum, to, 4), std::memcpy(&more, there, 4);
    sum += more;
    std::memcpy(to, &sum, 4);
  });
}
inline void end_tiles() { emulator::me->tiles.push_back(std::make_shared<int>(0)); }
template <int N>
void wait_tiles() {
  auto& batches = emulator::me->tiles;
  while (batches.size() > N + 1) {
    while (*batches.front() > 0) emulator::yield();
    batches.erase(batches.begin());
  }
  emulator::block.moved = true;
}

inline void turn_come(int id, int threads, bool waits) {
  if (id < 1 || id > 15 || threads % 32) emulator::fail("no such barrier");
  emulator::Barrier& barrier = emulator::block.turns[id];
  if (waits) {
    const int wanted = threads;
    emulator::wait(barrier, wanted);
  } else if (++barrier.waiting >= threads) {
    barrier.waiting = 0, ++barrier.turn;
  }
  emulator::block.moved = true;
}
inline void turn_wait(int id, int threads) { turn_come(id, threads, true); }
inline void turn_arrive(int id, int threads) { turn_come(id, threads, false); }

inline void fence_shared() { emulator::me->is_unfenced = false; }
template <int N>
void take_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
}
template <int N>
void give_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256);
}

// Byte in shared memory of an element: `i` counts rows of a or columns of b, `k` goes along the product's sums. A
// matrix is made of blocks of 8 rows of `width` bytes (16 without a swizzle); rows of a block follow i, or k where
// `is_across`.
inline uint32_t matrix_byte(uint64_t matrix, int i, int k, bool is_across) {
  static constexpr uint32_t kWidths[] = {16, 128, 64, 32};
  const uint32_t width = kWidths[matrix >> 62], start = (matrix & 0x3fff) << 4;
  const uint32_t leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
  if (matrix >> 49 & 7) emulator::fail("matrices with a base offset are not emulated");
  uint32_t at = start;
  if (is_across && width > 16)
    at += i / (width / 2) * leading + i % (width / 2) * 2 + k / 8 * stride + k % 8 * width;
  else if (is_across)
    at += i / 8 * stride + i % 8 * 2 + k / 8 * leading + k % 8 * width;
  else if (width > 16)
    at += i / 8 * stride + i % 8 * width + k * 2;
  else
    at += i / 8 * stride + i % 8 * width + k / 8 * leading + k % 8 * 2;
  at ^= at >> 3 & (width - 16);
  if (at + 2 > emulator::block.shared.size()) emulator::fail("a matrix lies outside of shared memory");
  return at;
}
// Elements [16][count] along k, of those from `first` on.
inline std::vector<uint16_t> matrix_elements(uint64_t matrix, int first, int count, bool is_across) {
  std::vector<uint16_t> all(16 * count);
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < count; ++i)
      std::memcpy(&all[k * count + i], emulator::block.base + matrix_byte(matrix, first + i, k, is_across), 2);
  return all;
}

struct Factors {
  uint32_t a[4];
  uint64_t a_matrix, b_matrix;
};

inline float e4m3_wide(uint32_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const float size = std::ldexp(static_cast<float>(exponent ? 8 + fraction : fraction), (exponent ? exponent : 1) - 10);
  return bits & 128 ? -size : size;
}
// Of two times 16 bits: an element each, or two of e4m3.
template <bool kIsE4m3>
float dot(uint32_t x, uint32_t y) {
  if (!kIsE4m3) return wide(x) * wide(y);
  static const auto all = [] {
    std::array<float, 256> values;
    for (int i = 0; i < 256; ++i) values[i] = e4m3_wide(i);
    return values;
  }();
  return all[x & 255] * all[y & 255] + all[x >> 8] * all[y >> 8];
}

// One m64n(2 kSums)k16 product, or k32 of e4m3; a is `registers`, or, without any, a_matrix.
template <bool kIsE4m3 = false, int kSums>
void start_product(float (&sums)[kSums], const uint32_t* registers, uint64_t a_matrix, uint64_t b_matrix,
                   bool is_b_across, bool adds, bool is_a_across = false) {
  constexpr int kColumns = 2 * kSums;
  emulator::Thread& me = *emulator::me;
  if (me.is_unfenced) emulator::fail("a product reads what came by copies, without a fence between them");
  const int lane = me.lane, row0 = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  auto& b = me.warp->operands[me.products++ % 2];
  if (lane == 0) b = matrix_elements(b_matrix, 0, kColumns, is_b_across);
  Factors mine{{}, a_matrix, b_matrix};
  if (registers) std::memcpy(mine.a, registers, sizeof mine.a);
  const Factors* all = emulator::exchange(mine, 30 + kSums);
  if (emulator::of_lane(all, 0).b_matrix != b_matrix || emulator::of_lane(all, 0).a_matrix != a_matrix)
    emulator::fail("lanes of a warp multiply different matrices");

  std::vector<uint16_t> a;
  if (!registers) a = matrix_elements(a_matrix, row0, 16, is_a_across);
  std::vector<float> added(kSums);
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    for (int k = 0; k < 16; ++k) {
      const uint32_t word = emulator::of_lane(all, row % 8 * 4 + k % 8 / 2).a[h + k / 8 * 2];
      const uint32_t x = registers ? word >> k % 2 * 16 & 0xffff : a[k * 16 + row];
      for (int n = 0; n < kSums / 4; ++n)
        for (int e = 0; e < 2; ++e)
          added[n * 4 + h * 2 + e] += dot<kIsE4m3>(x, b[k * kColumns + n * 8 + lane % 4 * 2 + e]);
    }
  }
  const std::vector<uint32_t> held(mine.a, mine.a + 4);
  const auto is_unchanged = [=, before = lane == 0 ? b : std::vector<uint16_t>()] {
    if (registers && !std::equal(held.begin(), held.end(), registers)) return false;
    if (lane != 0) return true;  // one lane looks for all
    return (registers || a == matrix_elements(a_matrix, row0, 16, is_a_across)) &&
           before == matrix_elements(b_matrix, 0, kColumns, is_b_across);
  };
  auto [place, is_first] = me.sums.try_emplace(sums, sums, sums + kSums);
  std::fill(sums, sums + kSums, __int_as_float(0x7fc00000));
  me.started.push_back({sums, [=, &real = place->second] {
                          if (!is_unchanged())
                            emulator::fail("what a product reads changed before the product was waited for");
                          for (int i = 0; i < kSums; ++i) real[i] = (adds ? real[i] : 0) + added[i];
                        }});
}
template <int kSums>
void multiply_keys(float (&d)[kSums], uint64_t a, uint64_t b, bool adds) {
  start_product(d, nullptr, a, b, false, adds);
}
template <int kSums>
void multiply_columns(float (&d)[kSums], uint64_t a, uint64_t b, bool adds) {
  start_product(d, nullptr, a, b, false, adds, true);
}
template <int kSums>
void multiply_values(float (&d)[kSums], const uint32_t* a, uint64_t b) {
  start_product(d, a, 0, b, true, true);
}
inline void multiply_values(float (&d)[128], uint64_t a, uint64_t b) { start_product(d, nullptr, a, b, true, true); }
inline void multiply_tiles(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
  start_product(d, nullptr, a, b, false, adds);
}
inline void multiply_tiles_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool adds) {
  start_product<true>(d, nullptr, a, b, false, adds);
}
inline void multiply_tiles_e4m3(float (&d)[128], uint64_t a, uint64_t b, bool adds) {
  start_product<true>(d, nullptr, a, b, false, adds);
}
template <int kSums>
void multiply_rows(float (&d)[kSums], const uint32_t* a, uint64_t b) {
  start_product(d, a, 0, b, false, true);
}

inline void begin_products() {}
inline void end_products() {
  emulator::me->batches.push_back(std::move(emulator::me->started));
  emulator::me->started.clear();
}
template <int N>
void wait_products() {
  emulator::exchange(0, 29);
  emulator::Thread& me = *emulator::me;
  while (me.batches.size() > N) {
    for (const auto& product : me.batches.front()) product.finish();
    me.batches.erase(me.batches.begin());
  }
  for (auto at = me.sums.begin(); at != me.sums.end();) {
    const auto& [sums, real] = *at;
    const auto has = [&, to = sums](const auto& batch) {
      return std::any_of(batch.begin(), batch.end(), [&](const auto& product) { return product.sums == to; });
    };
    if (has(me.started) || std::any_of(me.batches.begin(), me.batches.end(), has)) {
      ++at;
    } else {
      std::copy(real.begin(), real.end(), sums);
      at = me.sums.erase(at);
    }
  }
  emulator::exchange(0, 28);  // what one lane writes then, another must not find changed
}
inline void hold(float) {}
template <int N>
void settle(float (&)[N]) {}
