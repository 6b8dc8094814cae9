#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "train/corpus.h"

namespace logitless::train {

// Tokens 0-255 are the bytes, 256 ends a text, the rest are merges in the order in which they were learned.
class Vocabulary {
 public:
  static constexpr int32_t kEndOfText = 256;
  static constexpr int32_t kFirstMerged = 257;

  explicit Vocabulary(std::vector<std::pair<int32_t, int32_t>> merges);

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  // The bytes that a token stands for; none for kEndOfText.
  const std::string& bytes_of(int32_t token) const { return bytes_.at(static_cast<size_t>(token)); }

  // In the tokenizer.json format of the Hugging Face tokenizers library.
  std::string to_json() const;

 private:
  std::vector<std::pair<int32_t, int32_t>> merges_;
  std::vector<std::string> bytes_;
};

struct TokenizedCorpus {
  Vocabulary vocabulary;
  std::vector<int32_t> train;
  std::vector<int32_t> validation;
  int64_t distinct_words;
};

// Learns a vocabulary of `size` entries from the training documents (fewer when they have too little text)
// and encodes all documents with it, each followed by kEndOfText.
TokenizedCorpus tokenize(const Corpus& corpus, int64_t size, const std::function<void(int64_t)>& progress);

}  // namespace logitless::train
