// Softmax attention over paged keys and values: src/mla and src/gqa on a device, with f32
// arithmetic whatever the cache holds, or with bf16 products of latents where they are asked for.
//
// A query row at position p sees positions 0..p. They are walked in tiles of one block (64), tiles
// in segments of 1,024; each segment has a largest score, a sum of weights and weighted values of
// its own, and segments are merged in order. Tiles and segments lie at absolute positions and a
// sum's order depends on nothing else, so a row has the same bits whether one block of threads
// walks all its segments, or as many blocks as there are segments (`parts`, then `merge`), or
// launches one after another (`running`), and whatever rows stand beside it.
//
// A block of threads has up to 32 queries of one span that share their keys (heads of a group,
// rows that follow each other), eight threads to a query. Keys and values pass through shared
// memory 64 columns at a time and are read once for all 32. Bound by arithmetic: a cached value is
// multiplied by each query twice.
#include "common.cuh"

#define TILE 64
#define SEGMENT 1024
#define QUERIES 32
#define MOST_WIDTH 576
#define MOST_VALUES 512
// 64 columns, and four more that spread rows over the banks.
#define PITCH 68

// Where keys and values are: in blocks as latent rows, in blocks as key columns and value rows, or
// expanded from latents to rows of their own, with the part that heads share in blocks.
enum Source { LATENTS, HEADS, EXPANDED };
// Which rows of a span: all, those before `absorbed_from`, or those from it on.
enum Which { ALL_ROWS, BEFORE_ABSORBED, ABSORBED };

struct AttendArgument {
  // A query is `own` values of q and then `more` of q_more.
  const float *q, *q_more, *expanded;
  const char* arena;
  const Span* spans;
  const int64_t* tables;
  // Results, or what is known after some segments: weighted values, largest score, sum of weights.
  float *out, *parts;
  int64_t q_stride, q_head, more_stride, more_head, out_stride, out_head, at;
  // `rank` of a latent row; `key_heads` of a block; `group` heads share keys, `block_heads` of
  // them go to a block of threads, with `block_rows` rows.
  int32_t heads, key_heads, group, block_heads, block_rows;
  int32_t own, more, values, rank, source, which, narrow;
  // Segments to walk; with `split` a block of threads has one of them.
  int32_t first_segment, end_segment, split, segments;
  float scale;
  // First row of `expanded` that is a span's.
  int32_t bases[32];
  int32_t unused;
};

struct AttendShared {
  float q[QUERIES][MOST_WIDTH + 4];
  float tile[TILE * PITCH];
  float weights[QUERIES][PITCH];
  // Weighted values of the segments so far, touched once a segment.
  float totals[MOST_VALUES / 8][256];
};

DEVICE int first_row_of(const Span& span, int which) {
  return which == ABSORBED ? span.absorbed_from : 0;
}
DEVICE int end_row_of(const Span& span, int which) {
  return which == BEFORE_ABSORBED ? span.absorbed_from : span.rows;
}

// What is known of a head after some segments: of a span's only row in one segment if split, else
// of a row in all so far.
DEVICE float* part_of(const AttendArgument& a, int64_t row, int segment, int head) {
  int64_t i = a.split ? (int64_t)blockIdx.y * a.segments + segment : row;
  return a.parts + (i * a.heads + head) * (a.values + 2);
}

// Merges what a segment gave into what those before gave: for each value keep * x + scale * y. A
// query sees its first segment, so one of the two saw something; of a segment behind the query's
// position nothing is kept.
DEVICE void merge_factors(float& max, float& sum, float other_max, float other_sum, float& keep,
                          float& scale) {
  float largest = fmaxf(max, other_max);
  keep = expf(max - largest);
  scale = expf(other_max - largest);
  sum = fmaf(other_sum, scale, sum * keep);
  max = largest;
}

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

// ---- latents on tensor cores

// Positions of a tile here: three of them fit beside the queries in shared memory.
#define LATENT_TILE 32
#define LATENT_STAGES 3
// Chunks of eight values of the widest row.
#define CHUNKS (MOST_WIDTH / 8)

struct LatentShared {
  uint4 q[QUERIES * CHUNKS], tiles[LATENT_STAGES][LATENT_TILE * CHUNKS];
  float scores[QUERIES][LATENT_TILE + 1];
  // Rounded weights, `[query][32]`.
  uint4 weights[QUERIES * 4];
  // Of each query: in its segment, how much values so far shrink, in the segments before, and the
  // factors of a merge.
  float max[QUERIES], sum[QUERIES], shrink[QUERIES], total_max[QUERIES], total_sum[QUERIES],
      keep[QUERIES], scale[QUERIES];
};

