// A CUDA driver library of one device for `cuda.bindings`: a module is a library of the shim, and a
// launch runs its kernel on the CPU. The image that is loaded is the path of that library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kSuccess = 0, kInvalidImage = 200, kNotFound = 500, kLaunchFailed = 719 };

typedef const char* (*Launch)(const unsigned*, const unsigned*, size_t, void**, size_t, uint64_t);

typedef struct {
  Launch launch;
  size_t argument_bytes;
} Function;

static Function functions[64];
static int function_count;
static void* context;

int cuInit(unsigned flags) { return flags ? kNotFound : kSuccess; }

int cuCtxGetCurrent(void** result) {
  *result = context;
  return kSuccess;
}

int cuCtxSetCurrent(void* value) {
  context = value;
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** result, int device) {
  *result = (void*)(uintptr_t)(0x1000 + device);
  return kSuccess;
}

int cuModuleLoadData(void** module, const void* image) {
  *module = dlopen((const char*)image, RTLD_NOW);
  return *module ? kSuccess : kInvalidImage;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  char symbol[256];
  Function* entry = &functions[function_count++];
  snprintf(symbol, sizeof symbol, "launch_%s", name);
  entry->launch = (Launch)dlsym(module, symbol);
  snprintf(symbol, sizeof symbol, "size_%s", name);
  const size_t* size = (const size_t*)dlsym(module, symbol);
  if (!entry->launch || !size) return kNotFound;
  entry->argument_bytes = *size;
  *function = entry;
  return kSuccess;
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared_bytes, void* stream, void** parameters,
                   void** extra) {
  const Function* entry = (const Function*)function;
  const unsigned grid[2] = {gx, gy}, block[2] = {bx, by};
  if (gz != 1 || bz != 1 || extra || stream != (void*)(uintptr_t)5) return kLaunchFailed;
  const char* message =
      entry->launch(grid, block, shared_bytes, parameters, entry->argument_bytes, 1);
  if (message) fprintf(stderr, "%s\n", message);
  return message ? kLaunchFailed : kSuccess;
}

int cuGetProcAddress_v2(const char* name, void** address, int version, uint64_t flags,
                        int* status) {
  static const struct {
    const char* name;
    void* address;
  } known[] = {
      {"cuInit", (void*)cuInit},
      {"cuCtxGetCurrent", (void*)cuCtxGetCurrent},
      {"cuCtxSetCurrent", (void*)cuCtxSetCurrent},
      {"cuDeviceGet", (void*)cuDeviceGet},
      {"cuDevicePrimaryCtxRetain", (void*)cuDevicePrimaryCtxRetain},
      {"cuModuleLoadData", (void*)cuModuleLoadData},
      {"cuModuleGetFunction", (void*)cuModuleGetFunction},
      {"cuLaunchKernel", (void*)cuLaunchKernel},
  };
  (void)version;
  (void)flags;
  *address = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (strcmp(known[i].name, name) == 0) *address = known[i].address;
  }
  if (status) *status = *address ? 0 : 1;
  return kSuccess;
}
