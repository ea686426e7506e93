// Arguments that ops of low-rank adapters share.
#pragma once

#include "bindings/routing.h"
#include "linear/adapters.h"

namespace allspan {

// x, (panels, ranks, ends) from `weights_at` on and the routing from `routing_at` on; `out` is null.
AdapterArgs take_adapters(Runtime& runtime, OpArguments& args, int x_at, int weights_at, int routing_at);

}  // namespace allspan
