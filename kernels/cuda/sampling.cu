// What choosing a token needs of a row of logits: whether it is a distribution, its likeliest
// token, its first few. The order is that of src/engine/sampler.rs: by falling score, equal ones
// by rising id, with -0 equal to 0.
//
// A row to a block. `judge` reads a row once; `first` once for each digit of a key of a score and
// an id, until it knows which keys are the first: four times for scores that differ. All but the
// first read come from cache. Bound by memory.
#include "common.cuh"

enum Verdict { FINE, NOT_A_NUMBER, INFINITE, NOTHING_LEFT };

// The likeliest token, or the first token that breaks the row.
struct Judged {
  int32_t verdict;
  uint32_t id;
};

struct JudgeArgument {
  const float* logits;
  Judged* out;
  int64_t stride;
  int32_t width, unused;
};

#define NONE 0x7fffffff

// What some values are: the largest and where, and the first that is no number or infinite.
struct Seen {
  float best;
  int at, no_number, infinite;
};

DEVICE Seen both(Seen a, Seen b) {
  bool other = b.best > a.best || (b.best == a.best && b.at < a.at);
  return Seen{other ? b.best : a.best, other ? b.at : a.at, min(a.no_number, b.no_number),
              min(a.infinite, b.infinite)};
}

struct JudgeShared {
  Seen warps[32];
};

DEVICE Seen warp_seen(Seen seen) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    Seen other;
    other.best = __shfl_xor_sync(0xffffffffu, seen.best, step);
    other.at = __shfl_xor_sync(0xffffffffu, seen.at, step);
    other.no_number = __shfl_xor_sync(0xffffffffu, seen.no_number, step);
    other.infinite = __shfl_xor_sync(0xffffffffu, seen.infinite, step);
    seen = both(seen, other);
  }
  return seen;
}

// grid = (rows), 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) judge(const JudgeArgument a) {
  SHARED(JudgeShared, shared);
  const float* logits = a.logits + blockIdx.x * a.stride;
  Seen seen = {minus_infinity(), NONE, NONE, NONE};
  for (int i = threadIdx.x; i < a.width; i += 1024) {
    float x = logits[i];
    bool is_number = x == x;
    // An infinity breaks the row too, and is its largest value.
    seen = both(seen, Seen{is_number ? x : minus_infinity(), is_number ? i : NONE,
                           is_number ? NONE : i, x == -minus_infinity() ? i : NONE});
  }
  seen = warp_seen(seen);
  if (threadIdx.x % 32 == 0) shared->warps[threadIdx.x / 32] = seen;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  seen = warp_seen(shared->warps[threadIdx.x]);
  if (threadIdx.x > 0) return;
  Judged judged = {FINE, (uint32_t)seen.at};
  if (seen.best == minus_infinity()) judged = Judged{NOTHING_LEFT, 0};
  if (seen.infinite != NONE) judged = Judged{INFINITE, (uint32_t)seen.infinite};
  if (seen.no_number != NONE) judged = Judged{NOT_A_NUMBER, (uint32_t)seen.no_number};
  a.out[blockIdx.x] = judged;
}
KERNEL_SHARED(judge, JudgeShared)

// A token and its score.
struct Candidate {
  uint32_t id;
  float score;
};

struct FirstArgument {
  const float* logits;
  Candidate* out;
  int64_t stride;
  int32_t width, count;
};

#define MOST_FIRST 1024

struct FirstShared {
  uint64_t keys[MOST_FIRST];
  int32_t digits[256];
  // How many keys are before this digit, its number, and how many keys have been taken.
  int32_t before, digit, taken, unused;
};

// A number that rises as the score falls, and with the id among equal scores.
DEVICE uint64_t order_key(float score, int id) {
  FloatBits x;
  x.value = score + 0.0f;
  uint32_t rising = x.bits >> 31 ? ~x.bits : x.bits | 0x80000000u;
  return (uint64_t)(~rising) << 32 | (uint32_t)id;
}

// The first `count` tokens of a row, at most MOST_FIRST and no more than there are, in order. Keys
// are narrowed down digit by digit to the last one that is taken, then sorted. grid = (rows), 1024
// threads.
extern "C" __global__ void __launch_bounds__(1024) first(const FirstArgument a) {
  SHARED(FirstShared, shared);
  int t = threadIdx.x, wanted = a.count;
  const float* logits = a.logits + blockIdx.x * a.stride;
  // Keys whose digits so far are `prefix` are undecided; those below it are taken.
  uint64_t prefix = 0;
  int shift = 64;
  while (wanted > 0) {
    shift -= 8;
    if (t < 256) shared->digits[t] = 0;
    __syncthreads();
    for (int i = t; i < a.width; i += 1024) {
      uint64_t key = order_key(logits[i], i);
      if (shift == 56 || key >> (shift + 8) == prefix)
        atomicAdd(&shared->digits[key >> shift & 255], 1);
    }
    __syncthreads();
    if (t == 0) {
      int before = 0, digit = 0;
      while (before + shared->digits[digit] < wanted) before += shared->digits[digit++];
      shared->before = before;
      shared->digit = digit;
    }
    __syncthreads();
    prefix = prefix << 8 | (uint64_t)shared->digit;
    wanted -= shared->before;
    // All keys of the digit are wanted: nothing is left to decide.
    if (shared->digits[shared->digit] == wanted) break;
    __syncthreads();
  }
  if (t == 0) shared->taken = 0;
  shared->keys[t] = ~0ull;
  __syncthreads();
  for (int i = t; i < a.width; i += 1024) {
    uint64_t key = order_key(logits[i], i);
    if (key >> shift <= prefix) shared->keys[atomicAdd(&shared->taken, 1)] = key;
  }
  __syncthreads();
  // Bitonic sort.
  for (int size = 2; size <= MOST_FIRST; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
      int other = t ^ step;
      if (other > t) {
        uint64_t low = shared->keys[t], high = shared->keys[other];
        if ((low > high) == ((t & size) == 0)) {
          shared->keys[t] = high;
          shared->keys[other] = low;
        }
      }
      __syncthreads();
    }
  if (t < a.count) {
    uint32_t id = (uint32_t)shared->keys[t];
    a.out[(int64_t)blockIdx.x * a.count + t] = Candidate{id, logits[id]};
  }
}
KERNEL_SHARED(first, FirstShared)
