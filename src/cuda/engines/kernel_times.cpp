#include "cuda/engines/kernel_times.h"

#include <algorithm>
#include <utility>

#include "cuda/plan/sizes.h"
#include "cuda/run/arena.h"

namespace logitless::cuda {
namespace {

constexpr double kFlopPerProcessor = 5.3e12;  // bf16 products of whole waves, steady, on an H200
constexpr double kProcessors = 132, kFlops = 989.5e12, kMemory = 4.8e12;  // the vendor's figures for it
constexpr double kFloat32Share = 0.08;  // share of that rate with fp32 operands; float64 is alike
constexpr double kTF32Share = 0.45;     // share with fp32 operands that may be rounded to TF32
// Dot products: without tensor cores the rate of a processor, with 16-bit operands the share of that of
// products. It was 0.2 on an H100.
constexpr double kDotProductsFlop = 1.7e11, kDotProductsShare = 0.2;
constexpr double kBytesPerSecond = 4e12;

// Tile sizes of cuBLASLt's products.
constexpr std::pair<int64_t, int64_t> kTiles[] = {{256, 128}, {128, 256}, {192, 192},
                                                  {320, 128}, {128, 192}, {128, 128}};

double share_of(const Problem& problem) {
  const DType dtype = operand_dtype(problem);
  if (size_of(dtype) == 2) return 1;
  return problem.allow_tf32 && dtype == DType::kF32 ? kTF32Share : kFloat32Share;
}

// Returns the rate of a processor with 16-bit operands: as measured, or an H200's, by the vendor's figures
// where they are known.
double product_rate(const Device& device, double processors) {
  if (device.measured.matmul_flops > 0) return device.measured.matmul_flops / processors;
  return kFlopPerProcessor * (device.flops > 0 ? device.flops * kProcessors / (kFlops * processors) : 1);
}

double memory_rate(const Device& device) {
  if (device.measured.bytes_per_second > 0) return device.measured.bytes_per_second;
  return kBytesPerSecond * (device.bytes_per_second > 0 ? device.bytes_per_second / kMemory : 1);
}

}  // namespace

KernelTimes::KernelTimes(const Problem& problem, const Device& device)
    : device_(device),
      processors_(std::max(device.processors, 1)),
      rate_(product_rate(device, static_cast<double>(processors_)) * share_of(problem)),
      dot_products_rate_(size_of(operand_dtype(problem)) == 2 ? kDotProductsShare * rate_ : kDotProductsFlop),
      memory_rate_(memory_rate(device)) {}

double KernelTimes::product(int64_t m, int64_t n, int64_t k) const {
  double best = 0;
  for (const auto& [rows, columns] : kTiles) {
    const int64_t waves = ceil_div(ceil_div(m, rows) * ceil_div(n, columns), processors_);
    const double flop = 2.0 * static_cast<double>(rows * columns) * static_cast<double>(k);
    const double penalty = rows * columns < 128 * 192 ? 1.1 : 1;  // more bytes for each FLOP
    const double seconds = static_cast<double>(waves) * flop / rate_ * penalty;
    if (best == 0 || seconds < best) best = seconds;
  }
  return best + kLaunchSeconds;
}

double KernelTimes::dot_products(int64_t m, int64_t n, int64_t k) const {
  const double flop = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  return flop / (dot_products_rate_ * static_cast<double>(processors_)) + kLaunchSeconds;
}

double KernelTimes::moved(int64_t rows, int64_t columns, double bytes) const {
  return static_cast<double>(rows) * static_cast<double>(columns) * bytes / memory_rate_;
}

}  // namespace logitless::cuda
