/* libnvidia-ml.so.1: as much as torch's allocator and torch.cuda.device_count() ask. Everything else: not supported.
 */
#include "core.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
enum { NOT_SUPPORTED = 3 };
int nvmlInit_v2(void) { return 0; }
int nvmlInit(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int* v) {
  *v = 13000;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* n) {
  *n = fc_device_count();
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** d) {
  *d = (void*)(uintptr_t)(i + 1);
  return 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** d) {
  unsigned domain, bus = 1;
  sscanf(id, "%x:%x", &domain, &bus);
  *d = (void*)(uintptr_t)bus;
  return 0;
}
int nvmlDeviceGetUUID(void* d, char* s, unsigned n) {
  snprintf(s, n, "GPU-fafafafa-fafa-fafa-fafa-fafafafafa%02x", (unsigned)(uintptr_t)d - 1);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* d, unsigned long long* m) {
  int i = (int)(uintptr_t)d - 1;
  m[0] = fc_total(i);
  m[2] = fc_used(i);
  m[1] = m[0] - m[2];
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void* d, unsigned* n, void* infos) {
  struct info {
    unsigned pid;
    unsigned long long used;
    unsigned gi, ci;
  }* i = infos;
  if (*n < 1) {
    *n = 1;
    return 7;
  }
  *n = 1;
  i->pid = getpid();
  i->used = fc_used((int)(uintptr_t)d - 1);
  i->gi = i->ci = ~0u;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* d, unsigned l, void* t) {
  (void)d;
  (void)l;
  (void)t;
  return NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* d, unsigned l, void* p) {
  (void)d;
  (void)l;
  (void)p;
  return NOT_SUPPORTED;
}
int nvmlDeviceGetGpuFabricInfoV(void* d, void* i) {
  (void)d;
  memset((char*)i + 4, 0, 25);
  return 0;
} /* state 0: no fabric */
