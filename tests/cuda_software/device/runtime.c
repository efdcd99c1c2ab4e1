/* libcudart.so.13: the runtime calls that torch imports. Kernels are counted, never run. */
#define _GNU_SOURCE
#include "core.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef cudaGetDeviceProperties

typedef cudaError_t R;
static __thread R last;
static R fail(R e) {
  if (e && e != cudaErrorNotReady) last = e;
  return e;
}

/* ---- devices */
R cudaGetDeviceCount(int* n) {
  *n = fc_device_count();
  return *n ? 0 : fail(cudaErrorNoDevice);
}
R cudaGetDevice(int* d) {
  *d = fc_get_device();
  return 0;
}
R cudaSetDevice(int d) { return fc_set_device(d) ? fail(cudaErrorInvalidDevice) : 0; }
R cudaDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
R cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return 0;
}
R cudaGetDeviceProperties(struct cudaDeviceProp* p, int d) {
  if (d < 0 || d >= fc_device_count()) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", fc_name());
  memset(&p->uuid, 0xfa, sizeof p->uuid);
  ((char*)&p->uuid)[15] = d;
  fc_capability(&p->major, &p->minor);
  p->totalGlobalMem = fc_total(d);
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = fc_sm_count();
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->ECCEnabled = 1;
  p->pciBusID = 1 + d;
  p->asyncEngineCount = 3;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 40 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = p->major >= 9 ? 233472 : 167936;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = p->major >= 9 ? 232448 : 166912;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  p->memoryPoolsSupported = 1;
  return 0;
}
R cudaDeviceGetAttribute(int* v, enum cudaDeviceAttr a, int d) {
  struct cudaDeviceProp p;
  R r = cudaGetDeviceProperties(&p, d);
  if (r) return r;
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = 32; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrMemoryPoolsSupported: *v = 1; break;
    case cudaDevAttrClockRate: *v = 1410000; break;
    case cudaDevAttrMemoryClockRate: *v = 1215000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = 5120; break;
    case cudaDevAttrPciBusId: *v = 1 + d; break;
    default: *v = 0;
  }
  return 0;
}
R cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", 1 + d);
  return 0;
}
R cudaDeviceCanAccessPeer(int* c, int a, int b) {
  *c = a != b;
  return 0;
}
R cudaDeviceEnablePeerAccess(int d, unsigned f) {
  (void)d;
  (void)f;
  return 0;
}
R cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}
R cudaDeviceSynchronize(void) {
  fc_device_sync(fc_get_device());
  return 0;
}
R cudaProfilerStart(void) { return 0; }
R cudaProfilerStop(void) { return 0; }

/* ---- errors */
R cudaGetLastError(void) {
  R e = last;
  last = 0;
  return e;
}
R cudaPeekAtLastError(void) { return last; }
const char* cudaGetErrorName(R e) {
  switch (e) {
    case 0: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    default: return "cudaErrorFake";
  }
}
const char* cudaGetErrorString(R e) {
  switch (e) {
    case 0: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotSupported: return "operation not supported (fake device)";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    default: return "error of the fake device";
  }
}

