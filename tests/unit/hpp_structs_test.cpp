// Defaults, devices and their models; a run that allocates nothing.
#include <gtest/gtest.h>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string_view>
#include <vector>

#include "c_calls.h"

namespace {

std::atomic<long> allocations{0};

logitless::Problem small_problem() {
  logitless::Problem p;
  p.tokens = 3;
  p.vocab = 4;
  p.hidden = 2;
  return p;
}

}  // namespace

// Counts every allocation of the program. Not inlined, as compilers then warn of free() after new.
[[gnu::noinline]] void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace {

TEST(Structs, DefaultsOfInit) {
  const logitless::Problem p = small_problem();
  EXPECT_EQ(p.reduction, LOGITLESS_REDUCTION_MEAN);
  EXPECT_EQ(p.dtype.targets, LOGITLESS_I64);
  EXPECT_EQ(p.scale, 1);
  EXPECT_EQ(p.temperature, 1);
  EXPECT_EQ(p.top_k, 0);
  EXPECT_EQ(p.targets_per_row, 0);
  EXPECT_EQ(p.ignore_index, -100);
  EXPECT_EQ(p.max_workspace_bytes, 0u);
}

TEST(Structs, DevicesAreCountedAndDescribedOrMissingForAReason) {
  int32_t count = -1;
  char why[256];
  ASSERT_EQ(logitless_device_count(&count, why, sizeof why), LOGITLESS_OK);
  EXPECT_EQ(count == 0, std::strlen(why) > 0) << why;
  EXPECT_EQ(logitless_device_count(nullptr, nullptr, 0), LOGITLESS_INVALID_ARGUMENT);
  logitless_device_info info;
  for (int32_t i = 0; i < count; ++i) {
    ASSERT_EQ(logitless_device_get_info(i, &info), LOGITLESS_OK);
    EXPECT_GT(std::strlen(info.name), 0u);
    EXPECT_GE(info.compute_capability, 10);
  }
  for (const int32_t none : {-1, count}) {
    EXPECT_EQ(logitless_device_get_info(none, &info), LOGITLESS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(logitless_last_error()).find("ordinal: expected"), 0u);
  }
}

TEST(Structs, AModelOfDeviceIsForPlansOnly) {
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.device_model = "h200";
  logitless_context* context = nullptr;
  ASSERT_EQ(logitless_context_create(&options, &context), LOGITLESS_OK) << logitless_last_error();
  const logitless::Problem p = small_problem();
  logitless_plan* plan = nullptr;
  ASSERT_EQ(logitless_plan_create(context, &p, &plan), LOGITLESS_OK) << logitless_last_error();
  logitless_plan_info info;
  ASSERT_EQ(logitless_plan_get_info(plan, &info), LOGITLESS_OK);
  EXPECT_STREQ(info.backend, "cuda");
  logitless::Buffers buffers;
  EXPECT_EQ(logitless_run(plan, &buffers, nullptr, 0, nullptr), LOGITLESS_UNSUPPORTED);
  EXPECT_EQ(std::string(logitless_last_error()).find("device_model: expected"), 0u);
  float number = 1;
  void* const data = &number;
  const int32_t dtype = LOGITLESS_F32;
  const int64_t size = 1;
  EXPECT_EQ(logitless_scale_gradients(context, 1, &data, &dtype, &size, &number, nullptr),
            LOGITLESS_UNSUPPORTED);
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  options.device = 0;
  EXPECT_EQ(logitless_context_create(&options, &context), LOGITLESS_INVALID_ARGUMENT);
  options.device = LOGITLESS_HOST_MEMORY;
  options.device_model = "h9000";
  EXPECT_EQ(logitless_context_create(&options, &context), LOGITLESS_BACKEND_UNAVAILABLE);
}

// What is refused depends on the model, not on the devices that are here.
TEST(Structs, AModelOfDeviceSaysWhichThresholdsItTakes) {
  logitless::Problem p = small_problem();
  p.vocab = 1 << 20;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.has.d_hidden = 1;
  p.gradient = LOGITLESS_THINNED;
  p.threshold = 0x1p-13;
  for (const std::string model : {"h200", "a100"}) {
    logitless_context_options options;
    logitless_context_options_init(&options);
    options.device_model = model.c_str();
    logitless_context* context = nullptr;
    ASSERT_EQ(logitless_context_create(&options, &context), LOGITLESS_OK) << logitless_last_error();
    logitless_plan* plan = nullptr;
    const logitless_status status = logitless_plan_create(context, &p, &plan);
    EXPECT_EQ(status, model == "h200" ? LOGITLESS_OK : LOGITLESS_UNSUPPORTED) << logitless_last_error();
    if (status != LOGITLESS_OK) {
      EXPECT_NE(std::string(logitless_last_error()).find("threshold must be at least 2^-12"),
                std::string::npos);
    }
    logitless_plan_destroy(plan);
    logitless_context_destroy(context);
  }
}

// Exact or thinned, a run of 300 x 300 x 5 on one backend; false when the backend refuses it.
bool runs_without_allocating(const char* backend, logitless_gradient gradient) {
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.backend = backend;
  logitless_context* context = nullptr;
  if (logitless_context_create(&options, &context) != LOGITLESS_OK) return false;
  logitless::Problem p = small_problem();
  p.tokens = 300;
  p.vocab = 300;
  p.hidden = 5;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.has.entropy = p.has.d_hidden = p.has.d_classifier = 1;
  p.gradient = gradient;
  logitless_plan* plan = nullptr;
  if (logitless_plan_create(context, &p, &plan) != LOGITLESS_OK) {
    logitless_context_destroy(context);
    return false;
  }
  logitless_plan_info info;
  logitless_plan_get_info(plan, &info);
  std::vector<float> hidden(1500, 1), classifier(1500, 1), d_hidden(1500), d_classifier(1500);
  std::vector<int64_t> targets(300, 7);
  float loss = 0;
  logitless::Buffers b;
  b.hidden = hidden.data();
  b.classifier = classifier.data();
  b.targets = targets.data();
  b.loss = &loss;
  b.d_hidden = d_hidden.data();
  b.d_classifier = d_classifier.data();
  std::vector<char> memory(info.workspace_bytes + 64);
  char* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  const long before = allocations;
  const logitless_status status = logitless_run(plan, &b, workspace, info.workspace_bytes, nullptr);
  EXPECT_EQ(allocations - before, 0) << options.backend;
  EXPECT_EQ(status, LOGITLESS_OK);
  EXPECT_NEAR(loss, 5.70378, 1e-5);  // log 300
  logitless_plan_destroy(plan);
  logitless_context_destroy(context);
  return true;
}

TEST(Structs, ARunAllocatesNothing) {
  for (int32_t backend = 0; backend < logitless_backend_count(); ++backend) {
    const char* name = logitless_backend_name(backend);
    for (logitless_gradient gradient : {LOGITLESS_EXACT, LOGITLESS_THINNED}) {
      const bool ran = runs_without_allocating(name, gradient);
      EXPECT_TRUE(ran || std::string_view(name) == "cuda") << name;
    }
  }
}

}  // namespace
