/* Answers that are more than 0, for the libraries whose other symbols gen_stubs.py makes up. Each FAKE_<library> block
 * goes into one library. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef FAKE_cublasLt
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulAlgoGetHeuristic(void* h, void* d, void* a, void* b, void* c, void* e, void* p, int wanted,
                                   void* results, int* n) {
  (void)h;
  (void)d;
  (void)a;
  (void)b;
  (void)c;
  (void)e;
  (void)p;
  if (wanted < 1) {
    *n = 0;
    return 0;
  }
  memset(results, 0, 96);
  *n = 1;
  return 0; /* cublasLtMatmulHeuristicResult_t: algo[8 x u64], workspaceSize, state, wavesCount, reserved[4] */
}
#endif
#ifdef FAKE_cublas
int cublasGetPointerMode_v2(void* h, int* m) {
  (void)h;
  *m = 0;
  return 0;
}
int cublasGetMathMode(void* h, int* m) {
  (void)h;
  *m = 0;
  return 0;
}
#endif
#ifdef FAKE_cudnn
size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char* cudnnGetErrorString(int s) {
  (void)s;
  return "fake cudnn";
}
void cudnnGetLastErrorString(char* s, size_t n) {
  if (n) *s = 0;
}
int cudnnGetProperty(int type, int* v) {
  *v = type == 0 ? 9 : type == 1 ? 20 : 0;
  return 0;
}
#endif
#ifdef FAKE_cusparse
const char* cusparseGetErrorString(int s) {
  (void)s;
  return "fake cusparse";
}
#endif
#ifdef FAKE_nvrtc
const char* nvrtcGetErrorString(int s) {
  (void)s;
  return "fake nvrtc";
}
int nvrtcVersion(int* a, int* b) {
  *a = 13;
  *b = 0;
  return 0;
}
#endif
#ifdef FAKE_cupti
int cuptiGetVersion(uint32_t* v) {
  *v = 130000;
  return 0;
}
int cuptiGetResultString(int r, const char** s) {
  (void)r;
  *s = "fake cupti";
  return 0;
}
int cuptiSubscribe(void** s, void* c, void* u) {
  (void)s;
  (void)c;
  (void)u;
  return 39; /* CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED */
}
#endif
