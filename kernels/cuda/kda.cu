// Kimi Delta Attention on a device: src/kda/naive.rs, with what stands around it in a layer.
//
//   g = gate(raw + bias)   beta = sigmoid(raw)   q, k L2-normed, q also times key_dim^-1/2
//   S[v][k] *= exp(g[k]);  r = S k;  S += beta (v - r) k^T;  o = S q
//   out = norm(o) gate(output gate)
//
// States are f32 [head][V][K], K contiguous, in slots.
//
// kda_step: spans of form Step, row by row. One block for each (span, head), so that the norm over
//   the head's outputs stays in the block. Bound by memory: a state is read once and written once,
//   16 bytes a lane, eight lanes to a state row, and never passes through shared memory. The rows
//   of the next pass are asked for before the ones at hand are worked on, the first before the
//   norms. Both products with a state row are summed together: S q after the write is
//   (decayed S) q + write (k q), so a row needs one reduction.
// kda_prepare, kda_scan, kda_norm: spans of form Chunk, in the chunkwise form of MODELS.md section
//   4. What needs no state is prepared for all chunks at once, in f32; only the scan goes chunk by
//   chunk, and is split over V, since a single prompt waits for that chain and for nothing else.
//   It is bound by f32 products in kda_scan, and by reads of shared memory in kda_scan_tf32, which
//   multiplies in tf32; the state is f32 in both.
#include "common.cuh"

#define MAX_KEY 128
#define MAX_VALUE 256
#define CHUNK 64

struct KdaArgument {
  const float *qkv, *decay, *beta, *a_log, *bias, *output_gate, *norm;
  float *out, *work;
  const Span* spans;
  const Snapshot* snapshots;
  char* arena;
  int64_t qkv_stride, decay_stride, beta_stride, gate_stride, out_stride, at;
  int32_t key_heads, value_heads, key_dim, value_dim;
  // gate: 0 takes decays as they are, 1 softplus, 2 bounded; output: 0 none, 1 sigmoid, 2 silu.
  int32_t gate, beta_is_raw, output, decay_per_head;
  float lower, eps;
  int32_t rows, unused;
};

// Log-decay of a key channel.
DEVICE float log_decay(const KdaArgument& a, int64_t row, int head, int channel) {
  int at = a.decay_per_head ? head : head * a.key_dim + channel;
  float raw = a.decay[row * a.decay_stride + at];
  if (a.gate == 0) return raw;
  float rate = expf(a.a_log[head]), z = raw + a.bias[at];
  return a.gate == 1 ? -rate * softplus(z) : a.lower * sigmoid(rate * z);
}

DEVICE float write_strength(const KdaArgument& a, int64_t row, int head) {
  float beta = a.beta[row * a.beta_stride + head];
  return a.beta_is_raw ? sigmoid(beta) : beta;
}

// Columns of a head's query, key and value in a row.
struct Columns {
  int q, k, v;
};
DEVICE Columns columns(const KdaArgument& a, int head) {
  int key_head = head / (a.value_heads / a.key_heads), keys = a.key_heads * a.key_dim;
  return {key_head * a.key_dim, keys + key_head * a.key_dim, 2 * keys + head * a.value_dim};
}

DEVICE float* state_of(const KdaArgument& a, int64_t slot, int head) {
  return (float*)(a.arena + slot + a.at) + (int64_t)head * a.value_dim * a.key_dim;
}

DEVICE float output_value(const KdaArgument& a, int64_t row, int head, int v, float o,
                          float factor) {
  float gate = a.output_gate[row * a.gate_stride + head * a.value_dim + v];
  return o * factor * a.norm[v] * (a.output == 1 ? sigmoid(gate) : silu(gate));
}

// ---- Step

#define STEP_THREADS 256
#define STEP_WARPS (STEP_THREADS / 32)
// State rows that a block works on at once, eight lanes each.
#define STEP_ROWS (STEP_THREADS / 8)

struct StepShared {
  float q[MAX_KEY], k[MAX_KEY], decay[MAX_KEY], out[MAX_VALUE];
  float sums[3][STEP_WARPS], norm_sums[STEP_WARPS];
};

// The lane's part of state row `v`: channels 32 i + 4 (lane % 8) and three on.
template <int PARTS>
DEVICE void load_state(const float* state, int v, const KdaArgument& a, float4* x) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    int c = i * 32 + threadIdx.x % 8 * 4;
    bool there = state && v < a.value_dim && c < a.key_dim;
    x[i] = there ? load4(state + (int64_t)v * a.key_dim + c) : make_float4(0, 0, 0, 0);
  }
}

