// Products with weights: out = x w^T, src/gemm/naive.rs on a device.
//
// K is cut into at most eight slices of fixed length. A slice's sum runs from its first input to
// its last, and slices are added in order. Every kernel here does just that, so a row has the same
// bits whichever kernel computes it and however many rows stand beside it: `few` kernels give a
// slice to each warp, `many` kernels walk the slices one after another.
//
// Few rows are bound by the reads of weights: each value is read once, 16 bytes a lane, with the
// next tile on its way while one is multiplied. Many rows are bound by arithmetic: tiles of both
// sides are shared by a block. Rounded rows (bf16) go through tensor cores, with weights as the
// left operand, so that few rows waste nothing of the narrow right one.
//
// Rows may be grouped, each group with weights of its own (experts): then a block finds its group
// and rows in `tiles`, and `gather` names the row of x for each row.
#include "common.cuh"

#define SLICES 8

struct GemmArgument {
  const void *x, *w;
  float* out;
  // Which row of x each row is; none for its own.
  const int32_t* gather;
  // For groups: (group, first row) of each block's tile, the rows' ends, and how many bytes behind
  // w the weights are.
  const int32_t *tiles, *offsets;
  const int64_t* table;
  // Values from a row to the next, and from one of the grid's z to the next.
  int64_t x_stride, out_stride, x_batch, w_batch, out_batch;
  // `slice` inputs to a slice, a multiple of 64. `dtype` of the weights; `rounded` x is bf16, and
  // so is `narrow` out.
  int32_t rows, n, k, slice, add, dtype, by_four, rounded, narrow, unused;
};

struct f16 {
  uint16_t bits;
};
DEVICE float to_f32(f16 x) { return f16_to_f32(x.bits); }

// The rows that a block has: those of out from `row` to before `end`.
struct Rows {
  const char *x, *w;
  float* out;
  int row, end;
};

DEVICE Rows rows_of(const GemmArgument& a, int tile_rows, int x_bytes, int w_bytes) {
  Rows r;
  int64_t z = blockIdx.z;
  r.x = (const char*)a.x + z * a.x_batch * x_bytes;
  r.w = (const char*)a.w + z * a.w_batch * w_bytes;
  r.out = a.out + z * a.out_batch;
  r.row = blockIdx.y * tile_rows;
  r.end = a.rows;
  if (a.tiles) {
    int group = a.tiles[2 * blockIdx.y];
    r.row = a.tiles[2 * blockIdx.y + 1];
    r.end = group < 0 ? r.row : a.offsets[group + 1];
    r.w += group < 0 ? 0 : a.table[group];
  }
  return r;
}

// Row `row` of x, or none behind the last.
DEVICE const char* x_row(const GemmArgument& a, const Rows& r, int row, int x_bytes) {
  if (row >= r.end) return nullptr;
  int64_t from = a.gather ? a.gather[row] : row;
  return r.x + from * a.x_stride * x_bytes;
}

DEVICE void put(const GemmArgument& a, const Rows& r, int row, int output, float sum) {
  if (row >= r.end || output >= a.n) return;
  int64_t at = row * a.out_stride + output;
  if (a.narrow)
    ((bf16*)r.out)[at] = to_bf16(sum);
  else
    r.out[at] = a.add ? r.out[at] + sum : sum;
}

// ---- single precision, and rounded rows whose inputs are no multiple of eight

DEVICE float4 widened(const float* p) { return load4(p); }
DEVICE float4 widened(const bf16* p) {
  uint2 x = *(const uint2*)p;
  return make_float4(low_f32(x.x), high_f32(x.x), low_f32(x.y), high_f32(x.y));
}
DEVICE float4 widened(const f16* p) {
  uint2 x = *(const uint2*)p;
  return make_float4(f16_to_f32(x.x & 0xffff), f16_to_f32(x.x >> 16), f16_to_f32(x.y & 0xffff),
                     f16_to_f32(x.y >> 16));
}

