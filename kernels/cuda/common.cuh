// What every kernel file begins with: types, the step's table, and the few instructions that have
// no name in the language. No CUDA header is needed, so NVRTC compiles it alone.
//
// A kernel takes one argument, a plain struct by value, and is entered at the end of its file with
// KERNEL(name), or with KERNEL_SHARED(name, Struct) when it uses SHARED(Struct, name). The launch
// code in src/cuda has the same struct and size, and loading a kernel compares them.
#pragma once

#ifdef DELTAPOOL_EMULATED
#define DEVICE static inline
#else
#define DEVICE static __device__ __forceinline__
#define KERNEL(name)
#define KERNEL_SHARED(name, Struct)
// Aligned for a tile of any instruction.
extern __shared__ __align__(1024) char shared_bytes[];
#define SHARED(Struct, name) Struct* name = (Struct*)shared_bytes
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif

struct bf16 {
  uint16_t bits;
};
union FloatBits {
  float value;
  uint32_t bits;
};

// Values of a pair in a word: the first is the low half.
DEVICE float low_f32(uint32_t pair) {
  FloatBits x;
  x.bits = pair << 16;
  return x.value;
}
DEVICE float high_f32(uint32_t pair) {
  FloatBits x;
  x.bits = pair & 0xffff0000u;
  return x.value;
}
DEVICE float to_f32(bf16 x) { return low_f32(x.bits); }
DEVICE float to_f32(float x) { return x; }

// The bits of x for a product in tf32: rounded to 10 bits of mantissa, since what stands below them
// is ignored.
DEVICE uint32_t to_tf32(float x) {
  FloatBits r;
  r.value = x;
  return r.bits + 0x1000u;
}

#ifdef DELTAPOOL_EMULATED
#include "intrinsics.h"
#else

// To nearest, ties to even, as half::bf16::from_f32.
DEVICE bf16 to_bf16(float x) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}

DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

DEVICE float f16_to_f32(uint16_t bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

// d[16x8] += a[16x16] b[16x8], bf16 in, f32 out.
DEVICE void mma_bf16_16816(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d[16x8] += a[16x8] b[8x8], tf32 in (to_tf32), f32 out.
DEVICE void mma_tf32_1688(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <class T>
DEVICE uint32_t shared_address(const T* p) {
  return (uint32_t)__cvta_generic_to_shared(p);
}

// Four 8x8 tiles of 16-bit values from shared memory; lane l gives the address of row l % 8 of
// tile l / 8.
DEVICE void load_matrix_x4(uint32_t* out, const void* p, bool transposed) {
  uint32_t at = shared_address((const char*)p);
  if (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}

// 16 bytes from global to shared memory, past the registers.
DEVICE void copy_async_16(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address((const char*)target)),
               "l"(source)
               : "memory");
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `keep` groups of the thread are in flight.
#define copy_async_wait(keep) asm volatile("cp.async.wait_group %0;" ::"n"(keep) : "memory")

#endif

// ---- the step's table, as src/cuda/spans.rs writes it

// A read offset that means the zero state, a write offset that means nowhere.
#define NO_SLOT (-1ll)

// A run of rows of one sequence; offsets are bytes in the arena of states and blocks.
struct Span {
  int64_t read, write;
  int32_t first_row, rows, start, absorbed_from;
  int32_t table, table_len, snapshots, snapshots_len;
  // The span's first chunk among those of the step; 0 for spans of form Step.
  int32_t first_chunk, unused;
};
static_assert(sizeof(Span) == 56, "src/cuda/spans.rs has the same");

// A copy of the state written when a span has absorbed `after_rows` rows.
struct Snapshot {
  int64_t slot;
  int32_t after_rows, unused;
};
static_assert(sizeof(Snapshot) == 16, "src/cuda/spans.rs has the same");

// ---- what many kernels do

DEVICE float minus_infinity() {
  FloatBits x;
  x.bits = 0xff800000u;
  return x.value;
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// The sum over `LANES` neighbouring lanes, in all of them, in an order that depends on nothing.
template <int LANES>
DEVICE float lanes_sum(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The sum over all threads of a block of `WARPS` warps, in all of them; `scratch` has `WARPS`
// values. Barriers stand on both sides, so `scratch` can be used again at once.
template <int WARPS>
DEVICE float block_sum(float x, float* scratch) {
  x = lanes_sum<32>(x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) sum += scratch[i];
  __syncthreads();
  return sum;
}

DEVICE float4 load4(const float* p) { return *(const float4*)p; }
DEVICE void store4(float* p, float4 x) { *(float4*)p = x; }