template <int PARTS>
DEVICE void store_state(float* state, int v, const KdaArgument& a, const float4* x) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    int c = i * 32 + threadIdx.x % 8 * 4;
    if (v < a.value_dim && c < a.key_dim) store4(state + (int64_t)v * a.key_dim + c, x[i]);
  }
}

DEVICE float dot4(float4 x, float4 y, float sum) {
  return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
}
DEVICE float4 mul4(float4 x, float4 y) {
  return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w);
}
// x + a y
DEVICE float4 fma4(float a, float4 y, float4 x) {
  return make_float4(fmaf(a, y.x, x.x), fmaf(a, y.y, x.y), fmaf(a, y.z, x.z), fmaf(a, y.w, x.w));
}

// Normed query and key and the decays of a row into shared memory; gives k q.
DEVICE float step_vectors(const KdaArgument& a, int64_t row, int head, StepShared* shared) {
  int t = threadIdx.x;
  const float* qkv = a.qkv + row * a.qkv_stride;
  Columns at = columns(a, head);
  float q = 0.0f, k = 0.0f;
  if (t < a.key_dim) {
    q = qkv[at.q + t];
    k = qkv[at.k + t];
    shared->decay[t] = expf(log_decay(a, row, head, t));
  }
  float products[3] = {q * q, k * k, q * k};
#pragma unroll
  for (int i = 0; i < 3; i++) {
    float sum = lanes_sum<32>(products[i]);
    if (t % 32 == 0) shared->sums[i][t / 32] = sum;
  }
  __syncthreads();  // sums are there
  float sums[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 3; i++)
#pragma unroll
    for (int w = 0; w < STEP_WARPS; w++) sums[i] += shared->sums[i][w];
  float q_factor = 1.0f / sqrtf((float)a.key_dim) / sqrtf(sums[0] + 1e-6f);
  float k_factor = 1.0f / sqrtf(sums[1] + 1e-6f);
  if (t < a.key_dim) {
    shared->q[t] = q * q_factor;
    shared->k[t] = k * k_factor;
  }
  __syncthreads();  // vectors are there
  return sums[2] * q_factor * k_factor;
}

template <int PARTS>
DEVICE void step_row(const KdaArgument& a, const Span& span, int r, int head,
                     StepShared* shared) {
  int64_t row = span.first_row + r;
  // Each thread reads of the row before only what it wrote itself.
  int64_t from = r == 0 ? span.read : span.write;
  const float* source = from == NO_SLOT ? nullptr : state_of(a, from, head);
  float* target = state_of(a, span.write, head);
  int v = threadIdx.x / 8;
  float4 next[PARTS];
  load_state<PARTS>(source, v, a, next);
  float kq = step_vectors(a, row, head, shared);
  float4 q[PARTS], k[PARTS], decay[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; i++) {
    int c = i * 32 + threadIdx.x % 8 * 4;
    bool there = c < a.key_dim;
    float4 zero = make_float4(0, 0, 0, 0);
    q[i] = there ? load4(shared->q + c) : zero;
    k[i] = there ? load4(shared->k + c) : zero;
    decay[i] = there ? load4(shared->decay + c) : zero;
  }
  float beta = write_strength(a, row, head);
  const float* values = a.qkv + row * a.qkv_stride + columns(a, head).v;
  for (int pass = 0; pass < a.value_dim; pass += STEP_ROWS, v += STEP_ROWS) {
    float4 x[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) x[i] = next[i];
    if (pass + STEP_ROWS < a.value_dim) load_state<PARTS>(source, v + STEP_ROWS, a, next);
    float read = 0.0f, out = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      x[i] = mul4(x[i], decay[i]);
      read = dot4(x[i], k[i], read);
      out = dot4(x[i], q[i], out);
    }
    read = lanes_sum<8>(read);
    out = lanes_sum<8>(out);
    float value = v < a.value_dim ? values[v] : 0.0f;
    float write = beta * (value - read);
#pragma unroll
    for (int i = 0; i < PARTS; i++) x[i] = fma4(write, k[i], x[i]);
    store_state<PARTS>(target, v, a, x);
    for (int i = 0; i < span.snapshots_len; i++) {
      Snapshot snapshot = a.snapshots[span.snapshots + i];
      if (snapshot.after_rows == r + 1)
        store_state<PARTS>(state_of(a, snapshot.slot, head), v, a, x);
    }
    if (threadIdx.x % 8 == 0 && v < a.value_dim) shared->out[v] = fmaf(write, kq, out);
  }
  __syncthreads();  // outputs are there, and the vectors are read
  int t = threadIdx.x;
  float o = t < a.value_dim ? shared->out[t] : 0.0f;
  float* to = a.out + row * a.out_stride + head * a.value_dim;
  if (a.output == 0) {
    if (t < a.value_dim) to[t] = o;
    return;
  }
  float sum = block_sum<STEP_WARPS>(o * o, shared->norm_sums);
  float factor = 1.0f / sqrtf(sum / (float)a.value_dim + a.eps);
  if (t < a.value_dim) to[t] = output_value(a, row, head, t, o, factor);
}

