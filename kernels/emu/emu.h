// The CUDA language on a processor: one fiber per CUDA thread, one block at a time.
//
// The same .cu files are compiled by NVRTC or nvcc for a device and by g++ with this header for
// tests. A block's threads are fibers of one system thread, run in an order chosen by a seed, so
// that a kernel which relies on the order of its threads gives other numbers with another seed.
// Shared memory is filled with not-a-number before each block. What is reported, with the line:
// deadlock, divergent barriers, a shuffle with absent lanes, misaligned or outlying ldmatrix.
//
// What it cannot see: memory order between blocks (blocks run one after another, in a seeded
// order), bank conflicts of plain accesses, occupancy, and what the compiler for the device does.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

struct dim3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

namespace emu {

constexpr unsigned WARP = 32;
constexpr unsigned MAX_THREADS = 1024;
// What a block may have on sm_80, the least of the devices that are served; sm_90 has 227 KiB.
constexpr size_t MAX_SHARED = 163 * 1024;
constexpr unsigned ALL_LANES = 0xffffffffu;

enum class State : uint8_t { Ready, InWarpOp, AtBarrier, Done };

// A copy to shared memory that has been issued and has not landed.
struct PendingCopy {
  void* target;
  const void* source;
};

struct Fiber {
  void* stack_pointer;
  dim3 thread;
  unsigned index, lane, warp;
  State state;
  unsigned mask;   // lanes the current warp operation is called with
  int operation;   // which one it is
  int line;        // where it was called
  const void* in;  // operands and result, in the fiber's own frame
  void* out;
  unsigned barriers, warp_ops;  // how many it has passed
  PendingCopy copies[64];
  int copy_count, groups[16], group_count;
  void* sanitizer;
};

struct Warp {
  unsigned arrived;
  char passed[3];
};

struct Block {
  dim3 grid, block, at;
  unsigned threads, alive, at_barrier;
  char passed[2];
  char* shared;
  size_t shared_bytes;
  Fiber* fibers;
  Warp warps[MAX_THREADS / WARP];
  unsigned *order, *place;  // order[i]: who comes i-th; place: its inverse
  Fiber* current;
  void* main_stack_pointer;
  void* main_sanitizer;
  char* stacks;
  void (*entry)(void**);
  void** arguments;
  const void* main_stack;
  size_t main_stack_bytes;
};

struct Counts {
  uint64_t switches, warp_ops, barriers, matrix_loads, matrix_load_conflicts;
};

// __thread, since thread_local would come with a check at every use.
extern __thread Block* block;
extern __thread Counts counts;
// 0 runs threads and blocks in order. Odd ones let asynchronous copies land at once, even ones
// only when they are waited for.
extern __thread unsigned seed;

inline Fiber* current() { return block->current; }
[[noreturn]] void fail(const char* format, ...);
void barrier(int line);

// What a warp does together, run once by the last lane to arrive.
using WarpFunction = void (*)(Fiber* warp, unsigned mask);
void warp_op(unsigned mask, int operation, const void* in, void* out, WarpFunction, int line);
enum Operation { SYNC = 1, SHUFFLE, BALLOT, MMA, MATRIX_LOAD };

void launch(dim3 grid, dim3 block, size_t shared, void (*entry)(void**), void** arguments);

// A kernel that is there to be launched by name, as cuLaunchKernel calls it.
struct Kernel {
  const char *name, *file;
  void (*entry)(void**);
  int parameters;
  const uint16_t* parameter_bytes;
  size_t shared_bytes;
  Kernel* next;
  Kernel(const char*, const char*, void (*)(void**), int, const uint16_t*, size_t);
};
extern Kernel* kernels;
Kernel* find(const char* name);

template <auto function>
struct Entry;
template <class... A, void (*function)(A...)>
struct Entry<function> {
  template <size_t... I>
  static void call(void** p, std::index_sequence<I...>) {
    function(*(A*)p[I]...);
  }
  static void entry(void** p) { call(p, std::index_sequence_for<A...>{}); }
  static constexpr int parameters = sizeof...(A);
  static constexpr uint16_t bytes[sizeof...(A)] = {sizeof(A)...};
};

struct ShuffleIn {
  uint64_t value;
  int from;
};
void shuffle(Fiber* warp, unsigned mask);
void ballot(Fiber* warp, unsigned mask);

template <class T>
inline T shuffled(unsigned mask, T value, int from, int line) {
  static_assert(sizeof(T) <= 8);
  ShuffleIn in{0, from};
  memcpy(&in.value, &value, sizeof(T));
  uint64_t out = 0;
  warp_op(mask, SHUFFLE, &in, &out, shuffle, line);
  T result;
  memcpy(&result, &out, sizeof(T));
  return result;
}

inline unsigned ballot_of(unsigned mask, bool vote, int line) {
  uint64_t in = vote, out = 0;
  warp_op(mask, BALLOT, &in, &out, ballot, line);
  return (unsigned)out;
}

inline int lane_below(unsigned by) {
  unsigned lane = current()->lane;
  return lane < by ? lane : lane - by;
}
inline int lane_above(unsigned by) {
  unsigned lane = current()->lane;
  return lane + by >= WARP ? lane : lane + by;
}

}  // namespace emu

#define threadIdx (emu::block->current->thread)
#define blockIdx (emu::block->at)
#define blockDim (emu::block->block)
#define gridDim (emu::block->grid)
#define __syncthreads() emu::barrier(__LINE__)
#define __syncwarp() emu::warp_op(emu::ALL_LANES, emu::SYNC, nullptr, nullptr, nullptr, __LINE__)
#define __shfl_sync(mask, v, lane_) emu::shuffled((mask), (v), (int)((lane_) & 31), __LINE__)
#define __shfl_xor_sync(mask, v, x) \
  emu::shuffled((mask), (v), (int)(emu::current()->lane ^ (unsigned)(x)), __LINE__)
#define __shfl_up_sync(mask, v, by) emu::shuffled((mask), (v), emu::lane_below(by), __LINE__)
#define __shfl_down_sync(mask, v, by) emu::shuffled((mask), (v), emu::lane_above(by), __LINE__)
#define __ballot_sync(mask, vote) emu::ballot_of((mask), (vote), __LINE__)

template <class T>
inline T atomicAdd(T* p, T v) {
  if constexpr (std::is_integral<T>::value) {
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
  } else {
    static_assert(sizeof(T) == 4);
    uint32_t old = __atomic_load_n((uint32_t*)p, __ATOMIC_RELAXED), next;
    do {
      T sum;
      memcpy(&sum, &old, 4);
      sum += v;
      memcpy(&next, &sum, 4);
    } while (!__atomic_compare_exchange_n((uint32_t*)p, &old, next, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    T result;
    memcpy(&result, &old, 4);
    return result;
  }
}

// The block's shared memory as a struct; the launch gives its size.
#define SHARED(T, name) T* name = (T*)emu::block->shared
#define KERNEL(k) \
  static emu::Kernel kernel_##k(#k, __FILE__, &emu::Entry<&k>::entry, emu::Entry<&k>::parameters, \
                                emu::Entry<&k>::bytes, 0);
#define KERNEL_SHARED(k, T) \
  static emu::Kernel kernel_##k(#k, __FILE__, &emu::Entry<&k>::entry, emu::Entry<&k>::parameters, \
                                emu::Entry<&k>::bytes, sizeof(T));