/* ---- memory */
R cudaMalloc(void** p, size_t n) {
  *p = fc_malloc(fc_get_device(), n);
  return *p ? 0 : fail(cudaErrorMemoryAllocation);
}
R cudaFree(void* p) { return fc_free(p) ? fail(cudaErrorInvalidValue) : 0; }
R cudaMallocAsync(void** p, size_t n, cudaStream_t s) {
  (void)s;
  return cudaMalloc(p, n);
}
R cudaFreeAsync(void* p, cudaStream_t s) {
  (void)s;
  return cudaFree(p);
}
/* bitsandbytes asks for these; its paged states are not here */
R cudaMallocManaged(void** p, size_t n, unsigned f) {
  (void)p;
  (void)n;
  (void)f;
  return fail(cudaErrorNotSupported);
}
R cudaMemPrefetchAsync(const void* p, size_t n, struct cudaMemLocation to, unsigned f, cudaStream_t s) {
  (void)p;
  (void)n;
  (void)to;
  (void)f;
  (void)s;
  return fail(cudaErrorNotSupported);
}
R cudaHostAlloc(void** p, size_t n, unsigned f) {
  (void)f;
  *p = fc_host_malloc(n);
  return *p ? 0 : fail(cudaErrorMemoryAllocation);
}
R cudaMallocHost(void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
R cudaFreeHost(void* p) { return fc_free(p) ? fail(cudaErrorInvalidValue) : 0; }
R cudaHostRegister(void* p, size_t n, unsigned f) {
  (void)f;
  fc_note(p, n, fc_get_device(), FC_HOST);
  return 0;
}
R cudaHostUnregister(void* p) {
  fc_forget(p);
  return 0;
}
R cudaMemGetInfo(size_t* f, size_t* t) {
  int d = fc_get_device();
  *t = fc_total(d);
  *f = *t - fc_used(d);
  return 0;
}
R cudaMemcpy(void* a, const void* b, size_t n, enum cudaMemcpyKind k) {
  (void)k;
  fc_stream* s = fc_stream_of(NULL);
  fc_copy(a, b, n, s);
  fc_await(s, fc_tickets(s));
  return 0;
}
R cudaMemcpyAsync(void* a, const void* b, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  (void)k;
  fc_copy(a, b, n, fc_stream_of(s));
  return 0;
}
R cudaMemcpyPeerAsync(void* a, int ad, const void* b, int bd, size_t n, cudaStream_t s) {
  (void)ad;
  (void)bd;
  fc_copy(a, b, n, fc_stream_of(s));
  return 0;
}
R cudaMemcpy2DAsync(void* a, size_t ap, const void* b, size_t bp, size_t w, size_t h, enum cudaMemcpyKind k,
                    cudaStream_t s) {
  (void)k;
  for (size_t i = 0; i < h; i++) fc_copy((char*)a + i * ap, (const char*)b + i * bp, w, fc_stream_of(s));
  return 0;
}
R cudaMemcpyToSymbol(const void* a, const void* b, size_t n, size_t o, enum cudaMemcpyKind k) {
  (void)k;
  memmove((char*)a + o, b, n);
  return 0;
}
R cudaGetSymbolAddress(void** p, const void* s) {
  *p = (void*)s;
  return 0;
}
R cudaMemset(void* p, int v, size_t n) {
  fc_stream* s = fc_stream_of(NULL);
  fc_set(p, v, n, s);
  fc_await(s, fc_tickets(s));
  return 0;
}
R cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
  fc_set(p, v, n, fc_stream_of(s));
  return 0;
}
R cudaPointerGetAttributes(struct cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  int device = -2, kind = fc_find(p, NULL, NULL, &device);
  a->type = kind == FC_HOST ? cudaMemoryTypeHost : kind ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->device = device;
  if (kind && kind != FC_HOST) a->devicePointer = (void*)p;
  if (kind == FC_HOST) a->devicePointer = a->hostPointer = (void*)p;
  return 0;
}
static int pool;
R cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int d) {
  (void)d;
  *p = (cudaMemPool_t)&pool;
  return 0;
}
R cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void* v) {
  (void)p;
  (void)a;
  *(uint64_t*)v = fc_used(fc_get_device());
  return 0;
}
R cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void* v) {
  (void)p;
  (void)a;
  (void)v;
  return 0;
}
R cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc* d, size_t n) {
  (void)p;
  (void)d;
  (void)n;
  return 0;
}
R cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) {
  (void)p;
  (void)n;
  return 0;
}

