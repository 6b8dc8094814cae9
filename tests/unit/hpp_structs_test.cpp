// Devices and their models; a run that allocates nothing.
#include <gtest/gtest.h>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
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

// Counts every allocation of the program. It is not inlined, because compilers then warn of free() after new.
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

logitless::Context context_of_model(const std::string& model) {
  logitless::ContextOptions options;
  options.device_model = model.c_str();
  return logitless::Context(options);
}

TEST(Structs, AModelOfDeviceIsForPlansOnly) {
  const logitless::Context context = context_of_model("h200");
  const logitless::Plan plan(context, small_problem());
  EXPECT_STREQ(plan.info().backend, "cuda");
  const logitless::Buffers buffers;
  EXPECT_EQ(logitless_run(plan.handle(), &buffers, nullptr, 0, nullptr), LOGITLESS_UNSUPPORTED);
  EXPECT_EQ(std::string(logitless_last_error()).find("device_model: expected"), 0u);
  float number = 1;
  void* const data = &number;
  const int32_t dtype = LOGITLESS_F32;
  const int64_t size = 1;
  EXPECT_EQ(logitless_scale_gradients(context.handle(), 1, &data, &dtype, &size, &number, nullptr),
            LOGITLESS_UNSUPPORTED);
  logitless_context* made = nullptr;
  logitless_context_options options;
  logitless_context_options_init(&options);
  options.device_model = "h200";
  options.device = 0;
  EXPECT_EQ(logitless_context_create(&options, &made), LOGITLESS_INVALID_ARGUMENT);
  options.device = LOGITLESS_HOST_MEMORY;
  options.device_model = "h9000";
  EXPECT_EQ(logitless_context_create(&options, &made), LOGITLESS_BACKEND_UNAVAILABLE);
}

// Refusals depend on the model, not on the devices of this machine.
TEST(Structs, AModelOfDeviceSaysWhichThresholdsItTakes) {
  logitless::Problem p = small_problem();
  p.vocab = 1 << 20;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.has.d_hidden = 1;
  logitless::set_gradient(p, logitless::Gradient::sparsified, 0x1p-13);
  EXPECT_NO_THROW(logitless::Plan(context_of_model("h200"), p));
  try {
    logitless::Plan(context_of_model("a100"), p);
    FAIL() << "nothing was thrown";
  } catch (const logitless::Error& error) {
    EXPECT_EQ(error.status(), LOGITLESS_UNSUPPORTED);
    EXPECT_NE(std::string(error.what()).find("threshold must be at least 2^-12"), std::string::npos);
  }
}

// Runs 300 x 300 x 5 on one backend, exact or sparsified.
void expect_no_allocation(const logitless::Context& context, logitless_gradient gradient) {
  logitless::Problem p = small_problem();
  p.tokens = 300;
  p.vocab = 300;
  p.hidden = 5;
  p.pass = LOGITLESS_FORWARD_BACKWARD;
  p.has.entropy = p.has.d_hidden = p.has.d_weight = 1;
  p.gradient = gradient;
  const logitless::Plan plan(context, p);
  std::vector<float> hidden(1500, 1), weight(1500, 1), d_hidden(1500), d_weight(1500);
  std::vector<int64_t> targets(300, 7);
  float loss = 0;
  logitless::Buffers b;
  b.hidden = hidden.data();
  b.weight = weight.data();
  b.targets = targets.data();
  b.loss = &loss;
  b.d_hidden = d_hidden.data();
  b.d_weight = d_weight.data();
  const logitless::Workspace workspace(plan.info().workspace_bytes);
  const long before = allocations;
  plan.run(b, workspace.bytes());
  EXPECT_EQ(allocations - before, 0) << plan.info().backend;
  EXPECT_NEAR(loss, 5.70378, 1e-5);  // log 300
}

TEST(Structs, ARunAllocatesNothing) {
  for (const char* backend : {"cpu", "reference"}) {
    logitless::ContextOptions options;
    options.backend = backend;
    const logitless::Context context(options);
    for (logitless_gradient gradient : {LOGITLESS_EXACT, LOGITLESS_SPARSIFIED}) {
      expect_no_allocation(context, gradient);
    }
  }
}

}  // namespace
