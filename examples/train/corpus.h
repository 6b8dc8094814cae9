#pragma once

// The text to learn from: which files, and which of them are held back for validation.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace logitless::train {

struct Document {
  std::string path;
  std::string text;
  bool validation = false;
};

struct Corpus {
  std::string source;  // where the text came from, in words
  std::vector<Document> documents;
  int64_t files = 0;
  int64_t bytes = 0;
  int64_t validation_bytes = 0;
  int64_t skipped_files = 0;  // binary, empty or unreadable
};

struct CorpusOptions {
  std::vector<std::filesystem::path> paths;  // empty: this machine's default text
  int64_t max_bytes = int64_t{32} << 20;
  double validation_share = 0.05;
  uint64_t seed = 1;
};

// Reads files in an order shuffled by the seed until `max_bytes`; folders are walked to the end, without
// hidden entries and links to folders. The first files in that order, up to `validation_share` of the bytes,
// are for validation; a corpus of fewer than 20 files is cut inside each file instead. Throws
// std::runtime_error when nothing readable is found.
Corpus read_corpus(const CorpusOptions& options);

}  // namespace logitless::train
