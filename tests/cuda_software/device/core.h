/* The device: memory, streams and events, in libcuda.so.1, which the other libraries share. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define FC_GRANULARITY (2ull << 20)
#define FC_MAX_DEVICES 64

/* ---- settings: FAKE_CUDA_* of the environment, read at the first use */
double fc_number(const char* name, double otherwise); /* with a suffix K, M or G */
int fc_device_count(void);
size_t fc_total(int device);
int fc_copies(void); /* FAKE_CUDA_COPY=0: memcpy and memset leave the device's memory as it is */
int fc_capability(int* major, int* minor);
int fc_sm_count(void);
const char* fc_name(void);
double fc_now_ms(void);

/* ---- memory */
enum { FC_DEVICE = 1, FC_HOST = 2, FC_RESERVED = 3 };
int fc_get_device(void);
int fc_set_device(int device);
size_t fc_used(int device);
int fc_charge(int device, size_t bytes); /* 0, or -1 if the device is full */
void fc_credit(int device, size_t bytes);
void* fc_malloc(int device, size_t bytes); /* NULL if the device is full */
void* fc_host_malloc(size_t bytes);
int fc_free(void* p);                                         /* either of them */
void fc_note(void* base, size_t bytes, int device, int kind); /* a range that pointer queries know */
void fc_forget(void* base);
int fc_find(const void* p, void** base, size_t* bytes, int* device); /* its kind, or 0 */

/* ---- streams and events. Work runs at once, inside fc_queue. With FAKE_CUDA_LATENCY_MS each stream has a thread,
   which runs work in the stream's order: when somebody waits for it, or that long after it was queued. */
typedef struct fc_stream fc_stream;
typedef struct fc_event {
  double recorded_at;
  fc_stream* stream; /* NULL before the first record */
  long ticket;
} fc_event;
typedef void (*fc_call)(void* data); /* owns its data */
double fc_latency_ms(void);
fc_stream* fc_stream_new(int device, int priority);
fc_stream* fc_stream_of(void* handle); /* NULL, legacy and per-thread handles are the default stream */
int fc_stream_priority(const fc_stream* s);
long fc_queue(fc_stream* s, fc_call call, void* data); /* a ticket: how much the stream has been given so far */
void fc_await(fc_stream* s, long ticket);
void fc_wait(fc_stream* s, fc_stream* other, long ticket); /* what s is given from now on runs after that */
void fc_event_record(fc_event* e, fc_stream* s);
int fc_done(fc_stream* s, long ticket);
long fc_tickets(const fc_stream* s);
void fc_device_sync(int device);
void fc_copy(void* to, const void* from, size_t bytes, fc_stream* s); /* as cudaMemcpyAsync */
void fc_set(void* to, int value, size_t bytes, fc_stream* s);

enum {
  FC_N_LAUNCH,
  FC_N_MALLOC,
  FC_N_FREE,
  FC_N_COPY,
  FC_N_COPY_BYTES,
  FC_N_EVENT_RECORD,
  FC_N_STREAM_WAIT,
  FC_N_STREAM_SYNC,
  FC_N_EVENT_SYNC,
  FC_N_DEVICE_SYNC,
  FC_N_EVENT_QUERY,
  FC_N_MAP,
  FC_N_COUNTERS
};
#ifdef __cplusplus
}
#else
extern _Atomic long fc_counters[FC_N_COUNTERS];
#endif
