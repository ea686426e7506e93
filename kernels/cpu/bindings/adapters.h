// Arguments that ops of low-rank adapters share.
#pragma once

#include "bindings/routing.h"
#include "linear/adapters.h"

namespace allspan {

// (first matrices, their spec, panels, ranks, ends) from `weights_at` on and the routing from `routing_at` on, for the
// rows of x; without `columns`.
LayerAdapters take_layer_adapters(Runtime& runtime, OpArguments& args, int x_at, int weights_at, int routing_at);

}  // namespace allspan
