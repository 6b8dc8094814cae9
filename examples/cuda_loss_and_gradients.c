/* Loss and gradients on a CUDA device in C: the caller's memory, the caller's stream, the caller's workspace.
 *
 * Planning happens on the host and touches no device memory; a run only queues work on the stream. Ends with
 * 77 where there is no usable device. */
#include <cuda_runtime_api.h>
#include <logitless/logitless.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 256, VOCAB = 1000, HIDDEN = 64, SKIPPED = 77 };

static void check(logitless_status status) {
  if (status == LOGITLESS_OK) return;
  fprintf(stderr, "%s: %s\n", logitless_status_name(status), logitless_last_error());
  exit(1);
}

static void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  exit(1);
}

static void* device_memory(size_t bytes) {
  void* memory = NULL;
  check_cuda(cudaMalloc(&memory, bytes));
  return memory;
}

static float random_number(void) {
  return (float)rand() / (float)RAND_MAX - 0.5F;
}

int main(void) {
  char why_not[256] = "";
  int32_t devices = 0;
  logitless_device_info device = {0};
  check(logitless_device_count(&devices, why_not, sizeof why_not));
  if (devices > 0) check(logitless_device_get_info(0, &device));
  if (devices == 0 || device.why_unavailable[0] != '\0') {
    printf("skipped: no usable CUDA device: %s\n", devices == 0 ? why_not : device.why_unavailable);
    return SKIPPED;
  }

  /* What to compute, and how. */
  const logitless_option problem[] = {{LOGITLESS_OPTION_PASS, LOGITLESS_FORWARD_BACKWARD, 0},
                                      {LOGITLESS_OPTION_TOKENS, TOKENS, 0},
                                      {LOGITLESS_OPTION_VOCAB, VOCAB, 0},
                                      {LOGITLESS_OPTION_HIDDEN, HIDDEN, 0},
                                      {LOGITLESS_OPTION_MAX_WORKSPACE_BYTES, 16 << 20, 0}};
  const logitless_tensor_desc gradients[] = {{LOGITLESS_TENSOR_D_HIDDEN, LOGITLESS_F32, 0},
                                             {LOGITLESS_TENSOR_D_CLASSIFIER, LOGITLESS_F32, 0}};
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.device = 0;
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  logitless_plan_info info;
  check(logitless_context_create(&options, &context));
  check(logitless_plan_create(context, problem, 5, gradients, 2, &plan));
  check(logitless_plan_get_info(plan, &info));
  printf("%s: plan %s with %s (%s), %zu bytes of workspace\n", device.name,
         logitless_plan_kind_name((logitless_plan_kind)info.kind), info.implementation, info.reason,
         info.workspace_bytes);

  static float hidden[TOKENS * HIDDEN], classifier[VOCAB * HIDDEN];
  static int64_t targets[TOKENS];
  for (int i = 0; i < TOKENS * HIDDEN; ++i) hidden[i] = random_number();
  for (int i = 0; i < VOCAB * HIDDEN; ++i) classifier[i] = random_number();
  for (int i = 0; i < TOKENS; ++i) targets[i] = rand() % VOCAB;

  check_cuda(cudaSetDevice(0));
  cudaStream_t stream = NULL;
  check_cuda(cudaStreamCreate(&stream));
  void* d_targets = device_memory(sizeof targets);
  void* d_of_hidden = device_memory(sizeof hidden);
  void* d_of_classifier = device_memory(sizeof classifier);
  void* on_device[2] = {device_memory(sizeof hidden), device_memory(sizeof classifier)};
  check_cuda(cudaMemcpyAsync(on_device[0], hidden, sizeof hidden, cudaMemcpyHostToDevice, stream));
  check_cuda(cudaMemcpyAsync(on_device[1], classifier, sizeof classifier, cudaMemcpyHostToDevice, stream));
  check_cuda(cudaMemcpyAsync(d_targets, targets, sizeof targets, cudaMemcpyHostToDevice, stream));
  void* d_loss = device_memory(sizeof(float));
  void* d_invalid = device_memory(2 * sizeof(int64_t)); /* targets cannot be refused before the run */
  const logitless_tensor tensors[] = {
      {LOGITLESS_TENSOR_HIDDEN, on_device[0], 0},      {LOGITLESS_TENSOR_CLASSIFIER, on_device[1], 0},
      {LOGITLESS_TENSOR_TARGETS, d_targets, 0},        {LOGITLESS_TENSOR_LOSS, d_loss, 0},
      {LOGITLESS_TENSOR_D_HIDDEN, d_of_hidden, 0},     {LOGITLESS_TENSOR_D_CLASSIFIER, d_of_classifier, 0},
      {LOGITLESS_TENSOR_INVALID_TARGETS, d_invalid, 0}};
  void* workspace = device_memory(info.workspace_bytes);

  check(logitless_run(plan, tensors, 7, workspace, info.workspace_bytes, stream));

  float loss = 0;
  int64_t invalid[2] = {0, 0};
  check_cuda(cudaMemcpyAsync(&loss, d_loss, sizeof loss, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaMemcpyAsync(invalid, d_invalid, sizeof invalid, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaStreamSynchronize(stream));
  printf("loss %.4f, log of the vocabulary %.4f, %d invalid targets\n", loss, log(VOCAB), (int)invalid[0]);

  void* memory[] = {on_device[0], on_device[1],    d_targets, d_loss,
                    d_of_hidden,  d_of_classifier, d_invalid, workspace};
  for (size_t i = 0; i < sizeof memory / sizeof memory[0]; ++i) cudaFree(memory[i]);
  cudaStreamDestroy(stream);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return isfinite(loss) && fabs(loss - log(VOCAB)) < 1 && invalid[0] == 0 ? 0 : 1;
}
