/* Part of libcuda.so.1: settings, memory, and the driver calls that torch looks up. */
#define _GNU_SOURCE
#include "core.h"
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

_Atomic long fc_counters[FC_N_COUNTERS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t used[FC_MAX_DEVICES];
static __thread int current_device;

double fc_number(const char* name, double otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end;
  double value = strtod(text, &end);
  while (*end == ' ') end++;
  switch (*end) {
    case 'K':
    case 'k': value *= 1ull << 10; break;
    case 'M':
    case 'm': value *= 1ull << 20; break;
    case 'G':
    case 'g': value *= 1ull << 30; break;
  }
  return value;
}
static double cached(double* slot, const char* name, double otherwise) {
  if (*slot < 0) *slot = fc_number(name, otherwise);
  return *slot;
}
int fc_device_count(void) { /* as many as there are, or as CUDA_VISIBLE_DEVICES lists of them */
  static double v = -1;
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  int all = (int)cached(&v, "FAKE_CUDA_DEVICES", 1), listed = visible && *visible ? 1 : 0;
  for (const char* c = visible; c && *c; c++) listed += *c == ',';
  return !visible || listed > all ? all : listed;
}
size_t fc_total(int device) {
  static double v = -1;
  (void)device;
  return (size_t)cached(&v, "FAKE_CUDA_MEM", 8.0 * (1ull << 30));
}
int fc_copies(void) {
  static double v = -1;
  return (int)cached(&v, "FAKE_CUDA_COPY", 1);
}
int fc_sm_count(void) {
  static double v = -1;
  return (int)cached(&v, "FAKE_CUDA_SMS", 108);
}
const char* fc_name(void) {
  const char* n = getenv("FAKE_CUDA_NAME");
  return n && *n ? n : "Fake A100-SXM4-80GB";
}
int fc_capability(int* major, int* minor) {
  static double v = -1;
  int c = (int)cached(&v, "FAKE_CUDA_CAPABILITY", 80);
  *major = c / 10;
  *minor = c % 10;
  return 0;
}
double fc_now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
int fc_get_device(void) { return current_device; }
int fc_set_device(int d) {
  if (d < 0 || d >= fc_device_count()) return -1;
  current_device = d;
  return 0;
}

/* ---- memory
 * -------------------------------------------------------------------------------------------------------------- */
typedef struct range {
  char* base;
  size_t bytes;
  int device, kind;
  struct range* next;
} range;
static range* all;

void fc_note(void* base, size_t bytes, int device, int kind) {
  range* r = malloc(sizeof *r);
  *r = (range){base, bytes, device, kind, NULL};
  pthread_mutex_lock(&lock);
  r->next = all;
  all = r;
  pthread_mutex_unlock(&lock);
}
static range* take(void* base) {
  for (range** p = &all; *p; p = &(*p)->next)
    if ((*p)->base == (char*)base) {
      range* r = *p;
      *p = r->next;
      return r;
    }
  return NULL;
}
void fc_forget(void* base) {
  pthread_mutex_lock(&lock);
  free(take(base));
  pthread_mutex_unlock(&lock);
}
int fc_find(const void* p, void** base, size_t* bytes, int* device) {
  int kind = 0;
  pthread_mutex_lock(&lock);
  for (range* r = all; r; r = r->next)
    if ((char*)p >= r->base && (char*)p < r->base + r->bytes) {
      kind = r->kind;
      if (base) *base = r->base;
      if (bytes) *bytes = r->bytes;
      if (device) *device = r->device;
      break;
    }
  pthread_mutex_unlock(&lock);
  return kind;
}
static size_t whole(size_t bytes) { return (bytes + FC_GRANULARITY - 1) / FC_GRANULARITY * FC_GRANULARITY; }
size_t fc_used(int d) {
  pthread_mutex_lock(&lock);
  size_t u = used[d];
  pthread_mutex_unlock(&lock);
  return u;
}
int fc_charge(int d, size_t bytes) {
  pthread_mutex_lock(&lock);
  int full = used[d] + bytes > fc_total(d);
  if (!full) used[d] += bytes;
  pthread_mutex_unlock(&lock);
  return full ? -1 : 0;
}
void fc_credit(int d, size_t bytes) {
  pthread_mutex_lock(&lock);
  used[d] -= bytes;
  pthread_mutex_unlock(&lock);
}
static void* aligned_map(size_t bytes, int protection) { /* 2 MiB aligned; pages cost nothing until they are written */
  size_t more = bytes + FC_GRANULARITY;
  char* p = mmap(NULL, more, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return NULL;
  char* start = (char*)(((uintptr_t)p + FC_GRANULARITY - 1) / FC_GRANULARITY * FC_GRANULARITY);
  if (start > p) munmap(p, start - p);
  if (start + bytes < p + more) munmap(start + bytes, p + more - (start + bytes));
  return start;
}
void* fc_malloc(int device, size_t bytes) {
  bytes = whole(bytes ? bytes : 1);
  if (fc_charge(device, bytes)) return NULL;
  void* p = aligned_map(bytes, PROT_READ | PROT_WRITE);
  if (!p) {
    fc_credit(device, bytes);
    return NULL;
  }
  fc_note(p, bytes, device, FC_DEVICE);
  fc_counters[FC_N_MALLOC]++;
  return p;
}
int fc_free(void* p) {
  if (!p) return 0;
  fc_device_sync(fc_get_device()); /* as cudaFree does */
  pthread_mutex_lock(&lock);
  range* r = take(p);
  pthread_mutex_unlock(&lock);
  if (!r) return -1;
  munmap(r->base, r->bytes);
  if (r->kind == FC_DEVICE) {
    fc_credit(r->device, r->bytes);
    fc_counters[FC_N_FREE]++;
  }
  free(r);
  return 0;
}
void* fc_host_malloc(size_t bytes) {
  bytes = (bytes + 4095) / 4096 * 4096;
  if (!bytes) bytes = 4096;
  void* p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return NULL;
  fc_note(p, bytes, fc_get_device(), FC_HOST);
  return p;
}

/* ---- driver calls
 * --------------------------------------------------------------------------------------------------------- */
#undef cuMemcpyDtoH
static int context; /* any non-null address */
CUresult cuInit(unsigned f) {
  (void)f;
  return fc_device_count() ? 0 : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
CUresult cuDeviceGetCount(int* n) {
  *n = fc_device_count();
  return 0;
}
CUresult cuDeviceGet(CUdevice* d, int i) {
  if (i >= fc_device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *d = i;
  return 0;
}
CUresult cuDeviceGetName(char* n, int len, CUdevice d) {
  (void)d;
  snprintf(n, len, "%s", fc_name());
  return 0;
}
CUresult cuDeviceTotalMem_v2(size_t* b, CUdevice d) {
  *b = fc_total(d);
  return 0;
}
CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) {
  int major, minor;
  (void)d;
  fc_capability(&major, &minor);
  switch (a) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *v = 1; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *v = major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *v = minor; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *v = fc_sm_count(); break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = 1024; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *v = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *v = 166912; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *v = 1; break;
    default: *v = 0;
  }
  return 0;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned* f, int* a) {
  (void)d;
  *f = 0;
  *a = 1;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  (void)d;
  *c = (CUcontext)&context;
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)&context;
  return 0;
}
CUresult cuCtxSetCurrent(CUcontext c) {
  (void)c;
  return 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext c) {
  (void)c;
  return 0;
}
CUresult cuCtxPopCurrent_v2(CUcontext* c) {
  *c = (CUcontext)&context;
  return 0;
}
CUresult cuCtxGetDevice(CUdevice* d) {
  *d = fc_get_device();
  return 0;
}
CUresult cuGetErrorString(CUresult e, const char** s) {
  (void)e;
  *s = "fake driver error";
  return 0;
}
CUresult cuGetErrorName(CUresult e, const char** s) {
  *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}

typedef struct handle {
  size_t bytes;
  int device, refs;
} handle;
CUresult cuMemGetAllocationGranularity(size_t* g, const CUmemAllocationProp* p, CUmemAllocationGranularity_flags o) {
  (void)p;
  (void)o;
  *g = FC_GRANULARITY;
  return 0;
}
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t bytes, size_t alignment, CUdeviceptr addr, unsigned long long f) {
  (void)alignment;
  (void)addr;
  (void)f;
  void* m = aligned_map(bytes, PROT_NONE);
  if (!m) return CUDA_ERROR_OUT_OF_MEMORY;
  fc_note(m, bytes, fc_get_device(), FC_RESERVED);
  *p = (CUdeviceptr)m;
  return 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) {
  munmap((void*)p, bytes);
  fc_forget((void*)p);
  return 0;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* h, size_t bytes, const CUmemAllocationProp* p,
                     unsigned long long f) {
  (void)f;
  int device = p->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? p->location.id : fc_get_device();
  if (fc_charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  handle* n = malloc(sizeof *n);
  *n = (handle){bytes, device, 1};
  *h = (CUmemGenericAllocationHandle)(uintptr_t)n;
  return 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  handle* n = (handle*)(uintptr_t)h;
  if (!--n->refs) {
    fc_credit(n->device, n->bytes);
    free(n);
  }
  return 0;
}
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle h, unsigned long long f) {
  (void)p;
  (void)bytes;
  (void)offset;
  (void)h;
  (void)f;
  fc_counters[FC_N_MAP]++;
  return 0;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc* d, size_t n) {
  (void)d;
  (void)n;
  return mprotect((void*)p, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : 0;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) {
  madvise((void*)p, bytes, MADV_DONTNEED);
  return mprotect((void*)p, bytes, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : 0;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr p) {
  void* b;
  size_t n;
  if (!fc_find((void*)p, &b, &n, NULL)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = (CUdeviceptr)b;
  if (bytes) *bytes = n;
  return 0;
}
CUresult cuMemExportToShareableHandle(void* o, CUmemGenericAllocationHandle h, CUmemAllocationHandleType t,
                                      unsigned long long f) {
  (void)o;
  (void)h;
  (void)t;
  (void)f;
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* h, void* o, CUmemAllocationHandleType t) {
  (void)o;
  (void)h;
  (void)t;
  return CUDA_ERROR_NOT_SUPPORTED;
}
typedef struct {
  unsigned *to, value;
  size_t n;
} words;
static void write_words(void* data) {
  words* w = data;
  for (size_t i = 0; i < w->n; i++) ((volatile unsigned*)w->to)[i] = w->value;
  free(w);
}
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) {
  words* w = malloc(sizeof *w);
  *w = (words){(unsigned*)p, v, n};
  fc_queue(fc_stream_of(s), write_words, w);
  return 0;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute a, CUdeviceptr p) {
  int device = 0;
  int kind = fc_find((void*)p, NULL, NULL, &device);
  if (!kind) return CUDA_ERROR_INVALID_VALUE;
  switch (a) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext*)data = (CUcontext)&context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned*)data = kind == FC_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int*)data = device; break;
    default: *(void**)data = NULL;
  }
  return 0;
}
CUresult cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                        unsigned h, CUstream s, void** k, void** x) {
  (void)f;
  (void)a;
  (void)b;
  (void)c;
  (void)d;
  (void)e;
  (void)g;
  (void)h;
  (void)s;
  (void)k;
  (void)x;
  fc_counters[FC_N_LAUNCH]++;
  return 0;
}
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned f) {
  (void)f;
  return cuMemsetD32Async(p, v, 1, s);
}
