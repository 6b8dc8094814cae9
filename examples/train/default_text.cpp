#include "train/default_text.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <system_error>

namespace logitless::train {
namespace fs = std::filesystem;
namespace {

// The first line that `command` prints; empty when it fails.
std::string first_line_of(const char* command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  char line[4096];
  if (!pipe || std::fgets(line, sizeof line, pipe.get()) == nullptr) return {};
  std::string result = line;
  while (!result.empty() && (result.back() == '\n' || result.back() == '\r')) result.pop_back();
  return result;
}

// Regular files below `root` whose extension is in `extensions`, without third-party packages.
std::vector<fs::path> files_below(const fs::path& root, const std::set<std::string>& extensions) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(root, fs::directory_options::skip_permission_denied, error), end;
       !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (it->is_directory(error) && (name == "site-packages" || name == "dist-packages")) {
      it.disable_recursion_pending();
    } else if (it->is_regular_file(error) && extensions.count(it->path().extension().string()) != 0) {
      files.push_back(it->path());
    }
  }
  return files;
}

std::vector<fs::path> standard_library_folders() {
  std::vector<fs::path> folders;
  const std::string asked = first_line_of(
      "python3 -I -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))' 2>/dev/null </dev/null");
  if (!asked.empty()) folders.emplace_back(asked);
  std::vector<fs::path> usual;
  for (const char* parent : {"/usr/lib", "/usr/local/lib", "/opt/homebrew/lib"}) {
    std::error_code error;
    for (fs::directory_iterator it(parent, error), end; !error && it != end; it.increment(error)) {
      if (it->path().filename().string().rfind("python3", 0) == 0) usual.push_back(it->path());
    }
  }
  std::sort(usual.rbegin(), usual.rend());
  folders.insert(folders.end(), usual.begin(), usual.end());
  return folders;
}

}  // namespace

DefaultText find_default_text() {
  // Some distributions split the library and leave a folder with a few files: take one that is complete.
  constexpr size_t kEnoughFiles = 200;
  for (const fs::path& folder : standard_library_folders()) {
    std::vector<fs::path> files = files_below(folder, {".py"});
    if (files.size() >= kEnoughFiles) {
      return {"Python's standard library in " + folder.string(), std::move(files)};
    }
  }
  std::vector<fs::path> headers = files_below("/usr/include", {".h", ".hpp", ".hh", ".tcc", ""});
  if (headers.size() < kEnoughFiles) return {};
  return {"C and C++ headers in /usr/include", std::move(headers)};
}

}  // namespace logitless::train
