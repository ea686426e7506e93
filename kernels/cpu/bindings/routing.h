// The argument that says which rows go where.
#pragma once

#include "bindings/ops.h"
#include "moe/route.h"

namespace allspan {

// places, weights, slots and starts, from argument i on.
inline Routing take_routing(const OpArguments& args, int i, int64_t rows, int64_t top_k, int64_t num_places) {
  const auto numbers = [&](int at, const char* name, int64_t first, int64_t second) {
    return static_cast<int32_t*>(args.ints(args.at(at), name, {first, second}).data);
  };
  return {numbers(i, "places", rows, top_k), args.floats(args.at(i + 1), "weights", {rows, top_k}).floats(),
          numbers(i + 2, "slots", rows, top_k), numbers(i + 3, "starts", 1, num_places + 1), num_places};
}

// The places of a routing whose first argument is i.
inline int64_t places_of(const OpArguments& args, int i) {
  return args.ints(args.at(i + 3), "starts", {1, kAny}).shape[1] - 1;
}

}  // namespace allspan
