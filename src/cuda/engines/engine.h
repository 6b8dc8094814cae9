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

// What plans and runs must know of an engine.
struct EngineTraits {
  bool base_2 = false;  // exp_logits are relative to rounded_offset(), and kept ones as logit_offset.h says
  bool offsets_first =
      false;  // kExpLogits is given logit_offsets, and blocks they do not suit are done again; else it
              // chooses them itself, near the maximum (ExpLogitsArgs::found_offset)
  bool sums_while_drawing = false;  // kDraw sums exp_logits as well; else the sums are made before
  bool needs_scratch = false;       // LogitsScratch
  double draw_cost = 1;             // time of kDraw over that of kStats
  // kTop: a tile of so many columns has so many groups, whose maxima tell thresholds; 0: the best are kept
  // instead
  int64_t top_tile = 0, top_groups = 0;
  // With LogitsArgs::batch_invariant: columns of a partial. Windows of the vocabulary are multiples of them.
  int64_t partial_columns = 1;
};

// The tiles that a launch is made of; 0: it has none of its own.
struct EngineTiles {
  int64_t rows = 0, columns = 0;
  int64_t at_once = 0;  // on the device
};

// fp32 logits of a block of rows and columns (float64 ones of such operands), and what a plain product may
// use. kScratchBlocks blocks, where a launch has several: products run beside the row kernels of blocks
// before.
struct LogitsScratch {
  void* logits = nullptr;  // [blocks, rows, columns]
  int64_t rows = 0, columns = 0;
  void* gemm = nullptr;
  size_t gemm_bytes = 0;
};

// One way to make logits and what becomes of them. Engines are listed in engines.cpp and have no state.
class Engine {
 public:
  virtual const char* name() const = 0;
  virtual EngineTraits traits() const = 0;

  // Empty, or the condition that fails, of devices, of operands, and of both.
  virtual std::string why_not_on(const Device& device) const = 0;
  virtual std::string why_not_of(DType operands) const = 0;
  std::string why_not(const Device& device, DType operands) const {
    const std::string of_device = why_not_on(device);
    return of_device.empty() ? why_not_of(operands) : of_device;
  }
  // Why it is chosen.
  virtual std::string reason() const = 0;
  // Not empty: it is chosen only where it is asked for by name, and why.
  virtual std::string why_not_unasked() const { return ""; }

  // Of a launch, whose sizes, dtype, epilogue and options are looked at, and which pointers are null: the
  // partials of statistics that it needs, some of its rows perhaps left out; its tiles; its configuration,
  // for people.
  virtual int partials(const LogitsArgs& args, const Device& device) const = 0;
  virtual EngineTiles tiles(const LogitsArgs& args, const Device& device) const = 0;
  virtual std::string config(const LogitsArgs& args) const = 0;
  // What it will take, with so many bytes stored for each logit.
  virtual double seconds(const LogitsArgs& args, const LogitsScratch& scratch, double bytes,
                         const KernelTimes& times) const = 0;

  // Queues it. Allocates nothing and waits for nothing.
  virtual void launch(const LogitsArgs& args, const LogitsScratch& scratch, const Queue& queue) const = 0;
  // As launch(), of float64 operands; for engines that take these.
  virtual void launch_float64(const LogitsArgsOf<double>& /*args*/, const LogitsScratch& /*scratch*/,
                              const Queue& /*queue*/) const {
    throw Error(Status::kInternal, std::string("float64 operands of ") + name());
  }

 protected:
  ~Engine() = default;
};

namespace sm90 {  // Hopper's: one fused kernel of 16-bit operands (logits.h)
const Engine& engine();
}
namespace mma {  // the same for compute capability 8.0 and newer
const Engine& engine();
}
namespace portable {  // plain products and row kernels: any device and operands
const Engine& engine();
}

// All of them, the preferred ones first; the last takes any device and operands.
const std::vector<const Engine*>& engines();
// Null where there is none of this name.
const Engine* engine_named(const std::string& name);

// What a problem gets on a device, and why. `asked` by name, or empty.
struct Choice {
  const Engine* engine = nullptr;
  std::string reason;
};
Choice choose_engine(const Problem& problem, const Device& device, const std::string& asked);

}  // namespace logitless::cuda
