// Mixture of experts: routing, sorting of rows by expert, and the sum of what experts give. The
// definition is src/moe/naive.rs; the products between are gemm.cu's, over groups of rows.
//
// All are bound by the launch for few rows, and by memory for many: scores are read once to shared
// memory, outputs of experts once.
#include "common.cuh"

#define MOST_EXPERTS 1024

// An expert chosen for a row.
struct Choice {
  uint32_t expert;
  float weight;
};

struct RouteArgument {
  const float *logits, *bias;
  Choice* choices;
  int64_t stride;
  int32_t rows, experts, top_k, is_softmax, groups, top_groups, renormalize;
  float scale;
};

// Scores of a row, what experts and groups are worth, and the chosen by rising id.
struct RouteRow {
  float scores[MOST_EXPERTS], worth[MOST_EXPERTS], groups[MOST_EXPERTS];
  int chosen[32];
};
struct RouteShared {
  RouteRow rows[4];
};

DEVICE float not_a_number() {
  FloatBits x;
  x.bits = 0x7fc00000u;
  return x.value;
}

DEVICE float lanes_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Index of the largest of `count` values, the lowest of equals, in all lanes. What is not a number
// is passed over.
DEVICE int best_of(const float* values, int count) {
  float best = minus_infinity();
  int at = 0x7fffffff;
  for (int i = threadIdx.x % 32; i < count; i += 32)
    if (values[i] > best || (values[i] == best && i < at)) {
      best = values[i];
      at = i;
    }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, best, step);
    int other_at = __shfl_xor_sync(0xffffffffu, at, step);
    if (other > best || (other == best && other_at < at)) {
      best = other;
      at = other_at;
    }
  }
  return at;
}

// What each group is worth: the sum of its two best. Experts of groups that are not kept count as
// minus infinity.
DEVICE void mask_groups(const RouteArgument& a, RouteRow& row) {
  int lane = threadIdx.x % 32, size = a.experts / a.groups;
  for (int g = lane; g < a.groups; g += 32) {
    float first = minus_infinity(), second = minus_infinity();
    for (int i = g * size; i < (g + 1) * size; i++) {
      float x = row.worth[i];
      if (x > first) {
        second = first;
        first = x;
      } else if (x > second) {
        second = x;
      }
    }
    row.groups[g] = size > 1 ? first + second : first;
  }
  __syncwarp();
  // A group that is kept is marked by what is no number.
  for (int i = 0; i < a.top_groups; i++) {
    int best = best_of(row.groups, a.groups);
    __syncwarp();
    if (lane == 0) row.groups[best] = not_a_number();
    __syncwarp();
  }
  for (int i = lane; i < a.experts; i += 32)
    if (row.groups[i / size] == row.groups[i / size]) row.worth[i] = minus_infinity();
  __syncwarp();
}

// Scores of a row's experts, and what they are worth; whether all are numbers.
DEVICE bool score(const RouteArgument& a, const float* logits, RouteRow& row) {
  int lane = threadIdx.x % 32;
  float largest = minus_infinity(), sum = 0.0f;
  for (int i = lane; i < a.experts; i += 32) largest = fmaxf(largest, logits[i]);
  largest = lanes_max(largest);
  for (int i = lane; i < a.experts; i += 32) {
    row.scores[i] = a.is_softmax ? expf(logits[i] - largest) : sigmoid(logits[i]);
    sum += row.scores[i];
  }
  sum = lanes_sum<32>(sum);
  bool broken = false;
  for (int i = lane; i < a.experts; i += 32) {
    if (a.is_softmax) row.scores[i] /= sum;
    row.worth[i] = a.is_softmax ? row.scores[i] : row.scores[i] + a.bias[i];
    broken |= row.worth[i] != row.worth[i];
  }
  __syncwarp();
  return __ballot_sync(0xffffffffu, broken) == 0;
}

