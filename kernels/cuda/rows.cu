// Rows that outlive their step: the last hidden row of every span goes to its slot, and those that
// logits are asked for are gathered. Bound by the launch: a few kilobytes a row.
#include "common.cuh"

struct KeepArgument {
  const float* x;
  const Span* spans;
  const Snapshot* snapshots;
  char* arena;
  int64_t x_stride, at;
  int32_t width, unused;
};

// grid = (runs of 256 values, spans, 1 + most snapshots of a span), 256 threads: block z = 0 keeps
// a span's last row, z = i + 1 the row of its snapshot i.
extern "C" __global__ void __launch_bounds__(256) keep_last_rows(const KeepArgument a) {
  Span span = a.spans[blockIdx.y];
  int64_t slot = span.write;
  int rows = span.rows;
  if (blockIdx.z > 0) {
    int i = blockIdx.z - 1;
    if (i >= span.snapshots_len) return;
    Snapshot snapshot = a.snapshots[span.snapshots + i];
    slot = snapshot.slot;
    rows = snapshot.after_rows;
  }
  int c = blockIdx.x * 256 + threadIdx.x;
  if (slot < 0 || c >= a.width) return;
  float* kept = (float*)(a.arena + slot + a.at);
  kept[c] = a.x[(int64_t)(span.first_row + rows - 1) * a.x_stride + c];
}
KERNEL(keep_last_rows)

struct GatherRowsArgument {
  const float* x;
  const char* arena;
  const int64_t* origins;
  float* out;
  int64_t x_stride, out_stride;
  int32_t width, unused;
};

// grid = (runs of 256 values, rows), 256 threads. An origin is a row of x, or -1 - the byte at which
// a row lies in the arena.
extern "C" __global__ void __launch_bounds__(256) gather_rows(const GatherRowsArgument a) {
  int64_t origin = a.origins[blockIdx.y];
  const float* row =
      origin >= 0 ? a.x + origin * a.x_stride : (const float*)(a.arena + (-1 - origin));
  int c = blockIdx.x * 256 + threadIdx.x;
  if (c < a.width) a.out[blockIdx.y * a.out_stride + c] = row[c];
}
KERNEL(gather_rows)