// grid = (value heads, spans)
template <int PARTS>
DEVICE void kda_step(const KdaArgument& a) {
  SHARED(StepShared, shared);
  Span span = a.spans[blockIdx.y];
  int head = blockIdx.x;
  if (span.write == NO_SLOT) {
    if ((int)threadIdx.x < a.value_dim)
      a.out[span.first_row * a.out_stride + head * a.value_dim + threadIdx.x] = 0.0f;
    return;
  }
  for (int r = 0; r < span.rows; r++) step_row<PARTS>(a, span, r, head, shared);
}

#define STEP_KERNEL(key_dim)                                                     \
  extern "C" __global__ void __launch_bounds__(STEP_THREADS, 2) kda_step_##key_dim( \
      const KdaArgument a) {                                                     \
    kda_step<key_dim / 32>(a);                                                   \
  }                                                                              \
  KERNEL_SHARED(kda_step_##key_dim, StepShared)
STEP_KERNEL(32)
STEP_KERNEL(64)
STEP_KERNEL(128)

// ---- Chunk

#define CHUNK_THREADS 256
#define BLOCK 16
// A row of a tile is four values longer than it has to be, so that the rows of a column lie in
// different banks.
#define KEY_ROW (MAX_KEY + 4)
#define CHUNK_ROW (CHUNK + 4)
// Columns of V that a block of the scan has.
#define SPLIT 32
// Rows that a warp reads by column, eight values longer for the same reason.
#define SPLIT_ROW (SPLIT + 8)
#define REST_ROW (MAX_KEY + 8)

// A span's chunks end on the grid, the last with the span.
struct Chunk {
  int first, rows;
};
DEVICE int chunk_count(const Span& span) {
  return (span.start % CHUNK + span.rows + CHUNK - 1) / CHUNK;
}
DEVICE Chunk chunk_of(const Span& span, int i) {
  int off_grid = span.start % CHUNK;
  int first = max(i * CHUNK - off_grid, 0);
  return {first, min((i + 1) * CHUNK - off_grid, span.rows) - first};
}

// What the scan needs of a chunk and a head: with G the sum of log-decays up to a row, and of all
// rows at the end of the chunk,
//   solve[i][j] = ((I + A)^-1)[i][j] beta[j]     score[i][j] = q_i k_j exp(G_i - G_j), j <= i
//   total = exp(G_end)   key = k exp(G)   query = q exp(G)   rest = k exp(G_end - G)
struct Work {
  float *solve, *score, *total, *key, *query, *rest;
};
DEVICE Work work_of(const KdaArgument& a, const Span& span, int chunk, int head) {
  int64_t square = CHUNK * CHUNK, rows = (int64_t)CHUNK * a.key_dim;
  int64_t each = 2 * square + a.key_dim + 3 * rows;
  float* at = a.work + ((int64_t)(span.first_chunk + chunk) * a.value_heads + head) * each;
  float* total = at + 2 * square;
  float* key = total + a.key_dim;
  return {at, at + square, total, key, key + rows, key + 2 * rows};
}

struct PrepareShared {
  float q[CHUNK][KEY_ROW], k[CHUNK][KEY_ROW], sum[CHUNK][KEY_ROW];
  // Rows of a block of 16 relative to its first row, and the keys before it relative to that.
  float block_q[BLOCK][KEY_ROW], block_k[BLOCK][KEY_ROW];
  // The keys are used up when the inverse begins. Apart they would be more than sm_80 has.
  union {
    float before[CHUNK - BLOCK][KEY_ROW];
    float solve[CHUNK][CHUNK_ROW];
  };
  float a[CHUNK][CHUNK_ROW];
  float beta[CHUNK];
};

// Normed rows, a warp to a row; rows behind the chunk are zero, and change nothing.
DEVICE void prepare_rows(const KdaArgument& a, const Span& span, Chunk chunk, int head,
                         PrepareShared* shared) {
  Columns at = columns(a, head);
  int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < CHUNK; i += CHUNK_THREADS / 32) {
    bool there = i < chunk.rows;
    int64_t row = span.first_row + chunk.first + i;
    const float* qkv = a.qkv + row * a.qkv_stride;
    float q_squares = 0.0f, k_squares = 0.0f;
    for (int c = lane; c < a.key_dim; c += 32) {
      float q = there ? qkv[at.q + c] : 0.0f, k = there ? qkv[at.k + c] : 0.0f;
      shared->q[i][c] = q;
      shared->k[i][c] = k;
      shared->sum[i][c] = there ? log_decay(a, row, head, c) : 0.0f;
      q_squares += q * q;
      k_squares += k * k;
    }
    float q_factor = 1.0f / sqrtf((float)a.key_dim) / sqrtf(lanes_sum<32>(q_squares) + 1e-6f);
    float k_factor = 1.0f / sqrtf(lanes_sum<32>(k_squares) + 1e-6f);
    for (int c = lane; c < a.key_dim; c += 32) {
      shared->q[i][c] *= q_factor;
      shared->k[i][c] *= k_factor;
    }
    if (lane == 0) shared->beta[i] = there ? write_strength(a, row, head) : 0.0f;
  }
}

