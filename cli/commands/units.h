#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headroom::cli {

// "256MiB", "1GB", "64k", "1.5GiB", "4096": k, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024, the B may
// be left out. Throws UsageError naming the option.
size_t parse_size(const std::string& option, const std::string& text);

// Whole numbers with an optional suffix, "4096" or "4k" or "128Ki". Throws UsageError naming the option.
int64_t parse_count(const std::string& option, const std::string& text);

// The parts of a list such as "1,2,3".
std::vector<std::string> split(const std::string& text, char separator);

std::string format_bytes(double bytes);                   // "1.46 GiB"
std::string format_seconds(double seconds);               // "12.3 ms"
std::string format_number(double value, int digits = 6);  // significant digits
std::string format_fixed(double value, int digits);       // digits after the point
std::string format_count(int64_t value);                  // "128,256"

// Columns of text, the first left, the others right aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  // `indent` spaces before every line.
  std::string text(int indent = 0) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace headroom::cli
