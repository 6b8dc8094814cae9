// The check of an engine before its first use finds no fault in the mma engine, and one in an engine that is
// wrong in any epilogue. `tune` writes a record that is used.
#include <gtest/gtest.h>
#include <logitless/logitless.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "cuda/plan/device_record.h"
#include "cuda/tune/device_work.h"
#include "cuda/tune/self_check.h"

namespace logitless::cuda {
namespace {

// The mma engine, with other logits in one epilogue.
class Wrong final : public Engine {
 public:
  explicit Wrong(Epilogue epilogue) : epilogue_(epilogue) {}
  const char* name() const override { return right_.name(); }
  EngineTraits traits() const override { return right_.traits(); }
  std::string why_not_on(const Device& device) const override { return right_.why_not_on(device); }
  std::string why_not_of(DType operands) const override { return right_.why_not_of(operands); }
  std::string reason() const override { return right_.reason(); }
  int partials(const LogitsArgs& args, const Device& device) const override {
    return right_.partials(args, device);
  }
  EngineTiles tiles(const LogitsArgs& args, const Device& device) const override {
    return right_.tiles(args, device);
  }
  std::string config(const LogitsArgs& args) const override { return right_.config(args); }
  double seconds(const LogitsArgs& args, const LogitsScratch& scratch, double bytes,
                 const KernelTimes& times) const override {
    return right_.seconds(args, scratch, bytes, times);
  }
  void launch(const LogitsArgs& args, const LogitsScratch& scratch, const Queue& queue) const override {
    launched_.insert(args.epilogue());
    LogitsArgs wrong = args;
    if (args.epilogue() == epilogue_) wrong.transform.scale *= 1.03f;
    right_.launch(wrong, scratch, queue);
  }
  const std::set<Epilogue>& launched() const { return launched_; }