// Pairs of a row of block `block` and a row before it: one factor of each pair's decay goes to the
// row, the other to the key, both at most 1, so that neither overflows whatever the gate.
DEVICE void prepare_pairs(const KdaArgument& a, int block, PrepareShared* shared, float* score) {
  int first = block * BLOCK;
  for (int i = threadIdx.x; i < (first + BLOCK) * a.key_dim; i += CHUNK_THREADS) {
    int row = i / a.key_dim, c = i % a.key_dim;
    float reference = shared->sum[first][c], sum = shared->sum[row][c];
    if (row < first) {
      shared->before[row][c] = shared->k[row][c] * expf(reference - sum);
    } else {
      float factor = expf(sum - reference);
      shared->block_q[row - first][c] = shared->q[row][c] * factor;
      shared->block_k[row - first][c] = shared->k[row][c] * factor;
    }
  }
  __syncthreads();  // factors are there
  for (int i = threadIdx.x; i < BLOCK * first; i += CHUNK_THREADS) {
    int row = i / first, j = i % first;
    float with_q = 0.0f, with_k = 0.0f;
    for (int c = 0; c < a.key_dim; c += 4) {
      float4 key = load4(&shared->before[j][c]);
      with_q = dot4(load4(&shared->block_q[row][c]), key, with_q);
      with_k = dot4(load4(&shared->block_k[row][c]), key, with_k);
    }
    score[(first + row) * CHUNK + j] = with_q;
    shared->a[first + row][j] = with_k * shared->beta[first + row];
  }
  __syncthreads();  // factors are read
}

// Pairs inside the blocks, each with its own decay: there is no reference inside a block from
// which both factors are small when the gate has no bound.
DEVICE void prepare_diagonal(const KdaArgument& a, PrepareShared* shared, float* score) {
  const int pairs = BLOCK * (BLOCK + 1) / 2;
  for (int i = threadIdx.x; i < CHUNK / BLOCK * pairs; i += CHUNK_THREADS) {
    int row = 0, j = i % pairs;
    while (j > row) j -= ++row;
    int first = i / pairs * BLOCK;
    row += first;
    j += first;
    float with_q = 0.0f, with_k = 0.0f;
    for (int c = 0; c < a.key_dim; c++) {
      float key = shared->k[j][c] * expf(shared->sum[row][c] - shared->sum[j][c]);
      with_q = fmaf(shared->q[row][c], key, with_q);
      with_k = fmaf(shared->k[row][c], key, with_k);
    }
    score[row * CHUNK + j] = with_q;
    if (j < row) shared->a[row][j] = with_k * shared->beta[row];
  }
}

