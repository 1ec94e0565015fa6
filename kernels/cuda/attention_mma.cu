// Attention with products of bf16 on tensor cores and sums in f32 (attention.cuh says what is
// attended), over a cache of bf16. Queries and weights are rounded as they are multiplied, and a
// weight is summed as it multiplies: rounded.
//
// Heads have a warp for each 16 queries, latents one for each 64 columns of 32 queries, since a
// latent is wider than a warp has registers for. What a tensor core gives for a row of a tile
// depends on no other row of it.
#include "attention.cuh"

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

// Turns scores into rounded weights.
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

// ---- heads on tensor cores

// A kernel for keys of up to `WIDTH` values and values of up to `VALUES`: `ROWS` warps have 16
// queries each, `COLUMNS` warps the same ones and each its part of the values. `IN_COLUMNS` keys
// have their positions side by side.
template <int W, int V, int ROWS, int COLUMNS, bool IN_COLUMNS>
struct Form {
  static constexpr int width = W, values = V, columns = COLUMNS, queries = ROWS * 16;
  static constexpr int threads = ROWS * COLUMNS * 32, own_values = V / COLUMNS;
  static constexpr bool in_columns = IN_COLUMNS;
  // Chunks of eight values from a row to the next.
  static constexpr int key_pitch = IN_COLUMNS ? TILE / 8 : W / 8, value_pitch = V / 8;
};

template <class F>
struct HeadTile {
  uint4 keys[TILE * F::width / 8], values[TILE * F::values / 8];
};

template <class F>
struct HeadsShared {
  HeadTile<F> stages[2];
  // Weighted values of the segments so far, touched once a segment.
  float totals[F::own_values / 2][F::threads];
};

// Where a chunk is: no two of a column in eight rows share a bank.
template <int PITCH>
DEVICE int head_at(int row, int chunk) {
  return row * PITCH + (chunk ^ (row & 7));
}

// Copies rows of `chunks` chunks that are `stride` bytes apart to column `column` of a tile, zero
// where there are none: what is not a number must meet no weight.
template <int PITCH, int THREADS>
DEVICE void fetch_rows(uint4* tile, int column, const char* from, int64_t stride, int chunks,
                       int rows, int seen) {
  for (int i = threadIdx.x; i < rows * chunks; i += THREADS) {
    int row = i / chunks, chunk = i % chunks;
    uint4* to = tile + head_at<PITCH>(row, column + chunk);
    if (row < seen)
      copy_async_16(to, from + row * stride + chunk * 16);
    else
      *to = make_uint4(0, 0, 0, 0);
  }
}

// Copies the tile at `at`, of which some query of the block sees `seen` positions. A key column is
// copied whole: a position of it that nobody sees gives a score that nobody looks at.
template <class F>
DEVICE void fetch_heads(const AttendArgument& a, const Span& span, HeadTile<F>* tile,
                        int key_head, int at, int seen) {
  constexpr int keys = F::key_pitch, values = F::value_pitch, threads = F::threads;
  const char* block = a.arena + a.tables[span.table + at / TILE] + a.at;
  if (F::in_columns) {
    int64_t own = (int64_t)key_head * TILE * 2, before = (int64_t)a.key_heads * a.own * TILE * 2;
    fetch_rows<keys, threads>(tile->keys, 0, block + own * a.own, TILE * 2, TILE / 8, a.own, a.own);
    const char* from = block + before + own * a.values;
    fetch_rows<values, threads>(tile->values, 0, from, a.values * 2, a.values / 8, TILE, seen);
  } else {
    int64_t row = a.bases[blockIdx.y] + at % SEGMENT, of_head = (a.own + a.values) * 2;
    const char* from = (const char*)a.expanded + (row * a.heads + key_head) * of_head;
    int64_t stride = a.heads * of_head, shared = (a.rank + a.more) * 2;
    fetch_rows<keys, threads>(tile->keys, 0, from, stride, a.own / 8, TILE, seen);
    fetch_rows<keys, threads>(tile->keys, a.own / 8, block + a.rank * 2, shared, a.more / 8, TILE,
                              seen);
    fetch_rows<values, threads>(tile->values, 0, from + a.own * 2, stride, a.values / 8, TILE,
                                seen);
  }
}

