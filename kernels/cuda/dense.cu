// Element-wise functions, norms, rotary positions, and the embedding.
//
// All are bound by memory for many rows and by the launch for few. A row's values are read and
// written once (norms read them twice, the second time from cache), neighbouring threads at
// neighbouring addresses.
#include "common.cuh"

struct RowsArgument {
  float* x;
  const float* y;
  int64_t x_stride, y_stride;
  int32_t width, by_four;
};

// x = f(x, y), four values a thread. grid = (runs of 1024 values, rows), 256 threads.
template <class Function>
DEVICE void in_place(const RowsArgument& a, Function f) {
  float* x = a.x + blockIdx.y * a.x_stride;
  const float* y = a.y + blockIdx.y * a.y_stride;
  if (a.by_four) {
    int c = (blockIdx.x * 256 + threadIdx.x) * 4;
    if (c >= a.width) return;
    float4 p = load4(x + c), q = load4(y + c);
    store4(x + c, make_float4(f(p.x, q.x), f(p.y, q.y), f(p.z, q.z), f(p.w, q.w)));
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int c = blockIdx.x * 1024 + i * 256 + threadIdx.x;
      if (c < a.width) x[c] = f(x[c], y[c]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) add(const RowsArgument a) {
  in_place(a, [](float x, float y) { return x + y; });
}
extern "C" __global__ void __launch_bounds__(256) silu_mul(const RowsArgument a) {
  in_place(a, [](float gate, float up) { return silu(gate) * up; });
}
// Here y is x.
extern "C" __global__ void __launch_bounds__(256) sigmoid_rows(const RowsArgument a) {
  in_place(a, [](float x, float) { return sigmoid(x); });
}
KERNEL(add)
KERNEL(silu_mul)
KERNEL(sigmoid_rows)

enum GateKind { NO_GATE, SIGMOID_GATE, SILU_GATE };

struct NormArgument {
  const float *x, *weights, *gate;
  float* out;
  int64_t x_stride, gate_stride, out_stride;
  int32_t rows, width, gate_kind;
  float eps, offset;
  int32_t unused;
};

DEVICE void norm_value(const NormArgument& a, int64_t row, int c, float factor) {
  float y = a.x[row * a.x_stride + c] * factor * (a.weights[c] + a.offset);
  if (a.gate_kind != NO_GATE) {
    float gate = a.gate[row * a.gate_stride + c];
    y *= a.gate_kind == SIGMOID_GATE ? sigmoid(gate) : silu(gate);
  }
  a.out[row * a.out_stride + c] = y;
}

// out = x / sqrt(mean(x^2) + eps) (weights + offset), times the gate. A row to a block of 256
// threads, for wide rows; out may be x, since a thread reads again only what it writes.
struct NormShared {
  float sums[8];
};
extern "C" __global__ void __launch_bounds__(256) norm_wide(const NormArgument a) {
  SHARED(NormShared, shared);
  int64_t row = blockIdx.x;
  const float* x = a.x + row * a.x_stride;
  float sum = 0.0f;
  for (int c = threadIdx.x; c < a.width; c += 256) sum += x[c] * x[c];
  sum = block_sum<8>(sum, shared->sums);
  float factor = 1.0f / sqrtf(sum / (float)a.width + a.eps);
  for (int c = threadIdx.x; c < a.width; c += 256) norm_value(a, row, c, factor);
}
KERNEL_SHARED(norm_wide, NormShared)

// The same with a row to a warp, for the rows of heads: eight rows to a block.
extern "C" __global__ void __launch_bounds__(256) norm_narrow(const NormArgument a) {
  int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (row >= a.rows) return;
  const float* x = a.x + row * a.x_stride;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < a.width; c += 32) sum += x[c] * x[c];
  float factor = 1.0f / sqrtf(lanes_sum<32>(sum) / (float)a.width + a.eps);
  for (int c = threadIdx.x % 32; c < a.width; c += 32) norm_value(a, row, c, factor);
}
KERNEL(norm_narrow)

struct AnglesArgument {
  const int32_t* positions;
  const double* frequencies;
  float* out;
  int32_t rows, half;
};
// A row's cosines, then its sines. The product is made in double precision: in single precision
// the angle is lost beyond a few thousand positions. A thread to a pair.
extern "C" __global__ void __launch_bounds__(256) angles(const AnglesArgument a) {
  int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (i >= (int64_t)a.rows * a.half) return;
  int64_t row = i / a.half, pair = i % a.half;
  double angle = (double)a.positions[row] * a.frequencies[pair];
  a.out[row * 2 * a.half + pair] = (float)cos(angle);
  a.out[row * 2 * a.half + a.half + pair] = (float)sin(angle);
}
KERNEL(angles)

struct RotateArgument {
  float* x;
  const float* angles;
  int64_t x_stride, angles_stride;
  int32_t heads, head_dim, half, unused;
};
// Pairs (i, i + half) of every head, a thread to a pair. grid = (runs of 256 pairs, rows).
extern "C" __global__ void __launch_bounds__(256) rotate(const RotateArgument a) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= a.heads * a.half) return;
  int head = i / a.half, c = i % a.half;
  const float* row = a.angles + blockIdx.y * a.angles_stride;
  float* x = a.x + blockIdx.y * a.x_stride + head * a.head_dim;
  float cosine = row[c], sine = row[a.half + c], p = x[c], q = x[a.half + c];
  x[c] = p * cosine - q * sine;
  x[a.half + c] = q * cosine + p * sine;
}
KERNEL(rotate)

enum Dtype { F32, BF16, F16 };

struct EmbedArgument {
  const uint32_t* tokens;
  const void* table;
  float* out;
  int64_t out_stride;
  int32_t width, vocabulary, dtype, unused;
};
// out[row] = table[tokens[row]], widened. A token that is not in the table gives not-a-number.
// grid = (runs of 256 values, rows).
extern "C" __global__ void __launch_bounds__(256) embed(const EmbedArgument a) {
  int c = blockIdx.x * 256 + threadIdx.x;
  if (c >= a.width) return;
  uint32_t token = a.tokens[blockIdx.y];
  int64_t at = (int64_t)token * a.width + c;
  float value = nanf("");
  if (token < (uint32_t)a.vocabulary) {
    if (a.dtype == F32)
      value = ((const float*)a.table)[at];
    else if (a.dtype == BF16)
      value = to_f32(((const bf16*)a.table)[at]);
    else
      value = f16_to_f32(((const uint16_t*)a.table)[at]);
  }
  a.out[blockIdx.y * a.out_stride + c] = value;
}
KERNEL(embed)
