// main() of the test programs. With --device the program is there for the tests on a CUDA device: where none
// is usable it says so and ends with 77, which ctest shows as skipped.
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#include "engine.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  bool for_device = false;
  for (int i = 1; i < argc; ++i) for_device = for_device || std::string_view(argv[i]) == "--device";
  if (for_device && logitless_test::device_engines().empty()) {
    std::printf("skipped: no usable CUDA device: %s\n", logitless_test::why_no_device().c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
