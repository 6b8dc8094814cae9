#include <logitless/logitless.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  const float hidden[1] = {0};
  const float classifier[3] = {1, 2, 3};
  const int64_t targets[1] = {1};
  float loss = 0;
  logitless_problem problem;
  logitless_problem_init(&problem);
  problem.tokens = 1;
  problem.vocab = 3;
  problem.hidden = 1;
  logitless_buffers buffers;
  logitless_buffers_init(&buffers);
  buffers.hidden = hidden;
  buffers.classifier = classifier;
  buffers.targets = targets;
  buffers.loss = &loss;
  logitless_context* context = NULL;
  logitless_plan* plan = NULL;
  logitless_plan_info info;
  logitless_plan_info_init(&info);
  int status = logitless_context_create(NULL, &context);
  if (status == LOGITLESS_OK) status = logitless_plan_create(context, &problem, &plan);
  if (status == LOGITLESS_OK) status = logitless_plan_get_info(plan, &info);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);
  if (status == LOGITLESS_OK) status = logitless_run(plan, &buffers, workspace, info.workspace_bytes, NULL);
  if (status == LOGITLESS_OK)
    printf("logitless %s: log 3 = %.4f\n", logitless_version(), loss);
  else
    fprintf(stderr, "%s\n", logitless_last_error());
  free(workspace);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return status;
}
