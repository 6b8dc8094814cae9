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
  logitless_device_info device;
  logitless_device_info_init(&device);
  check(logitless_device_count(&devices, why_not, sizeof why_not));
  if (devices > 0) check(logitless_device_get_info(0, &device));
  if (devices == 0 || device.why_unavailable[0] != '\0') {
    printf("skipped: no usable CUDA device: %s\n", devices == 0 ? why_not : device.why_unavailable);
    return SKIPPED;
  }

  /* What to compute, and how. */
  logitless_problem problem;
  logitless_problem_init(&problem);
  problem.pass = LOGITLESS_FORWARD_BACKWARD;
  problem.tokens = TOKENS;
  problem.vocab = VOCAB;
  problem.hidden = HIDDEN;
  problem.want_d_hidden = problem.want_d_classifier = 1;
  problem.max_workspace_bytes = 16 << 20;
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.device = 0;
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  check(logitless_context_create(&options, &context));
  check(logitless_plan_create(context, &problem, &plan));
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
  logitless_buffers buffers;
  logitless_buffers_init(&buffers);
  void* on_device[2] = {device_memory(sizeof hidden), device_memory(sizeof classifier)};
  check_cuda(cudaMemcpyAsync(on_device[0], hidden, sizeof hidden, cudaMemcpyHostToDevice, stream));
  check_cuda(cudaMemcpyAsync(on_device[1], classifier, sizeof classifier, cudaMemcpyHostToDevice, stream));
  check_cuda(cudaMemcpyAsync(d_targets, targets, sizeof targets, cudaMemcpyHostToDevice, stream));
  buffers.hidden = on_device[0];
  buffers.classifier = on_device[1];
  buffers.targets = d_targets;
  buffers.loss = device_memory(sizeof(float));
  buffers.d_hidden = d_of_hidden;
  buffers.d_classifier = d_of_classifier;
  buffers.invalid_targets = device_memory(2 * sizeof(int64_t)); /* targets cannot be refused before the run */
  void* workspace = device_memory(info.workspace_bytes);

  check(logitless_run(plan, &buffers, workspace, info.workspace_bytes, stream));

  float loss = 0;
  int64_t invalid[2] = {0, 0};
  check_cuda(cudaMemcpyAsync(&loss, buffers.loss, sizeof loss, cudaMemcpyDeviceToHost, stream));
  check_cuda(
      cudaMemcpyAsync(invalid, buffers.invalid_targets, sizeof invalid, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaStreamSynchronize(stream));
  printf("loss %.4f, log of the vocabulary %.4f, %d invalid targets\n", loss, log(VOCAB), (int)invalid[0]);

  void* memory[] = {on_device[0],
                    on_device[1],
                    d_targets,
                    buffers.loss,
                    d_of_hidden,
                    d_of_classifier,
                    buffers.invalid_targets,
                    workspace};
  for (size_t i = 0; i < sizeof memory / sizeof memory[0]; ++i) cudaFree(memory[i]);
  cudaStreamDestroy(stream);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return isfinite(loss) && fabs(loss - log(VOCAB)) < 1 && invalid[0] == 0 ? 0 : 1;
}
