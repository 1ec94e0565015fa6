// Fibers, barriers and warp operations of emu.h.
//
// Under the race detector this file is compiled without it (-DEMU_TSAN in its place): a fiber then
// is a thread to the detector, and only barriers and warp operations order them.
#include "emu.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <vector>

#if defined(EMU_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#define RELEASE(p) __tsan_release(p)
#define ACQUIRE(p) __tsan_acquire(p)
#else
#define RELEASE(p)
#define ACQUIRE(p)
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" void emu_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl emu_switch
emu_switch:
  stp x29,x30,[sp,#-160]!
  stp x19,x20,[sp,#16]
  stp x21,x22,[sp,#32]
  stp x23,x24,[sp,#48]
  stp x25,x26,[sp,#64]
  stp x27,x28,[sp,#80]
  stp d8,d9,[sp,#96]
  stp d10,d11,[sp,#112]
  stp d12,d13,[sp,#128]
  stp d14,d15,[sp,#144]
  mov x2,sp
  str x2,[x0]
  mov sp,x1
  ldp x19,x20,[sp,#16]
  ldp x21,x22,[sp,#32]
  ldp x23,x24,[sp,#48]
  ldp x25,x26,[sp,#64]
  ldp x27,x28,[sp,#80]
  ldp d8,d9,[sp,#96]
  ldp d10,d11,[sp,#112]
  ldp d12,d13,[sp,#128]
  ldp d14,d15,[sp,#144]
  ldp x29,x30,[sp],#160
  ret
)");
#endif

namespace emu {

__thread Block* block;
__thread Counts counts;
__thread unsigned seed;
Kernel* kernels;

static constexpr size_t STACK_BYTES = 64 << 10;

Kernel::Kernel(const char* name, const char* path, void (*entry)(void**), int parameters,
               const uint16_t* parameter_bytes, size_t shared_bytes)
    : name(name),
      file(strrchr(path, '/') ? strrchr(path, '/') + 1 : path),
      entry(entry),
      parameters(parameters),
      parameter_bytes(parameter_bytes),
      shared_bytes(shared_bytes),
      next(kernels) {
  kernels = this;
}

Kernel* find(const char* name) {
  for (Kernel* k = kernels; k; k = k->next)
    if (!strcmp(k->name, name)) return k;
  return nullptr;
}

void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  fprintf(stderr, "emulator: ");
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  abort();
}

static void switch_to(void** save, Fiber* fiber) {
  counts.switches++;
  block->current = fiber;
#if defined(EMU_TSAN)
  __tsan_switch_to_fiber(fiber->sanitizer, 1 /* which orders nothing */);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake;
  __sanitizer_start_switch_fiber(&fake, block->stacks + STACK_BYTES * fiber->index, STACK_BYTES);
#endif
  emu_switch(save, fiber->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

static Fiber* next_ready(unsigned from) {
  unsigned place = block->place[from];
  for (unsigned i = 0; i < block->threads; i++) {
    if (++place >= block->threads) place = 0;
    Fiber* fiber = &block->fibers[block->order[place]];
    if (fiber->state == State::Ready) return fiber;
  }
  return nullptr;
}

[[noreturn]] static void deadlock() {
  unsigned in_warp_op = 0, at_barrier = 0, done = 0;
  int warp_line = 0, barrier_line = 0;
  for (unsigned i = 0; i < block->threads; i++) {
    Fiber& fiber = block->fibers[i];
    if (fiber.state == State::InWarpOp) {
      in_warp_op++;
      warp_line = fiber.line;
    } else if (fiber.state == State::AtBarrier) {
      at_barrier++;
      barrier_line = fiber.line;
    } else {
      done++;
    }
  }
  fail("deadlock in block (%u, %u, %u): %u threads in a warp operation (one at line %d), %u at a "
       "barrier (one at line %d), %u done",
       block->at.x, block->at.y, block->at.z, in_warp_op, warp_line, at_barrier, barrier_line,
       done);
}

static void give_way() {
  Fiber* me = block->current;
  Fiber* next = next_ready(me->index);
  if (!next) deadlock();
  if (next != me) switch_to(&me->stack_pointer, next);
}

static void open_barrier() {
  block->at_barrier = 0;
  int line = 0;
  for (unsigned i = 0; i < block->threads; i++) {
    Fiber& fiber = block->fibers[i];
    if (fiber.state != State::AtBarrier) continue;
    if (line && fiber.line != line)
      fail("divergent barriers: line %d meets line %d", line, fiber.line);
    line = fiber.line;
    fiber.state = State::Ready;
  }
}

// What comes before a barrier is ordered before what comes after it, and before nothing else: a
// thread that is slow to go on must not see what a fast one released at the next barrier. Nobody
// can be two barriers ahead, so two places are enough.
void barrier(int line) {
  Fiber* me = block->current;
  counts.barriers++;
  [[maybe_unused]] char* passed = &block->passed[me->barriers++ % 2];
  RELEASE(passed);
  me->state = State::AtBarrier;
  me->line = line;
  if (++block->at_barrier == block->alive) open_barrier();
  if (me->state != State::Ready) give_way();
  ACQUIRE(passed);
}

void warp_op(unsigned mask, int operation, const void* in, void* out, WarpFunction function,
             int line) {
  Fiber* me = block->current;
  Warp& warp = block->warps[me->warp];
  counts.warp_ops++;
  Fiber* lanes = &block->fibers[me->warp * WARP];
  unsigned there = block->threads - me->warp * WARP;
  if (there < WARP) mask &= (1u << there) - 1;
  if (!(mask >> me->lane & 1))
    fail("line %d: lane %u calls a warp operation whose mask (%08x) leaves it out", line, me->lane,
         mask);
  // As in `barrier`. Lanes that go different ways count differently: they share a place.
  bool all = mask == ALL_LANES;
  [[maybe_unused]] char* passed = &warp.passed[all ? me->warp_ops++ % 2 : 2];
  RELEASE(passed);
  me->state = State::InWarpOp;
  me->mask = mask;
  me->operation = operation;
  me->line = line;
  me->in = in;
  me->out = out;
  warp.arrived |= 1u << me->lane;
  if ((warp.arrived & mask) == mask) {
    for (unsigned m = mask; m; m &= m - 1) {
      Fiber& other = lanes[__builtin_ctz(m)];
      if (other.mask != mask || other.operation != operation || other.line != line)
        fail("two warp operations meet: lane %u at line %d (mask %08x), lane %u at line %d (%08x)",
             me->lane, line, mask, other.lane, other.line, other.mask);
    }
    if (function) function(lanes, mask);
    warp.arrived &= ~mask;
    for (unsigned m = mask; m; m &= m - 1) lanes[__builtin_ctz(m)].state = State::Ready;
  }
  if (me->state != State::Ready) give_way();
  ACQUIRE(passed);
}

void shuffle(Fiber* warp, unsigned mask) {
  for (unsigned m = mask; m; m &= m - 1) {
    Fiber& fiber = warp[__builtin_ctz(m)];
    int from = ((const ShuffleIn*)fiber.in)->from;
    if (!(mask >> from & 1))
      fail("line %d: a shuffle reads lane %d outside its mask %08x", fiber.line, from, mask);
    *(uint64_t*)fiber.out = ((const ShuffleIn*)warp[from].in)->value;
  }
}

void ballot(Fiber* warp, unsigned mask) {
  uint64_t votes = 0;
  for (unsigned m = mask; m; m &= m - 1)
    if (*(const uint64_t*)warp[__builtin_ctz(m)].in) votes |= 1ull << __builtin_ctz(m);
  for (unsigned m = mask; m; m &= m - 1) *(uint64_t*)warp[__builtin_ctz(m)].out = votes;
}

static void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (!block->main_stack) {
    block->main_stack = stack;
    block->main_stack_bytes = bytes;
  }
#endif
  Fiber* me = block->current;
  ACQUIRE(&block->at);
  block->entry(block->arguments);
  RELEASE(&block->alive);
  if (me->copy_count) fail("thread %u ends with %d cp.async in flight", me->index, me->copy_count);
  me->state = State::Done;
  block->alive--;
  if (block->alive && block->at_barrier == block->alive) open_barrier();
  if (!block->alive) {
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(block->main_sanitizer, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(nullptr, block->main_stack, block->main_stack_bytes);
#endif
    void* dropped;
    emu_switch(&dropped, block->main_stack_pointer);
  }
  Fiber* next = next_ready(me->index);
  if (!next) deadlock();
  switch_to(&me->stack_pointer, next);
  __builtin_unreachable();
}

// Kept from launch to launch: mapping stacks takes longer than most blocks run.
struct Pool {
  std::vector<Fiber> fibers;
  std::vector<unsigned> order, place;
  char* stacks = nullptr;
  size_t stack_count = 0;

  void grow(unsigned threads) {
    order.resize(threads);
    place.resize(threads);
    if (stack_count >= threads) return;
    if (stacks) munmap(stacks, stack_count * STACK_BYTES);
    stacks = (char*)mmap(nullptr, threads * STACK_BYTES, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stack_count = threads;
    fibers.resize(threads);
  }
};
static thread_local Pool pool;

static void shuffle_order(unsigned* order, size_t count, uint64_t& random) {
  for (size_t i = 0; i < count; i++) order[i] = i;
  if (!seed) return;
  for (size_t i = count; i-- > 1;) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(order[i], order[(random >> 33) % (i + 1)]);
  }
}

static void prepare_fiber(Fiber& fiber, unsigned index, dim3 shape) {
  fiber.index = index;
  fiber.lane = index % WARP;
  fiber.warp = index / WARP;
  fiber.state = State::Ready;
  fiber.copy_count = fiber.group_count = 0;
  fiber.barriers = fiber.warp_ops = 0;
  fiber.thread = {index % shape.x, index / shape.x % shape.y, index / (shape.x * shape.y)};
  void** top = (void**)(block->stacks + STACK_BYTES * (index + 1)) - 3;
  *top = nullptr;
#if defined(__aarch64__)
  char* frame = (char*)top - 160;
  memset(frame, 0, 160);
  ((void**)frame)[1] = (void*)fiber_main;
  fiber.stack_pointer = frame;
#else
  *--top = (void*)fiber_main;
  top -= 6;
  memset(top, 0, 48);
  fiber.stack_pointer = top;
#endif
}

static void run_block(uint64_t& random) {
  unsigned threads = block->threads;
  block->alive = threads;
  block->at_barrier = 0;
  memset(block->warps, 0, sizeof block->warps);
  memset(block->shared, 0xff, block->shared_bytes);
  shuffle_order(block->order, threads, random);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(block->stacks, threads * STACK_BYTES);
#endif
  for (unsigned i = 0; i < threads; i++) {
    block->place[block->order[i]] = i;
    prepare_fiber(block->fibers[i], i, block->block);
  }
  RELEASE(&block->at);
  switch_to(&block->main_stack_pointer, &block->fibers[block->order[0]]);
  ACQUIRE(&block->alive);
}

void launch(dim3 grid, dim3 shape, size_t shared, void (*entry)(void**), void** arguments) {
  unsigned threads = shape.x * shape.y * shape.z;
  if (threads == 0 || threads > MAX_THREADS) fail("a block of %u threads", threads);
  if (shared > MAX_SHARED) fail("%zu bytes of shared memory", shared);
  pool.grow(threads);
  // An allocation of its own, so that an overrun is seen; a little more, so that it is never empty.
  size_t allocated = (shared + 1024) & ~size_t(1023);
  Block b{};
  b.grid = grid;
  b.block = shape;
  b.threads = threads;
  b.shared = (char*)aligned_alloc(1024, allocated);
  b.shared_bytes = shared;
  b.fibers = pool.fibers.data();
  b.order = pool.order.data();
  b.place = pool.place.data();
  b.stacks = pool.stacks;
  b.entry = entry;
  b.arguments = arguments;
#if defined(__SANITIZE_ADDRESS__)
  if (allocated > shared) ASAN_POISON_MEMORY_REGION(b.shared + shared, allocated - shared);
#endif
#if defined(EMU_TSAN)
  b.main_sanitizer = __tsan_get_current_fiber();
  for (unsigned i = 0; i < threads; i++) b.fibers[i].sanitizer = __tsan_create_fiber(0);
#endif
  block = &b;
  uint64_t random = seed * 0x9e3779b97f4a7c15ull + 1;
  std::vector<unsigned> blocks((size_t)grid.x * grid.y * grid.z);
  shuffle_order(blocks.data(), blocks.size(), random);
  for (unsigned linear : blocks) {
    b.at = {linear % grid.x, linear / grid.x % grid.y, linear / (grid.x * grid.y)};
    run_block(random);
  }
  block = nullptr;
#if defined(EMU_TSAN)
  for (unsigned i = 0; i < threads; i++) __tsan_destroy_fiber(b.fibers[i].sanitizer);
#endif
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(b.shared, allocated);
#endif
  free(b.shared);
}

}  // namespace emu
