// Copies of rows that begin and end anywhere: right in every element, and none written beside them. Under
// compute-sanitizer: none read beside them either.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda/rows/rows.h"
#include "cuda/runtime/queue.h"

namespace logitless::cuda::rows_copies {
namespace {

template <class T>
constexpr DType dtype_of = std::is_same_v<T, float> ? DType::kF32 : DType::kBF16;

float to_float(float x) {
  return x;
}
float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
void put(float* to, float x) {
  *to = x;
}
void put(__nv_bfloat16* to, float x) {
  *to = __float2bfloat16_rn(x);
}

template <class T>
std::vector<T> random_numbers(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-4, 4);
  std::vector<T> out(static_cast<size_t>(count));
  for (T& x : out) put(&x, uniform(random));
  return out;
}

// Elements that begin so many behind a multiple of 256 bytes, and memory that ends with them.
template <class T>
class Elements {
 public:
  Elements(const std::vector<T>& values, int64_t before) : count_(values.size()), before_(before) {
    EXPECT_EQ(cudaMalloc(&memory_, sizeof(T) * (count_ + static_cast<size_t>(before))), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data(), values.data(), sizeof(T) * count_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  Elements(const Elements&) = delete;
  Elements& operator=(const Elements&) = delete;
  ~Elements() { cudaFree(memory_); }
  T* data() const { return memory_ + before_; }
  std::vector<T> read() const {
    std::vector<T> out(count_);
    EXPECT_EQ(cudaMemcpy(out.data(), data(), sizeof(T) * count_, cudaMemcpyDeviceToHost), cudaSuccess);
    return out;
  }

 private:
  size_t count_;
  int64_t before_;
  T* memory_ = nullptr;
};

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), sizeof(T) * a.size()) == 0;
}

constexpr int64_t kRows = 19;

template <class From, class To>
void check_copies(int64_t columns, int64_t gap, int64_t before, bool maps) {
  const int64_t stride = columns + gap, padded = (columns + 15) / 16 * 16;
  const std::vector<From> values = random_numbers<From>((kRows - 1) * stride + columns, 1);
  const Elements<From> from(values, before);
  const std::vector<To> old = random_numbers<To>(kRows * padded, 2);
  const Elements<To> to(old, 0);
  std::vector<int32_t> map(kRows);
  for (int32_t r = 0; r < kRows; ++r) map[static_cast<size_t>(r)] = r * 7 % static_cast<int32_t>(kRows);
  const Elements<int32_t> device_map(map, 0);
  std::vector<To> expected(old.size());
  for (int64_t r = 0; r < kRows; ++r) {
    const int64_t row = maps ? map[static_cast<size_t>(r)] : r;
    for (int64_t i = 0; i < padded; ++i) {
      put(&expected[static_cast<size_t>(r * padded + i)],
          i < columns ? to_float(values[static_cast<size_t>(row * stride + i)]) : 0.0f);
    }
  }
  RowsCopy c{};
  c.from = from.data();
  c.from_dtype = dtype_of<From>;
  c.from_stride = stride;
  c.row_map = maps ? device_map.data() : nullptr;
  c.to = to.data();
  c.to_dtype = dtype_of<To>;
  c.to_stride = padded;
  c.rows = kRows;
  c.columns = columns;
  c.padded = padded;
  launch_copy_rows(c, nullptr);
  EXPECT_TRUE(same(to.read(), expected))
      << columns << " + " << gap << ", " << before << (maps ? ", mapped" : "");
}

template <class From, class To>
void check_stores(int64_t columns, int64_t gap, int64_t before, bool accumulate) {
  const int64_t stride = columns + gap, padded = (columns + 7) / 8 * 8;
  const std::vector<From> values = random_numbers<From>(kRows * padded, 3);
  const Elements<From> from(values, 0);
  const std::vector<To> old = random_numbers<To>((kRows - 1) * stride + columns, 4);
  const Elements<To> to(old, before);
  std::vector<To> expected = old;
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < columns; ++i) {
      To& element = expected[static_cast<size_t>(r * stride + i)];
      const float value = to_float(values[static_cast<size_t>(r * padded + i)]);
      put(&element, accumulate ? to_float(element) + value : value);
    }
  }
  launch_store_matrix(
      {from.data(), dtype_of<From>, padded, kRows, columns, to.data(), dtype_of<To>, stride, accumulate},
      nullptr);
  EXPECT_TRUE(same(to.read(), expected))
      << columns << " + " << gap << ", " << before << (accumulate ? ", added" : "");
}

template <class Check>
void for_rows(const Check& check) {
  for (const int64_t columns : {1, 2, 7, 8, 9, 15, 16, 17, 31, 877, 1024, 1030, 2049}) {
    for (const int64_t gap : {0, 1, 3, 8}) {
      for (int64_t before = 0; before < 8; ++before) {
        for (const bool other : {false, true}) check(columns, gap, before, other);
      }
    }
  }
}

TEST(RowCopies, FromAnywhere) {
  for_rows(check_copies<__nv_bfloat16, __nv_bfloat16>);
  for_rows(check_copies<float, __nv_bfloat16>);
  for_rows(check_copies<float, float>);
  for_rows(check_copies<__nv_bfloat16, float>);
}

TEST(RowCopies, ToAnywhere) {
  for_rows(check_stores<__nv_bfloat16, __nv_bfloat16>);
  for_rows(check_stores<float, __nv_bfloat16>);
  for_rows(check_stores<float, float>);
  for_rows(check_stores<__nv_bfloat16, float>);
}

}  // namespace
}  // namespace logitless::cuda::rows_copies
