// Fibers, for emulator.h: who runs leaves off at `change` and goes on there when somebody changes back.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

#ifdef __x86_64__

// swapcontext asks the system to keep the mask of signals, twice a change; this takes some nanoseconds.
struct Fiber {
  void* top = nullptr;  // of its stack, where the registers lie that a function must keep
};

extern "C" __attribute__((visibility("hidden"))) void allspan_change_stack(void** from, void* to);  // in emulator.cpp

inline void change(Fiber& from, const Fiber& to) { allspan_change_stack(&from.top, to.top); }

// `entry` never returns. It finds the stack as a call would leave it: 8 bytes off a multiple of 16.
inline void begin(Fiber& fiber, char* stack, size_t size, void (*entry)()) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(stack + size) & ~uintptr_t{15};
  void** const top = reinterpret_cast<void**>(end) - 8;
  for (int i = 0; i < 8; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(entry);
  fiber.top = top;
}

#else

struct Fiber {
  ucontext_t context;
};

inline void change(Fiber& from, const Fiber& to) { swapcontext(&from.context, &to.context); }

inline void begin(Fiber& fiber, char* stack, size_t size, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = size;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#endif

}  // namespace emulator
