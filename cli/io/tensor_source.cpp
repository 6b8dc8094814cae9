#include "io/tensor_source.h"

#include <filesystem>

#include "io/file_error.h"
#include "io/npy.h"

namespace logitless::cli {

TensorReference parse_tensor_reference(const std::string& text) {
  std::error_code error;
  if (std::filesystem::exists(text, error)) return {text, ""};
  for (size_t colon = text.rfind(':'); colon != std::string::npos && colon > 0;
       colon = text.rfind(':', colon - 1)) {
    const std::string file = text.substr(0, colon);
    if (std::filesystem::exists(file, error)) return {file, text.substr(colon + 1)};
  }
  // Nothing exists: split where a file name's ending says so, for the message that follows.
  for (const char* ending : {".safetensors:", ".json:", ".npy:"}) {
    const size_t found = text.find(ending);
    if (found != std::string::npos) {
      const size_t colon = found + std::string(ending).size() - 1;
      return {text.substr(0, colon), text.substr(colon + 1)};
    }
  }
  return {text, ""};
}

TensorView TensorSource::open(const std::string& role, const std::string& reference,
                              const std::vector<std::string>& usual_names) {
  const auto [path, tensor] = parse_tensor_reference(reference);
  if (path.ends_with(".npy")) {
    if (!tensor.empty()) {
      throw FileError(path, "an npy file has no named tensors, so ':" + tensor + "' cannot be in it");
    }
    npy_files_.push_back(path);
    return open_npy(path);
  }
  const std::filesystem::path name(path);
  std::error_code error;
  const bool known = name.extension() == ".safetensors" || name.extension() == ".json" ||
                     std::filesystem::is_directory(name, error);
  if (!known && std::filesystem::exists(name, error)) {
    throw FileError(path,
                    "expected a .safetensors, .safetensors.index.json or .npy file, or a checkpoint folder");
  }
  auto file = files_.find(path);
  if (file == files_.end()) file = files_.emplace(path, Safetensors::open(path)).first;
  if (!tensor.empty()) return file->second.tensor(tensor);

  const std::vector<std::string> names = file->second.names();
  if (names.size() == 1) return file->second.tensor(names.front());
  for (const std::string& usual : usual_names) {
    if (file->second.contains(usual)) return file->second.tensor(usual);
  }
  std::string known_names;
  for (size_t i = 0; i < names.size() && i < 8; ++i)
    known_names += (i == 0 ? "" : ", ") + in_quotes(names[i]);
  throw FileError(path, "has " + std::to_string(names.size()) + " tensors; name the " + role + " as " + path +
                            ":TENSOR" + (names.empty() ? "" : ", one of " + known_names) +
                            (names.size() > 8 ? ", ..." : ""));
}

std::vector<std::string> TensorSource::files() const {
  std::vector<std::string> all = npy_files_;
  for (const auto& [path, file] : files_) {
    for (const std::string& part : file.files()) all.push_back(part);
  }
  return all;
}

}  // namespace logitless::cli
