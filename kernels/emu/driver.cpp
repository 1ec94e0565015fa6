// A stand-in libcuda for tests: the driver calls that cudarc makes, over host memory and emu.h.
//
// Work is queued per stream and runs only when somebody waits, in a seeded order between streams
// that respects events and nothing else; for three of four seeds one stream of each three that were
// made (a device's: kernels, copies out, copies in) runs only when no other can. So a missing event
// wait, or a pinned buffer that is written too early, gives wrong numbers for some seed. Pageable
// memory is copied when the call is made, pinned memory when the stream comes to it, as a device
// does.
//
// What it refuses where a driver would: addresses outside an allocation, launches beyond the
// limits, a shared size other than the kernel's struct, calls without a current context, what may
// not be captured. A kernel that writes past an allocation ends the process with its name.
#include "emu.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

using Address = uint64_t;
enum Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  LAUNCH_FAILED = 719,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_ISOLATION = 905,
};

struct Event {
  uint64_t recorded = 0, reached = 0;
  bool timed = false;
  std::chrono::steady_clock::time_point at;
};
// Work that waits for an event keeps it: one may be destroyed before it is reached.
using EventHandle = std::shared_ptr<Event>;
struct Work {
  std::function<void()> run;
  EventHandle wait;
  uint64_t until = 0;
};
struct Stream {
  std::deque<Work> queue;
  bool capturing = false;
  std::vector<Work> captured;
  unsigned number = 0;
};
struct Graph {
  std::vector<Work> work;
};
struct Module {
  std::string file;
};

static std::recursive_mutex lock_;
#define LOCKED std::lock_guard<std::recursive_mutex> guard_(lock_)
#define IN_CONTEXT                              \
  LOCKED;                                       \
  if (!current_context) return INVALID_CONTEXT; \
  if (broken) return LAUNCH_FAILED

static std::map<Address, size_t> device_memory, pinned_memory;
static std::map<const emu::Kernel*, size_t> large_shared;
static std::vector<Stream*> streams;
static Stream default_stream;
static size_t memory_bytes = size_t(8) << 30, used_bytes, pinnable_bytes = size_t(8) << 30;
static size_t pinned_bytes;

// What a program that is run on its own is told of the machine.
static uint64_t told(const char* name, uint64_t otherwise) {
  const char* value = getenv(name);
  return value ? strtoull(value, nullptr, 10) : otherwise;
}
static int driver_version = (int)told("DELTAPOOL_STANDIN_DRIVER", 13000);
static int devices = (int)told("DELTAPOOL_STANDIN_DEVICES", 1);
static int shared_bytes = emu::MAX_SHARED;
// The launch that fails, counted from the start; 0 for none. Then every call fails, as with a
// device.
static uint64_t failing_launch = told("DELTAPOOL_STANDIN_FAILING_LAUNCH", 0);
static bool broken;

static uint64_t random_state = 88172645463325252ull, launches;
static unsigned kernel_seed, streams_made, late_stream = 3;
static char context;
static thread_local void* current_context;
static FILE* record;

static uint64_t next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

using Memory = std::map<Address, size_t>;
static Memory::iterator allocation(Memory& memory, Address at) {
  auto i = memory.upper_bound(at);
  if (i == memory.begin()) return memory.end();
  --i;
  return at < i->first + i->second ? i : memory.end();
}
static bool holds(Memory& memory, Address at, size_t bytes) {
  if (bytes == 0) return true;
  auto i = allocation(memory, at);
  return i != memory.end() && at + bytes <= i->first + i->second;
}

static Stream* stream_of(void* handle) {
  return (uintptr_t)handle < 3 ? &default_stream : (Stream*)handle;
}

static bool advance(Stream* stream) {
  if (stream->queue.empty()) return false;
  Work& first = stream->queue.front();
  if (first.wait && first.wait->reached < first.until) return false;
  Work work = std::move(first);
  stream->queue.pop_front();
  if (work.run) work.run();
  return true;
}

