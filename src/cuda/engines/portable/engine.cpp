#include "cuda/engines/engine.h"

#include "cuda/engines/portable/launch.h"

namespace logitless::cuda::portable {
namespace {

class Portable final : public Engine {
 public:
  const char* name() const override { return "portable"; }

  EngineTraits traits() const override {
    // Draws took 1.02 to 1.17 of the time of sums on an H100, with a flat softmax.
    return {
        .seldom_differs = true, .needs_scratch = true, .draw_cost = 1.15, .partial_columns = kStripColumns};
  }

  std::string why_not_on(const Device& /*device*/) const override { return ""; }
  std::string why_not_of(DType /*operands*/) const override { return ""; }
  std::string reason() const override { return "no other engine"; }

  int partials(const LogitsArgs& args, const Device& /*device*/) const override {
    return args.batch_invariant ? static_cast<int>((args.columns + kStripColumns - 1) / kStripColumns) : 1;
  }
  EngineTiles tiles(const LogitsArgs& /*args*/, const Device& /*device*/) const override { return {}; }
  std::string config(const LogitsArgs& /*args*/) const override { return "portable"; }

  double seconds(const LogitsArgs& args, const LogitsScratch& scratch, double bytes,
                 const KernelTimes& times) const override {
    const bool are_dot_products = multiplies_by_dot_products(args);
    const double blocks = KernelTimes::in_parts(args.rows, scratch.rows, [&](int64_t m) {
      return KernelTimes::in_parts(args.columns, scratch.columns, [&](int64_t n) {
        return (are_dot_products ? times.dot_products(m, n, args.depth) : times.product(m, n, args.depth)) +
               2 * kLaunchSeconds;
      });
    });
    const bool again = args.epilogue() == Epilogue::kTop || args.epilogue() == Epilogue::kSample;
    const double more = again ? 4 : 0;  // bytes that are read once more
    return blocks + times.moved(args.rows, args.columns, 4 + more + bytes) + kLaunchSeconds;
  }

  void launch(const LogitsArgs& args, const LogitsScratch& scratch, const Queue& queue) const override {
    launch_logits(args, scratch, queue);
  }
  void launch_float64(const LogitsArgsOf<double>& args, const LogitsScratch& scratch,
                      const Queue& queue) const override {
    launch_logits(args, scratch, queue);
  }
};

}  // namespace

const Engine& engine() {
  static const Portable only;
  return only;
}

}  // namespace logitless::cuda::portable
