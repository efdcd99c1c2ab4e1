/* libnccl.so.2 between processes of one host. Each rank publishes (process id, pointer) in shared memory, its peers
   read by process_vm_readv. A collective waits until all ranks have come to it: the caller, or the stream's thread
   where there is latency. */
#define _GNU_SOURCE
#include "core.h"
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_RANKS 64
typedef struct {
  int pid;
  const char* send;
  size_t bytes;
  long a, b;
} slot;
typedef struct {
  _Atomic long posted, taken;
  int pid;
  const char* send;
  size_t bytes;
} mail;
typedef struct {
  _Atomic int joined, left;
  _Atomic long arrived;
  _Atomic int aborted;
  slot slots[MAX_RANKS];
  mail box[MAX_RANKS][MAX_RANKS];
} region;
struct ncclComm {
  region* r;
  char name[96];
  int rank, n, device;
  long barriers, splits;
  _Atomic int aborted, error;
  long double scalars[64];
  int n_scalars;
  fc_stream* stream;
  long ticket; /* of its last group of calls: the next one comes after it, on whatever stream */
};
typedef ncclResult_t N;
#define API __attribute__((visibility("default"), used))
static const size_t width[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
static double patience(void) {
  const char* t = getenv("FAKE_NCCL_TIMEOUT_S");
  return 1e3 * (t ? atof(t) : 300);
}

#define WAIT(c, condition)                                                                               \
  ({                                                                                                     \
    double start = fc_now_ms();                                                                          \
    int ok = 1;                                                                                          \
    for (long i = 0; !(condition); i++) {                                                                \
      if ((c)->aborted || (c)->r->aborted || ((i & 1023) == 1023 && fc_now_ms() - start > patience())) { \
        ok = 0;                                                                                          \
        break;                                                                                           \
      }                                                                                                  \
      if (i > 200)                                                                                       \
        usleep(i > 5000 ? 500 : 20);                                                                     \
      else                                                                                               \
        sched_yield();                                                                                   \
    }                                                                                                    \
    ok;                                                                                                  \
  })
static int barrier(struct ncclComm* c) {
  long target = ++c->barriers * c->n;
  atomic_fetch_add(&c->r->arrived, 1);
  return WAIT(c, atomic_load(&c->r->arrived) >= target);
}
static int pull(int pid, const char* from, char* to, size_t bytes) {
  if (pid == getpid()) {
    memmove(to, from, bytes);
    return 1;
  }
  while (bytes) {
    struct iovec l = {to, bytes}, m = {(void*)from, bytes};
    ssize_t k = process_vm_readv(pid, &l, 1, &m, 1, 0);
    if (k <= 0) {
      fprintf(stderr, "fake nccl: process_vm_readv: %s\n", strerror(errno));
      return 0;
    }
    to += k;
    from += k;
    bytes -= k;
  }
  return 1;
}
static float bf(uint16_t x) {
  uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static uint16_t to_bf(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
static long double get(const char* p, size_t i, int t) {
  switch (t) {
    case 0: return ((int8_t*)p)[i];
    case 1: return ((uint8_t*)p)[i];
    case 2: return ((int32_t*)p)[i];
    case 3: return ((uint32_t*)p)[i];
    case 4: return ((int64_t*)p)[i];
    case 5: return ((uint64_t*)p)[i];
    case 6: return (double)((_Float16*)p)[i];
    case 7: return ((float*)p)[i];
    case 8: return ((double*)p)[i];
    case 9: return bf(((uint16_t*)p)[i]);
    default: return 0;
  }
}
static void put(char* p, size_t i, int t, long double v) {
  switch (t) {
    case 0: ((int8_t*)p)[i] = v; break;
    case 1: ((uint8_t*)p)[i] = v; break;
    case 2: ((int32_t*)p)[i] = v; break;
    case 3: ((uint32_t*)p)[i] = v; break;
    case 4: ((int64_t*)p)[i] = v; break;
    case 5: ((uint64_t*)p)[i] = v; break;
    case 6: ((_Float16*)p)[i] = v; break;
    case 7: ((float*)p)[i] = v; break;
    case 8: ((double*)p)[i] = v; break;
    case 9: ((uint16_t*)p)[i] = to_bf((float)v); break;
  }
}
/* acc[i] = acc[i] OP x[i]; accumulated in long double, which holds 64-bit integers */
static void fold(long double* acc, const char* x, size_t n, int t, int op, int first, long double scale) {
  for (size_t i = 0; i < n; i++) {
    long double v = get(x, i, t) * scale;
    acc[i] = first            ? v
             : op == ncclProd ? acc[i] * v
             : op == ncclMax  ? (v > acc[i] ? v : acc[i])
             : op == ncclMin  ? (v < acc[i] ? v : acc[i])
                              : acc[i] + v;
  }
}
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECV };
typedef struct {
  int kind;
  const char* send;
  char* recv;
  size_t count;
  int type, op, root;
  struct ncclComm* c;
  long ticket;
} call;
static N collective(call* k) {
  struct ncclComm* c = k->c;
  size_t w = width[k->type], bytes = k->count * w;
  c->r->slots[c->rank] = (slot){getpid(), k->send, bytes, k->kind, 0};
  if (!barrier(c)) return ncclRemoteError;
  for (int i = 0; i < c->n; i++)
    if (c->r->slots[i].a != k->kind || c->r->slots[i].bytes != bytes) {
      fprintf(stderr, "fake nccl: rank %d calls kind %d with %zu bytes, rank %d kind %ld with %zu\n", c->rank, k->kind,
              bytes, i, c->r->slots[i].a, c->r->slots[i].bytes);
      return ncclInvalidUsage;
    }
  size_t out = k->kind == ALL_GATHER || k->kind == ALL_TO_ALL ? bytes * c->n : bytes;
  int has_out = k->kind == REDUCE || k->kind == BROADCAST ? (k->kind == BROADCAST || c->rank == k->root) : 1, ok = 1;
  static double most = -1; /* as for operators, of which integers are always computed */
  if (most < 0) most = fc_number("FAKE_CUDA_COMPUTE_MAX", 4 << 20);
  int is_float = k->type >= ncclFloat16, is_done = !is_float || out / w <= most;
  char* t = has_out && out && is_done ? malloc(out) : NULL;
  if (t) switch (k->kind) {
      case ALL_GATHER:
        for (int i = 0; i < c->n && ok; i++) ok = pull(c->r->slots[i].pid, c->r->slots[i].send, t + i * bytes, bytes);
        break;
      case ALL_TO_ALL:
        for (int i = 0; i < c->n && ok; i++)
          ok = pull(c->r->slots[i].pid, c->r->slots[i].send + c->rank * bytes, t + i * bytes, bytes);
        break;
      case BROADCAST: ok = pull(c->r->slots[k->root].pid, c->r->slots[k->root].send, t, bytes); break;
      default: {
        size_t offset = k->kind == REDUCE_SCATTER ? c->rank * bytes : 0, step = 1 << 16;
        long double* acc = malloc(step * sizeof *acc);
        char* x = malloc(step * w);
        long double scale = k->op >= ncclNumOps ? c->scalars[k->op - ncclNumOps] : 1;
        for (size_t at = 0; at < k->count && ok; at += step) {
          size_t n = k->count - at < step ? k->count - at : step;
          for (int i = 0; i < c->n && ok; i++) {
            ok = pull(c->r->slots[i].pid, c->r->slots[i].send + offset + at * w, x, n * w);
            fold(acc, x, n, k->type, k->op, i == 0, scale);
          }
          for (size_t i = 0; i < n; i++) put(t, at + i, k->type, k->op == ncclAvg ? acc[i] / c->n : acc[i]);
        }
        free(acc);
        free(x);
      }
    }
  if (!barrier(c)) {
    free(t);
    return ncclRemoteError;
  } /* all have read: outputs may overwrite inputs */
  if (t && ok) memcpy(k->recv, t, out);
  free(t);
  return ok ? ncclSuccess : ncclSystemError;
}
typedef struct {
  int n;
  call calls[];
} group; /* what stands between ncclGroupStart and ncclGroupEnd, or one call */
static N run_group(group* g) {
  N result = ncclSuccess;
  call* end = g->calls + g->n;
  for (call* k = g->calls; k < end; k++)
    if (k->kind == SEND) {
      mail* m = &k->c->r->box[k->c->rank][k->root];
      if (!WAIT(k->c, atomic_load(&m->taken) == atomic_load(&m->posted)))
        return ncclRemoteError; /* one letter at a time */
      m->pid = getpid();
      m->send = k->send;
      m->bytes = k->count * width[k->type];
      k->ticket = atomic_fetch_add(&m->posted, 1) + 1;
    }
  for (call* k = g->calls; k < end; k++)
    if (k->kind == RECV) {
      mail* m = &k->c->r->box[k->root][k->c->rank];
      if (!WAIT(k->c, atomic_load(&m->posted) > atomic_load(&m->taken))) return ncclRemoteError;
      if (m->bytes != k->count * width[k->type] || !pull(m->pid, m->send, k->recv, m->bytes))
        result = ncclInvalidUsage;
      atomic_fetch_add(&m->taken, 1);
    } else if (k->kind < SEND) {
      N r = collective(k);
      if (r) result = r;
    }
  for (call* k = g->calls; k < end; k++)
    if (k->kind == SEND) {
      mail* m = &k->c->r->box[k->c->rank][k->root];
      if (!WAIT(k->c, atomic_load(&m->taken) >= k->ticket)) return ncclRemoteError;
    }
  return result;
}
static void run_late(void* data) {
  group* g = data;
  N result = run_group(g);
  for (int i = 0; result && i < g->n; i++) g->calls[i].c->error = result;
  free(g);
}
static __thread int depth;
static __thread group* open_group;
static __thread fc_stream* open_stream;
static N close_group(void) {
  group* g = open_group;
  fc_stream* s = open_stream;
  open_group = NULL;
  if (!g) return ncclSuccess;
  if (fc_latency_ms() <= 0) {
    N result = run_group(g);
    free(g);
    return result;
  }
  for (int i = 0; i < g->n; i++)
    if (g->calls[i].c->stream) fc_wait(s, g->calls[i].c->stream, g->calls[i].c->ticket);
  int n = g->n;
  struct ncclComm* comms[n];
  for (int i = 0; i < n; i++) comms[i] = g->calls[i].c;
  long ticket = fc_queue(s, run_late, g);
  for (int i = 0; i < n; i++) {
    comms[i]->stream = s;
    comms[i]->ticket = ticket;
  }
  return ncclSuccess;
}
static N enqueue(call k, cudaStream_t st) {
  if (!k.c || k.c->aborted) return ncclInvalidArgument;
  int n = open_group ? open_group->n : 0;
  if (!n) open_stream = fc_stream_of(st);
  open_group = realloc(open_group, sizeof(group) + (n + 1) * sizeof(call));
  open_group->calls[n] = k;
  open_group->n = n + 1;
  return depth ? ncclSuccess : close_group();
}
API N ncclGroupStart(void) {
  depth++;
  return 0;
}
API N ncclGroupEnd(void) {
  if (--depth > 0) return 0;
  depth = 0;
  return close_group();
}
API N ncclAllReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c, cudaStream_t st) {
  return enqueue((call){ALL_REDUCE, s, r, n, t, o, 0, c}, st);
}
API N ncclReduceScatter(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c,
                        cudaStream_t st) {
  return enqueue((call){REDUCE_SCATTER, s, r, n, t, o, 0, c}, st);
}
API N ncclReduce(const void* s, void* r, size_t n, ncclDataType_t t, ncclRedOp_t o, int root, ncclComm_t c,
                 cudaStream_t st) {
  return enqueue((call){REDUCE, s, r, n, t, o, root, c}, st);
}
API N ncclAllGather(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
  return enqueue((call){ALL_GATHER, s, r, n, t, 0, 0, c}, st);
}
API N ncclAlltoAll(const void* s, void* r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) {
  return enqueue((call){ALL_TO_ALL, s, r, n, t, 0, 0, c}, st);
}
API N ncclBroadcast(const void* s, void* r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
  return enqueue((call){BROADCAST, s, r, n, t, 0, root, c}, st);
}
API N ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
  return ncclBroadcast(b, b, n, t, root, c, st);
}
API N ncclSend(const void* s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
  return enqueue((call){SEND, s, NULL, n, t, 0, peer, c}, st);
}
API N ncclRecv(void* r, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) {
  return enqueue((call){RECV, NULL, r, n, t, 0, peer, c}, st);
}