template <class Until>
static void run_until(Until until) {
  while (!until()) {
    std::vector<Stream*> all{&default_stream};
    all.insert(all.end(), streams.begin(), streams.end());
    size_t first = next_random() % all.size();
    bool advanced = false;
    for (size_t i = 0; i < 2 * all.size() && !advanced; i++) {
      Stream* stream = all[(first + i) % all.size()];
      bool is_late = stream != &default_stream && stream->number % 3 == late_stream;
      if (is_late == (i >= all.size())) advanced = advance(stream);
    }
    if (!advanced) emu::fail("every stream waits for an event that nobody records");
  }
}

static int push(void* handle, Work work) {
  Stream* stream = stream_of(handle);
  if (stream->capturing)
    stream->captured.push_back(std::move(work));
  else
    stream->queue.push_back(std::move(work));
  return SUCCESS;
}
static int push(void* handle, std::function<void()> run) {
  return push(handle, Work{std::move(run), nullptr, 0});
}

#define API extern "C" __attribute__((visibility("default"))) int

// ---- devices and contexts

API cuInit(unsigned) { return devices ? SUCCESS : NO_DEVICE; }
API cuDriverGetVersion(int* version) {
  *version = driver_version;
  return SUCCESS;
}
API cuDeviceGetCount(int* count) {
  *count = devices;
  return SUCCESS;
}
API cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < devices ? SUCCESS : INVALID_DEVICE;
}
API cuDeviceGetName(char* name, int bytes, int) {
  snprintf(name, bytes, "emulated device");
  return SUCCESS;
}
API cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = memory_bytes;
  return SUCCESS;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 10: *value = 32; break;            // warp size
    case 16: *value = 132; break;           // multiprocessors
    case 75: *value = 9; break;             // compute capability
    case 76: *value = 0; break;
    case 97: *value = shared_bytes; break;
    case 115: *value = 1; break;            // memory pools
    default: *value = 0;
  }
  return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** handle, int) {
  *handle = &context;
  return SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxSetCurrent(void* handle) {
  current_context = handle;
  return SUCCESS;
}
API cuCtxGetCurrent(void** handle) {
  *handle = current_context;
  return SUCCESS;
}
API cuCtxSynchronize() {
  LOCKED;
  run_until([] {
    for (auto stream : streams)
      if (!stream->queue.empty()) return false;
    return default_stream.queue.empty();
  });
  return SUCCESS;
}

// ---- memory: filled with not-a-number, so that nothing relies on a cleared allocation

// What stands behind every allocation, and must stand there after every kernel.
static constexpr size_t GUARD_BYTES = 4096;
static constexpr unsigned char GUARD = 0xa5;

static void check_guards(const char* kernel) {
  static const std::string guard(GUARD_BYTES, (char)GUARD);
  for (auto [at, bytes] : device_memory)
    if (memcmp((char*)at + bytes, guard.data(), GUARD_BYTES))
      emu::fail("%s writes past the end of %zu bytes", kernel, bytes);
}

API cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = memory_bytes - used_bytes;
  *total = memory_bytes;
  return SUCCESS;
}
API cuMemAlloc_v2(Address* at, size_t bytes) {
  IN_CONTEXT;
  if (bytes == 0) return INVALID_VALUE;
  if (used_bytes + bytes > memory_bytes) return OUT_OF_MEMORY;
  void* memory = aligned_alloc(512, (bytes + GUARD_BYTES + 511) & ~size_t(511));
  memset(memory, 0xff, bytes);
  memset((char*)memory + bytes, GUARD, GUARD_BYTES);
  *at = (Address)memory;
  device_memory[*at] = bytes;
  used_bytes += bytes;
  return SUCCESS;
}
API cuMemFree_v2(Address at) {
  IN_CONTEXT;
  auto i = device_memory.find(at);
  if (i == device_memory.end()) return INVALID_VALUE;
  cuCtxSynchronize();
  used_bytes -= i->second;
  // What is read after it was freed is not what it was.
  memset((void*)at, 0xff, i->second);
  device_memory.erase(i);
  free((void*)at);
  return SUCCESS;
}
API cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  IN_CONTEXT;
  if (pinned_bytes + bytes > pinnable_bytes) return OUT_OF_MEMORY;
  *memory = aligned_alloc(4096, (bytes + 4095) & ~size_t(4095));
  memset(*memory, 0xff, bytes);
  pinned_memory[(Address)*memory] = bytes;
  pinned_bytes += bytes;
  return SUCCESS;
}
API cuMemFreeHost(void* memory) {
  IN_CONTEXT;
  auto i = pinned_memory.find((Address)memory);
  if (i == pinned_memory.end()) return INVALID_VALUE;
  cuCtxSynchronize();
  pinned_bytes -= i->second;
  pinned_memory.erase(i);
  free(memory);
  return SUCCESS;
}
API cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (!holds(device_memory, to, bytes)) return INVALID_VALUE;
  if (holds(pinned_memory, (Address)from, bytes))
    return push(stream, [=] { memcpy((void*)to, from, bytes); });
  if (stream_of(stream)->capturing) return CAPTURE_UNSUPPORTED;
  auto staged = std::make_shared<std::string>((const char*)from, bytes);
  return push(stream, [=] { memcpy((void*)to, staged->data(), bytes); });
}
API cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (!holds(device_memory, from, bytes)) return INVALID_VALUE;
  bool pinned = holds(pinned_memory, (Address)to, bytes);
  Stream* queue = stream_of(stream);
  if (queue->capturing && !pinned) return CAPTURE_UNSUPPORTED;
  push(stream, [=] { memcpy(to, (void*)from, bytes); });
  if (!pinned) run_until([=] { return queue->queue.empty(); });
  return SUCCESS;
}
API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (!holds(device_memory, from, bytes) || !holds(device_memory, to, bytes)) return INVALID_VALUE;
  return push(stream, [=] { memcpy((void*)to, (void*)from, bytes); });
}
API cuMemsetD8Async(Address at, unsigned char value, size_t bytes, void* stream) {
  IN_CONTEXT;
  if (!holds(device_memory, at, bytes)) return INVALID_VALUE;
  return push(stream, [=] { memset((void*)at, value, bytes); });
}

