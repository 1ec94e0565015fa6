// A stand-in libnvrtc for tests: the image it gives names the file it was asked to compile, and
// driver.cpp takes the kernels of that file from its own library.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

struct Program {
  std::string name, log;
};
enum Result { SUCCESS = 0, COMPILATION = 6 };

static uint64_t compiled;

#define API extern "C" __attribute__((visibility("default")))
API int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return SUCCESS;
}
API int nvrtcCreateProgram(Program** program, const char*, const char* name, int,
                           const char* const*, const char* const*) {
  *program = new Program{name, ""};
  return SUCCESS;
}
API int nvrtcDestroyProgram(Program** program) {
  delete *program;
  return SUCCESS;
}
API int nvrtcCompileProgram(Program*, int, const char* const*) {
  compiled++;
  return SUCCESS;
}
static std::string image(Program* program) { return "emulated " + program->name; }
API int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  *bytes = image(program).size() + 1;
  return SUCCESS;
}
API int nvrtcGetCUBIN(Program* program, char* out) {
  strcpy(out, image(program).c_str());
  return SUCCESS;
}
API int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return SUCCESS;
}
API int nvrtcGetProgramLog(Program* program, char* out) {
  strcpy(out, program->log.c_str());
  return SUCCESS;
}
API const char* nvrtcGetErrorString(int) { return "emulated error"; }
API uint64_t standin_compiled() { return compiled; }
