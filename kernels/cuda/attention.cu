// Attention in f32 arithmetic (attention.cuh says what is attended), the merge of all forms, and
// what is written to the cache.
//
// A block of threads has up to 32 queries of one span that share their keys (heads of a group,
// rows that follow each other), eight threads to a query. Keys and values pass through shared
// memory 64 columns at a time and are read once for all 32. Bound by arithmetic: a cached value is
// multiplied by each query twice.
#include "attention.cuh"

// 64 columns, and four more that spread rows over the banks.
#define PITCH 68

struct AttendShared {
  float q[QUERIES][MOST_WIDTH + 4];
  float tile[TILE * PITCH];
  float weights[QUERIES][PITCH];
  // Weighted values of the segments so far, touched once a segment.
  float totals[MOST_VALUES / 8][256];
};

// Value `column` of the key or of the value at `place` of a tile; `block` has the tile.
template <class E>
DEVICE float cached(const AttendArgument& a, const char* block, int key_head, int tile_at,
                    int place, int column, bool is_value) {
  const E* values = (const E*)block;
  int width = a.own + a.more;
  if (a.source == LATENTS) return to_f32(values[(int64_t)place * width + column]);
  if (a.source == HEADS) {
    if (!is_value) return to_f32(values[((int64_t)key_head * a.own + column) * TILE + place]);
    int64_t keys = (int64_t)a.key_heads * a.own * TILE;
    return to_f32(values[keys + ((int64_t)key_head * TILE + place) * a.values + column]);
  }
  if (!is_value && column >= a.own)
    return to_f32(values[(int64_t)place * (a.rank + a.more) + a.rank + column - a.own]);
  int64_t row = a.bases[blockIdx.y] + tile_at % SEGMENT + place;
  int64_t of_head = (row * a.heads + key_head) * (a.own + a.values);
  return a.expanded[of_head + (is_value ? a.own : 0) + column];
}

// Columns first..first+63 of the tile's keys or values, zero where there are none.
template <class E>
DEVICE void stage(const AttendArgument& a, float* tile, const char* block, int key_head,
                  int tile_at, int seen, int first, bool is_value) {
  int width = is_value ? a.values : a.own + a.more;
  bool columns = a.source == HEADS && !is_value;
#pragma unroll 2
  for (int i = threadIdx.x; i < TILE * 64; i += 256) {
    int place = columns ? i % TILE : i / 64, column = columns ? i / TILE : i % 64;
    float x = 0.0f;
    if (place < seen && first + column < width)
      x = cached<E>(a, block, key_head, tile_at, place, first + column, is_value);
    tile[place * PITCH + column] = x;
  }
}

// What a thread has of its query: eight columns of each 64, and the query's pair.
struct Attended {
  float values[MOST_VALUES / 64][8];
  float max, sum;
};

DEVICE void clear(Attended& x) {
  x.max = minus_infinity();
  x.sum = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST_VALUES / 8; i++) x.values[i / 8][i % 8] = 0.0f;
}

// Column of value i of run c.
DEVICE int column_of(int c, int i) { return c * 64 + i / 4 * 32 + threadIdx.x % 8 * 4 + i % 4; }

// Attends to the tile at `tile_at`, of which some query of the block sees `seen` positions and this
// one those up to `position`.
template <class E>
DEVICE void attend_tile(const AttendArgument& a, AttendShared* shared, const char* block,
                        int key_head, int tile_at, int seen, int position, Attended& so_far) {
  int query = threadIdx.x / 8, part = threadIdx.x % 8;
  int width = a.own + a.more;
  float scores[8];
#pragma unroll
  for (int i = 0; i < 8; i++) scores[i] = 0.0f;
  for (int c = 0; c < width; c += 64) {
    __syncthreads();
    stage<E>(a, shared->tile, block, key_head, tile_at, seen, c, false);
    __syncthreads();
#pragma unroll 1
    for (int d = 0; d < 64; d += 4) {
      float4 q = load4(&shared->q[query][c + d]);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float4 k = load4(shared->tile + (part + i * 8) * PITCH + d);
        scores[i] = fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, fmaf(q.x, k.x, scores[i]))));
      }
    }
  }
  float largest = so_far.max;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    scores[i] = tile_at + part + i * 8 <= position ? scores[i] * a.scale : minus_infinity();
    largest = fmaxf(largest, scores[i]);
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  // A query that sees nothing here keeps what it has.
  bool sees = tile_at <= position;
  float shrink = sees ? expf(so_far.max - largest) : 1.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float weight = sees ? expf(scores[i] - largest) : 0.0f;
    shared->weights[query][part + i * 8] = weight;
    sum += weight;
  }
  so_far.sum = fmaf(so_far.sum, shrink, lanes_sum<8>(sum));
  so_far.max = largest;
