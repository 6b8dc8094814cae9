#pragma once
#include <cstdint>
#include <headroom/headroom.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "case.h"

namespace headroom_test {

// One way of computing on this machine: a backend, and for the CPU backend an instruction set.
struct Engine {
  std::string backend;
  std::string isa;
  // Double precision inside, so only the outputs are rounded.
  bool is_reference() const { return backend == "reference"; }
  bool can_run(const headroom_problem& problem) const {
    return is_reference() || problem.hidden_dtype != HEADROOM_F64;
  }
  // Whether the gradient of the logits is rounded to bfloat16 before the products of the backward pass: where
  // both operands are bfloat16 and the bfloat16 dot product multiplies them.
  bool shortens_gradients(const headroom_problem& problem) const {
    return isa == "avx512_bf16" && problem.hidden_dtype == HEADROOM_BF16 &&
           problem.classifier_dtype == HEADROOM_BF16;
  }
  std::string name() const { return isa.empty() ? backend : backend + "_" + isa; }
};

inline void PrintTo(const Engine& engine, std::ostream* out) {
  *out << engine.name();
}

// All usable ones. The reference is the last.
std::vector<Engine> engines();
// The first: what a user gets.
Engine best_engine();

// ThreadSanitizer makes everything ten times slower: suites then take fewer random problems.
bool is_slowed_down();
inline uint64_t seeds(uint64_t count) {
  return is_slowed_down() ? (count + 7) / 8 : count;
}

// threads 0: the default. ThreadSanitizer builds get spawned threads, as it does not understand OpenMP.
headroom::Context make_context(const Engine& engine, int threads = 0);

// A context that is given its threads by the host: `threads` of them are started for every loop and take
// tasks from a counter, so their order is up to the scheduler.
headroom::Context make_hosted_context(const Engine& engine, int threads);

}  // namespace headroom_test
