#include <logitless/logitless.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  float hidden[1] = {0};
  float weight[3] = {1, 2, 3};
  int64_t targets[1] = {1};
  float loss = 0;
  const logitless_option options[] = {
      {LOGITLESS_OPTION_TOKENS, 1, 0}, {LOGITLESS_OPTION_VOCAB, 3, 0}, {LOGITLESS_OPTION_HIDDEN, 1, 0}};
  const logitless_tensor tensors[] = {{LOGITLESS_TENSOR_HIDDEN, hidden, 0},
                                      {LOGITLESS_TENSOR_WEIGHT, weight, 0},
                                      {LOGITLESS_TENSOR_TARGETS, targets, 0},
                                      {LOGITLESS_TENSOR_LOSS, &loss, 0}};
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  logitless_plan_info info = {0};
  int status = logitless_context_create(NULL, &context);
  if (status == LOGITLESS_OK) status = logitless_plan_create(context, options, 3, NULL, 0, &plan);
  if (status == LOGITLESS_OK) status = logitless_plan_get_info(plan, &info);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);
  if (status == LOGITLESS_OK) status = logitless_run(plan, tensors, 4, workspace, info.workspace_bytes, NULL);
  if (status == LOGITLESS_OK)
    printf("logitless %s: log 3 = %.4f\n", logitless_version(), loss);
  else
    fprintf(stderr, "%s\n", logitless_last_error());
  free(workspace);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return status;
}
