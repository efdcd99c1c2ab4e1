/* Preloaded before the device of tests/cuda_software. Once quiet, collectives return at once, so that no rank waits
   for another and a step's time is its caller's alone. Copies and memsets of at most 64 KiB are done, so that the host
   reads true values; FAKE_CUDA_COPY=0 leaves larger ones undone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#define API __attribute__((visibility("default")))
typedef void *P;
static int quiet;
static __thread int small;
API void be_quiet(void) { quiet = 1; }
API int fc_copies(void) { return small; }
static P next(const char *library, const char *name) { return dlsym(dlopen(library, RTLD_LAZY | RTLD_NOLOAD), name); }

#define COLLECTIVE(name, parameters, arguments)                    \
  API int name parameters {                                        \
    static int(*own) parameters;                                   \
    if (quiet) return 0;                                           \
    if (!own) own = next("libnccl.so.2", #name);                   \
    return own arguments;                                          \
  }
COLLECTIVE(ncclAllReduce, (P s, P r, size_t n, int t, int o, P c, P q), (s, r, n, t, o, c, q))
COLLECTIVE(ncclReduceScatter, (P s, P r, size_t n, int t, int o, P c, P q), (s, r, n, t, o, c, q))
COLLECTIVE(ncclAllGather, (P s, P r, size_t n, int t, P c, P q), (s, r, n, t, c, q))
COLLECTIVE(ncclBroadcast, (P s, P r, size_t n, int t, int o, P c, P q), (s, r, n, t, o, c, q))

#define COPY(name, parameters, arguments)                          \
  API int name parameters {                                        \
    static int(*own) parameters;                                   \
    if (!own) own = next("libcudart.so.13", #name);                \
    small = n <= 65536;                                            \
    int result = own arguments;                                    \
    small = 0;                                                     \
    return result;                                                 \
  }
COPY(cudaMemcpyAsync, (P d, P s, size_t n, int k, P q), (d, s, n, k, q))
COPY(cudaMemcpy, (P d, P s, size_t n, int k), (d, s, n, k))
COPY(cudaMemsetAsync, (P d, int v, size_t n, P q), (d, v, n, q))
