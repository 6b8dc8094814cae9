// main() of the test programs.
// With --device the program holds the tests on a CUDA device. Where no device is usable it says so and ends
// with 77, which ctest shows as skipped.
// With --slow-once, tests whose names end in Slow only run on the newest engine of the host and on that of
// the device. With --all-once, all tests of engines do.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "engine.h"

namespace {

void leave_to_the_first(const std::string& tests, const std::vector<logitless_test::Engine>& engines) {
  std::string filter = GTEST_FLAG_GET(filter);
  for (size_t i = 1; i < engines.size(); ++i) {
    filter += filter.find('-') == std::string::npos ? "-" : ":";
    filter += tests + "/" + engines[i].name();
  }
  GTEST_FLAG_SET(filter, filter);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  bool for_device = false;
  std::string once;  // tests that run on the newest engines
  for (int i = 1; i < argc; ++i) {
    for_device = for_device || std::string_view(argv[i]) == "--device";
    if (std::string_view(argv[i]) == "--slow-once") once = "*Slow";
    if (std::string_view(argv[i]) == "--all-once") once = "*";
  }
  if (for_device && logitless_test::device_engines().empty()) {
    std::printf("skipped: no usable CUDA device: %s\n", logitless_test::why_no_device().c_str());
    return 77;
  }
  if (!once.empty()) {
    leave_to_the_first(once, logitless_test::host_engines());
    leave_to_the_first(once, logitless_test::device_engines());
  }
  return RUN_ALL_TESTS();
}
