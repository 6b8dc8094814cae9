// Logits at lists of columns for C++20 over logitless/candidates.h, which has the contract. Header-only.
#pragma once

#include <logitless/candidates.h>

#include <cstddef>
#include <cstdint>
#include <logitless/logitless.hpp>
#include <span>
#include <string>
#include <type_traits>

namespace logitless {
inline namespace v0_1 {

// One stage's inputs and outputs, at first with the defaults.
struct Candidates : logitless_candidates {
  Candidates() noexcept { logitless_candidates_init(this); }
};

// Makes the first stage of lists of ids, without an output. ids: row after row. offsets: where rows begin, or
// empty for rows of equal length. The bias and each gradient get the dtype of their operand.
template <class H, class C, class Id>
Candidates make_candidates(Matrix<H> hidden, Matrix<C> weight, std::span<const Id> ids,
                           std::span<const int64_t> offsets = {}) {
  static_assert(std::is_same_v<Id, int32_t> || std::is_same_v<Id, int64_t>, "ids are int32 or int64");
  check_columns(hidden.columns, weight.columns);
  if (!offsets.empty() && static_cast<int64_t>(offsets.size()) != hidden.rows + 1) {
    throw Error(LOGITLESS_INVALID_ARGUMENT, "offsets: expected " + std::to_string(hidden.rows + 1) +
                                                " entries, one more than hidden has rows, got " +
                                                std::to_string(offsets.size()));
  }
  Candidates made;
  made.rows = hidden.rows;
  made.hidden_size = hidden.columns;
  made.vocab = weight.rows;
  made.elements = static_cast<int64_t>(ids.size());
  made.hidden_dtype = made.d_hidden_dtype = dtype_of<H>();
  made.weight_dtype = made.d_weight_dtype = dtype_of<C>();
  made.bias_dtype = made.d_bias_dtype = dtype_of<C>();
  made.id_dtype = dtype_of<Id>();
  made.hidden = hidden.data;
  made.hidden_stride = hidden.stride;
  made.weight = weight.data;
  made.weight_stride = weight.stride;
  made.ids = ids.data();
  made.offsets = offsets.data();
  return made;
}

// Returns the bytes of workspace that the stage needs.
inline size_t workspace_bytes(const Context& context, const Candidates& candidates) {
  size_t bytes = 0;
  check(logitless_candidates_workspace_bytes(context.handle(), &candidates, &bytes));
  return bytes;
}

// Runs the stage. The workspace holds at least workspace_bytes(). Allocates nothing.
inline void run_candidates(const Context& context, const Candidates& candidates,
                           std::span<std::byte> workspace, void* stream = nullptr) {
  check(logitless_candidates_run(context.handle(), &candidates, workspace.data(), workspace.size(), stream));
}

// Allocates the workspace and runs the stage, on host memory.
inline void run_once(const Context& context, const Candidates& candidates) {
  const Workspace workspace(workspace_bytes(context, candidates));
  run_candidates(context, candidates, workspace.bytes());
}

}  // namespace v0_1
}  // namespace logitless
