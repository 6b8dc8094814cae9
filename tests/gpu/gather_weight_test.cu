// The gather of d_weight: lists of all lengths, hidden states in one slice and in several. Compiled for the
// CPU as well as for a GPU.
#include <cmath>
#include <random>
#include <vector>

#include "cuda/rows/gathers.h"
#include "cuda/runtime/queue.h"
#include "guarded.h"

namespace logitless::cuda::test {
namespace {

constexpr int kRows = 700;
constexpr float kUntouched = 12345;

// Hidden states, and a list of rows for each column of the vocabulary.
struct Lists {
  Lists(int hidden_columns, const std::vector<int>& lengths) : columns(hidden_columns) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    hidden.resize(static_cast<size_t>(kRows) * columns);
    for (float& x : hidden) x = normal(random);
    heavy.push_back(0);
    for (const int length : lengths) {
      if (length > kHeavyColumn) heavy.push_back(static_cast<int32_t>(start.size()) - 1), ++heavy[0];
      for (int i = 0; i < length; ++i) {
        elements.push_back({static_cast<int32_t>(random() % kRows), normal(random)});
      }
      start.push_back(static_cast<int32_t>(elements.size()));
    }
    elements.push_back({});  // no array is empty
  }

  int64_t vocab() const { return static_cast<int64_t>(start.size()) - 1; }

  // claimed_rows: as many rows as the launch expects decide on slices.
  std::vector<float> gathered(int64_t claimed_rows, bool accumulate) const {
    const Guarded<float> device_hidden(hidden);
    const Guarded<KeptRow> device_elements(elements);
    const Guarded<int32_t> device_start(start), device_heavy(heavy);
    const Guarded<float> out(std::vector<float>(static_cast<size_t>(vocab() * columns), kUntouched));
    GatherWeightOf<float> g{};
    g.lists = {device_elements.get(), device_start.get(), device_heavy.get(), nullptr, vocab()};
    g.columns = g.padded = columns;
    g.hidden = {device_hidden.get(), DType::kF32, columns};
    g.operand_dtype = DType::kF32;
    g.rows = claimed_rows;
    g.to = {out.get(), DType::kF32, columns};
    g.accumulate = accumulate;
    launch_gather_weight(g, Queue(cudaStream_t{}));
    check_cuda(cudaDeviceSynchronize());
    out.expect_guards();
    return out.read();
  }

  // No order of the terms, with a rounding for each, has a larger error.
  void check(const std::vector<float>& got, bool accumulate) const {
    for (int64_t j = 0; j < vocab(); ++j) {
      for (int64_t k = 0; k < columns; ++k) {
        double sum = accumulate ? kUntouched : 0, magnitude = std::abs(sum);
        for (int i = start[j]; i < start[j + 1]; ++i) {
          const double term = double{hidden[elements[i].row * columns + k]} * elements[i].value;
          sum += term, magnitude += std::abs(term);
        }
        const double bound = (start[j + 1] - start[j] + 1) * 0x1p-24 * magnitude;
        ASSERT_NEAR(got[j * columns + k], sum, bound) << j << ", " << k;
      }
    }
  }

  int64_t columns;
  std::vector<float> hidden;
  std::vector<KeptRow> elements;
  std::vector<int32_t> start{0}, heavy;
};

TEST(GatherWeight, AnySliceAndLength) {
  if (!has_gpu()) GTEST_SKIP() << "needs a GPU";
  const std::vector<int> lengths = {0, 1, 256, 0, 257, 8, 63, 1500, 2, 0, 9, 300, 17, 0, 0, 5, 1};
  for (const int columns : {1, 100, 256, 520, 1024, 2304, 4104}) {
    const Lists lists(columns, lengths);
    // A slice of all columns, of a few, of the fewest; with more rows, longer lists count as light.
    for (const int64_t rows : {int64_t{kRows}, int64_t{6000}, int64_t{20000}, int64_t{1} << 30}) {
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, " << rows << " rows, " << accumulate);
        lists.check(lists.gathered(rows, accumulate), accumulate);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace logitless::cuda::test