// What a lane has of its two queries, eight rows apart: its columns of fragments, and of each query
// the largest score and its own part of the sum of weights.
template <class F>
struct Fragments {
  uint32_t q[F::width / 16][4];
  float sums[F::own_values / 8][4], max[2], sum[2];
};

// Scores of 16 queries by the 64 positions of a tile.
template <class F>
DEVICE void head_scores(const AttendArgument& a, const uint4* keys, const Fragments<F>& f,
                        float (*scores)[4]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 32; i++) scores[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int k = 0; k < F::width / 16; k++) {
    if (k * 16 >= a.own + a.more) break;
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      uint32_t right[4];
      int row = F::in_columns ? k * 16 + lane % 16 : pair * 16 + lane / 16 * 8 + lane % 8;
      int chunk = F::in_columns ? pair * 2 + lane / 16 : k * 2 + lane / 8 % 2;
      load_matrix_x4(right, keys + head_at<F::key_pitch>(row, chunk), F::in_columns);
      mma_bf16_16816(scores[pair * 2], f.q[k], right);
      mma_bf16_16816(scores[pair * 2 + 1], f.q[k], right + 2);
    }
  }
}

// Turns scores into rounded weights, as the left operand of the next product. Weighted values so
// far shrink to the new largest score.
template <class F>
DEVICE void head_weights(const AttendArgument& a, Fragments<F>& f, float (*scores)[4], int at,
                         const int* position, uint32_t (*weights)[4]) {
  int lane = threadIdx.x % 32;
  float largest[2] = {f.max[0], f.max[1]}, shrink[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    int place = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i % 4 / 2;
    float* score = &scores[i / 4][i % 4];
    *score = at + place <= position[half] ? *score * a.scale : minus_infinity();
    largest[half] = fmaxf(largest[half], *score);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
    largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
    // A query that sees nothing here keeps what it has.
    shrink[half] = at <= position[half] ? expf(f.max[half] - largest[half]) : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int half = i % 2;
    bool sees = at <= position[half];
    float* pair = &scores[i / 2][half * 2];
    uint32_t rounded = pack_bf16(sees ? expf(pair[0] - largest[half]) : 0.0f,
                                 sees ? expf(pair[1] - largest[half]) : 0.0f);
    sum[half] += low_f32(rounded) + high_f32(rounded);
    weights[i / 4][i % 4] = rounded;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    f.sum[half] = fmaf(f.sum[half], shrink[half], sum[half]);
    f.max[half] = largest[half];
  }
#pragma unroll
  for (int i = 0; i < F::own_values / 2; i++) f.sums[i / 4][i % 4] *= shrink[i % 4 / 2];
}

// Adds the weighted values of a tile, from column `first` on.
template <class F>
DEVICE void head_values(const AttendArgument& a, const uint4* values, Fragments<F>& f, int first,
                        const uint32_t (*weights)[4]) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int pair = 0; pair < F::own_values / 16; pair++) {
    int column = first + pair * 16;
    if (column >= a.values) break;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      uint32_t right[4];
      int at = head_at<F::value_pitch>(k * 16 + lane % 16, column / 8 + lane / 16);
      load_matrix_x4(right, values + at, true);
      mma_bf16_16816(f.sums[pair * 2], weights[k], right);
      mma_bf16_16816(f.sums[pair * 2 + 1], weights[k], right + 2);
    }
  }
}