// Inputs k..k+3 of a row, zero behind the last or where there is no row.
template <class T>
DEVICE float4 inputs(const T* row, int k, int end, bool by_four) {
  if (row == nullptr || k >= end) return make_float4(0, 0, 0, 0);
  if (by_four) return widened(row + k);
  float4 x = make_float4(to_f32(row[k]), 0, 0, 0);
  if (k + 1 < end) x.y = to_f32(row[k + 1]);
  if (k + 2 < end) x.z = to_f32(row[k + 2]);
  if (k + 3 < end) x.w = to_f32(row[k + 3]);
  return x;
}

DEVICE float dot4(float4 x, float4 w, float sum) {
  sum = fmaf(x.x, w.x, sum);
  sum = fmaf(x.y, w.y, sum);
  sum = fmaf(x.z, w.z, sum);
  return fmaf(x.w, w.w, sum);
}

// 32 inputs of a row, with four values behind them that spread rows over the banks.
#define PITCH 36

struct GemmFewShared {
  float w[SLICES][32 * PITCH], x[SLICES][8 * PITCH];
  float sums[SLICES][8][32];
};

// Up to 8 rows by 32 outputs: a warp to a slice, a lane to an output.
template <class X, class W>
DEVICE void few(const GemmArgument& a, GemmFewShared* shared) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * 32;
  Rows r = rows_of(a, 8, sizeof(X), sizeof(W));
  if (r.row >= r.end) return;
  int end = min(a.k, (warp + 1) * a.slice), part = lane % 8 * 4;
  float *w = shared->w[warp], *x = shared->x[warp];
  const W* w_rows[8];
  const X* x_rows[2];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int output = first + lane / 8 + i * 4;
    w_rows[i] = output < a.n ? (const W*)r.w + (int64_t)output * a.k : nullptr;
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
    x_rows[i] = (const X*)x_row(a, r, r.row + lane / 8 + i * 4, sizeof(X));
  float sums[8];
  float4 next_w[8], next_x[2];
#pragma unroll
  for (int i = 0; i < 8; i++) sums[i] = 0.0f;
  auto fetch = [&](int k) {
#pragma unroll
    for (int i = 0; i < 8; i++) next_w[i] = inputs(w_rows[i], k + part, end, a.by_four);
#pragma unroll
    for (int i = 0; i < 2; i++) next_x[i] = inputs(x_rows[i], k + part, end, a.by_four);
  };
  fetch(warp * a.slice);
  for (int k = warp * a.slice; k < end; k += 32) {
#pragma unroll
    for (int i = 0; i < 8; i++) store4(w + (lane / 8 + i * 4) * PITCH + part, next_w[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) store4(x + (lane / 8 + i * 4) * PITCH + part, next_x[i]);
    __syncwarp();
    fetch(k + 32);
#pragma unroll
    for (int c = 0; c < 32; c += 4) {
      float4 weights = load4(w + lane * PITCH + c);
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] = dot4(load4(x + i * PITCH + c), weights, sums[i]);
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < 8; i++) shared->sums[warp][i][lane] = sums[i];
  __syncthreads();
  float total = shared->sums[0][warp][lane];
  for (int i = 1; i * a.slice < a.k; i++) total += shared->sums[i][warp][lane];
  put(a, r, r.row + warp, first + lane, total);
}

struct GemmManyShared {
  float w[64 * PITCH], x[64 * PITCH];
};