// solve = (I + A)^-1: the diagonal blocks by forward substitution, a thread to a column, then
// block row by block row.
DEVICE void invert(PrepareShared* shared) {
  int t = threadIdx.x;
  if (t < CHUNK) {
    int first = t / BLOCK * BLOCK, column = t;
    for (int i = first; i < first + BLOCK; i++) {
      float value = i == column ? 1.0f : 0.0f;
      for (int j = first; j < i; j++)
        value = fmaf(-shared->a[i][j], shared->solve[j][column], value);
      shared->solve[i][column] = value;
    }
  }
  __syncthreads();  // diagonal blocks are there
  // What was the pairs' working memory takes the products with A.
  float(*product)[KEY_ROW] = shared->block_q;
  for (int first = BLOCK; first < CHUNK; first += BLOCK) {
    for (int i = t; i < BLOCK * first; i += CHUNK_THREADS) {
      int row = i / first, column = i % first;
      float sum = 0.0f;
      for (int j = column / BLOCK * BLOCK; j < first; j++)
        sum = fmaf(shared->a[first + row][j], shared->solve[j][column], sum);
      product[row][column] = sum;
    }
    __syncthreads();  // products are there
    for (int i = t; i < BLOCK * first; i += CHUNK_THREADS) {
      int row = i / first, column = i % first;
      float sum = 0.0f;
      for (int j = 0; j <= row; j++)
        sum = fmaf(shared->solve[first + row][first + j], product[j][column], sum);
      shared->solve[first + row][column] = -sum;
    }
    __syncthreads();  // the block row is there, and the products are read
  }
}

// grid = (value heads, spans, chunks of the longest span)
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) kda_prepare(const KdaArgument a) {
  SHARED(PrepareShared, shared);
  Span span = a.spans[blockIdx.y];
  int head = blockIdx.x, t = threadIdx.x;
  if ((int)blockIdx.z >= chunk_count(span)) return;
  Chunk chunk = chunk_of(span, blockIdx.z);
  Work work = work_of(a, span, blockIdx.z, head);
  prepare_rows(a, span, chunk, head, shared);
  for (int i = t; i < CHUNK * CHUNK; i += CHUNK_THREADS) {
    if (i % CHUNK > i / CHUNK) {
      work.score[i] = 0.0f;
      work.solve[i] = 0.0f;
    }
  }
  __syncthreads();  // rows are there
  if (t < a.key_dim)
    for (int i = 1; i < CHUNK; i++) shared->sum[i][t] += shared->sum[i - 1][t];
  __syncthreads();  // sums are there
  for (int block = 1; block < CHUNK / BLOCK; block++) prepare_pairs(a, block, shared, work.score);
  prepare_diagonal(a, shared, work.score);
  __syncthreads();  // all of A is there
  invert(shared);
  for (int i = t; i < CHUNK * CHUNK; i += CHUNK_THREADS) {
    int row = i / CHUNK, j = i % CHUNK;
    if (j <= row) work.solve[i] = shared->solve[row][j] * shared->beta[j];
  }
  for (int i = t; i < chunk.rows * a.key_dim; i += CHUNK_THREADS) {
    int row = i / a.key_dim, c = i % a.key_dim;
    float sum = shared->sum[row][c], factor = expf(sum);
    work.key[i] = shared->k[row][c] * factor;
    work.query[i] = shared->q[row][c] * factor;
    work.rest[i] = shared->k[row][c] * expf(shared->sum[CHUNK - 1][c] - sum);
  }
  if (t < a.key_dim) work.total[t] = expf(shared->sum[CHUNK - 1][t]);
}
KERNEL_SHARED(kda_prepare, PrepareShared)

struct ScanShared {
  float key[CHUNK][KEY_ROW], query[CHUNK][KEY_ROW], rest[CHUNK][REST_ROW];
  float solve[CHUNK][CHUNK_ROW], score[CHUNK][CHUNK_ROW];
  // The block's rows of the state, and what each row of the chunk lacks, then writes.
  float state[SPLIT][KEY_ROW];
  float rows[CHUNK][SPLIT_ROW];
};

// Asks for the rows that meet the state: one group of copies.
DEVICE void fetch_rows(const KdaArgument& a, Work work, int rows, ScanShared* shared) {
  int quads = a.key_dim / 4;
  for (int i = threadIdx.x; i < rows * quads; i += CHUNK_THREADS) {
    int row = i / quads, c = i % quads * 4;
    copy_async_16(&shared->key[row][c], work.key + i * 4);
    copy_async_16(&shared->query[row][c], work.query + i * 4);
  }
  copy_async_commit();
}

// Asks for the rest: a second group.
DEVICE void fetch_rest(const KdaArgument& a, Work work, int rows, ScanShared* shared) {
  int quads = a.key_dim / 4;
  for (int i = threadIdx.x; i < rows * quads; i += CHUNK_THREADS)
    copy_async_16(&shared->rest[i / quads][i % quads * 4], work.rest + i * 4);
  // Eight rows are multiplied at once.
  for (int i = rows * quads + threadIdx.x; i < (rows + 7) / 8 * 8 * quads; i += CHUNK_THREADS)
    store4(&shared->rest[i / quads][i % quads * 4], make_float4(0, 0, 0, 0));
  for (int i = threadIdx.x; i < rows * (CHUNK / 4); i += CHUNK_THREADS) {
    int row = i / (CHUNK / 4), c = i % (CHUNK / 4) * 4;
    copy_async_16(&shared->solve[row][c], work.solve + i * 4);
    copy_async_16(&shared->score[row][c], work.score + i * 4);
  }
  copy_async_commit();
}

