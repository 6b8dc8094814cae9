#pragma once
#include <string>
#include <vector>

#include "core/problem.h"
#include "core/status.h"
#include "cuda/engines/kernel_times.h"
#include "cuda/engines/logits.h"
#include "cuda/runtime/device.h"

namespace logitless::cuda {

class Queue;

// The properties of an engine that plans and runs depend on.
struct EngineTraits {
  // Exp logits are relative to rounded_offset(); kept ones as described in logit_offset.h.
  bool base_2 = false;
  // True: kExpLogits gets logit offsets, and blocks of rows that they do not suit are done again. False: the
  // engine chooses offsets itself (ExpLogitsArgs::chosen_offset).
  bool offsets_first = false;
  bool seldom_differs = false;  // launches with LogitsProduct::seldom round logits in another way
  bool needs_scratch = false;   // it uses LogitsScratch
  bool keeps_float16 = false;   // exp logits with float16 operands, with Exponents
  bool has_e4m3 = false;        // all epilogues but kTop and kSample take operands of DType::kE4M3
  double draw_cost = 1;         // time of kDraw over that of kStats
  // kTop: a tile of top_tile columns has top_groups groups of columns, whose maxima give thresholds. With 0
  // groups the engine keeps the best logits instead.
  int64_t top_tile = 0, top_groups = 0;
  // The columns of a partial with LogitsArgs::batch_invariant. Windows of the vocabulary are multiples of
  // this.
  int64_t partial_columns = 1;
};

// The tiles of a launch; rows is 0 if the engine has no tiles of its own.
struct EngineTiles {
  int64_t rows = 0, columns = 0;
  int64_t at_once = 0;  // tiles in flight on the device at one time
};

// Scratch of a launch: logits of a block of rows and columns (fp32, or float64 for float64 operands), and
// memory for plain products. If a launch has several blocks, there is room for kScratchBlocks of them, so
// that products run beside the row kernels of earlier blocks.
struct LogitsScratch {
  void* logits = nullptr;  // [blocks, rows, columns]
  int64_t rows = 0, columns = 0;
  void* gemm = nullptr;
  size_t gemm_bytes = 0;
};

// One way to make logits and reduce them. engines.cpp lists the engines. They have no state.
class Engine {
 public:
  virtual const char* name() const = 0;
  virtual EngineTraits traits() const = 0;

  // Each returns an empty string, or the condition that fails: for devices, for operands, and for both.
  virtual std::string why_not_on(const Device& device) const = 0;
  virtual std::string why_not_of(DType operands) const = 0;
  std::string why_not(const Device& device, DType operands) const {
    const std::string of_device = why_not_on(device);
    return of_device.empty() ? why_not_of(operands) : of_device;
  }
  // Returns why the engine is chosen.
  virtual std::string reason() const = 0;
  // If not empty, the device uses the engine only when it is requested by name or measured as the fastest,
  // for this reason.
  virtual std::string opt_in_reason(const Device& /*device*/) const { return ""; }
  // Returns this reason and how to request the engine, for people.
  std::string opt_in_hint(const Device& device) const {
    return std::string(name()) + ": " + opt_in_reason(device) + ", opt in with backend cuda:" + name();
  }
  // Whether no device of this kind has run the engine's tests. Then the engine is checked before it is used.
  virtual bool is_untried_on(const Device& /*device*/) const { return false; }

  // Describes a launch: the number of partials that its statistics need, its tiles, and its configuration as
  // text for people. They depend on sizes, dtype, epilogue, options and which pointers are null. The partials
  // also suffice if some of the rows are left out.
  virtual int partials(const LogitsArgs& args, const Device& device) const = 0;
  virtual EngineTiles tiles(const LogitsArgs& args, const Device& device) const = 0;
  virtual std::string config(const LogitsArgs& args) const = 0;
  // Predicts the time of a launch that stores this many bytes for each logit.
  virtual double seconds(const LogitsArgs& args, const LogitsScratch& scratch, double bytes,
                         const KernelTimes& times) const = 0;

  // Queues the launch. Allocates nothing and waits for nothing.
  virtual void launch(const LogitsArgs& args, const LogitsScratch& scratch, const Queue& queue) const = 0;
  // Queues a launch with float64 operands, for engines that support them.
  virtual void launch_float64(const LogitsArgsOf<double>& /*args*/, const LogitsScratch& /*scratch*/,
                              const Queue& /*queue*/) const {
    throw Error(Status::kInternal, std::string("float64 operands of ") + name());
  }

 protected:
  ~Engine() = default;
};

namespace sm90 {  // for Hopper: one fused kernel for 16-bit operands (logits.h)
const Engine& engine();
}
namespace mma {  // for compute capability 8.0 and newer: one fused kernel for 16-bit operands
const Engine& engine();
}
namespace portable {  // for any device and operands: plain products and row kernels
const Engine& engine();
}

// Returns all engines, the preferred ones first; the last one takes any device and operands.
const std::vector<const Engine*>& engines();
// Returns null if no engine has this name.
const Engine* engine_named(const std::string& name);

// Returns the kind of a problem. With batch_invariant all passes are of one kind, as their bits must agree,
// and so are those that share saved exp logits.
Work work_of(const Problem& problem);

// The engine for a problem on a device, with the reason. `requested` is an engine's name or empty.
struct Choice {
  const Engine* engine = nullptr;
  std::string reason;
};
Choice choose_engine(const Problem& problem, const Device& device, const std::string& requested);

}  // namespace logitless::cuda