 private:
  const Engine& right_ = *engine_named("mma");
  const Epilogue epilogue_;
  mutable std::set<Epilogue> launched_;
};

TEST(SelfCheck, FindsNoFaultInTheEngine) {
  EXPECT_TRUE(self_check(*engine_named("mma"), query_device(0)).passed());
}

TEST(SelfCheck, FindsAFaultInEachEpilogue) {
  for (const Epilogue epilogue : {Epilogue::kStats, Epilogue::kExpLogits, Epilogue::kGradient,
                                  Epilogue::kDraw, Epilogue::kTop, Epilogue::kSample}) {
    const Wrong engine(epilogue);
    const std::string difference = self_check(engine, query_device(0)).difference;
    EXPECT_NE(difference.find(" from portable's, in a "), std::string::npos)
        << static_cast<int>(epilogue) << ": " << difference;
    EXPECT_TRUE(engine.launched().contains(epilogue));
  }
}

// On a device of compute capability 8.0 the engine is checked, and then chosen.
TEST(Default, ADeviceWithoutFasterInstructionsTakesTheEngine) {
  if (query_device(0).capability != 80) GTEST_SKIP() << "another device";
  const Device device = checked_device(0, "");
  EXPECT_EQ(device.untrusted_engine, "") << device.why_untrusted;
  Problem problem;
  problem.tokens = problem.vocab = problem.hidden = 64;
  problem.dtype.hidden = problem.dtype.weight = DType::kBF16;
  EXPECT_STREQ(choose_engine(problem, device, "").engine->name(), "mma");
}

#ifndef LOGITLESS_CUDA_ON_CPU  // which has no captures
// A caller's capture of another stream goes on, and has nothing of the check.
TEST(SelfCheck, RunsBesideACapture) {
  const TimedStream stream;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  EXPECT_TRUE(self_check(*engine_named("mma"), query_device(0)).passed());
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  size_t nodes = 1;
  check(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
  EXPECT_EQ(nodes, 0U);
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}
#endif

class Tune : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_records().empty()) GTEST_SKIP() << why_no_records();
    options_.heads = heads_;
    options_.head_count = 2;
    options_.seconds = 1e-3;  // one round
    options_.path = path_.c_str();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  const int64_t heads_[6] = {64, 700, 72, 40, 300, 64};
  const std::string path_ = testing::TempDir() + "logitless_tune.json";
  logitless_tune_options options_{};
};

TEST_F(Tune, WritesARecordThatIsUsed) {
  double share = 0;
  options_.progress = [](double now, void* data) {
    EXPECT_GE(now, *static_cast<double*>(data));
    *static_cast<double*>(data) = now;
    return 0;
  };
  options_.progress_data = &share;
  const char* written = nullptr;
  ASSERT_EQ(logitless_tune(&options_, &written), LOGITLESS_OK) << logitless_last_error();
  const std::string text = written;
  EXPECT_GT(share, 0);
  std::ifstream file(path_);
  EXPECT_EQ(text, std::string(std::istreambuf_iterator<char>(file), {}));
  const DeviceRecord record = parse_record(text, path_);
  const Device& device = query_device(0);
  EXPECT_EQ(record.device.name, device.name);
  EXPECT_GT(record.device.measured.matmul_flops, 0);
  EXPECT_GT(record.device.measured.bytes_per_second, 0);
  EXPECT_GT(record.device.measured.mma_share, 0);
  std::set<std::string> engines;
  for (const TimedRun& run : record.runs) {
    EXPECT_GT(run.median_seconds, 0);
    EXPECT_GE(run.repeats, 1);
    engines.insert(run.engine);
  }
  EXPECT_EQ(record.runs.size(), 2 * kWorkNames.size() * engines.size());
  for (const std::string& engine : record.device.measured.engines)
    EXPECT_TRUE(engines.contains(engine)) << engine;
}

// Heads too small for any rate, and odd ones.
TEST_F(Tune, RatesDoNotDependOnTheHeads) {
  const int64_t small[] = {1, 1, 1, 3, 1, 7};
  options_.heads = small;
  const char* written = nullptr;
  ASSERT_EQ(logitless_tune(&options_, &written), LOGITLESS_OK) << logitless_last_error();
  const Measured measured = parse_record(written, path_).device.measured;
  EXPECT_GT(measured.matmul_flops, 0);
  EXPECT_GT(measured.bytes_per_second, 0);
}

TEST_F(Tune, RefusesAndWritesNothing) {
  const auto refusal = [&] {
    const char* written = nullptr;
    EXPECT_NE(logitless_tune(&options_, &written), LOGITLESS_OK);
    EXPECT_FALSE(std::filesystem::exists(path_));
    return std::string(logitless_last_error());
  };
  options_.progress = [](double, void*) { return 1; };
  EXPECT_EQ(refusal(), "progress: expected 0 to go on, got another value, which stops");
  options_.progress = nullptr;
  const int64_t none[] = {64, 0, 72};
  options_.heads = none;
  options_.head_count = 1;
  EXPECT_EQ(refusal(), "heads[0]: expected sizes from 1 to 2^30 - 1, got 0");
  const int64_t large[] = {1 << 20, 1 << 29, 4096};
  options_.heads = large;
  EXPECT_NE(refusal().find("heads: expected some that fit the device's free memory, got none ("),
            std::string::npos);
  options_.heads = heads_;
  options_.seconds = -1;
  EXPECT_NE(refusal().find("seconds: expected a time from 0 (60 seconds) to a day"), std::string::npos);
  options_.seconds = 0.001;
  options_.device = 77;
  EXPECT_NE(refusal().find("there is no CUDA device 77"), std::string::npos);
  options_.device = 0;
  // A path is refused before the measurements, in which progress is called.
  options_.progress = [](double, void*) { return 1; };
  options_.path = "/dev/null/record.json";
  EXPECT_EQ(refusal(), "path: expected a file that can be written, got /dev/null/record.json");
  const std::string folder = testing::TempDir() + "logitless_tune";
  std::filesystem::create_directory(folder);
  for (const std::string& path : {folder, folder + "/", std::string("/dev/null")}) {
    options_.path = path.c_str();
    EXPECT_EQ(refusal(), "path: expected a file that can be written, got " + path + " (no regular file)");
  }
  for (const auto& entry : std::filesystem::directory_iterator(testing::TempDir())) {
    const std::string name = entry.path().filename().string();
    EXPECT_FALSE(name.starts_with("logitless_tune") && name.ends_with(".new")) << name;
  }
  EXPECT_TRUE(std::filesystem::remove(folder));  // fails if it holds anything
}

}  // namespace
}  // namespace logitless::cuda