// The products of a chunk in f32. A thread has eight values of a [CHUNK][SPLIT] product, four rows
// and two columns, and sixteen of the state.
struct InF32 {
  DEVICE int first_row() { return threadIdx.x / (SPLIT / 2) * 4; }
  DEVICE int first_column() { return threadIdx.x % (SPLIT / 2) * 2; }
  DEVICE int row(int i) { return first_row() + i / 2; }
  DEVICE int column(int i) { return first_column() + i % 2; }
  // Rows of the product that end with the thread's own, and how many are multiplied at once.
  DEVICE int last_row() { return first_row() + 4; }
  static const int AT_ONCE = 4;

  // What the state before the chunk gives for every key and query.
  DEVICE void read_state(const KdaArgument& a, const ScanShared* shared, float* with_key,
                                float* with_query) {
    for (int c = 0; c < a.key_dim; c += 4) {
      float4 state[2];
#pragma unroll
      for (int j = 0; j < 2; j++) state[j] = load4(&shared->state[first_column() + j][c]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float4 key = load4(&shared->key[first_row() + i][c]);
        float4 query = load4(&shared->query[first_row() + i][c]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          with_key[2 * i + j] = dot4(key, state[j], with_key[2 * i + j]);
          with_query[2 * i + j] = dot4(query, state[j], with_query[2 * i + j]);
        }
      }
    }
  }

