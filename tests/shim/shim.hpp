// What the kernel sources need of CUDA, for g++: a launch runs on the CPU, one block after another.
//
// The threads of a block are fibers. One runs until it waits at a barrier or returns; then another
// one, in an order that depends on the seed. Blocks run in random order too. Shared memory holds NaN
// before each block, and what lies behind the requested size must not change. With this a missing
// barrier, a read of memory that nobody wrote and an index that is off change results or fail.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

constexpr size_t kSharedBytes = 48 * 1024;
alignas(16) static double shared_memory[kSharedBytes / sizeof(double)];

// --- number formats and the rest of hardware.cuh ------------------------------------------------

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Half value) {
  _Float16 number;
  memcpy(&number, &value, sizeof number);
  return number;
}

inline float to_float(BFloat16 value) {
  const unsigned bits = static_cast<unsigned>(value.bits) << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

inline void round_to(float value, float* result) { *result = value; }

inline void round_to(float value, Half* result) {
  const _Float16 number = static_cast<_Float16>(value);
  memcpy(result, &number, sizeof number);
}

inline void round_to(float value, BFloat16* result) {
  if (isnan(value)) {
    result->bits = 0x7fff;
    return;
  }
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  const unsigned kept = bits >> 16, dropped = bits & 0xffff;
  const bool up = dropped > 0x8000 || (dropped == 0x8000 && kept % 2 == 1);
  result->bits = static_cast<unsigned short>(kept + up);
}

template <typename T>
unsigned pack(float first, float second) {
  T pair[2];
  round_to(first, &pair[0]);
  round_to(second, &pair[1]);
  return pair[0].bits | static_cast<unsigned>(pair[1].bits) << 16;
}

template <typename T>
void unpack(unsigned both, float* values, T) {
  values[0] = to_float(T{static_cast<unsigned short>(both)});
  values[1] = to_float(T{static_cast<unsigned short>(both >> 16)});
}

inline float fast_exp2(float value) { return exp2f(value); }
inline float fast_reciprocal(float value) { return 1.0f / value; }

template <typename T>
void store_whole(T* address, T value) {
  *address = value;
}

inline float load_coherent(const float* address) { return *address; }

// --- threads ------------------------------------------------------------------------------------

namespace shim {

constexpr size_t kStackBytes = 256 * 1024;
constexpr unsigned kMaxBlock = 1024;

enum State { kReady, kAtBarrier, kDone };

struct Fiber {
  ucontext_t context;
  char* stack;
  State state;
  Index index;
};

static Fiber fibers[kMaxBlock];
static ucontext_t scheduler;
static Fiber* current;
static void (*kernel)(const void*);
static const void* kernel_arguments;
static uint64_t random_state;
static char message[256];

inline unsigned random_below(unsigned limit) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<unsigned>(random_state >> 33) % limit;
}

inline void shuffle(unsigned* values, unsigned count) {
  for (unsigned i = 0; i < count; ++i) values[i] = i;
  for (unsigned i = count; i > 1; --i) {
    const unsigned j = random_below(i);
    const unsigned kept = values[i - 1];
    values[i - 1] = values[j];
    values[j] = kept;
  }
}

// A switch in the direction of a stack; AddressSanitizer has to know which one is in use.
inline void switch_to(ucontext_t* from, ucontext_t* to, [[maybe_unused]] const void* stack,
                      [[maybe_unused]] size_t bytes, [[maybe_unused]] bool leaves) {
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(leaves ? nullptr : &fake, stack, bytes);
  swapcontext(from, to);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  swapcontext(from, to);
#endif
}

static const void* scheduler_stack;
static size_t scheduler_bytes;

inline void to_scheduler(bool leaves) {
  switch_to(&current->context, &scheduler, scheduler_stack, scheduler_bytes, leaves);
}

inline void run_thread() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
  kernel(kernel_arguments);
  current->state = kDone;
  to_scheduler(true);
}

