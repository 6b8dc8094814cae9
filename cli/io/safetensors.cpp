#include "io/safetensors.h"

#include <filesystem>
#include <set>

#include "io/file_error.h"

namespace logitless::cli {
namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";
constexpr size_t kNamesShown = 8;

std::string resolve_folder(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(path, error)) return path;
  for (const char* name : {kIndexName, kSingleName}) {
    const fs::path candidate = fs::path(path) / name;
    if (fs::exists(candidate, error)) return candidate.string();
  }
  throw FileError(path, std::string("is a folder without ") + kSingleName + " or " + kIndexName);
}

}  // namespace

Safetensors Safetensors::open(const std::string& path) {
  Safetensors result;
  result.path_ = resolve_folder(path);
  if (result.path_.ends_with(".json")) {
    const auto index = MappedFile::open(result.path_);
    const auto folder = std::filesystem::path(result.path_).parent_path();
    for (const auto& [name, file] : parse_safetensors_index(index->bytes(), result.path_)) {
      result.file_of_[name] = (folder / file).string();
    }
  } else {
    for (const auto& [name, entry] : result.shard(result.path_).header.tensors) {
      result.file_of_[name] = result.path_;
    }
  }
  return result;
}

std::vector<std::string> Safetensors::names() const {
  std::vector<std::string> names;
  names.reserve(file_of_.size());
  for (const auto& [name, file] : file_of_) names.push_back(name);
  return names;
}

std::vector<std::string> Safetensors::files() const {
  std::set<std::string> files{path_};
  for (const auto& [name, file] : file_of_) files.insert(file);
  return {files.begin(), files.end()};
}

const Safetensors::Shard& Safetensors::shard(const std::string& path) {
  const auto found = shards_.find(path);
  if (found != shards_.end()) return found->second;
  Shard shard;
  shard.file = MappedFile::open(path);
  shard.header = parse_safetensors(shard.file->bytes(), path);
  return shards_.emplace(path, std::move(shard)).first->second;
}

TensorView Safetensors::tensor(const std::string& name) {
  const auto place = file_of_.find(name);
  if (place == file_of_.end()) {
    std::string known;
    size_t shown = 0;
    for (const auto& [other, file] : file_of_) {
      if (shown++ == kNamesShown) {
        known += ", and " + std::to_string(file_of_.size() - kNamesShown) + " more";
        break;
      }
      known += (known.empty() ? "" : ", ") + in_quotes(other);
    }
    throw FileError(path_,
                    "has no tensor " + in_quotes(name) + "; it has " + (known.empty() ? "none" : known));
  }
  const Shard& found = shard(place->second);
  const auto entry = found.header.tensors.find(name);
  if (entry == found.header.tensors.end()) {
    throw FileError(path_,
                    "says that tensor " + in_quotes(name) + " is in " + place->second + ", but it is not");
  }
  TensorView view;
  view.name = place->second + ":" + name;
  view.dtype = entry->second.dtype;
  view.shape = entry->second.shape;
  view.data = found.file->bytes().subspan(found.header.data_offset + entry->second.begin,
                                          entry->second.end - entry->second.begin);
  view.owner = found.file;
  return aligned(std::move(view));
}

}  // namespace logitless::cli