  // sums += left[][0..end] rows[0..end][].
  DEVICE void multiply(const float (*left)[CHUNK_ROW], const ScanShared* shared, int end,
                              float* sums) {
    for (int j = 0; j < end; j += 4) {
      float2 right[4];
#pragma unroll
      for (int i = 0; i < 4; i++) right[i] = *(const float2*)&shared->rows[j + i][first_column()];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float4 l = load4(&left[first_row() + i][j]);
        float4 x = make_float4(right[0].x, right[1].x, right[2].x, right[3].x);
        float4 y = make_float4(right[0].y, right[1].y, right[2].y, right[3].y);
        sums[2 * i] = dot4(l, x, sums[2 * i]);
        sums[2 * i + 1] = dot4(l, y, sums[2 * i + 1]);
      }
    }
  }

  // state = state total + rows^T rest, four rows of V and four channels at once.
  DEVICE void advance(const KdaArgument& a, const float* total, int count,
                             ScanShared* shared) {
    int quads = a.key_dim / 4;
    for (int i = threadIdx.x; i < SPLIT / 4 * quads; i += CHUNK_THREADS) {
      int v = i / quads * 4, c = i % quads * 4;
      float4 factor = load4(total + c), state[4];
#pragma unroll
      for (int j = 0; j < 4; j++) state[j] = mul4(load4(&shared->state[v + j][c]), factor);
      for (int row = 0; row < count; row++) {
        float4 rest = load4(&shared->rest[row][c]), write = load4(&shared->rows[row][v]);
        state[0] = fma4(write.x, rest, state[0]);
        state[1] = fma4(write.y, rest, state[1]);
        state[2] = fma4(write.z, rest, state[2]);
        state[3] = fma4(write.w, rest, state[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) store4(&shared->state[v + j][c], state[j]);
    }
  }
};

// The same on tensor cores. A warp has two tiles of 16 rows and 8 columns of a [CHUNK][SPLIT]
// product; lane l has rows l / 4 and l / 4 + 8 of a tile, and columns 2 (l % 4) and one on.
struct InTf32 {
  DEVICE int warp() { return threadIdx.x / 32; }
  DEVICE int group() { return threadIdx.x % 32 / 4; }
  DEVICE int place() { return threadIdx.x % 4; }
  DEVICE int first_row() { return warp() / 2 * 16; }
  DEVICE int first_column() { return warp() % 2 * 16; }
  DEVICE int row(int i) { return first_row() + group() + i % 4 / 2 * 8; }
  DEVICE int column(int i) { return first_column() + i / 4 * 8 + place() * 2 + i % 2; }
  DEVICE int last_row() { return first_row() + 16; }
  static const int AT_ONCE = 8;

  // The lane's part of a 16x8 and of an 8x8 operand whose first value is at `at`.
  DEVICE void left_tile(const float* at, int row_step, int k_step, uint32_t* a) {
    at += group() * row_step + place() * k_step;
    a[0] = to_tf32(at[0]);
    a[1] = to_tf32(at[8 * row_step]);
    a[2] = to_tf32(at[4 * k_step]);
    a[3] = to_tf32(at[8 * row_step + 4 * k_step]);
  }
  DEVICE void right_tile(const float* at, int k_step, int column_step, uint32_t* b) {
    at += place() * k_step + group() * column_step;
    b[0] = to_tf32(at[0]);
    b[1] = to_tf32(at[4 * k_step]);
  }

  DEVICE void read_state(const KdaArgument& a, const ScanShared* shared, float* with_key,
                                float* with_query) {
    for (int c = 0; c < a.key_dim; c += 8) {
      uint32_t key[4], query[4], state[2];
      left_tile(&shared->key[first_row()][c], KEY_ROW, 1, key);
      left_tile(&shared->query[first_row()][c], KEY_ROW, 1, query);
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        right_tile(&shared->state[first_column() + 8 * tile][c], 1, KEY_ROW, state);
        mma_tf32_1688(with_key + 4 * tile, key, state);
        mma_tf32_1688(with_query + 4 * tile, query, state);
      }
    }
  }

  DEVICE void multiply(const float (*left)[CHUNK_ROW], const ScanShared* shared, int end,
                              float* sums) {
    for (int j = 0; j < end; j += 8) {
      uint32_t l[4], right[2];
      left_tile(&left[first_row()][j], CHUNK_ROW, 1, l);
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        right_tile(&shared->rows[j][first_column() + 8 * tile], SPLIT_ROW, 1, right);
        mma_tf32_1688(sums + 4 * tile, l, right);
      }
    }
  }

  // A warp has 16 rows of V and every fourth run of eight channels.
  DEVICE void advance(const KdaArgument& a, const float* total, int count,
                             ScanShared* shared) {
    const int most = MAX_KEY / 8 / 4;
    int v = warp() % 2 * 16, tiles = a.key_dim / 8;
    float state[most][4];
#pragma unroll
    for (int i = 0; i < most; i++) {
      int tile = warp() / 2 + 4 * i, c = tile * 8 + place() * 2;
      if (tile >= tiles) continue;
#pragma unroll
      for (int j = 0; j < 4; j++)
        state[i][j] = shared->state[v + group() + j / 2 * 8][c + j % 2] * total[c + j % 2];
    }
    for (int row = 0; row < count; row += 8) {
      uint32_t writes[4], rest[2];
      left_tile(&shared->rows[row][v], 1, SPLIT_ROW, writes);
#pragma unroll
      for (int i = 0; i < most; i++) {
        int tile = warp() / 2 + 4 * i;
        if (tile >= tiles) continue;
        right_tile(&shared->rest[row][tile * 8], REST_ROW, 1, rest);
        mma_tf32_1688(state[i], writes, rest);
      }
    }
#pragma unroll
    for (int i = 0; i < most; i++) {
      int tile = warp() / 2 + 4 * i, c = tile * 8 + place() * 2;
      if (tile >= tiles) continue;
#pragma unroll
      for (int j = 0; j < 4; j++)
        shared->state[v + group() + j / 2 * 8][c + j % 2] = state[i][j];
    }
  }
};

DEVICE void keep_state(const KdaArgument& a, int64_t slot, int head, int first_v,
                       const ScanShared* shared) {
  float* target = state_of(a, slot, head);
  int quads = a.key_dim / 4;
  for (int i = threadIdx.x; i < SPLIT * quads; i += CHUNK_THREADS) {
    int v = i / quads, c = i % quads * 4;
    if (first_v + v < a.value_dim)
      store4(target + (int64_t)(first_v + v) * a.key_dim + c, load4(&shared->state[v][c]));
  }
}

