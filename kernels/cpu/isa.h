// Which instruction sets this CPU has and this operating system has switched on.
#pragma once

#include <vector>

#include "kernels.h"

namespace allspan {

// The kernels that can run here, best first; the last is always the generic one.
std::vector<const Kernels*> runnable_kernels();

}  // namespace allspan
