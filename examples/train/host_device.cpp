#include <omp.h>

#include <stdexcept>
#include <utility>

#include "support/process_memory.h"
#include "train/device.h"
#include "train/gemm.h"

namespace logitless::train {
namespace {

class HostDevice : public Device {
 public:
  std::string name() const override { return "this machine's processors"; }
  std::string matrix_library() const override { return gemm_library(); }

  std::unique_ptr<Head> materialized_head() override { return make_materialized_head(); }
  std::unique_ptr<Head> fused_head(Context context, int64_t max_workspace_bytes,
                                   const HeadGradient& gradient) override {
    return make_fused_head(std::move(context), max_workspace_bytes, gradient);
  }
  std::unique_ptr<Network> network(const TrainerConfig& config, std::unique_ptr<Head> head) override {
    return make_host_network(config, std::move(head));
  }

  std::string peak_name() const override { return "process: peak resident"; }
  int64_t peak_bytes() const override { return cli::peak_resident_bytes(); }
  bool reset_peak() override { return cli::reset_peak_resident_bytes(); }
};

}  // namespace

void set_host_threads(int threads) {
  if (threads > 0) omp_set_num_threads(threads);
}

std::unique_ptr<Device> make_host_device() {
  if (const std::string why_not = why_no_gemm(); !why_not.empty()) {
    throw std::runtime_error("train: " + why_not);
  }
  return std::make_unique<HostDevice>();
}

}  // namespace logitless::train
