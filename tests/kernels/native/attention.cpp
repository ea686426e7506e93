#include <cmath>
#include <cstring>

#include "check.h"

using allspan::AttentionArgs;
using allspan::CacheArgs;
using allspan::Type;

namespace {

struct Request {
  int32_t queries, tokens;  // new ones, and all in the cache
};

struct Case {
  const char* name;
  int64_t dim, page_size;
  std::vector<Request> requests;
  std::vector<int32_t> kv_head_of;
};

// Pages that start as NaN where a NaN can be.
class Pages {
 public:
  Pages(Type type, int64_t pages, int64_t kv_heads, int64_t page_size, int64_t dim) : row_bytes_(bytes_of(type, dim)) {
    const int64_t tokens = pages * kv_heads * page_size;
    for (int side = 0; side < 2; ++side) {
      cache_[side].assign(tokens * row_bytes_, 0xff);
      scales_[side].assign(tokens * 2, std::nanf(""));
    }
    const bool quantised = type == Type::kInt8 || type == Type::kUint4;
    args = {cache_[0].data(),
            cache_[1].data(),
            quantised ? scales_[0].data() : nullptr,
            quantised ? scales_[1].data() : nullptr,
            pages,
            kv_heads,
            page_size,
            dim,
            type,
            dim};
  }
  Pages(const Pages&) = delete;

  // Element i of a token in a slot, of K (side 0) or V (side 1), as everybody must read it.
  double at(int side, int64_t slot, int64_t head, int64_t i) const {
    const int64_t block = slot / args.page_size * args.kv_heads + head, offset = slot % args.page_size;
    const uint8_t* row = cache_[side].data() + (block * args.page_size + offset) * row_bytes_;
    if (args.type == Type::kFloat32) {
      float x;
      std::memcpy(&x, row + i * 4, sizeof x);
      return x;
    }
    if (args.type == Type::kBfloat16) {
      uint16_t half;
      std::memcpy(&half, row + i * 2, sizeof half);
      return from_bfloat16(half);
    }
    const int number = args.type == Type::kInt8 ? static_cast<int8_t>(row[i]) : row[i / 2] >> i % 2 * 4 & 15;
    return (number - static_cast<double>(scale_of(side, block, 0, offset))) * scale_of(side, block, 1, offset);
  }
  // How far `at` may be from what was written.
  double step(int side, int64_t slot, int64_t head, double x) const {
    const int64_t block = slot / args.page_size * args.kv_heads + head;
    if (args.type == Type::kFloat32) return 0;
    if (args.type == Type::kBfloat16) return std::fabs(x) / 256;
    return 0.501 * scale_of(side, block, 1, slot % args.page_size);
  }

  CacheArgs args;

 private:
  static int64_t bytes_of(Type type, int64_t dim) {
    if (type == Type::kFloat32) return 4 * dim;
    if (type == Type::kBfloat16) return 2 * dim;
    return type == Type::kInt8 ? dim : (dim + 1) / 2;
  }
  float scale_of(int side, int64_t block, int which, int64_t offset) const {
    return scales_[side][(block * 2 + which) * args.page_size + offset];
  }

  int64_t row_bytes_;
  std::vector<uint8_t> cache_[2];
  Floats scales_[2];
};

// A batch of requests whose pages are handed out backwards.
struct Batch {
  std::vector<int32_t> qo_indptr{0}, page_indptr{0}, page_indices, kv_lens, slots;
  std::vector<Floats> written;  // K and V of all tokens, in the order of `slots`
  int64_t pages = 1;

  Batch(const Case& c, int64_t kv_heads) {
    for (const Request& request : c.requests) pages += (request.tokens + c.page_size - 1) / c.page_size;
    int32_t next = static_cast<int32_t>(pages) - 1;
    for (const Request& request : c.requests) {
      for (int32_t token = 0; token < request.tokens; ++token) {
        if (token % c.page_size == 0) page_indices.push_back(next--);
        slots.push_back(static_cast<int32_t>(page_indices.back() * c.page_size + token % c.page_size));
      }
      qo_indptr.push_back(qo_indptr.back() + request.queries);
      page_indptr.push_back(static_cast<int32_t>(page_indices.size()));
      kv_lens.push_back(request.tokens);
    }
    Random random(c.dim);
    for (int side = 0; side < 2; ++side) written.push_back(random.reals(slots.size() * kv_heads * c.dim));
  }
};

Doubles attend(const Case& c, const Batch& batch, const Pages& pages, const Floats& q, float scale) {
  const int64_t heads = static_cast<int64_t>(c.kv_head_of.size());
  Doubles out(q.size(), 0);
  int64_t first_slot = 0;
  for (size_t request = 0; request < c.requests.size(); ++request) {
    const auto [queries, tokens] = c.requests[request];
    for (int64_t query = 0; query < queries; ++query) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t row = ((batch.qo_indptr[request] + query) * heads + head) * c.dim, from = c.kv_head_of[head];
        Doubles weights;
        double highest = -INFINITY, total = 0;
        for (int64_t token = 0; token < tokens - queries + query + 1; ++token) {
          double score = 0;
          for (int64_t i = 0; i < c.dim; ++i)
            score += q[row + i] * pages.at(0, batch.slots[first_slot + token], from, i);
          weights.push_back(score * scale);
          highest = std::fmax(highest, weights.back());
        }
        for (double& weight : weights) total += weight = std::exp(weight - highest);
        for (size_t token = 0; token < weights.size(); ++token)
          for (int64_t i = 0; i < c.dim; ++i)
            out[row + i] += weights[token] / total * pages.at(1, batch.slots[first_slot + token], from, i);
      }
    }
    first_slot += tokens;
  }
  return out;
}