// Chooses `top_k` experts for each row, by rising id. Where a score is no number there is no
// choice: the first experts, with weights that are none either, so that the row's request fails.
// A row to a warp. grid = (runs of 4 rows), 128 threads.
extern "C" __global__ void __launch_bounds__(128) route(const RouteArgument a) {
  SHARED(RouteShared, shared);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int64_t r = (int64_t)blockIdx.x * 4 + warp;
  if (r >= a.rows) return;
  RouteRow& row = shared->rows[warp];
  Choice* choices = a.choices + r * a.top_k;
  if (!score(a, a.logits + r * a.stride, row)) {
    if (lane < a.top_k) choices[lane] = Choice{(uint32_t)lane, not_a_number()};
    return;
  }
  if (a.groups > 1) mask_groups(a, row);
  int mine = 0x7fffffff;
  for (int i = 0; i < a.top_k; i++) {
    int best = best_of(row.worth, a.experts);
    __syncwarp();
    if (lane == i) mine = best;
    if (lane == 0) row.worth[best] = not_a_number();
    __syncwarp();
  }
  int rank = 0;
  for (int i = 0; i < a.top_k; i++) rank += __shfl_sync(0xffffffffu, mine, i) < mine;
  if (lane < a.top_k) row.chosen[rank] = mine;
  __syncwarp();
  float sum = 0.0f;
  for (int i = 0; i < a.top_k; i++) sum += row.scores[row.chosen[i]];
  float factor = a.renormalize ? a.scale / (sum + 1e-20f) : a.scale;
  if (lane < a.top_k) {
    int expert = row.chosen[lane];
    choices[lane] = Choice{(uint32_t)expert, row.scores[expert] * factor};
  }
}
KERNEL_SHARED(route, RouteShared)

struct SortArgument {
  const Choice* choices;
  // For each sorted place its row; for each choice its place; for each expert its first place; for
  // each tile its expert and first place.
  int32_t *gather, *place, *offsets, *tiles;
  int32_t choices_len, top_k, experts, tile_rows, most_tiles, unused;
};
struct SortShared {
  int32_t counts[MOST_EXPERTS], places[MOST_EXPERTS], tiles[MOST_EXPERTS], experts[1024];
};

// Sorts choices by expert, rows in order within one: a thread to an expert, which looks at every
// choice: 1,024 of them take about as long as a launch. One block of 1,024 threads.
extern "C" __global__ void __launch_bounds__(1024) sort_choices(const SortArgument a) {
  SHARED(SortShared, shared);
  int t = threadIdx.x;
  shared->counts[t] = 0;
  __syncthreads();
  for (int i = t; i < a.choices_len; i += 1024) atomicAdd(&shared->counts[a.choices[i].expert], 1);
  __syncthreads();
  int count = shared->counts[t], tiles = (count + a.tile_rows - 1) / a.tile_rows;
  shared->places[t] = count;
  shared->tiles[t] = tiles;
  __syncthreads();
  // Running sums, each step over twice the distance.
  for (int step = 1; step < MOST_EXPERTS; step *= 2) {
    int places = t >= step ? shared->places[t - step] : 0;
    int more = t >= step ? shared->tiles[t - step] : 0;
    __syncthreads();
    shared->places[t] += places;
    shared->tiles[t] += more;
    __syncthreads();
  }
  int first = shared->places[t] - count, first_tile = shared->tiles[t] - tiles;
  int all_tiles = shared->tiles[MOST_EXPERTS - 1];
  if (t <= a.experts) a.offsets[t] = first;
  if (t == MOST_EXPERTS - 1 && a.experts == MOST_EXPERTS) a.offsets[MOST_EXPERTS] = first + count;
  for (int i = 0; i < tiles; i++) {
    a.tiles[2 * (first_tile + i)] = t;
    a.tiles[2 * (first_tile + i) + 1] = first + i * a.tile_rows;
  }
  for (int i = all_tiles + t; i < a.most_tiles; i += 1024) {
    a.tiles[2 * i] = -1;
    a.tiles[2 * i + 1] = 0;
  }
  int next = first;
  for (int at = 0; at < a.choices_len; at += 1024) {
    int len = min(1024, a.choices_len - at);
    __syncthreads();
    if (t < len) shared->experts[t] = a.choices[at + t].expert;
    __syncthreads();
    for (int i = 0; t < a.experts && i < len; i++)
      if (shared->experts[i] == t) {
        a.place[at + i] = next;
        a.gather[next] = (at + i) / a.top_k;
        next++;
      }
  }
}
KERNEL_SHARED(sort_choices, SortShared)

struct CombineArgument {
  const Choice* choices;
  const int32_t* place;
  const float* y;
  float* out;
  int64_t out_stride;
  int32_t width, top_k;
};

// out = the sum of a row's weighted outputs, by rising expert. grid = (runs of 256 values, rows).
extern "C" __global__ void __launch_bounds__(256) combine(const CombineArgument a) {
  int c = blockIdx.x * 256 + threadIdx.x;
  if (c >= a.width) return;
  int64_t row = blockIdx.y;
  float sum = 0.0f;
  for (int i = 0; i < a.top_k; i++) {
    float y = a.y[(int64_t)a.place[row * a.top_k + i] * a.width + c];
    sum = fmaf(a.choices[row * a.top_k + i].weight, y, sum);
  }
  a.out[row * a.out_stride + c] = sum;
}
KERNEL(combine)
