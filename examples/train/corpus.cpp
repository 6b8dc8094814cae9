#include "train/corpus.h"

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "train/default_text.h"
#include "train/random.h"

namespace logitless::train {
namespace fs = std::filesystem;
namespace {

constexpr size_t kFewFiles = 20;

std::vector<fs::path> files_of(const fs::path& path) {
  std::error_code error;
  if (fs::is_regular_file(path, error)) return {path};
  if (!fs::is_directory(path, error)) {
    throw std::runtime_error(path.string() + ": expected a file or a folder of text, found neither");
  }
  std::vector<fs::path> files;
  for (fs::recursive_directory_iterator it(path, fs::directory_options::skip_permission_denied, error), end;
       !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.size() > 1 && name[0] == '.') {
      if (it->is_directory(error)) it.disable_recursion_pending();
    } else if (it->is_regular_file(error)) {
      files.push_back(it->path());
    }
  }
  return files;
}

// Empty for binary and unreadable files; at most `limit` bytes.
std::string read_text(const fs::path& path, int64_t limit) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return {};
  std::string text;
  constexpr int64_t kPiece = 1 << 16;
  while (file && static_cast<int64_t>(text.size()) < limit) {
    const auto before = text.size();
    text.resize(before + static_cast<size_t>(std::min(kPiece, limit - static_cast<int64_t>(before))));
    file.read(text.data() + before, static_cast<std::streamsize>(text.size() - before));
    text.resize(before + static_cast<size_t>(file.gcount()));
    constexpr size_t kLooked = 65536;
    if (std::string_view(text).substr(0, kLooked).find('\0') != std::string_view::npos) return {};
  }
  text.shrink_to_fit();
  return text;
}

void shuffle(std::vector<fs::path>& files, uint64_t seed) {
  Random random(seed);
  for (size_t i = files.size(); i > 1; --i) {
    std::swap(files[i - 1], files[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
}

void split_by_file(Corpus& corpus, double share) {
  const auto wanted = static_cast<int64_t>(share * static_cast<double>(corpus.bytes));
  // The first files, but no file that alone is a large part of the whole.
  for (Document& document : corpus.documents) {
    const auto size = static_cast<int64_t>(document.text.size());
    if (corpus.validation_bytes >= wanted) break;
    if (corpus.validation_bytes + size > 2 * wanted) continue;
    document.validation = true;
    corpus.validation_bytes += size;
  }
}

void split_inside_files(Corpus& corpus, double share) {
  const size_t count = corpus.documents.size();
  for (size_t i = 0; i < count; ++i) {
    std::string& text = corpus.documents[i].text;
    const auto size = static_cast<double>(text.size());
    const auto cut = static_cast<size_t>(size * (1.0 - share));
    Document tail{corpus.documents[i].path, text.substr(cut), true};
    text.resize(cut);
    corpus.validation_bytes += static_cast<int64_t>(tail.text.size());
    corpus.documents.push_back(std::move(tail));
  }
}

}  // namespace

Corpus read_corpus(const CorpusOptions& options) {
  Corpus corpus;
  std::vector<fs::path> files;
  if (options.paths.empty()) {
    DefaultText text = find_default_text();
    if (text.files.empty()) {
      throw std::runtime_error(
          "no default text on this machine (looked for Python's standard library and /usr/include): name "
          "files "
          "or folders of text");
    }
    corpus.source = text.description;
    files = std::move(text.files);
  } else {
    for (const fs::path& path : options.paths) {
      const std::vector<fs::path> found = files_of(path);
      files.insert(files.end(), found.begin(), found.end());
      corpus.source += (corpus.source.empty() ? "" : ", ") + path.string();
    }
  }
  // The order of a folder's entries is the file system's own: sort before shuffling by the seed.
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  shuffle(files, options.seed);
  for (const fs::path& file : files) {
    if (corpus.bytes >= options.max_bytes) break;
    std::string text = read_text(file, options.max_bytes - corpus.bytes);
    if (text.empty()) {
      ++corpus.skipped_files;
      continue;
    }
    corpus.bytes += static_cast<int64_t>(text.size());
    ++corpus.files;
    corpus.documents.push_back({file.string(), std::move(text), false});
  }
  if (corpus.documents.empty()) {
    throw std::runtime_error("no readable text in " + corpus.source + " (" +
                             std::to_string(corpus.skipped_files) +
                             " files are binary, empty or unreadable)");
  }
  if (corpus.documents.size() < kFewFiles) {
    split_inside_files(corpus, options.validation_share);
  } else {
    split_by_file(corpus, options.validation_share);
  }
  return corpus;
}

}  // namespace logitless::train