#pragma unroll
  for (int c = 0; c < MOST_VALUES / 64; c++) {
    if (c * 64 < a.values) {
      __syncthreads();
      stage<E>(a, shared->tile, block, key_head, tile_at, seen, c * 64, true);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8; i++) so_far.values[c][i] *= shrink;
#pragma unroll 2
      for (int k = 0; k < TILE; k++) {
        float weight = shared->weights[query][k];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float4 v = load4(shared->tile + k * PITCH + half * 32 + part * 4);
          float* sums = so_far.values[c] + half * 4;
          sums[0] = fmaf(weight, v.x, sums[0]);
          sums[1] = fmaf(weight, v.y, sums[1]);
          sums[2] = fmaf(weight, v.z, sums[2]);
          sums[3] = fmaf(weight, v.w, sums[3]);
        }
      }
    }
  }
}

template <class E>
DEVICE void attend_rows(const AttendArgument& a, AttendShared* shared) {
  Span span = a.spans[blockIdx.y];
  // z is (rows, key head, heads of its group).
  int head_runs = (a.group + a.block_heads - 1) / a.block_heads;
  int z = blockIdx.z, of_group = z % head_runs * a.block_heads;
  z /= head_runs;
  int key_head = z % a.key_heads, end_row = end_row_of(span, a.which);
  int first_row = first_row_of(span, a.which) + z / a.key_heads * a.block_rows;
  if (first_row >= end_row) return;
  int query = threadIdx.x / 8;
  int row = first_row + query / a.block_heads, in_group = of_group + query % a.block_heads;
  int head = key_head * a.group + in_group;
  bool is_query = query < a.block_heads * a.block_rows && row < end_row && in_group < a.group;
  int64_t batch_row = span.first_row + row;
  if (span.write == NO_SLOT) {
    // Padding: zeros from the first block of threads of its row.
    for (int c = threadIdx.x % 8; is_query && blockIdx.x == 0 && !a.split && c < a.values; c += 8)
      a.out[batch_row * a.out_stride + head * a.out_head + c] = 0.0f;
    return;
  }
  int position = is_query ? span.start + row : -1;
  int last = span.start + min(first_row + a.block_rows, end_row) - 1;
  int segment = a.split ? (int)blockIdx.x : a.first_segment;
  int end_segment = a.split ? segment + 1 : a.end_segment;
  if (segment * SEGMENT > last) return;
  for (int i = threadIdx.x; i < QUERIES * MOST_WIDTH; i += 256) {
    int q = i / MOST_WIDTH, c = i % MOST_WIDTH;
    int64_t r = span.first_row + first_row + q / a.block_heads;
    int in = of_group + q % a.block_heads, h = key_head * a.group + in;
    float x = 0.0f;
    if (q < a.block_heads * a.block_rows && first_row + q / a.block_heads < end_row &&
        in < a.group) {
      if (c < a.own)
        x = a.q[r * a.q_stride + h * a.q_head + c];
      else if (c < a.own + a.more)
        x = a.q_more[r * a.more_stride + h * a.more_head + c - a.own];
    }
    shared->q[q][c] = x;
  }
  float max = minus_infinity(), sum = 0.0f;
  bool goes_on = !a.split && segment > 0 && is_query && position / SEGMENT >= segment;
  const float* before = part_of(a, batch_row, 0, head);
  if (goes_on) {
    max = before[a.values];
    sum = before[a.values + 1];
  }
#pragma unroll
  for (int i = 0; i < MOST_VALUES / 8; i++) {
    int c = column_of(i / 8, i % 8);
    shared->totals[i][threadIdx.x] = goes_on && c < a.values ? before[c] : 0.0f;
  }
  for (; segment < end_segment && segment * SEGMENT <= last; segment++) {
    Attended now;
    clear(now);
    int end = min(last + 1, (segment + 1) * SEGMENT);
    for (int at = segment * SEGMENT; at < end; at += TILE) {
      const char* block = a.arena + a.tables[span.table + at / TILE] + a.at;
      attend_tile<E>(a, shared, block, key_head, at, min(TILE, end - at), position, now);
    }
    float keep = 0.0f, scale = 1.0f;
    if (a.split) {
      max = now.max;
      sum = now.sum;
    } else {
      merge_factors(max, sum, now.max, now.sum, keep, scale);
    }
#pragma unroll
    for (int i = 0; i < MOST_VALUES / 8; i++) {
      float* total = &shared->totals[i][threadIdx.x];
      *total = fmaf(now.values[i / 8][i % 8], scale, *total * keep);
    }
  }
  if (!is_query || position / SEGMENT < a.first_segment) return;
  // What is known so far, or the result.
  bool is_part = a.split || position / SEGMENT >= a.end_segment;
  float* part = part_of(a, batch_row, segment - 1, head);
  float* out = is_part ? part : a.out + batch_row * a.out_stride + head * a.out_head;
  float factor = is_part ? 1.0f : 1.0f / sum;
#pragma unroll
  for (int i = 0; i < MOST_VALUES / 8; i++) {
    int c = column_of(i / 8, i % 8);
    if (c < a.values) out[c] = shared->totals[i][threadIdx.x] * factor;
  }
  if (is_part && threadIdx.x % 8 == 0) {
    part[a.values] = max;
    part[a.values + 1] = sum;
  }
}

