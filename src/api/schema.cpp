// Options and tensors as JSON, made from options.def and tensors.def.
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>

#include "api/c_structs.h"
#include "core/number_text.h"

namespace logitless {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return out + "\"";
}

std::string number(double value) {
  return std::isfinite(value) ? number_text(value, 17) : "null";
}

std::string number(int64_t value) {
  return std::to_string(value);
}

// Turns "a|b" into ["a","b"].
std::string list_of(const std::string& values) {
  std::string out = "[\"";
  for (const char c : values) out += c == '|' ? std::string("\",\"") : std::string(1, c);
  return out + "\"]";
}

template <class T>
std::string range(T lowest, T highest) {
  return ",\"lowest\":" + number(lowest) + ",\"highest\":" + number(highest);
}

// The rows of a JSON array, one a line.
class Rows {
 public:
  void add(const std::string& row) { text_ += (text_.empty() ? "{" : ",\n{") + row + "}"; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string option(int id, const char* name, const char* type, const std::string& default_value,
                   const std::string& more, const char* doc) {
  return "\"id\":" + std::to_string(id) + ",\"name\":" + quoted(name) + ",\"type\":" + quoted(type) +
         ",\"default\":" + default_value + more + ",\"doc\":" + quoted(doc);
}

}  // namespace

std::string schema_text() {
  Rows options, tensors;
#define LOGITLESS_OPTION_INTEGER(name, NAME, type, default_value, lowest, highest, doc)         \
  options.add(option(LOGITLESS_OPTION_##NAME, #name, "integer", number(int64_t{default_value}), \
                     range(int64_t{lowest}, int64_t{highest}), doc));
#define LOGITLESS_OPTION_REAL(name, NAME, default_value, lowest, highest, doc)              \
  options.add(option(LOGITLESS_OPTION_##NAME, #name, "real", number(double{default_value}), \
                     range(double{lowest}, double{highest}), doc));
#define LOGITLESS_OPTION_FLAG(name, NAME, doc) \
  options.add(option(LOGITLESS_OPTION_##NAME, #name, "flag", "0", range(int64_t{0}, int64_t{1}), doc));
#define LOGITLESS_OPTION_CHOICE(name, NAME, type, default_value, values, doc)                  \
  options.add(option(LOGITLESS_OPTION_##NAME, #name, "choice", number(int64_t{default_value}), \
                     ",\"values\":" + list_of(values), doc));
#include "logitless/options.def"
  const auto tensor = [&](int id, const char* name, const char* dtype, const char* role, const char* shape,
                          bool is_matrix, const char* planned, const char* only, const char* when,
                          const char* doc) {
    tensors.add("\"id\":" + std::to_string(id) + ",\"name\":" + quoted(name) + ",\"shape\":" + quoted(shape) +
                ",\"dtype\":" + quoted(dtype) + ",\"role\":" + quoted(role) +
                ",\"matrix\":" + (is_matrix ? "true" : "false") + ",\"planned\":" + quoted(planned) +
                ",\"null\":" + quoted(only) + ",\"needed\":" + quoted(when) + ",\"doc\":" + quoted(doc));
  };
#define LOGITLESS_ROW(matrix, name, NAME, dtype, role, shape, planned, only, when, doc) \
  tensor(LOGITLESS_TENSOR_##NAME, #name, #dtype, #role, shape, matrix, #planned, only, when, doc);
#define LOGITLESS_TENSOR(name, NAME, element, dtype, role, shape, planned, allowed, only, needed, when, doc) \
  LOGITLESS_ROW(false, name, NAME, dtype, role, shape, planned, only, when, doc)
#define LOGITLESS_MATRIX(name, NAME, element, dtype, role, shape, planned, allowed, only, needed, when, doc) \
  LOGITLESS_ROW(true, name, NAME, dtype, role, shape, planned, only, when, doc)
#include "logitless/tensors.def"
#undef LOGITLESS_ROW
  return "{\"options\":[" + options.text() + "],\n\"tensors\":[" + tensors.text() + "]}";
}

}  // namespace logitless