// ---- streams and events

API cuStreamCreate(void** handle, unsigned) {
  IN_CONTEXT;
  Stream* stream = new Stream;
  stream->number = streams_made++;
  streams.push_back(stream);
  *handle = stream;
  return SUCCESS;
}
API cuStreamCreateWithPriority(void** handle, unsigned flags, int) {
  return cuStreamCreate(handle, flags);
}
API cuStreamDestroy_v2(void* handle) {
  LOCKED;
  Stream* stream = stream_of(handle);
  run_until([=] { return stream->queue.empty(); });
  for (size_t i = 0; i < streams.size(); i++)
    if (streams[i] == stream) streams.erase(streams.begin() + i);
  delete stream;
  return SUCCESS;
}
API cuStreamSynchronize(void* handle) {
  IN_CONTEXT;
  Stream* stream = stream_of(handle);
  if (stream->capturing) return CAPTURE_UNSUPPORTED;
  run_until([=] { return stream->queue.empty(); });
  return broken ? LAUNCH_FAILED : SUCCESS;
}
API cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
  IN_CONTEXT;
  EventHandle event = *(EventHandle*)event_handle;
  if (stream_of(handle)->capturing) return event->recorded ? CAPTURE_ISOLATION : SUCCESS;
  return push(handle, Work{nullptr, event, event->recorded});
}
API cuEventCreate(void** handle, unsigned flags) {
  IN_CONTEXT;
  const unsigned DISABLE_TIMING = 2;
  Event* event = new Event;
  event->timed = !(flags & DISABLE_TIMING);
  *handle = new EventHandle(event);
  return SUCCESS;
}
API cuEventDestroy_v2(void* handle) {
  LOCKED;
  delete (EventHandle*)handle;
  return SUCCESS;
}
API cuEventRecord(void* handle, void* stream) {
  IN_CONTEXT;
  EventHandle event = *(EventHandle*)handle;
  if (stream_of(stream)->capturing) return SUCCESS;
  uint64_t number = ++event->recorded;
  return push(stream, [=] {
    event->reached = number;
    event->at = std::chrono::steady_clock::now();
  });
}
API cuEventSynchronize(void* handle) {
  IN_CONTEXT;
  EventHandle event = *(EventHandle*)handle;
  uint64_t number = event->recorded;
  run_until([=] { return event->reached >= number; });
  return broken ? LAUNCH_FAILED : SUCCESS;
}
// Somebody who asks again and again must see it happen: a question moves the streams on.
API cuEventQuery(void* handle) {
  IN_CONTEXT;
  EventHandle event = *(EventHandle*)handle;
  if (event->reached >= event->recorded) return SUCCESS;
  bool once = false;
  run_until([&] { return std::exchange(once, true); });
  return NOT_READY;
}
// What the emulation took, which says nothing of a device.
API cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  IN_CONTEXT;
  EventHandle start = *(EventHandle*)from, end = *(EventHandle*)to;
  if (!start->timed || !end->timed || !start->recorded || !end->recorded) return INVALID_HANDLE;
  if (start->reached < start->recorded || end->reached < end->recorded) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return SUCCESS;
}

