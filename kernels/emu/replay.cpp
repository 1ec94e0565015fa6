// Runs launches that driver.cpp wrote down, alone and with memory of their own, so that sanitizers
// see every access: replay FILE SEEDS. Allocations are exactly as long as they were on the device;
// addresses in the arguments are moved to them. Each launch runs with several orders of blocks and
// threads, and must leave the same bits with each.
#include "emu.h"

#include <cstdio>
#include <map>
#include <string>
#include <vector>

static FILE* file;

static bool get(void* to, size_t bytes) { return fread(to, 1, bytes, file) == bytes; }
static uint64_t number() {
  uint64_t value;
  if (!get(&value, sizeof value)) emu::fail("the record ends too early");
  return value;
}
static std::string text() {
  std::string result(number(), 0);
  if (!get(result.data(), result.size())) emu::fail("the record ends too early");
  return result;
}

struct Allocation {
  uint64_t was_at;
  std::string before;
  char* at;
};

static bool run_next(unsigned seeds) {
  uint64_t length;
  if (!get(&length, sizeof length)) return false;
  std::string name(length, 0);
  unsigned shape[6];
  if (!get(name.data(), length) || !get(shape, sizeof shape)) emu::fail("half a launch");
  size_t shared = number();
  std::vector<std::string> arguments(number());
  for (auto& argument : arguments) argument = text();
  std::vector<Allocation> memory(number());
  for (auto& allocation : memory) {
    allocation.was_at = number();
    allocation.before = text();
    // Device memory is aligned to 256 bytes, and ends where it ends.
    if (posix_memalign((void**)&allocation.at, 256, allocation.before.size()))
      emu::fail("no memory");
  }
  for (auto& argument : arguments)
    for (size_t i = 0; i + 8 <= argument.size(); i += 8) {
      uint64_t at;
      memcpy(&at, argument.data() + i, 8);
      for (auto& allocation : memory)
        if (at >= allocation.was_at && at < allocation.was_at + allocation.before.size()) {
          at = (uint64_t)allocation.at + (at - allocation.was_at);
          memcpy(argument.data() + i, &at, 8);
          break;
        }
    }
  emu::Kernel* kernel = emu::find(name.c_str());
  if (!kernel) emu::fail("there is no kernel %s", name.c_str());
  std::vector<void*> pointers;
  for (auto& argument : arguments) pointers.push_back(argument.data());
  std::vector<std::string> first;
  for (unsigned seed = 1; seed <= seeds; seed++) {
    for (auto& allocation : memory)
      memcpy(allocation.at, allocation.before.data(), allocation.before.size());
    emu::seed = seed;
    emu::launch({shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, shared,
                kernel->entry, pointers.data());
    for (size_t i = 0; i < memory.size(); i++) {
      std::string after(memory[i].at, memory[i].before.size());
      if (seed == 1)
        first.push_back(std::move(after));
      else if (after != first[i])
        emu::fail("%s gives other bits with order %u", name.c_str(), seed);
    }
  }
  for (auto& allocation : memory) free(allocation.at);
  return true;
}

int main(int, char** arguments) {
  file = fopen(arguments[1], "rb");
  if (!file) emu::fail("no record %s", arguments[1]);
  unsigned launches = 0;
  while (run_next(atoi(arguments[2]))) launches++;
  printf("%u launches\n", launches);
  return launches == 0;
}
