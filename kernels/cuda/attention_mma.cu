// Attention with products of bf16 on tensor cores and sums in f32 (attention.cuh says what is
// attended), over a cache of bf16. Queries and weights are rounded as they are multiplied, and a
// weight is summed as it multiplies: rounded.
//
// What a tensor core gives for a row of a tile depends on no other row of it.
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