// ---- modules and launches. The kernels are those of this library; an image tells which file it
// was compiled from (nvrtc.cpp).

API cuModuleLoadData(void** handle, const void* image) {
  IN_CONTEXT;
  static const char MAGIC[] = "emulated ";
  if (memcmp(image, MAGIC, sizeof MAGIC - 1)) return INVALID_IMAGE;
  *handle = new Module{(const char*)image + sizeof MAGIC - 1};
  return SUCCESS;
}
API cuModuleUnload(void* handle) {
  delete (Module*)handle;
  return SUCCESS;
}
API cuModuleGetFunction(void** function, void* module, const char* name) {
  IN_CONTEXT;
  emu::Kernel* kernel = emu::find(name);
  if (!kernel || ((Module*)module)->file != kernel->file) return NOT_FOUND;
  *function = kernel;
  return SUCCESS;
}
API cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* bytes) {
  emu::Kernel* kernel = (emu::Kernel*)function;
  if (index >= (size_t)kernel->parameters) return INVALID_VALUE;
  *offset = 0;
  for (size_t i = 0; i < index; i++) *offset += kernel->parameter_bytes[i];
  *bytes = kernel->parameter_bytes[index];
  return SUCCESS;
}
API cuFuncSetAttribute(void* function, int attribute, int value) {
  LOCKED;
  if (attribute != 8) return SUCCESS;
  if ((size_t)value > emu::MAX_SHARED) return INVALID_VALUE;
  large_shared[(emu::Kernel*)function] = value;
  return SUCCESS;
}

static void write_record(const emu::Kernel* kernel, const unsigned* shape, size_t shared,
                         const std::vector<std::string>& arguments);

API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** arguments, void**) {
  IN_CONTEXT;
  const emu::Kernel* kernel = (emu::Kernel*)function;
  size_t threads = (size_t)bx * by * bz;
  if (!gx || !gy || !gz || gy > 65535 || gz > 65535) return INVALID_VALUE;
  if (threads == 0 || threads > emu::MAX_THREADS) return INVALID_VALUE;
  auto allowed = large_shared.find(kernel);
  if (shared > (allowed == large_shared.end() ? 48 * 1024 : allowed->second)) return INVALID_VALUE;
  if (shared != kernel->shared_bytes) {
    fprintf(stderr, "emulator: %s is launched with %u bytes of shared memory, its struct has %zu\n",
            kernel->name, shared, kernel->shared_bytes);
    return INVALID_VALUE;
  }
  std::vector<std::string> copies;
  for (int i = 0; i < kernel->parameters; i++)
    copies.emplace_back((const char*)arguments[i], kernel->parameter_bytes[i]);
  std::vector<unsigned> shape{gx, gy, gz, bx, by, bz};
  return push(stream, [=] {
    if (record) write_record(kernel, shape.data(), shared, copies);
    std::vector<void*> pointers;
    for (auto& copy : copies) pointers.push_back((void*)copy.data());
    emu::seed = ++kernel_seed;
    if (++launches == failing_launch) broken = true;
    if (broken) return;
    emu::launch({gx, gy, gz}, {bx, by, bz}, shared, kernel->entry, pointers.data());
    check_guards(kernel->name);
  });
}

// ---- graphs

