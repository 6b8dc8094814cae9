#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace logitless::cli {

// The head of a published language model.
struct ModelHead {
  std::string_view name;     // as given to --model
  int64_t vocab;             // V, rows of the head's weight
  int64_t hidden;            // D
  double softcap;            // 0: none
  double scale;              // factor of the logits, 1: none
  std::string_view weights;  // its repository on the Hugging Face hub; a name for --model too
  std::string_view source;   // the public file that says so
};

std::span<const ModelHead> known_models();

// Throws UsageError naming similar models when there is none of this name. Case and '_' for '-' do not
// matter.
const ModelHead& find_model(const std::string& name);

}  // namespace logitless::cli
