/* Part of libcuda.so.1: streams, events and copies. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core.h"

typedef struct work {
  fc_call call;
  void* data;
  double due;
  struct work* next;
} work;
struct fc_stream {
  int device, priority, has_thread;
  long queued, done, wanted; /* tickets */
  work *first, **last;
  fc_stream* next; /* of all streams */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static fc_stream defaults[FC_MAX_DEVICES], *streams;
static int running, ends;

__attribute__((constructor)) static void set_up(void) {
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&changed, &monotonic);
  for (int d = 0; d < FC_MAX_DEVICES; d++) defaults[d] = (fc_stream){.device = d, .next = d ? &defaults[d - 1] : NULL};
  streams = &defaults[FC_MAX_DEVICES - 1];
}

double fc_latency_ms(void) {
  static double value = -1;
  return value < 0 ? value = fc_number("FAKE_CUDA_LATENCY_MS", 0) : value;
}

static int is_late(const fc_stream* s) {
  const char* which = getenv("FAKE_CUDA_LATE");
  int is_main = s >= defaults && s < defaults + FC_MAX_DEVICES;
  return !which || !*which || !strcmp(which, "all") || !strcmp(which, is_main ? "main" : "side");
}

fc_stream* fc_stream_new(int device, int priority) { /* never freed: events may still name it */
  fc_stream* s = calloc(1, sizeof *s);
  s->device = device;
  s->priority = priority;
  pthread_mutex_lock(&lock);
  s->next = streams;
  streams = s;
  pthread_mutex_unlock(&lock);
  return s;
}

fc_stream* fc_stream_of(void* handle) { return (uintptr_t)handle <= 2 ? &defaults[fc_get_device()] : handle; }
int fc_stream_priority(const fc_stream* s) { return s->priority; }

static void wait_until(double ms) {
  struct timespec at = {(time_t)(ms / 1e3), (long)((ms - 1e3 * (long)(ms / 1e3)) * 1e6)};
  pthread_cond_timedwait(&changed, &lock, &at);
}

static void* run_stream(void* data) {
  fc_stream* s = data;
  pthread_mutex_lock(&lock);
  for (;;) {
    work* w = s->first;
    if (!w || ends) {
      pthread_cond_wait(&changed, &lock);
    } else if (s->wanted <= s->done && fc_now_ms() < w->due) {
      wait_until(w->due);
    } else {
      if (!(s->first = w->next)) s->last = &s->first;
      running++;
      pthread_mutex_unlock(&lock);
      w->call(w->data);
      free(w);
      pthread_mutex_lock(&lock);
      running--;
      s->done++;
      pthread_cond_broadcast(&changed);
    }
  }
  return NULL;
}

static void end(void) { /* the process exits: nothing more is begun, and what runs has a second */
  double until = fc_now_ms() + 1e3;
  pthread_mutex_lock(&lock);
  ends = 1;
  while (running && fc_now_ms() < until) wait_until(until);
  pthread_mutex_unlock(&lock);
}

long fc_queue(fc_stream* s, fc_call call, void* data) {
  if (fc_latency_ms() <= 0) {
    call(data);
    return 0;
  }
  work* w = malloc(sizeof *w);
  *w = (work){call, data, fc_now_ms() + (is_late(s) ? fc_latency_ms() : 0), NULL};
  pthread_mutex_lock(&lock);
  if (!s->has_thread) {
    static int registered;
    pthread_t thread;
    if (!registered) registered = 1, atexit(end);
    s->has_thread = 1;
    s->last = &s->first;
    pthread_create(&thread, NULL, run_stream, s);
    pthread_detach(thread);
  }
  *s->last = w;
  s->last = &w->next;
  long ticket = ++s->queued;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return ticket;
}

void fc_await(fc_stream* s, long ticket) {
  pthread_mutex_lock(&lock);
  if (s->wanted < ticket) s->wanted = ticket;
  pthread_cond_broadcast(&changed);
  while (s->done < ticket && !ends) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

int fc_done(fc_stream* s, long ticket) {
  pthread_mutex_lock(&lock);
  int done = s->done >= ticket;
  pthread_mutex_unlock(&lock);
  return done;
}
long fc_tickets(const fc_stream* s) {
  pthread_mutex_lock(&lock);
  long queued = s->queued;
  pthread_mutex_unlock(&lock);
  return queued;
}

typedef struct {
  fc_stream* stream;
  long ticket;
} mark;
static void await_mark(void* data) {
  mark* m = data;
  fc_await(m->stream, m->ticket);
  free(m);
}
void fc_wait(fc_stream* s, fc_stream* other, long ticket) {
  fc_counters[FC_N_STREAM_WAIT]++;
  if (s == other || fc_done(other, ticket)) return;
  mark* m = malloc(sizeof *m);
  *m = (mark){other, ticket};
  fc_queue(s, await_mark, m);
}

static void nothing(void* data) { (void)data; }
void fc_event_record(fc_event* e, fc_stream* s) { /* work of its own, so that it is late on an idle stream too */
  fc_counters[FC_N_EVENT_RECORD]++;
  *e = (fc_event){fc_now_ms(), s, fc_queue(s, nothing, NULL)};
}

void fc_device_sync(int device) {
  fc_counters[FC_N_DEVICE_SYNC]++;
  pthread_mutex_lock(&lock);
  fc_stream* s = streams; /* newer ones are put before it */
  pthread_mutex_unlock(&lock);
  for (; s; s = s->next)
    if (s->device == device) fc_await(s, fc_tickets(s));
}

/* ---- copies */
typedef struct {
  void *to, *staged;
  const void* from;
  size_t bytes;
  int value;
} copy;
static void do_copy(void* data) {
  copy* c = data;
  memmove(c->to, c->from, c->bytes);
  free(c->staged);
  free(c);
}
static void do_set(void* data) {
  copy* c = data;
  memset(c->to, c->value, c->bytes);
  free(c);
}

void fc_copy(void* to, const void* from, size_t bytes, fc_stream* s) {
  fc_counters[FC_N_COPY]++;
  fc_counters[FC_N_COPY_BYTES] += bytes;
  int kind = fc_find(to, NULL, NULL, NULL);
  if (!bytes || to == from || (!fc_copies() && (kind == FC_DEVICE || kind == FC_RESERVED))) return;
  copy* c = malloc(sizeof *c);
  *c = (copy){to, NULL, from, bytes, 0};
  if (fc_latency_ms() > 0 && !fc_find(from, NULL, NULL, NULL)) { /* the host may reuse pageable memory at once */
    c->from = c->staged = malloc(bytes);
    memcpy(c->staged, from, bytes);
  }
  long ticket = fc_queue(s, do_copy, c);
  if (!kind) fc_await(s, ticket); /* it may read pageable memory at once, too */
}
void fc_set(void* to, int value, size_t bytes, fc_stream* s) {
  if (!bytes || !fc_copies()) return;
  copy* c = malloc(sizeof *c);
  *c = (copy){to, NULL, NULL, bytes, value};
  fc_queue(s, do_set, c);
}