void check_case(Checks& checks, const Case& c, Type type, const char* type_name) {
  int64_t kv_heads = 1;
  for (int32_t head : c.kv_head_of) kv_heads = std::max<int64_t>(kv_heads, head + 1);
  const int64_t heads = static_cast<int64_t>(c.kv_head_of.size());
  const Batch batch(c, kv_heads);
  const Floats q = Random(c.dim + 1).reals(batch.qo_indptr.back() * heads * c.dim, 3);
  const float scale = 1 / std::sqrt(static_cast<float>(c.dim));
  Doubles expected;  // from the first variant's pages; the others' hold the same numbers
  checks.each(std::string("attention ") + c.name + ' ' + type_name, [&](Checks::Run& run) {
    Pages pages(type, batch.pages, kv_heads, c.page_size, c.dim);
    run.kernels().append_kv(pages.args, batch.written[0].data(), batch.written[1].data(), batch.slots.data(),
                            static_cast<int64_t>(batch.slots.size()));
    double worst = 0;
    for (size_t i = 0; i < batch.written[0].size(); ++i) {
      const int64_t slot = batch.slots[i / (kv_heads * c.dim)], head = i / c.dim % kv_heads;
      for (int side = 0; side < 2; ++side) {
        const double x = batch.written[side][i], far = std::fabs(pages.at(side, slot, head, i % c.dim) - x);
        worst = std::fmax(worst, std::isnan(far) ? INFINITY : far - pages.step(side, slot, head, x) - 1e-6);
      }
    }
    checks.require(worst <= 0, "append_kv is off by " + std::to_string(worst) + " too much");
    if (expected.empty()) expected = attend(c, batch, pages, q, scale);

    Floats out(q.size(), 1e30f);
    AttentionArgs args{};
    args.q = q.data();
    args.q_stride = heads * c.dim;
    args.out = out.data();
    args.cache = pages.args;
    args.heads = heads;
    args.scale = scale;
    const allspan::Runtime::Batch requests{static_cast<int64_t>(c.requests.size()),
                                           batch.qo_indptr.data(),
                                           batch.page_indptr.data(),
                                           batch.page_indices.data(),
                                           batch.kv_lens.data(),
                                           c.kv_head_of.data()};
    run.runtime->pool().team([&](allspan::Worker& worker) { run.runtime->attention(worker, args, requests); });
    const std::string variant = run.variant->name;
    // Some multiply queries and weights in bfloat16 with what is less than float32.
    const bool in_pairs = type != Type::kFloat32 && (variant == "avx512_bf16" || variant == "amx");
    checks.close(out, expected, in_pairs ? 1e-2 : 2e-5);
  });
}

}  // namespace

void check_attention(Checks& checks) {
  const std::vector<Case> cases = {
      {"decode", 64, 16, {{1, 5}, {1, 64}, {1, 65}, {1, 140}}, {0, 0, 0, 1, 1, 1}},
      {"mixed", 80, 16, {{1, 90}, {17, 17}, {0, 12}, {9, 70}}, {1, 0, 1, 2}},
      {"odd heads", 33, 48, {{5, 70}, {1, 20}}, {0, 0, 1}},
      {"small heads", 1, 16, {{3, 20}}, {0}},
      {"large heads", 256, 16, {{3, 66}}, {0, 0}},
      {"many heads", 16, 16, {{3, 40}}, std::vector<int32_t>(70, 0)},
      {"long", 20, 32, {{1, 700}, {3, 515}}, {0, 0, 1}},
  };
  for (const Case& c : cases) {
    check_case(checks, c, Type::kFloat32, "float32");
    check_case(checks, c, Type::kBfloat16, "bfloat16");
    check_case(checks, c, Type::kInt8, "int8");
    check_case(checks, c, Type::kUint4, "uint4");
  }
}
