// CUDA C++ on a processor: put before a kernel's source, it makes of it a program in which each thread of a block is a
// fiber. Blocks run one after the other, so nothing here tells of races between them, but for launches that run beside
// each other (`Launch`). What a block meets is checked: shared memory starts as NaNs, asynchronous copies arrive no
// sooner than they are waited for, the lanes of a warp must come to the same collective, and a block whose threads wait
// for each other in vain is an error.
#pragma once

#include "runtime.h"

#include "cuda_words.h"
#include "hopper_words.h"
#include "ptx_words.h"
