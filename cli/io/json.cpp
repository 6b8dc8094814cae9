#include "io/json.h"

#include <set>
#include <vector>

#include "io/tensor.h"

namespace logitless::cli {
namespace {

using nlohmann::json;

// Reads JSON and keeps only the keys of the objects that are open.
class StrictReader : public nlohmann::json_sax<json> {
 public:
  StrictReader(const std::string& file, int max_depth) : file_(file), max_depth_(max_depth) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    throw FileError(file_, "JSON has the key " + in_quotes(name) + " twice in one object");
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& error) override {
    const auto* place = dynamic_cast<const json::parse_error*>(&error);
    throw FileError(file_,
                    "is not valid JSON: " + (place != nullptr ? "error at byte " + std::to_string(place->byte)
                                                              : in_quotes(error.what())));
  }

 private:
  bool open() {
    if (keys_.size() >= static_cast<size_t>(max_depth_)) {
      throw FileError(file_, "JSON is nested deeper than " + std::to_string(max_depth_) + " levels");
    }
    keys_.emplace_back();
    return true;
  }
  bool close() { return keys_.pop_back(), true; }

  const std::string& file_;
  int max_depth_;
  std::vector<std::set<std::string>> keys_;  // keys of the open objects, outermost first
};

}  // namespace

// The text is read twice: a parser that checks by callbacks would look at a whole object again after each of
// its parts.
json parse_strict_json(std::string_view text, const std::string& file, int max_depth) {
  StrictReader reader(file, max_depth);
  json::sax_parse(text.begin(), text.end(), &reader);
  return json::parse(text.begin(), text.end());
}

}  // namespace logitless::cli