inline void start(Fiber* fiber) {
  if (!fiber->stack) fiber->stack = static_cast<char*>(malloc(kStackBytes));
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, run_thread, 0);
  fiber->state = kReady;
}

inline void guard_shared(size_t requested) {
  memset(shared_memory, 0xff, kSharedBytes);  // NaN as float and as double
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(reinterpret_cast<char*>(shared_memory) + requested,
                              kSharedBytes - requested);
#else
  (void)requested;
#endif
}

inline void check_shared(size_t requested) {
#ifdef __SANITIZE_ADDRESS__
  (void)requested;
  __asan_unpoison_memory_region(shared_memory, kSharedBytes);
#else
  const char* behind = reinterpret_cast<const char*>(shared_memory) + requested;
  const size_t bytes = kSharedBytes - requested;
  if (bytes > 0 && (behind[0] != '\xff' || memcmp(behind, behind + 1, bytes - 1) != 0)) {
    snprintf(message, sizeof message, "shared memory: written behind its end");
  }
#endif
}

inline void run_block(unsigned threads) {
  unsigned order[kMaxBlock];
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].index = {i % blockDim.x, i / blockDim.x, 0};
    start(&fibers[i]);
  }
  for (;;) {
    unsigned done = 0;
    shuffle(order, threads);
    for (unsigned i = 0; i < threads; ++i) {
      current = &fibers[order[i]];
      threadIdx = current->index;
      switch_to(&scheduler, &current->context, current->stack, kStackBytes, false);
      done += current->state == kDone;
    }
    if (done == threads) return;
    if (done > 0) {
      snprintf(message, sizeof message, "barrier: a thread returned before it");
      return;
    }
  }
}

inline const char* launch(void (*function)(const void*), size_t expected, const unsigned* grid,
                          const unsigned* block, size_t shared_bytes, void** parameters,
                          size_t argument_bytes, uint64_t seed) {
  message[0] = 0;
  if (argument_bytes != expected) {
    snprintf(message, sizeof message, "arguments: %zu bytes given, %zu expected", argument_bytes,
             expected);
    return message;
  }
  if (shared_bytes > kSharedBytes) return "shared memory: more than 48 KiB";
  kernel = function;
  kernel_arguments = parameters[0];
  random_state = seed * 0x9e3779b97f4a7c15u + 1;
  gridDim = {grid[0], grid[1], 1};
  blockDim = {block[0], block[1], 1};
  const unsigned blocks = grid[0] * grid[1], threads = block[0] * block[1];
  if (threads == 0 || threads > kMaxBlock) return "block: 1 to 1024 threads";
  unsigned* order = static_cast<unsigned*>(malloc(blocks * sizeof(unsigned)));
  shuffle(order, blocks);
  for (unsigned i = 0; i < blocks && !message[0]; ++i) {
    blockIdx = {order[i] % grid[0], order[i] / grid[0], 0};
    guard_shared(shared_bytes);
    run_block(threads);
    check_shared(shared_bytes);
  }
  free(order);
  return message[0] ? message : nullptr;
}

}  // namespace shim

inline void __syncthreads() {
  shim::Fiber* me = shim::current;
  me->state = shim::kAtBarrier;
  shim::to_scheduler(false);
}

inline void __threadfence() {}

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  const unsigned old = *address;
  *address = old >= limit ? 0 : old + 1;
  return old;
}

// Make a kernel callable from Python as `launch_` with its name, and say what it takes.
#define SHIM_EXPORT(name, Arguments)                                                            \
  extern "C" const size_t size_##name;                                                          \
  const size_t size_##name = sizeof(Arguments);                                                 \
  extern "C" const char* launch_##name(const unsigned* grid, const unsigned* block,             \
                                       size_t shared_bytes, void** parameters,                  \
                                       size_t argument_bytes, uint64_t seed) {                  \
    return shim::launch(                                                                        \
        [](const void* arguments) { name(*static_cast<const Arguments*>(arguments)); },         \
        sizeof(Arguments), grid, block, shared_bytes, parameters, argument_bytes, seed);        \
  }
