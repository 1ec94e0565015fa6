// A stand-in libcublasLt for tests: the calls a matrix product takes. Column-major, f32 sums in
// rising k, queued on the streams of driver.cpp.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

extern "C" void standin_push(void* stream, void (*function)(void*), void* argument);

enum Result { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum DataType { F32 = 0, BF16 = 14 };

struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t leading;
  int32_t batch;
  int64_t stride;
};
struct Descriptor {
  int transpose_a, transpose_b;
};
struct Job {
  Descriptor descriptor;
  Layout a, b, c;
  const void *a_at, *b_at, *c_at;
  void* d_at;
  float alpha, beta;
};

static float get(const void* p, int type, size_t i) {
  if (type == F32) return ((const float*)p)[i];
  uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void put(void* p, int type, size_t i, float value) {
  if (type == F32) {
    ((float*)p)[i] = value;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  ((uint16_t*)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A captured job is run again at each replay, so nobody frees it.
static void run(void* argument) {
  const Job& j = *(const Job*)argument;
  uint64_t k = j.descriptor.transpose_a ? j.a.rows : j.a.cols;
  for (int batch = 0; batch < j.c.batch; batch++)
    for (uint64_t col = 0; col < j.c.cols; col++)
      for (uint64_t row = 0; row < j.c.rows; row++) {
        float sum = 0;
        for (uint64_t i = 0; i < k; i++) {
          size_t a = j.descriptor.transpose_a ? row * j.a.leading + i : i * j.a.leading + row;
          size_t b = j.descriptor.transpose_b ? i * j.b.leading + col : col * j.b.leading + i;
          sum += get(j.a_at, j.a.type, batch * j.a.stride + a) *
                 get(j.b_at, j.b.type, batch * j.b.stride + b);
        }
        size_t at = batch * j.c.stride + col * j.c.leading + row;
        float old = j.beta != 0 ? j.beta * get(j.c_at, j.c.type, at) : 0;
        put(j.d_at, j.c.type, at, j.alpha * sum + old);
      }
}

#define API extern "C" __attribute__((visibility("default"))) int
API cublasLtCreate(void** handle) {
  *handle = malloc(8);
  return SUCCESS;
}
API cublasLtDestroy(void* handle) {
  free(handle);
  return SUCCESS;
}
API cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols,
                               int64_t leading) {
  if (type != F32 && type != BF16) return NOT_SUPPORTED;
  *layout = new Layout{type, rows, cols, leading, 1, 0};
  return SUCCESS;
}
API cublasLtMatrixLayoutSetAttribute(void* layout, int attribute, const void* value, size_t) {
  if (attribute == 5) memcpy(&((Layout*)layout)->batch, value, 4);
  if (attribute == 6) memcpy(&((Layout*)layout)->stride, value, 8);
  return SUCCESS;
}
API cublasLtMatrixLayoutDestroy(void* layout) {
  delete (Layout*)layout;
  return SUCCESS;
}
API cublasLtMatmulDescCreate(void** descriptor, int, int) {
  *descriptor = new Descriptor{0, 0};
  return SUCCESS;
}
API cublasLtMatmulDescSetAttribute(void* descriptor, int attribute, const void* value, size_t) {
  Descriptor* d = (Descriptor*)descriptor;
  int number;
  memcpy(&number, value, 4);
  if (attribute == 3) d->transpose_a = number;
  if (attribute == 4) d->transpose_b = number;
  if (attribute == 7 && number != 1) return NOT_SUPPORTED;  // an epilogue
  return SUCCESS;
}
API cublasLtMatmulDescDestroy(void* descriptor) {
  delete (Descriptor*)descriptor;
  return SUCCESS;
}
API cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = malloc(8);
  return SUCCESS;
}
API cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return SUCCESS; }
API cublasLtMatmulPreferenceDestroy(void* preference) {
  free(preference);
  return SUCCESS;
}
API cublasLtMatmulAlgoGetHeuristic(void*, void*, void* a, void* b, void* c, void*, void*, int,
                                   void* results, int* count) {
  for (void* layout : {a, b, c}) {
    Layout* l = (Layout*)layout;
    if (l->leading < (int64_t)l->rows) return INVALID_VALUE;
  }
  memset(results, 0, 96);
  *count = 1;
  return SUCCESS;
}
API cublasLtMatmul(void*, void* descriptor, const float* alpha, const void* a_at, void* a,
                   const void* b_at, void* b, const float* beta, const void* c_at, void* c,
                   void* d_at, void*, const void*, void*, size_t, void* stream) {
  const Descriptor& d = *(Descriptor*)descriptor;
  Layout &la = *(Layout*)a, &lb = *(Layout*)b, &lc = *(Layout*)c;
  uint64_t rows = d.transpose_a ? la.cols : la.rows, k = d.transpose_a ? la.rows : la.cols;
  uint64_t cols = d.transpose_b ? lb.rows : lb.cols, other = d.transpose_b ? lb.cols : lb.rows;
  if (k != other || rows != lc.rows || cols != lc.cols) return INVALID_VALUE;
  standin_push(stream, run, new Job{d, la, lb, lc, a_at, b_at, c_at, d_at, *alpha, *beta});
  return SUCCESS;
}