// Where a chunk is: no two of a column in eight rows share a bank.
DEVICE int latent_at(int row, int chunk) { return row * CHUNKS + (chunk ^ (row & 7)); }
DEVICE int weight_at(int query, int chunk) { return query * 4 + (chunk ^ (query / 2 & 3)); }

// Copies the rows of a tile, zero behind the last: what is not a number must meet no weight.
DEVICE void fetch_latents(const AttendArgument& a, const Span& span, uint4* tile, int at,
                          int last) {
  int chunks = (a.own + a.more) / 8;
  for (int i = threadIdx.x; i < LATENT_TILE * chunks; i += 256) {
    int row = i / chunks, chunk = i % chunks, position = at + row;
    uint4* to = tile + latent_at(row, chunk);
    if (position <= last) {
      const char* block = a.arena + a.tables[span.table + position / TILE] + a.at;
      copy_async_16(to, block + ((int64_t)(position % TILE) * chunks + chunk) * 16);
    } else {
      *to = make_uint4(0, 0, 0, 0);
    }
  }
}

// Scores of a tile: each warp has 16 queries by 8 positions, in two sums of every other 16 values.
DEVICE void latent_scores(const AttendArgument& a, LatentShared* shared, const uint4* tile) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int first = warp / 4 * 16, column = warp % 4 * 8;
  float sums[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
  for (int k = 0; k < (a.own + a.more) / 8; k += 4) {
    uint32_t q[2][4], keys[4];
    load_matrix_x4(keys, tile + latent_at(column + lane % 8, k + lane / 8), false);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int chunk = k + i * 2 + lane / 16;
      load_matrix_x4(q[i], shared->q + latent_at(first + lane % 16, chunk), false);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) mma_bf16_16816(sums[i], q[i], keys + i * 2);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    shared->scores[first + lane / 4 + i / 2 * 8][column + lane % 4 * 2 + i % 2] =
        sums[0][i] + sums[1][i];
}

// Turns scores into rounded weights. A weight is summed as it multiplies: rounded.
DEVICE void latent_weights(const AttendArgument& a, LatentShared* shared, int at, int position) {
  int query = threadIdx.x / 8, part = threadIdx.x % 8;
  float scores[4], before = shared->max[query], largest = before, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float score = shared->scores[query][part + i * 8] * a.scale;
    scores[i] = at + part + i * 8 <= position ? score : minus_infinity();
    largest = fmaxf(largest, scores[i]);
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  bool sees = at <= position;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    bf16 weight = to_bf16(sees ? expf(scores[i] - largest) : 0.0f);
    ((bf16*)(shared->weights + weight_at(query, i)))[part] = weight;
    sum += to_f32(weight);
  }
  sum = lanes_sum<8>(sum);
  if (part == 0) {
    float shrink = sees ? expf(before - largest) : 1.0f;
    shared->shrink[query] = shrink;
    shared->sum[query] = fmaf(shared->sum[query], shrink, sum);
    shared->max[query] = largest;
  }
}

// Adds weighted latents: each warp has 64 columns of all queries.
DEVICE void latent_values(const AttendArgument& a, LatentShared* shared, const uint4* tile,
                          float (*sums)[8][4]) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t weights[2][2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int at = weight_at(m * 16 + lane % 16, k * 2 + lane / 16);
      load_matrix_x4(weights[m][k], shared->weights + at, false);
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
      sums[m][i / 4][i % 4] *= shared->shrink[m * 16 + lane / 4 + i % 4 / 2 * 8];
  }
#pragma unroll
  for (int pair = 0; pair < 4; pair++) {
    int column = warp * 64 + pair * 16;
    if (column >= a.values) break;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      uint32_t values[4];
      int at = latent_at(k * 16 + lane % 16, column / 8 + lane / 16);
      load_matrix_x4(values, tile + at, true);
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 2; n++)
          mma_bf16_16816(sums[m][pair * 2 + n], weights[m][k], values + n * 2);
    }
  }
}

