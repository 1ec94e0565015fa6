// What single instructions of the device do, for tests on a processor: the twin of the part of
// common.cuh that only a device's compiler reads.
#pragma once
#include "emu.h"

#define NOT_WATCHED __attribute__((no_sanitize("thread")))

static inline bf16 to_bf16(float f) {
  FloatBits x;
  x.value = f;
  if ((x.bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fff};
  return bf16{(uint16_t)((x.bits + 0x7fffu + (x.bits >> 16 & 1)) >> 16)};
}

static inline uint32_t pack_bf16(float low, float high) {
  return (uint32_t)to_bf16(low).bits | (uint32_t)to_bf16(high).bits << 16;
}

static inline float f16_to_f32(uint16_t bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return (float)x;
}

// mma.sync.aligned.m16n8k16: fragments as the PTX ISA lays them out. The order in which a tensor
// core adds is not told anywhere; here it is rising k, so results agree to rounding only.
struct MmaIn {
  const uint32_t *a, *b;
};

NOT_WATCHED static void mma_warp(emu::Fiber* warp, unsigned mask) {
  if (mask != emu::ALL_LANES) emu::fail("mma with a partial warp");
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const MmaIn* in = (const MmaIn*)warp[lane].in;
    int group = lane >> 2, pair = (lane & 3) * 2;
    for (int i = 0; i < 4; i++) {
      int row = group + (i & 1) * 8, col = pair + (i >> 1) * 8;
      a[row][col] = low_f32(in->a[i]);
      a[row][col + 1] = high_f32(in->a[i]);
    }
    for (int i = 0; i < 2; i++) {
      b[pair + i * 8][group] = low_f32(in->b[i]);
      b[pair + i * 8 + 1][group] = high_f32(in->b[i]);
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    float* d = (float*)warp[lane].out;
    int group = lane >> 2, pair = (lane & 3) * 2;
    for (int i = 0; i < 4; i++) {
      int row = group + (i >> 1) * 8, col = pair + (i & 1);
      for (int k = 0; k < 16; k++) d[i] += a[row][k] * b[k][col];
    }
  }
}

// mma.sync.aligned.m16n8k8 of tf32: of an operand's bits the low 13 are not looked at.
NOT_WATCHED static float tf32(uint32_t bits) {
  FloatBits x;
  x.bits = bits & ~0x1fffu;
  return x.value;
}

NOT_WATCHED static void mma_tf32_warp(emu::Fiber* warp, unsigned mask) {
  if (mask != emu::ALL_LANES) emu::fail("mma with a partial warp");
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; lane++) {
    const MmaIn* in = (const MmaIn*)warp[lane].in;
    int group = lane >> 2, place = lane & 3;
    for (int i = 0; i < 4; i++) a[group + (i & 1) * 8][place + (i >> 1) * 4] = tf32(in->a[i]);
    for (int i = 0; i < 2; i++) b[place + i * 4][group] = tf32(in->b[i]);
  }
  for (int lane = 0; lane < 32; lane++) {
    float* d = (float*)warp[lane].out;
    int group = lane >> 2, pair = (lane & 3) * 2;
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < 8; k++) d[i] += a[group + (i >> 1) * 8][k] * b[k][pair + (i & 1)];
  }
}

static inline void mma_host(float* d, const uint32_t* a, const uint32_t* b,
                            emu::WarpFunction function, int line) {
  MmaIn in{a, b};
  emu::warp_op(emu::ALL_LANES, emu::MMA, &in, d, function, line);
}
#define mma_bf16_16816(d, a, b) mma_host((d), (a), (b), mma_warp, __LINE__)
#define mma_tf32_1688(d, a, b) mma_host((d), (a), (b), mma_tf32_warp, __LINE__)

// ldmatrix.x4: each lane gives the address of one row of eight values. A lane reads its own row, so
// that the race detector sees the access in the thread that makes it.
struct MatrixLoadIn {
  const void* address;
  bool transposed;
  uint16_t row[8];
};

NOT_WATCHED static void matrix_load_warp(emu::Fiber* warp, unsigned mask) {
  if (mask != emu::ALL_LANES) emu::fail("ldmatrix with a partial warp");
  for (int tile = 0; tile < 4; tile++) {
    const uint16_t* row[8];
    unsigned banks = 0;
    emu::counts.matrix_loads++;
    for (int r = 0; r < 8; r++) {
      const MatrixLoadIn* in = (const MatrixLoadIn*)warp[8 * tile + r].in;
      row[r] = in->row;
      unsigned bank = 1u << ((const char*)in->address - emu::block->shared) / 16 % 8;
      if (banks & bank) emu::counts.matrix_load_conflicts++;
      banks |= bank;
    }
    for (int lane = 0; lane < 32; lane++) {
      int r = lane >> 2, c = (lane & 3) * 2;
      bool transposed = ((const MatrixLoadIn*)warp[lane].in)->transposed;
      uint16_t low = transposed ? row[c][r] : row[r][c];
      uint16_t high = transposed ? row[c + 1][r] : row[r][c + 1];
      ((uint32_t*)warp[lane].out)[tile] = low | (uint32_t)high << 16;
    }
  }
}

static inline void matrix_load_host(uint32_t* out, const void* p, bool transposed, int line) {
  if ((uintptr_t)p & 15) emu::fail("line %d: ldmatrix row not 16-byte aligned", line);
  if ((size_t)((const char*)p - emu::block->shared) + 16 > emu::block->shared_bytes)
    emu::fail("line %d: ldmatrix outside shared memory", line);
  MatrixLoadIn in{p, transposed, {}};
  for (int i = 0; i < 8; i++) in.row[i] = ((const uint16_t*)p)[i];
  emu::warp_op(emu::ALL_LANES, emu::MATRIX_LOAD, &in, out, matrix_load_warp, line);
}
#define load_matrix_x4(out, p, transposed) matrix_load_host((out), (p), (transposed), __LINE__)

// cp.async: the copy may land at any time from issue to wait. Odd seeds take the first moment, even
// seeds the last, so that both a read before the wait and a buffer reused too early show.
static inline void land(void* target, const void* source) {
  typedef uint64_t __attribute__((may_alias)) Word;
  ((Word*)target)[0] = ((const Word*)source)[0];
  ((Word*)target)[1] = ((const Word*)source)[1];
}

static inline void copy_async_16(void* target, const void* source) {
  emu::Fiber* fiber = emu::current();
  if (((uintptr_t)target | (uintptr_t)source) & 15) emu::fail("cp.async misaligned");
  if (fiber->copy_count == 64) emu::fail("more than 64 cp.async in flight in a thread");
  if (emu::seed & 1)
    land(target, source);
  else
    fiber->copies[fiber->copy_count++] = {target, source};
}

static inline void copy_async_commit() {
  emu::Fiber* fiber = emu::current();
  if (fiber->group_count == 16) emu::fail("more than 16 groups of cp.async");
  fiber->groups[fiber->group_count++] = fiber->copy_count;
}

static inline void copy_async_wait_host(int keep) {
  emu::Fiber* fiber = emu::current();
  int done = fiber->group_count - keep;
  if (done <= 0) return;
  int count = fiber->groups[done - 1];
  for (int i = 0; i < count; i++) land(fiber->copies[i].target, fiber->copies[i].source);
  fiber->copy_count -= count;
  memmove(fiber->copies, fiber->copies + count, fiber->copy_count * sizeof fiber->copies[0]);
  for (int i = done; i < fiber->group_count; i++)
    fiber->groups[i - done] = fiber->groups[i] - count;
  fiber->group_count -= done;
}
#define copy_async_wait(keep) copy_async_wait_host(keep)