/* ---- streams and events */
R cudaStreamCreateWithPriority(cudaStream_t* s, unsigned f, int p) {
  (void)f;
  *s = (cudaStream_t)fc_stream_new(fc_get_device(), p);
  return 0;
}
R cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
R cudaStreamCreateWithFlags(cudaStream_t* s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
R cudaStreamDestroy(cudaStream_t s) {
  (void)s;
  return 0;
}
R cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = fc_stream_priority(fc_stream_of(s));
  return 0;
}
R cudaStreamQuery(cudaStream_t h) {
  fc_stream* s = fc_stream_of(h);
  return fc_done(s, fc_tickets(s)) ? 0 : cudaErrorNotReady;
}
R cudaStreamSynchronize(cudaStream_t h) {
  fc_counters[FC_N_STREAM_SYNC]++;
  fc_stream* s = fc_stream_of(h);
  fc_await(s, fc_tickets(s));
  return 0;
}
R cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
  (void)f;
  fc_event* v = (fc_event*)e;
  if (v->stream) fc_wait(fc_stream_of(s), v->stream, v->ticket);
  return 0;
}
typedef struct {
  cudaStreamCallback_t call;
  cudaHostFn_t host;
  cudaStream_t stream;
  void* data;
} on_host;
static void call_host(void* data) {
  on_host* h = data;
  if (h->host)
    h->host(h->data);
  else
    h->call(h->stream, 0, h->data);
  free(h);
}
static R queue_host(on_host h) {
  on_host* kept = malloc(sizeof h);
  *kept = h;
  fc_queue(fc_stream_of(h.stream), call_host, kept);
  return 0;
}
R cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t c, void* u, unsigned f) {
  (void)f;
  return queue_host((on_host){c, NULL, s, u});
}
R cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t c, void* u) { return queue_host((on_host){NULL, c, s, u}); }
R cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* c) {
  (void)s;
  *c = cudaStreamCaptureStatusNone;
  return 0;
}
#undef cudaStreamGetCaptureInfo
R cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* c, unsigned long long* id, cudaGraph_t* g,
                           const cudaGraphNode_t** d, const cudaGraphEdgeData** e, size_t* n) {
  (void)s;
  if (c) *c = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (g) *g = NULL;
  if (d) *d = NULL;
  if (e) *e = NULL;
  if (n) *n = 0;
  return 0;
}
R cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* m) {
  static __thread enum cudaStreamCaptureMode now;
  enum cudaStreamCaptureMode o = now;
  now = *m;
  *m = o;
  return 0;
}
R cudaEventCreateWithFlags(cudaEvent_t* e, unsigned f) {
  (void)f;
  *e = (cudaEvent_t)calloc(1, sizeof(fc_event));
  return 0;
}
R cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
R cudaEventDestroy(cudaEvent_t e) {
  free(e);
  return 0;
}
R cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  fc_event_record((fc_event*)e, fc_stream_of(s));
  return 0;
}
R cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
  (void)f;
  return cudaEventRecord(e, s);
}
R cudaEventQuery(cudaEvent_t e) {
  fc_event* v = (fc_event*)e;
  fc_counters[FC_N_EVENT_QUERY]++;
  return !v->stream || fc_done(v->stream, v->ticket) ? 0 : cudaErrorNotReady;
}
R cudaEventSynchronize(cudaEvent_t e) {
  fc_event* v = (fc_event*)e;
  fc_counters[FC_N_EVENT_SYNC]++;
  if (v->stream) fc_await(v->stream, v->ticket);
  return 0;
}
R cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  fc_event *x = (fc_event*)a, *y = (fc_event*)b;
  if (!x->stream || !y->stream) return fail(cudaErrorInvalidResourceHandle);
  *ms = (float)(y->recorded_at - x->recorded_at);
  return 0;
}