// grid = (segments if split, spans, rows by key heads by heads of a group), 256 threads. Blocks of
// threads behind a span's rows or positions leave at once, so a graph is replayed with others.
extern "C" __global__ void __launch_bounds__(256) attend(const AttendArgument a) {
  SHARED(AttendShared, shared);
  if (a.narrow)
    attend_rows<bf16>(a, shared);
  else
    attend_rows<float>(a, shared);
}
KERNEL_SHARED(attend, AttendShared)

// ---- parts, and the cache

// Merges the parts of a row and head, segment after segment. Reads each once: bound by memory.
// grid = (heads, spans of one row), 128 threads.
extern "C" __global__ void __launch_bounds__(128) attend_merge(const AttendArgument a) {
  Span span = a.spans[blockIdx.y];
  int head = blockIdx.x, last = span.start / SEGMENT;
  float* out = a.out + span.first_row * a.out_stride + head * a.out_head;
  for (int c = threadIdx.x; c < a.values; c += 128) {
    if (span.write == NO_SLOT) {
      out[c] = 0.0f;
      continue;
    }
    float value = 0.0f, max = minus_infinity(), sum = 0.0f;
    for (int segment = 0; segment <= last; segment++) {
      const float* part = part_of(a, 0, segment, head);
      float keep, scale;
      merge_factors(max, sum, part[a.values], part[a.values + 1], keep, scale);
      value = fmaf(part[c], scale, value * keep);
    }
    out[c] = value * (1.0f / sum);
  }
}
KERNEL(attend_merge)

struct KvArgument {
  const float* rows;
  char* arena;
  const Span* spans;
  const int64_t* tables;
  int64_t stride, at;
  // `total` values of a row, `width` of each group of them; `columns` puts positions side by side.
  int32_t total, width, columns, narrow;
};

#define KV_RUN 32

DEVICE void set(float& to, float x) { to = x; }
DEVICE void set(bf16& to, float x) { to = to_bf16(x); }

template <class E>
DEVICE void write_run(const KvArgument& a, const Span& span, int c, int first, int last) {
  for (int r = first; r < last; r++) {
    int position = span.start + r, place = position % TILE;
    E* block = (E*)(a.arena + a.tables[span.table + position / TILE] + a.at);
    int64_t at = a.columns ? (int64_t)c * TILE + place
                           : ((int64_t)(c / a.width) * TILE + place) * a.width + c % a.width;
    set(block[at], a.rows[(span.first_row + r) * a.stride + c]);
  }
}

// Writes rows to their places in blocks, rounded to the cache's type: `[group][64][width]`, or
// `[width][64]` in columns. Bound by memory; a thread has one value of 32 rows, so that columns are
// written line by line. grid = (runs of 256 values, spans, runs of 32 rows), 256 threads.
extern "C" __global__ void __launch_bounds__(256) write_kv(const KvArgument a) {
  int c = blockIdx.x * 256 + threadIdx.x;
  Span span = a.spans[blockIdx.y];
  int first = blockIdx.z * KV_RUN, last = min(first + KV_RUN, span.rows);
  if (c >= a.total || span.write == NO_SLOT) return;
  if (a.narrow)
    write_run<bf16>(a, span, c, first, last);
  else
    write_run<float>(a, span, c, first, last);
}
KERNEL(write_kv)

struct GatherArgument {
  const char* arena;
  const Span* spans;
  const int64_t* tables;
  void* out;
  int64_t at, stride;
  // Values of a row in the cache, how many of them are copied, and of which segment.
  int32_t row, width, segment, narrow, rounded, unused;
  int32_t bases[32];
};

// The latents of a segment of some spans side by side, as products read them. A span's rows are
// those up to its last row that is expanded. grid = (runs of 256 values, spans, 1024).
extern "C" __global__ void __launch_bounds__(256) gather_latents(const GatherArgument a) {
  int c = blockIdx.x * 256 + threadIdx.x, place = blockIdx.z;
  Span span = a.spans[blockIdx.y];
  int position = a.segment * SEGMENT + place;
  if (c >= a.width || span.absorbed_from == 0 || position >= span.start + span.absorbed_from)
    return;
  const char* block = a.arena + a.tables[span.table + position / TILE] + a.at;
  int64_t from = (int64_t)(position % TILE) * a.row + c;
  float x = a.narrow ? to_f32(((const bf16*)block)[from]) : ((const float*)block)[from];
  int64_t to = (a.bases[blockIdx.y] + place) * a.stride + c;
  if (a.rounded)
    set(((bf16*)a.out)[to], x);
  else
    set(((float*)a.out)[to], x);
}
KERNEL(gather_latents)