// One chunk: writes = solve (v - key S), out = query S + score writes, S = S total + writes^T rest.
// The next chunk's copies are asked for as soon as the memory they go to is read.
template <class Products>
DEVICE void scan_chunk(const KdaArgument& a, const Span& span, int index, int head, int first_v,
                       bool last, ScanShared* shared) {
  Chunk chunk = chunk_of(span, index);
  Work work = work_of(a, span, index, head);
  int64_t first_row = span.first_row + chunk.first;
  float with_key[8] = {}, outputs[8] = {}, writes[8] = {};
  copy_async_wait(1);
  __syncthreads();  // keys, queries and the state are there
  Products::read_state(a, shared, with_key, outputs);
  const float* values = a.qkv + columns(a, head).v + first_v;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int row = Products::row(i), v = Products::column(i);
    // Rows behind the chunk lack nothing, so that they may be multiplied with the others.
    bool there = row < chunk.rows && first_v + v < a.value_dim;
    float value = there ? values[(first_row + row) * a.qkv_stride + v] : 0.0f;
    shared->rows[row][v] = there ? value - with_key[i] : 0.0f;
  }
  copy_async_wait(0);
  __syncthreads();  // what rows lack is there, and the rest; keys and queries are read
  if (!last)
    fetch_rows(a, work_of(a, span, index + 1, head), chunk_of(span, index + 1).rows, shared);
  // Nothing stands right of the diagonal.
  int at_once = Products::AT_ONCE, rounded = (chunk.rows + at_once - 1) / at_once * at_once;
  int end = min(Products::last_row(), rounded);
  Products::multiply(shared->solve, shared, end, writes);
  __syncthreads();  // what rows lack is read
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int row = Products::row(i);
    shared->rows[row][Products::column(i)] = row < chunk.rows ? writes[i] : 0.0f;
  }
  __syncthreads();  // writes are there
  Products::multiply(shared->score, shared, end, outputs);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int row = Products::row(i), v = first_v + Products::column(i);
    if (row < chunk.rows && v < a.value_dim)
      a.out[(first_row + row) * a.out_stride + head * a.value_dim + v] = outputs[i];
  }
  Products::advance(a, work.total, chunk.rows, shared);
  __syncthreads();  // the state is there; the rest is read
  if (!last)
    fetch_rest(a, work_of(a, span, index + 1, head), chunk_of(span, index + 1).rows, shared);
  int done = chunk.first + chunk.rows;
  for (int i = 0; i < span.snapshots_len; i++) {
    Snapshot snapshot = a.snapshots[span.snapshots + i];
    if (snapshot.after_rows == done) keep_state(a, snapshot.slot, head, first_v, shared);
  }
}

// grid = (value heads, spans, runs of SPLIT columns of V)
template <class Products>
DEVICE void scan(const KdaArgument& a) {
  SHARED(ScanShared, shared);
  Span span = a.spans[blockIdx.y];
  int head = blockIdx.x, first_v = blockIdx.z * SPLIT, quads = a.key_dim / 4;
  Work first = work_of(a, span, 0, head);
  int rows = chunk_of(span, 0).rows, chunks = chunk_count(span);
  fetch_rows(a, first, rows, shared);
  fetch_rest(a, first, rows, shared);
  const float* source = span.read == NO_SLOT ? nullptr : state_of(a, span.read, head);
  for (int i = threadIdx.x; i < SPLIT * quads; i += CHUNK_THREADS) {
    int v = i / quads, c = i % quads * 4;
    bool there = source && first_v + v < a.value_dim;
    float4 zero = make_float4(0, 0, 0, 0);
    store4(&shared->state[v][c],
           there ? load4(source + (int64_t)(first_v + v) * a.key_dim + c) : zero);
  }
  for (int i = 0; i < chunks; i++)
    scan_chunk<Products>(a, span, i, head, first_v, i + 1 == chunks, shared);
  keep_state(a, span.write, head, first_v, shared);
}

extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) kda_scan(const KdaArgument a) {
  scan<InF32>(a);
}
KERNEL_SHARED(kda_scan, ScanShared)
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) kda_scan_tf32(const KdaArgument a) {
  scan<InTf32>(a);
}
KERNEL_SHARED(kda_scan_tf32, ScanShared)

// The gated norm of every head of every row, in place, a warp to a head. Rows of form Step are
// normed as well, and then written by kda_step.
extern "C" __global__ void __launch_bounds__(256) kda_norm(const KdaArgument a) {
  int64_t i = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= (int64_t)a.rows * a.value_heads) return;
  int64_t row = i / a.value_heads;
  int head = i % a.value_heads;
  float* out = a.out + row * a.out_stride + head * a.value_dim;
  float sum = 0.0f;
  for (int v = threadIdx.x % 32; v < a.value_dim; v += 32) sum += out[v] * out[v];
  float factor = 1.0f / sqrtf(lanes_sum<32>(sum) / (float)a.value_dim + a.eps);
  for (int v = threadIdx.x % 32; v < a.value_dim; v += 32)
    out[v] = output_value(a, row, head, v, out[v], factor);
}
KERNEL(kda_norm)
