#include <headroom/headroom.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  const float hidden[1] = {0};
  const float classifier[3] = {1, 2, 3};
  const int64_t targets[1] = {1};
  float loss = 0;
  headroom_problem problem;
  headroom_problem_init(&problem);
  problem.tokens = 1;
  problem.vocab = 3;
  problem.hidden = 1;
  headroom_buffers buffers;
  headroom_buffers_init(&buffers);
  buffers.hidden = hidden;
  buffers.classifier = classifier;
  buffers.targets = targets;
  buffers.loss = &loss;
  headroom_context* context = NULL;
  headroom_plan* plan = NULL;
  headroom_plan_info info;
  headroom_plan_info_init(&info);
  int status = headroom_context_create(NULL, &context);
  if (status == HEADROOM_OK) status = headroom_plan_create(context, &problem, &plan);
  if (status == HEADROOM_OK) status = headroom_plan_get_info(plan, &info);
  void* workspace = aligned_alloc(64, (info.workspace_bytes + 63) / 64 * 64);
  if (status == HEADROOM_OK) status = headroom_run(plan, &buffers, workspace, info.workspace_bytes, NULL);
  if (status == HEADROOM_OK)
    printf("headroom %s: log 3 = %.4f\n", headroom_version(), loss);
  else
    fprintf(stderr, "%s\n", headroom_last_error());
  free(workspace);
  headroom_plan_destroy(plan);
  headroom_context_destroy(context);
  return status;
}
