#pragma once
#include <map>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "io/tensor_view.h"

namespace logitless::cli {

// FILE[:TENSOR] as the user gives it. A file name may contain colons: the longest name that exists is the
// file's.
struct TensorReference {
  std::string file;
  std::string tensor;  // may be empty
};
TensorReference parse_tensor_reference(const std::string& text);

// Opens tensors by reference; a file that several references name is opened once.
class TensorSource {
 public:
  // Without a tensor name: the only tensor of the file, else the first of `usual_names` that the file has.
  // `role` names the argument in messages.
  TensorView open(const std::string& role, const std::string& reference,
                  const std::vector<std::string>& usual_names = {});

  // All files that were opened, and those that belong to the same checkpoint.
  std::vector<std::string> files() const;

 private:
  std::vector<std::string> npy_files_;
  std::map<std::string, Safetensors> files_;
};

}  // namespace logitless::cli
