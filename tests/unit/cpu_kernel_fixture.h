#pragma once
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "cpu/plan/shape.h"
#include "cpu/simd/isa.h"

namespace logitless::cpu {

inline void PrintTo(const Kernels& kernels, std::ostream* out) {
  *out << kernels.name;
}

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline std::vector<Kernels> usable_kernels() {
  std::vector<Kernels> out;
  const Kernels* pairs = bf16_pair_kernels();
  if (pairs != nullptr && why_isa_unavailable(pairs->name).empty()) out.push_back(*pairs);
  for (const Kernels& k : fp32_kernels()) {
    if (why_isa_unavailable(k.name).empty()) out.push_back(k);
  }
  return out;
}

// Memory at vector alignment whose end is not followed by anything that may be read.
template <class T>
class Aligned {
 public:
  explicit Aligned(int64_t count)
      : size_(count),
        data_(static_cast<T*>(std::aligned_alloc(
            64, static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)) + 1, 64))))) {
    std::memset(data_, 0, static_cast<size_t>(count) * sizeof(T));
  }
  ~Aligned() { std::free(data_); }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  T* data_;
};

class CpuKernels : public testing::TestWithParam<Kernels> {
 protected:
  const Kernels& k() const { return GetParam(); }
  float random() { return std::normal_distribution<float>()(engine_); }
  // A number that an element holds exactly.
  float element() { return bf16_to_float(float_to_bf16(random())); }
  void set_element(void* elements, int64_t i, float v) const {
    if (k().pair == 2) {
      static_cast<uint16_t*>(elements)[i] = float_to_bf16(v);
    } else {
      static_cast<float*>(elements)[i] = v;
    }
  }
  float get_element(const void* elements, int64_t i) const {
    return k().pair == 2 ? bf16_to_float(static_cast<const uint16_t*>(elements)[i])
                         : static_cast<const float*>(elements)[i];
  }
  // The worst relative rounding of an element.
  double element_epsilon() const { return k().pair == 2 ? 0x1p-8 : 0x1p-24; }

 private:
  std::mt19937 engine_{7};
};

}  // namespace logitless::cpu