API cuStreamBeginCapture_v2(void* handle, int) {
  IN_CONTEXT;
  Stream* stream = stream_of(handle);
  if (stream == &default_stream || stream->capturing) return CAPTURE_UNSUPPORTED;
  stream->capturing = true;
  stream->captured.clear();
  return SUCCESS;
}
API cuStreamEndCapture(void* handle, void** graph) {
  IN_CONTEXT;
  Stream* stream = stream_of(handle);
  stream->capturing = false;
  *graph = new Graph{std::move(stream->captured)};
  return SUCCESS;
}
API cuStreamIsCapturing(void* handle, int* status) {
  LOCKED;
  *status = stream_of(handle)->capturing;
  return SUCCESS;
}
API cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  *executable = new Graph(*(Graph*)graph);
  return SUCCESS;
}
API cuGraphLaunch(void* executable, void* stream) {
  IN_CONTEXT;
  for (auto& work : ((Graph*)executable)->work) push(stream, work);
  return SUCCESS;
}
API cuGraphDestroy(void* graph) {
  delete (Graph*)graph;
  return SUCCESS;
}
API cuGraphExecDestroy(void* executable) {
  LOCKED;
  cuCtxSynchronize();
  delete (Graph*)executable;
  return SUCCESS;
}

API cuGetErrorName(int error, const char** name) {
  static thread_local char text[32];
  snprintf(text, sizeof text, "CUDA error %d", error);
  *name = text;
  return SUCCESS;
}
API cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }

// ---- launches written down, for replay.cpp: what a kernel was given and the memory it may touch.
// Device addresses are found in the arguments, which are the only place that holds any.

static void put(const void* data, size_t bytes) { fwrite(data, 1, bytes, record); }
static void put_number(uint64_t number) { put(&number, sizeof number); }

static void write_record(const emu::Kernel* kernel, const unsigned* shape, size_t shared,
                         const std::vector<std::string>& arguments) {
  put_number(strlen(kernel->name));
  put(kernel->name, strlen(kernel->name));
  put(shape, 6 * sizeof *shape);
  put_number(shared);
  Memory named;
  put_number(arguments.size());
  for (auto& argument : arguments) {
    put_number(argument.size());
    put(argument.data(), argument.size());
    for (size_t i = 0; i + 8 <= argument.size(); i += 8) {
      Address at;
      memcpy(&at, argument.data() + i, 8);
      auto found = allocation(device_memory, at);
      if (found != device_memory.end()) named.insert(*found);
    }
  }
  put_number(named.size());
  for (auto [at, bytes] : named) {
    put_number(at);
    put_number(bytes);
    put((void*)at, bytes);
  }
}

// ---- what tests set and ask

#define TEST extern "C" __attribute__((visibility("default")))
TEST void standin_seed(uint64_t seed) {
  LOCKED;
  random_state = seed * 0x9e3779b97f4a7c15ull | 1;
  kernel_seed = (unsigned)seed;
  late_stream = (seed + 3) % 4;
}
TEST uint64_t standin_launches() { return launches; }
TEST void standin_machine(int count, int version, size_t memory, size_t pinnable) {
  LOCKED;
  devices = count;
  driver_version = version;
  memory_bytes = memory;
  pinnable_bytes = pinnable;
}
// Bytes of shared memory that the device says it gives a block.
TEST void standin_shared(int bytes) { shared_bytes = bytes; }
// Has the nth launch from now on fail, and every call after it; 0 mends the device.
TEST void standin_fail(uint64_t nth) {
  LOCKED;
  broken = false;
  failing_launch = nth ? launches + nth : 0;
}
// Writes every launch to `path` from now on; null ends it.
TEST void standin_record(const char* path) {
  LOCKED;
  if (record) fclose(record);
  record = path ? fopen(path, "wb") : nullptr;
}
// Queues work of a sibling library on a stream.
TEST void standin_push(void* stream, void (*function)(void*), void* argument) {
  LOCKED;
  push(stream, [=] { function(argument); });
}
// ldmatrix so far whose rows shared a bank.
TEST uint64_t standin_matrix_load_conflicts() { return emu::counts.matrix_load_conflicts; }
// The kernels whose blocks take more shared memory than so many bytes, a name and a space each.
TEST const char* standin_kernels_over(size_t bytes) {
  static std::string names;
  names.clear();
  for (emu::Kernel* k = emu::kernels; k; k = k->next)
    if (k->shared_bytes > bytes) names += std::string(k->name) + " ";
  return names.c_str();
}