// 64 rows by 64 outputs, four by four of them to a thread, 16 apart.
template <class X, class W>
DEVICE void many(const GemmArgument& a, GemmManyShared* shared) {
  int first = blockIdx.x * 64, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  Rows r = rows_of(a, 64, sizeof(X), sizeof(W));
  if (r.row >= r.end) return;
  // What the thread carries: inputs `part`.. of rows `carried` and 32 behind it.
  int carried = threadIdx.x / 8, part = threadIdx.x % 8 * 4;
  const W* w_rows[2];
  const X* x_rows[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int output = first + carried + i * 32;
    w_rows[i] = output < a.n ? (const W*)r.w + (int64_t)output * a.k : nullptr;
    x_rows[i] = (const X*)x_row(a, r, r.row + carried + i * 32, sizeof(X));
  }
  float sums[4][4], totals[4][4];
  float4 next_w[2], next_x[2];
#pragma unroll
  for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
  auto fetch = [&](int k) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      next_w[i] = inputs(w_rows[i], k + part, a.k, a.by_four);
      next_x[i] = inputs(x_rows[i], k + part, a.k, a.by_four);
    }
  };
  fetch(0);
  for (int k = 0; k < a.k; k += 32) {
    if (k > 0 && k % a.slice == 0) {
#pragma unroll
      for (int i = 0; i < 16; i++) {
        float sum = sums[i / 4][i % 4];
        totals[i / 4][i % 4] = k == a.slice ? sum : totals[i / 4][i % 4] + sum;
        sums[i / 4][i % 4] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      store4(shared->w + (carried + i * 32) * PITCH + part, next_w[i]);
      store4(shared->x + (carried + i * 32) * PITCH + part, next_x[i]);
    }
    __syncthreads();
    fetch(k + 32);
#pragma unroll
    for (int c = 0; c < 32; c += 4) {
      float4 weights[4], x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        weights[i] = load4(shared->w + (tx + i * 16) * PITCH + c);
        x[i] = load4(shared->x + (ty + i * 16) * PITCH + c);
      }
#pragma unroll
      for (int i = 0; i < 16; i++)
        sums[i / 4][i % 4] = dot4(x[i / 4], weights[i % 4], sums[i / 4][i % 4]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float sum = sums[i / 4][i % 4];
    float total = a.k > a.slice ? totals[i / 4][i % 4] + sum : sum;
    put(a, r, r.row + ty + i / 4 * 16, first + tx + i % 4 * 16, total);
  }
}

enum Dtype { F32, BF16, F16 };

// grid = (runs of 32 outputs, runs of 8 rows, batch), 256 threads.
extern "C" __global__ void __launch_bounds__(256) gemm_few(const GemmArgument a) {
  SHARED(GemmFewShared, shared);
  if (a.rounded) return few<bf16, bf16>(a, shared);
  if (a.dtype == F32) few<float, float>(a, shared);
  if (a.dtype == BF16) few<float, bf16>(a, shared);
  if (a.dtype == F16) few<float, f16>(a, shared);
}
KERNEL_SHARED(gemm_few, GemmFewShared)

// grid = (runs of 64 outputs, runs of 64 rows, batch), 256 threads.
extern "C" __global__ void __launch_bounds__(256) gemm_many(const GemmArgument a) {
  SHARED(GemmManyShared, shared);
  if (a.rounded) return many<bf16, bf16>(a, shared);
  if (a.dtype == F32) many<float, float>(a, shared);
  if (a.dtype == BF16) many<float, bf16>(a, shared);
  if (a.dtype == F16) many<float, f16>(a, shared);
}
KERNEL_SHARED(gemm_many, GemmManyShared)

// ---- tensor cores

#define STAGES 3

// Tiles of rows of 64 values: chunks of eight values lie where no two of a column share a bank.
template <int OUTPUTS, int ROWS>
struct MmaStage {
  uint4 w[OUTPUTS * 8], x[ROWS * 8];
};

DEVICE int chunk_at(int row, int chunk) { return row * 8 + (chunk ^ (row & 7)); }

// Copies inputs k..k+63 of `ROWS` rows, by `THREADS` threads of which this is number `thread`.
template <int ROWS, int THREADS, class Row>
DEVICE void fetch_rows(uint4* tile, int thread, int k, int end, Row row_of) {
#pragma unroll
  for (int i = 0; i < ROWS * 8; i += THREADS) {
    int row = (i + thread) / 8, chunk = (i + thread) % 8, at = k + chunk * 8;
    const char* from = row_of(row);
    uint4* to = tile + chunk_at(row, chunk);
    if (from && at < end)
      copy_async_16(to, from + (int64_t)at * 2);
    else
      *to = make_uint4(0, 0, 0, 0);
  }
}

template <int OUTPUTS, int ROWS, int THREADS>
DEVICE void fetch_stage(const GemmArgument& a, const Rows& r, MmaStage<OUTPUTS, ROWS>* stage,
                        int thread, int k, int end) {
  int first = blockIdx.x * OUTPUTS;
  fetch_rows<OUTPUTS, THREADS>(stage->w, thread, k, end, [&](int i) {
    return first + i < a.n ? r.w + (int64_t)(first + i) * a.k * 2 : nullptr;
  });
  fetch_rows<ROWS, THREADS>(stage->x, thread, k, end,
                            [&](int i) { return x_row(a, r, r.row + i, 2); });
}

// sums[m][n] += w x^T over a stage: outputs 16 m.. and rows 8 n.. of the warp's.
template <int M, int PAIRS>
DEVICE void multiply_stage(const uint4* w, const uint4* x, float (*sums)[2 * PAIRS][4]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t left[M][4], right[PAIRS][4];
#pragma unroll
    for (int m = 0; m < M; m++)
      load_matrix_x4(left[m], w + chunk_at(m * 16 + lane % 16, k * 2 + lane / 16), false);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
      int row = p * 16 + lane / 16 * 8 + lane % 8;
      load_matrix_x4(right[p], x + chunk_at(row, k * 2 + lane / 8 % 2), false);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < 2 * PAIRS; n++)
        mma_bf16_16816(sums[m][n], left[m], right[n / 2] + n % 2 * 2);
  }
}

