#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace logitless::cli {

std::string format_bytes(double bytes);                   // "1.46 GiB", rounded to nearest
std::string format_budget(double bytes);                  // rounded up, so that the budget is enough
std::string format_seconds(double seconds);               // "12.3 ms"
std::string format_duration(double seconds);              // "12s", "3m05s", "2h10m"
std::string format_number(double value, int digits = 6);  // significant digits
std::string format_fixed(double value, int digits);       // digits after the point
std::string format_count(int64_t value);                  // "128,256"

// Columns of text. The first one is left-aligned, the others right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace logitless::cli