// `attend_rows` with products on tensor cores: the same grid, segments and parts. A warp keeps its
// queries, weights and sums in registers; tiles pass through shared memory once for all warps, the
// next on its way while one is multiplied.
template <class F>
DEVICE void attend_on_cores(const AttendArgument& a, HeadsShared<F>* shared) {
  Span span = a.spans[blockIdx.y];
  // z is (rows, key head, heads of its group).
  int head_runs = (a.group + a.block_heads - 1) / a.block_heads;
  int z = blockIdx.z, of_group = z % head_runs * a.block_heads;
  z /= head_runs;
  int key_head = z % a.key_heads, end_row = end_row_of(span, a.which);
  int first_row = first_row_of(span, a.which) + z / a.key_heads * a.block_rows;
  if (first_row >= end_row) return;
  // Row and head of a query, or no row.
  auto row_of = [&](int query) {
    int row = first_row + query / a.block_heads;
    bool is_query = query < a.block_heads * a.block_rows && row < end_row &&
                    of_group + query % a.block_heads < a.group;
    return is_query ? row : -1;
  };
  auto head_of = [&](int query) { return key_head * a.group + of_group + query % a.block_heads; };
  int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (span.write == NO_SLOT) {
    // Padding: zeros from the first block of threads of its row.
    for (int i = t; blockIdx.x == 0 && !a.split && i < F::queries * a.values; i += F::threads) {
      int query = i / a.values, row = row_of(query);
      float* out = a.out + (span.first_row + row) * a.out_stride + head_of(query) * a.out_head;
      if (row >= 0) out[i % a.values] = 0.0f;
    }
    return;
  }
  int last = span.start + min(first_row + a.block_rows, end_row) - 1;
  int segment = a.split ? (int)blockIdx.x : a.first_segment;
  int end_segment = a.split ? segment + 1 : a.end_segment;
  if (segment * SEGMENT > last) return;
  int end = last / SEGMENT < end_segment ? last + 1 : end_segment * SEGMENT;
  int at = segment * SEGMENT;
  fetch_heads<F>(a, span, &shared->stages[0], key_head, at, end - at);
  copy_async_commit();

  int first = warp % F::columns * F::own_values;
  int row[2], head[2], position[2];
  float total_max[2], total_sum[2];
  const float* before[2];
  bool goes_on[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int query = warp / F::columns * 16 + lane / 4 + half * 8;
    row[half] = row_of(query);
    head[half] = head_of(query);
    position[half] = row[half] >= 0 ? span.start + row[half] : -1;
    goes_on[half] = !a.split && segment > 0 && position[half] / SEGMENT >= segment;
    before[half] = part_of(a, span.first_row + row[half], 0, head[half]);
    total_max[half] = goes_on[half] ? before[half][a.values] : minus_infinity();
    total_sum[half] = goes_on[half] ? before[half][a.values + 1] : 0.0f;
  }
  // Column and half of value i of the sums.
  auto column_of = [&](int i) { return first + i / 4 * 8 + lane % 4 * 2 + i % 2; };
  Fragments<F> f;
#pragma unroll
  for (int i = 0; i < F::own_values / 2; i++) {
    int half = i % 4 / 2, c = column_of(i);
    shared->totals[i][t] = goes_on[half] && c < a.values ? before[half][c] : 0.0f;
    f.sums[i / 4][i % 4] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < F::width / 4; i++) {
    int half = i % 2, c = i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
    float2 x = make_float2(0.0f, 0.0f);
    if (row[half] >= 0 && c < a.own + a.more) {
      int64_t r = span.first_row + row[half], h = head[half];
      const float* q = c < a.own ? a.q + r * a.q_stride + h * a.q_head + c
                                 : a.q_more + r * a.more_stride + h * a.more_head + c - a.own;
      x = make_float2(q[0], q[1]);
    }
    f.q[i / 4][i % 4] = pack_bf16(x.x, x.y);
  }
  f.max[0] = f.max[1] = minus_infinity();
  f.sum[0] = f.sum[1] = 0.0f;
  // The last position that a query of the warp sees.
  int sees_to = max(position[0], position[1]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    sees_to = max(sees_to, __shfl_xor_sync(0xffffffffu, sees_to, step));

  for (; at < end; at += TILE) {
    copy_async_wait(0);
    // This tile is there, and all are done with the one before it, which is filled next.
    __syncthreads();
    int ahead = at + TILE;
    HeadTile<F>* tile = &shared->stages[at / TILE % 2];
    if (ahead < end)
      fetch_heads<F>(a, span, &shared->stages[ahead / TILE % 2], key_head, ahead, end - ahead);
    copy_async_commit();
    if (at <= sees_to) {
      float scores[TILE / 8][4];
      uint32_t weights[TILE / 16][4];
      head_scores<F>(a, tile->keys, f, scores);
      head_weights<F>(a, f, scores, at, position, weights);
      head_values<F>(a, tile->values, f, first, weights);
    }
    if (ahead % SEGMENT != 0 && ahead < end) continue;
    float keep[2] = {0.0f, 0.0f}, scale[2] = {1.0f, 1.0f};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum = lanes_sum<4>(f.sum[half]);
      if (a.split) {
        total_max[half] = f.max[half];
        total_sum[half] = sum;
      } else {
        merge_factors(total_max[half], total_sum[half], f.max[half], sum, keep[half], scale[half]);
      }
      f.max[half] = minus_infinity();
      f.sum[half] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < F::own_values / 2; i++) {
      int half = i % 4 / 2;
      float *sum = &f.sums[i / 4][i % 4], *total = &shared->totals[i][t];
      *total = fmaf(*sum, scale[half], *total * keep[half]);
      *sum = 0.0f;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (row[half] < 0 || position[half] / SEGMENT < a.first_segment) continue;
    // What is known so far, or the result.
    int64_t batch_row = span.first_row + row[half];
    bool is_part = a.split || position[half] / SEGMENT >= a.end_segment;
    float* part = part_of(a, batch_row, segment, head[half]);
    float* out = is_part ? part : a.out + batch_row * a.out_stride + head[half] * a.out_head;
    float factor = is_part ? 1.0f : 1.0f / total_sum[half];
#pragma unroll
    for (int i = 0; i < F::own_values / 4; i++) {
      int value = i / 2 * 4 + half * 2 + i % 2, c = column_of(value);
      if (c < a.values) out[c] = shared->totals[value][t] * factor;
    }
    if (is_part && first == 0 && lane % 4 == 0) {
      part[a.values] = total_max[half];
      part[a.values + 1] = total_sum[half];
    }
  }
}

// Grouped heads. Few queries, as of generated rows, are bound by the reads of keys and values: all
// warps copy, multiply the same scores and then values of their own columns.
typedef Form<128, 128, 1, 4, true> FewHeads;
// Many queries are bound by arithmetic: each tile is read once for 128 of them.
typedef Form<128, 128, 8, 1, true> ManyHeads;
// Heads that are expanded from latents, rounded: keys are rows, with the part that heads share.
typedef Form<192, 128, 8, 1, false> ExpandedHeads;

extern "C" __global__ void __launch_bounds__(128) attend_few_heads(const AttendArgument a) {
  SHARED(HeadsShared<FewHeads>, shared);
  attend_on_cores<FewHeads>(a, shared);
}
KERNEL_SHARED(attend_few_heads, HeadsShared<FewHeads>)

extern "C" __global__ void __launch_bounds__(256) attend_many_heads(const AttendArgument a) {
  SHARED(HeadsShared<ManyHeads>, shared);
  attend_on_cores<ManyHeads>(a, shared);
}
KERNEL_SHARED(attend_many_heads, HeadsShared<ManyHeads>)

extern "C" __global__ void __launch_bounds__(256) attend_expanded(const AttendArgument a) {
  SHARED(HeadsShared<ExpandedHeads>, shared);
  attend_on_cores<ExpandedHeads>(a, shared);
}
KERNEL_SHARED(attend_expanded, HeadsShared<ExpandedHeads>)