// Output and row, in the warp's part, of value i of a fragment.
DEVICE int output_of(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
DEVICE int row_of(int i) { return threadIdx.x % 4 * 2 + i % 2; }

template <int ROWS>
struct MmaFewShared {
  MmaStage<16, ROWS> stages[SLICES][STAGES];
  float sums[SLICES][ROWS][17];
};

// 16 outputs by `ROWS` rows: a warp to a slice, with stages of its own.
template <int ROWS>
DEVICE void mma_few(const GemmArgument& a, MmaFewShared<ROWS>* shared) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Rows r = rows_of(a, ROWS, 2, 2);
  if (r.row >= r.end) return;
  int start = warp * a.slice, end = min(a.k, start + a.slice);
  MmaStage<16, ROWS>* stages = shared->stages[warp];
  float sums[1][ROWS / 8][4];
#pragma unroll
  for (int i = 0; i < ROWS / 8 * 4; i++) sums[0][i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    int k = start + s * 64;
    if (k < end) fetch_stage<16, ROWS, 32>(a, r, &stages[s], lane, k, end);
    copy_async_commit();
  }
  int stage = 0;
  for (int k = start; k < end; k += 64) {
    copy_async_wait(STAGES - 2);
    // All lanes' copies of this stage are there, and all are done with the stage before.
    __syncwarp();
    int ahead = k + (STAGES - 1) * 64, target = (stage + STAGES - 1) % STAGES;
    if (ahead < end) fetch_stage<16, ROWS, 32>(a, r, &stages[target], lane, ahead, end);
    copy_async_commit();
    multiply_stage<1, ROWS / 16>(stages[stage].w, stages[stage].x, sums);
    stage = (stage + 1) % STAGES;
  }
#pragma unroll
  for (int i = 0; i < ROWS / 8 * 4; i++)
    shared->sums[warp][i / 4 * 8 + row_of(i % 4)][output_of(i % 4)] = sums[0][i / 4][i % 4];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * 16; i += 256) {
    int row = i / 16, output = i % 16;
    float total = shared->sums[0][row][output];
    for (int s = 1; s * a.slice < a.k; s++) total += shared->sums[s][row][output];
    put(a, r, r.row + row, blockIdx.x * 16 + output, total);
  }
}