// `attend` for latents that the cache holds in bf16, with queries and weights rounded to it: the
// same grid, segments and parts. Tiles pass through shared memory once for all 32 queries, two on
// their way while one is multiplied: bound by the reads of latents where one row's heads are 32 or
// fewer; more heads read them again, from cache. One block of threads to a multiprocessor.
extern "C" __global__ void __launch_bounds__(256) attend_latents(const AttendArgument a) {
  SHARED(LatentShared, shared);
  Span span = a.spans[blockIdx.y];
  int head_runs = (a.group + a.block_heads - 1) / a.block_heads;
  int of_group = blockIdx.z % head_runs * a.block_heads, end_row = end_row_of(span, a.which);
  int first_row = first_row_of(span, a.which) + blockIdx.z / head_runs * a.block_rows;
  if (first_row >= end_row) return;
  // Row and head of a query, or no row.
  auto row_of = [&](int query) {
    int row = first_row + query / a.block_heads;
    bool is_query = query < a.block_heads * a.block_rows && row < end_row &&
                    of_group + query % a.block_heads < a.group;
    return is_query ? row : -1;
  };
  auto head_of = [&](int query) { return of_group + query % a.block_heads; };
  int t = threadIdx.x, own_row = row_of(t / 8);
  if (span.write == NO_SLOT) {
    for (int c = t % 8; own_row >= 0 && blockIdx.x == 0 && !a.split && c < a.values; c += 8)
      a.out[span.first_row * a.out_stride + head_of(t / 8) * a.out_head + c] = 0.0f;
    return;
  }
  int position = own_row >= 0 ? span.start + own_row : -1;
  int last = span.start + min(first_row + a.block_rows, end_row) - 1;
  int start = a.split ? (int)blockIdx.x * SEGMENT : 0;
  if (start > last) return;
  if (a.split) last = min(last, start + SEGMENT - 1);
#pragma unroll
  for (int s = 0; s < LATENT_STAGES - 1; s++) {
    int at = start + s * LATENT_TILE;
    if (at <= last) fetch_latents(a, span, shared->tiles[s], at, last);
    copy_async_commit();
  }
  for (int i = t; i < QUERIES * CHUNKS * 4; i += 256) {
    int query = i / (CHUNKS * 4), c = i % (CHUNKS * 4) * 2, row = row_of(query);
    float2 x = make_float2(0.0f, 0.0f);
    if (row >= 0 && c < a.own + a.more) {
      int64_t r = span.first_row + row, head = head_of(query);
      const float* q = c < a.own ? a.q + r * a.q_stride + head * a.q_head + c
                                 : a.q_more + r * a.more_stride + head * a.more_head + c - a.own;
      x = make_float2(q[0], q[1]);
    }
    ((uint32_t*)(shared->q + latent_at(query, c / 8)))[c % 8 / 2] = pack_bf16(x.x, x.y);
  }
  if (t < QUERIES) {
    shared->max[t] = shared->total_max[t] = minus_infinity();
    shared->sum[t] = shared->total_sum[t] = 0.0f;
  }
  float sums[2][8][4], totals[2][8][4];
#pragma unroll
  for (int i = 0; i < 64; i++)
    sums[i / 32][i / 4 % 8][i % 4] = totals[i / 32][i / 4 % 8][i % 4] = 0.0f;
  int stage = 0;
  for (int at = start; at <= last; at += LATENT_TILE) {
    copy_async_wait(LATENT_STAGES - 2);
    // This tile is there, and all are done with the one before it, which is filled next.
    __syncthreads();
    int ahead = at + (LATENT_STAGES - 1) * LATENT_TILE;
    int target = (stage + LATENT_STAGES - 1) % LATENT_STAGES;
    if (ahead <= last) fetch_latents(a, span, shared->tiles[target], ahead, last);
    copy_async_commit();
    latent_scores(a, shared, shared->tiles[stage]);
    __syncthreads();
    latent_weights(a, shared, at, position);
    __syncthreads();
    latent_values(a, shared, shared->tiles[stage], sums);
    stage = (stage + 1) % LATENT_STAGES;
    if ((at + LATENT_TILE) % SEGMENT != 0 && at + LATENT_TILE <= last) continue;
    if (t < QUERIES) {
      merge_factors(shared->total_max[t], shared->total_sum[t], shared->max[t], shared->sum[t],
                    shared->keep[t], shared->scale[t]);
      shared->max[t] = minus_infinity();
      shared->sum[t] = 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) {
      int query = i / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8;
      float *sum = &sums[i / 32][i / 4 % 8][i % 4], *total = &totals[i / 32][i / 4 % 8][i % 4];
      *total = fmaf(*sum, shared->scale[query], *total * shared->keep[query]);
      *sum = 0.0f;
    }
  }
#pragma unroll
  for (int half = 0; half < 4; half++) {
    int query = half * 8 + t % 32 / 4, row = row_of(query), head = head_of(query);
    if (row < 0) continue;
    float* part = part_of(a, 0, start / SEGMENT, head);
    int64_t batch_row = span.first_row + row;
    float* out = a.split ? part : a.out + batch_row * a.out_stride + head * a.out_head;
    float factor = a.split ? 1.0f : 1.0f / shared->total_sum[query];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int c = t / 32 * 64 + i / 2 * 8 + t % 4 * 2 + i % 2;
      if (c < a.values) out[c] = totals[half / 2][i / 2][half % 2 * 2 + i % 2] * factor;
    }
    if (a.split && t / 32 == 0 && t % 4 == 0) {
      part[a.values] = shared->total_max[query];
      part[a.values + 1] = shared->total_sum[query];
    }
  }
}
KERNEL_SHARED(attend_latents, LatentShared)

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
