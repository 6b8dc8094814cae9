#include "io/json.h"

#include <set>
#include <vector>

#include "io/file_error.h"

namespace headroom::cli {

nlohmann::json parse_strict_json(std::string_view text, const std::string& file, int max_depth) {
  using nlohmann::json;
  std::vector<std::set<std::string>> keys;  // of the objects that are open, outermost first
  const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= max_depth) {
        throw FileError(file, "JSON is nested deeper than " + std::to_string(max_depth) + " levels");
      }
      keys.resize(static_cast<size_t>(depth) + 1);
      keys.back().clear();
    } else if (event == json::parse_event_t::key) {
      keys.resize(static_cast<size_t>(depth));  // a key's depth is that of its object's inside
      const auto& name = parsed.get_ref<const std::string&>();
      if (!keys.back().insert(name).second) {
        throw FileError(file, "JSON has the key " + in_quotes(name) + " twice in one object");
      }
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), check);
  } catch (const json::parse_error& error) {
    throw FileError(file, "is not valid JSON: error at byte " + std::to_string(error.byte));
  } catch (const json::exception& error) {
    throw FileError(file, "is not valid JSON: " + in_quotes(error.what()));
  }
}

}  // namespace headroom::cli