// grid = (runs of 16 outputs, runs of 16 or 32 rows, batch), 256 threads.
extern "C" __global__ void __launch_bounds__(256) gemm_mma_few(const GemmArgument a) {
  SHARED(MmaFewShared<16>, shared);
  mma_few<16>(a, shared);
}
KERNEL_SHARED(gemm_mma_few, MmaFewShared<16>)
extern "C" __global__ void __launch_bounds__(256) gemm_mma_some(const GemmArgument a) {
  SHARED(MmaFewShared<32>, shared);
  mma_few<32>(a, shared);
}
KERNEL_SHARED(gemm_mma_some, MmaFewShared<32>)

struct MmaManyShared {
  MmaStage<128, 128> stages[STAGES];
  // Sums of the slices so far, touched once a slice: registers have no room for them.
  float totals[64][256];
};

// 128 outputs by 128 rows: eight warps, two by four, of 64 outputs by 32 rows.
extern "C" __global__ void __launch_bounds__(256) gemm_mma_many(const GemmArgument a) {
  SHARED(MmaManyShared, shared);
  Rows r = rows_of(a, 128, 2, 2);
  if (r.row >= r.end) return;
  int warp = threadIdx.x / 32, outputs = warp / 4 * 64, rows = warp % 4 * 32;
  float sums[4][4][4];
#pragma unroll
  for (int i = 0; i < 64; i++) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (s * 64 < a.k)
      fetch_stage<128, 128, 256>(a, r, &shared->stages[s], threadIdx.x, s * 64, a.k);
    copy_async_commit();
  }
  int stage = 0;
  for (int k = 0; k < a.k; k += 64) {
    if (k > 0 && k % a.slice == 0) {
#pragma unroll
      for (int i = 0; i < 64; i++) {
        float sum = sums[i / 16][i / 4 % 4][i % 4], *total = &shared->totals[i][threadIdx.x];
        *total = k == a.slice ? sum : *total + sum;
        sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
      }
    }
    copy_async_wait(STAGES - 2);
    // The copies of this stage are there, and all warps are done with the stage before it, which
    // is filled next.
    __syncthreads();
    int ahead = k + (STAGES - 1) * 64, target = (stage + STAGES - 1) % STAGES;
    if (ahead < a.k)
      fetch_stage<128, 128, 256>(a, r, &shared->stages[target], threadIdx.x, ahead, a.k);
    copy_async_commit();
    const MmaStage<128, 128>* now = &shared->stages[stage];
    multiply_stage<4, 2>(now->w + outputs * 8, now->x + rows * 8, sums);
    stage = (stage + 1) % STAGES;
  }
#pragma unroll
  for (int i = 0; i < 64; i++) {
    float sum = sums[i / 16][i / 4 % 4][i % 4];
    float total = a.k > a.slice ? shared->totals[i][threadIdx.x] + sum : sum;
    int row = rows + i / 4 % 4 * 8 + row_of(i % 4);
    int output = outputs + i / 16 * 16 + output_of(i % 4);
    put(a, r, r.row + row, blockIdx.x * 128 + output, total);
  }
}
KERNEL_SHARED(gemm_mma_many, MmaManyShared)

struct RoundArgument {
  const float* x;
  bf16* out;
  int64_t x_stride, out_stride;
  int32_t width, unused;
};
// Rows rounded to bf16, for all products that read them. grid = (runs of 256 values, rows).
extern "C" __global__ void __launch_bounds__(256) round_rows(const RoundArgument a) {
  int c = blockIdx.x * 256 + threadIdx.x;
  if (c < a.width)
    a.out[blockIdx.y * a.out_stride + c] = to_bf16(a.x[blockIdx.y * a.x_stride + c]);
}
KERNEL(round_rows)