/* ---- kernels: registered, configured and counted, with their names; never run */
typedef struct {
  const void* stub;
  const char* name;
  long launches;
} kernel;
static kernel* kernels;
static size_t n_kernels, size_kernels;
static int trace = -1;
static const void* spinning; /* torch.cuda._sleep */
void** __cudaRegisterFatBinary(void* b) { return malloc(sizeof b); }
void __cudaRegisterFatBinaryEnd(void** h) { (void)h; }
void __cudaUnregisterFatBinary(void** h) { free(h); }
void __cudaRegisterFunction(void** h, const char* stub, char* fn, const char* name, int l, void* a, void* b, void* c,
                            void* d, int* e) {
  (void)h;
  (void)fn;
  (void)l;
  (void)a;
  (void)b;
  (void)c;
  (void)d;
  (void)e;
  if (strstr(name, "spin_kernel")) spinning = stub;
  if (trace < 0) trace = getenv("FAKE_CUDA_TRACE") != NULL;
  if (!trace) return;
  if (n_kernels == size_kernels)
    kernels = realloc(kernels, (size_kernels = size_kernels ? 2 * size_kernels : 4096) * sizeof *kernels);
  kernels[n_kernels++] = (kernel){stub, name, 0};
}
void __cudaRegisterVar(void** h, char* v, char* n, const char* m, int e, size_t s, int c, int g) {
  (void)h;
  (void)v;
  (void)n;
  (void)m;
  (void)e;
  (void)s;
  (void)c;
  (void)g;
}
char __cudaInitModule(void** h) {
  (void)h;
  return 1;
}
R __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return 0;
}
static R launched(const void* f) {
  fc_counters[FC_N_LAUNCH]++;
  if (trace > 0)
    for (size_t i = 0; i < n_kernels; i++)
      if (kernels[i].stub == f) {
        kernels[i].launches++;
        break;
      }
  return 0;
}
void fake_cuda_print_kernels(void) {
  for (size_t i = 0; i < n_kernels; i++)
    if (kernels[i].launches) fprintf(stderr, "%8ld %s\n", kernels[i].launches, kernels[i].name);
}
static __thread struct {
  dim3 g, b;
  size_t m;
  void* s;
} config;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, struct CUstream_st* s) {
  config.g = g;
  config.b = b;
  config.m = m;
  config.s = s;
  return 0;
}
R __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) {
  *g = config.g;
  *b = config.b;
  *m = config.m;
  *(void**)s = config.s;
  return 0;
}
static void sleep_for(void* data) {
  nanosleep(data, NULL);
  free(data);
}
static void spin(const void* kernel, void** arguments, void* stream) { /* for so many cycles of 1 GHz, where there is latency */
  if (kernel != spinning || fc_latency_ms() <= 0) return;
  struct timespec* t = malloc(sizeof *t);
  int64_t ns = *(int64_t*)arguments[0];
  *t = (struct timespec){ns / 1000000000, ns % 1000000000};
  fc_queue(fc_stream_of(stream), sleep_for, t);
}
R __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  (void)g;
  (void)b;
  (void)m;
  spin(k, a, s);
  return launched(k);
}
R cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  (void)g;
  (void)b;
  (void)m;
  spin(f, a, s);
  return launched(f);
}
R cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) {
  (void)g;
  (void)b;
  (void)a;
  (void)m;
  (void)s;
  return launched(f);
}
R cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  (void)c;
  (void)a;
  return launched(f);
}
R cudaFuncGetAttributes(struct cudaFuncAttributes* a, const void* f) {
  (void)f;
  memset(a, 0, sizeof *a);
  int major, minor;
  fc_capability(&major, &minor);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = major * 10 + minor;
  a->maxDynamicSharedSizeBytes = 166912;
  return 0;
}
R cudaFuncSetAttribute(const void* f, enum cudaFuncAttribute a, int v) {
  (void)f;
  (void)a;
  (void)v;
  return 0;
}
R cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v, int d) {
  (void)k;
  (void)a;
  (void)v;
  (void)d;
  return 0;
}
R cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* f, int b, size_t m, unsigned g) {
  (void)f;
  (void)m;
  (void)g;
  int k = b > 0 ? 2048 / b : 1;
  *n = k < 1 ? 1 : k > 32 ? 32 : k;
  return 0;
}
R cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* f, int b, size_t m) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, b, m, 0);
}

/* ---- the driver by name */
R cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned v, unsigned long long g,
                                   enum cudaDriverEntryPointQueryResult* q) {
  (void)v;
  (void)g;
  static const char* suffixes[] = {"_v2", "", "_v3"};
  static void* driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  char full[256];
  *f = NULL;
  for (int i = 0; i < 3 && !*f; i++) {
    snprintf(full, sizeof full, "%s%s", name, suffixes[i]);
    *f = dlsym(driver ? driver : RTLD_DEFAULT, full);
  }
  if (q) *q = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return 0;
}
