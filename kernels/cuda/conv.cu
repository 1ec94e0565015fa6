// Short causal convolution with a carried window, then SiLU: src/conv/naive.rs on a device.
//
// y[t] = silu(sum over j of taps[j] x[t - W + 1 + j]), oldest tap first. A thread has one channel
// of a run of rows, with the last W rows in registers, so each row is read about once, by
// neighbouring threads at neighbouring addresses. Bound by memory for many rows, by the launch for
// few.
//
// The thread that has the first run of a span also writes the windows that the span leaves: it
// alone has read the old window, which may lie where the new one goes.
#include "common.cuh"

struct ConvArgument {
  const float *x, *taps;
  float* out;
  const Span* spans;
  const Snapshot* snapshots;
  char* arena;
  int64_t x_stride, out_stride, at;
  int32_t channels, width, run, unused;
};

// The channel's part of a window: W - 1 rows of `channels` values.
DEVICE float* window_of(const ConvArgument& a, int64_t slot, int channel) {
  return (float*)(a.arena + slot + a.at) + channel;
}

template <int W>
DEVICE void keep(const ConvArgument& a, const Span& span, int64_t slot, int rows, int channel,
                 const float* before) {
  float* window = window_of(a, slot, channel);
#pragma unroll
  for (int j = 0; j < W - 1; j++) {
    // Row `rows + j` of the old window followed by the span's rows.
    int at = rows + j - (W - 1);
    float value = 0.0f;
    if (at >= 0) {
      value = a.x[(span.first_row + at) * a.x_stride + channel];
    } else {
#pragma unroll
      for (int i = 0; i < W - 1; i++)
        if (i == rows + j) value = before[i];
    }
    window[(int64_t)j * a.channels] = value;
  }
}

template <int W>
DEVICE void conv_run(const ConvArgument& a, const Span& span, int channel, int first, int last) {
  float taps[W], rows[W], before[W - 1];
#pragma unroll
  for (int j = 0; j < W; j++) taps[j] = a.taps[(int64_t)j * a.channels + channel];
#pragma unroll
  for (int j = 0; j < W - 1; j++) {
    before[j] = 0.0f;
    if (first == 0 && span.read != NO_SLOT)
      before[j] = window_of(a, span.read, channel)[(int64_t)j * a.channels];
    // Later runs begin at least W - 1 rows behind the window.
    rows[j] = first == 0 ? before[j]
                         : a.x[(span.first_row + first + j - (W - 1)) * a.x_stride + channel];
  }
  for (int r = first; r < last; r++) {
    rows[W - 1] = a.x[(span.first_row + r) * a.x_stride + channel];
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < W; j++) sum += taps[j] * rows[j];
    a.out[(span.first_row + r) * a.out_stride + channel] = silu(sum);
#pragma unroll
    for (int j = 0; j < W - 1; j++) rows[j] = rows[j + 1];
  }
  if (first > 0) return;
  for (int i = 0; i < span.snapshots_len; i++) {
    Snapshot snapshot = a.snapshots[span.snapshots + i];
    keep<W>(a, span, snapshot.slot, snapshot.after_rows, channel, before);
  }
  keep<W>(a, span, span.write, span.rows, channel, before);
}

// grid = (runs of 128 channels, spans, runs of rows of the longest span), 128 threads.
extern "C" __global__ void __launch_bounds__(128) conv(const ConvArgument a) {
  int channel = blockIdx.x * 128 + threadIdx.x;
  Span span = a.spans[blockIdx.y];
  int first = blockIdx.z * a.run, last = min(first + a.run, span.rows);
  if (channel >= a.channels || first >= last) return;
  if (span.write == NO_SLOT) {
    a.out[span.first_row * a.out_stride + channel] = 0.0f;
    return;
  }
  switch (a.width) {
    case 2: return conv_run<2>(a, span, channel, first, last);
    case 3: return conv_run<3>(a, span, channel, first, last);
    case 4: return conv_run<4>(a, span, channel, first, last);
    case 5: return conv_run<5>(a, span, channel, first, last);
    case 6: return conv_run<6>(a, span, channel, first, last);
    case 7: return conv_run<7>(a, span, channel, first, last);
    default: return conv_run<8>(a, span, channel, first, last);
  }
}
KERNEL(conv)
