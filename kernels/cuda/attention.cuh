// Softmax attention over paged keys and values: src/mla and src/gqa on a device. attention.cu has
// f32 arithmetic whatever the cache holds, attention_mma.cu products of bf16 where they are asked
// for; here is what they share.
//
// A query row at position p sees positions 0..p. They are walked in tiles of one block (64), tiles
// in segments of 1,024; each segment has a largest score, a sum of weights and weighted values of
// its own, and segments are merged in order. Tiles and segments lie at absolute positions and a
// sum's order depends on nothing else, so a row has the same bits whether one block of threads
// walks all its segments, or as many blocks as there are segments (`parts`, then `merge`), or
// launches one after another (`running`), and whatever rows stand beside it.
#pragma once
#include "common.cuh"

#define TILE 64
#define SEGMENT 1024
#define QUERIES 32
#define MOST_WIDTH 576
#define MOST_VALUES 512

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