static N join(struct ncclComm** out, const char* name, int rank, int n) {
  if (n > MAX_RANKS) return ncclInvalidArgument;
  struct ncclComm* c = calloc(1, sizeof *c);
  snprintf(c->name, sizeof c->name, "%s", name);
  c->rank = rank;
  c->n = n;
  c->device = fc_get_device();
  int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(region))) return ncclSystemError;
  c->r = mmap(NULL, sizeof(region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  atomic_fetch_add(&c->r->joined, 1);
  if (!WAIT(c, atomic_load(&c->r->joined) >= n) || !barrier(c)) return ncclRemoteError;
  shm_unlink(name); /* all have it mapped */
  *out = c;
  return 0;
}
API N ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  unsigned long r[2] = {0};
  int fd = open("/dev/urandom", O_RDONLY);
  if (read(fd, r, 16)) {}
  close(fd);
  snprintf((char*)id, 64, "/fakenccl-%lx%lx", r[0], r[1]);
  return 0;
}
API N ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int rank) { return join(c, (char*)&id, rank, n); }
API N ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId id, int rank, ncclConfig_t* g) {
  return join(c, (char*)&id, rank, n);
}
API N ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int ni, ncclUniqueId* ids, ncclConfig_t* g) {
  return join(c, (char*)ids, rank, n);
}
API N ncclCommSplit(ncclComm_t p, int color, int key, ncclComm_t* out, ncclConfig_t* g) {
  if (p->stream) fc_await(p->stream, p->ticket); /* it uses the parent's slots, too */
  p->r->slots[p->rank] = (slot){getpid(), NULL, 0, color, key};
  if (!barrier(p)) return ncclRemoteError;
  int n = 0, rank = 0;
  for (int i = 0; i < p->n; i++)
    if (p->r->slots[i].a == color) {
      n++;
      long k = p->r->slots[i].b;
      if (k < key || (k == key && i < p->rank)) rank++;
    }
  if (!barrier(p)) return ncclRemoteError;
  long split = ++p->splits;
  *out = NULL;
  if (color == NCCL_SPLIT_NOCOLOR) return 0;
  char name[96];
  snprintf(name, sizeof name, "%.60s-%ld-%d", p->name, split, color);
  return join(out, name, rank, n);
}
API N ncclCommAbort(ncclComm_t c) {
  if (c) {
    c->aborted = 1;
    c->r->aborted = 1;
  }
  return 0;
}
API N ncclCommFinalize(ncclComm_t c) {
  if (c->stream) fc_await(c->stream, c->ticket);
  return 0;
}
API N ncclCommDestroy(ncclComm_t c) { return 0; /* watchdogs may look once more */ }
API N ncclCommGetAsyncError(ncclComm_t c, N* e) {
  *e = c->error;
  return 0;
}
API N ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->n;
  return 0;
}
API N ncclCommUserRank(const ncclComm_t c, int* r) {
  *r = c->rank;
  return 0;
}
API N ncclCommCuDevice(const ncclComm_t c, int* d) {
  *d = c->device;
  return 0;
}
API N ncclGetVersion(int* v) {
  *v = NCCL_VERSION_CODE;
  return 0;
}
API const char* ncclGetErrorString(N e) { return e ? "fake nccl error" : "no error"; }
API const char* ncclGetLastError(ncclComm_t c) { return ""; }
API N ncclMemAlloc(void** p, size_t n) {
  *p = fc_malloc(fc_get_device(), n);
  return *p ? 0 : ncclUnhandledCudaError;
}
API N ncclMemFree(void* p) {
  fc_free(p);
  return 0;
}
API N ncclRedOpCreatePreMulSum(ncclRedOp_t* o, void* s, ncclDataType_t t, ncclScalarResidence_t where, ncclComm_t c) {
  if (c->n_scalars == 64) c->n_scalars = 0; /* reused in turn: torch destroys each right after its call */
  c->scalars[c->n_scalars] = get(s, 0, t);
  *o = ncclNumOps + c->n_scalars++;
  return 0;
}
API N ncclRedOpDestroy(ncclRedOp_t o, ncclComm_t c) { return 0; }
