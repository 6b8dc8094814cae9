#include "core/divergence_plan.h"

#include <algorithm>
#include <string>

#include "core/plan.h"
#include "core/status.h"

namespace logitless {
namespace {

// Bytes of the largest useful tile. With more rows, products would read the operands less often, but products
// of these sizes do not wait for their operands.
constexpr int64_t most_bytes(bool on_host) {
  return on_host ? int64_t{256} << 20 : int64_t{2} << 30;
}

// Rows of a tile whose gradients are made with its values. Each tile reads and writes the sum of the weight's
// gradient, which takes longer than the product itself where the tile has few rows.
constexpr int64_t least_rows_of_both(bool on_host) {
  return on_host ? 64 : 1024;
}

// A tile's rows begin at multiples of this number of columns, which is a line of 128 bytes in 16 bits.
// Products with other strides take longer, several times as long where rows are not a multiple of 16 bytes.
constexpr int64_t kAligned = 64;
// Calls of smaller tiles would take longer than their products.
constexpr int64_t kLeastRows = 16, kLeastWindow = 64;
constexpr int64_t kRowNumbers = 5;  // of a first stage: two lse, student_kl, divergence, entropy
constexpr int64_t kIndexBytes = 8;
// A rank's numbers of a row take these bytes: as they are gathered, in float64, and while they are merged.
constexpr int64_t kExchangedBytes = 12 * 8;

constexpr int64_t rounded_up(int64_t size, int64_t unit) {
  return (size + unit - 1) / unit * unit;
}
// The size of equal parts, in whole units.
constexpr int64_t part_of(int64_t size, int64_t parts, int64_t unit) {
  return rounded_up(size, parts * unit) / parts;
}
int64_t bytes_of(DType dtype) {
  return static_cast<int64_t>(size_of(dtype));
}

// Bytes of one pass beyond its outputs, for tiles of some rows, and all columns or a window of them.
struct Costs {
  int64_t fixed = 0;
  int64_t row = 0;      // for each row of a tile: copies of hidden states, sums
  int64_t column = 0;   // for each column of a window: copies of weights, sums
  int64_t element = 0;  // for each element of a tile: products of both heads, gradients

  // A window of these columns' weights is copied at one time.
  int64_t bytes(int64_t rows, int64_t window, int64_t columns) const {
    return fixed + row * rows + column * window + element * rows * rounded_up(columns, kAligned);
  }
  int64_t of_window(int64_t rows, int64_t window) const { return bytes(rows, window, window); }
};

class Planner {
 public:
  explicit Planner(const DivergenceProblem& p)
      : p_(p),
        rows_(std::max<int64_t>(p.rows, 1)),
        size_(bytes_of(p.stats())),
        budget_(p.budget >= kFastest ? 0 : static_cast<int64_t>(p.budget)) {}

  DivergencePlan plan() const {
    check_budget();
    DivergencePlan plan;
    if (p_.pass == Pass::kBackward) {
      plan.gradients = windows();
    } else if (p_.pass == Pass::kForward || !p_.wants_gradients()) {
      plan.values = whole_rows(false);
    } else if (budget_ == 0 || budget_ >= least_of_both()) {
      plan.values = whole_rows(true);
    } else {
      plan.values = whole_rows(false);
      plan.gradients = windows();
    }
    return plan;
  }

 private:
  // Whether sums of products are made in the gradient itself.
  bool writes_hidden() const { return !p_.gathers_rows && p_.student.hidden == p_.stats(); }
  bool writes_weight() const { return p_.student.weight == p_.stats(); }
  // Whether one product over all rows makes d_weight in its own dtype, rounded once.
  bool rounds_weight_once() const {
    return p_.student.weight == DType::kBF16 && p_.student.product == DType::kBF16;
  }
  bool sums_weight(bool all_rows) const {
    return p_.want_d_weight && !writes_weight() && !(all_rows && rounds_weight_once());
  }
  bool sums_hidden() const { return p_.want_d_hidden && !writes_hidden(); }

  // Returns the bytes for each row of a matrix that is copied into operands; 0 if it is read as it is.
  int64_t copied(int64_t width, DType matrix, DType product, bool gathers) const {
    const bool rounds = p_.rounded != DType::kF32 && p_.rounded != product;
    if (matrix == product && !gathers && !rounds) return 0;
    return width *
           (bytes_of(product) + (gathers ? bytes_of(matrix) : 0) + (rounds ? bytes_of(p_.rounded) : 0));
  }

  // Returns the bytes of copies and products of both heads.
  Costs costs_of_values() const {
    Costs costs;
    costs.fixed = size_ * p_.vocab * p_.copied_biases;
    // The index, upstream gradients and numbers of the rows that count, before they are spread over all rows.
    if (p_.gathers_rows) costs.fixed += (kIndexBytes + size_ * (kRowNumbers + 1)) * p_.rows;
    for (const DivergenceOperands* head : {&p_.student, &p_.teacher}) {
      costs.row += copied(head->width, head->hidden, head->product, p_.gathers_rows);
      costs.column += copied(head->width, head->weight, head->product, false);
    }
    if (p_.ranks > 1 && p_.pass != Pass::kBackward) costs.row += kExchangedBytes * (p_.ranks + 1);
    costs.element = 2 * size_;
    return costs;
  }

  // whole: tiles have whole rows. all_rows: tiles have all rows.
  Costs costs_of_gradients(bool whole, bool all_rows) const {
    Costs costs = costs_of_values();
    const int64_t sums = size_ * p_.student.width, product = bytes_of(p_.student.product);
    if (p_.student.product != p_.stats()) costs.element += product;  // G is not made in the products' place
    // Upstream gradients times their unit, and temporaries of finding that.
    if (p_.student.product == DType::kF16) costs.fixed += 2 * size_ * p_.rows;
    if (p_.want_d_bias) {
      costs.fixed += size_ * p_.vocab;
      costs.row += product;  // a column of ones
    }
    if (sums_hidden()) {
      if (p_.gathers_rows) costs.row += bytes_of(p_.student.hidden) * p_.student.width;
      whole ? costs.row += sums : costs.fixed += sums * p_.rows;
    }
    if (sums_weight(all_rows)) whole ? costs.fixed += sums* p_.vocab : costs.column += sums;
    return costs;
  }

  int64_t least_of_windows(bool all_rows) const {
    return costs_of_gradients(false, all_rows)
        .of_window(all_rows ? rows_ : std::min(rows_, kLeastRows), std::min(p_.vocab, kLeastWindow));
  }
  int64_t least_of_windows() const { return std::min(least_of_windows(false), least_of_windows(true)); }
  // Gradients that are made with the values, from whole rows of products that are kept.
  int64_t least_of_both() const {
    return costs_of_gradients(true, false)
        .bytes(std::min(rows_, least_rows_of_both(p_.on_host)), 1, p_.vocab);
  }

  // Later gradients count as well, so that nothing is computed in vain.
  void check_budget() const {
    int64_t least = 0;
    if (p_.pass != Pass::kBackward) least = costs_of_values().bytes(1, 1, p_.vocab);
    if (p_.wants_gradients()) {
      least = std::max(least, least_of_windows());
      if (p_.pass == Pass::kForwardBackward) least = std::min(least, least_of_both());
    }
    if (budget_ != 0 && budget_ < least) throw_budget_too_small(static_cast<uint64_t>(least), p_.budget);
  }

  int64_t limit_of(const Costs& costs, int64_t least) const {
    return budget_ != 0 ? budget_ : std::max(least, costs.fixed + most_bytes(p_.on_host));
  }

  static DivergenceTiles with_bytes(const Costs& costs, DivergenceTiles tiles, int64_t columns) {
    tiles.bytes = static_cast<uint64_t>(costs.bytes(tiles.rows, tiles.window, columns));
    return tiles;
  }

  // Returns tiles of as many whole rows as fit, for values and, if `both`, gradients.
  DivergenceTiles whole_rows(bool both) const {
    const Costs costs = both ? costs_of_gradients(true, false) : costs_of_values();
    const int64_t limit = limit_of(costs, costs.bytes(1, 1, p_.vocab));
    DivergenceTiles tiles{.rows = 1, .window = p_.vocab};
    if (costs.column > 0) {  // a quarter is for copies of weights, the rest for rows
      const int64_t left = limit - costs.bytes(1, 0, p_.vocab);
      const int64_t most = std::min(left / costs.column, (limit - costs.fixed) / (4 * costs.column));
      tiles.window = std::max<int64_t>(1, std::min(p_.vocab, most));
    }
    const int64_t of_rows = limit - costs.fixed - costs.column * tiles.window;
    const int64_t fitting = of_rows / (costs.row + costs.element * rounded_up(p_.vocab, kAligned));
    tiles.rows = std::max<int64_t>(1, std::min(rows_, fitting));
    if (!both) return with_bytes(costs, tiles, p_.vocab);
    const bool all_rows = tiles.rows == rows_;
    if (sums_hidden()) tiles.hidden_sums = tiles.rows;
    if (sums_weight(all_rows)) tiles.weight_sums = p_.vocab;
    return with_bytes(costs_of_gradients(true, all_rows), tiles, p_.vocab);
  }

  DivergenceTiles windows() const {
    if (budget_ == 0 || budget_ >= least_of_windows(false)) {
      const DivergenceTiles tiles = windows(false);
      if (tiles.rows < rows_) return tiles;
    }
    return windows(true);
  }

  // Returns tiles of windows of columns, with about as many rows as columns. On CUDA there are as few windows
  // as fit, of equal size: each window reads and writes the sums of d_hidden once. On the host that gains
  // nothing.
  DivergenceTiles windows(bool all_rows) const {
    const Costs costs = costs_of_gradients(false, all_rows);
    const int64_t limit = limit_of(costs, least_of_windows(all_rows));
    const int64_t least_rows = all_rows ? rows_ : kLeastRows;
    DivergenceTiles tiles{.rows = rows_, .window = p_.vocab};
    while (costs.of_window(tiles.rows, tiles.window) > limit) {
      const bool has_more_rows = tiles.rows > tiles.window || tiles.window <= kLeastWindow;
      if (tiles.rows > least_rows && has_more_rows) {
        tiles.rows = part_of(tiles.rows, 2, kLeastRows);
      } else {
        tiles.window = part_of(tiles.window, 2, kLeastWindow);
      }
    }
    if (!p_.on_host && tiles.window < p_.vocab) {
      const int64_t left = limit - costs.fixed - costs.row * tiles.rows;
      const int64_t most = left / (costs.column + costs.element * tiles.rows) / kLeastWindow * kLeastWindow;
      const int64_t count = (p_.vocab + most - 1) / most;
      tiles.window = std::min(p_.vocab, part_of(p_.vocab, count, kLeastWindow));
    }
    if (sums_hidden()) tiles.hidden_sums = rows_;
    if (sums_weight(all_rows)) tiles.weight_sums = tiles.window;
    return with_bytes(costs, tiles, tiles.window);
  }

  const DivergenceProblem& p_;
  const int64_t rows_;    // at least 1
  const int64_t size_;    // of a number of stats
  const int64_t budget_;  // 0: none
};

void check_operands(const DivergenceOperands& head, const std::string& name) {
  expect(head.width >= 1, name + "_width", "at least 1", std::to_string(head.width));
  const struct {
    const char* name;
    DType dtype;
  } dtypes[] = {
      {"_hidden_dtype", head.hidden}, {"_weight_dtype", head.weight}, {"_product_dtype", head.product}};
  for (const auto& each : dtypes) {
    expect(is_float(each.dtype), name + each.name, "a float dtype", dtype_name(each.dtype));
  }
}

}  // namespace

DivergencePlan plan_divergence(const DivergenceProblem& problem) {
  expect(problem.rows >= 0, "rows", "at least 0", std::to_string(problem.rows));
  expect(problem.vocab >= 1, "vocab", "at least 1", std::to_string(problem.vocab));
  expect(problem.ranks >= 0, "ranks", "at least 0", std::to_string(problem.ranks));
  expect(problem.copied_biases >= 0 && problem.copied_biases <= 2, "copied_biases", "0 to 2",
         std::to_string(problem.copied_biases));
  expect(is_float(problem.rounded), "rounded_dtype", "a float dtype", dtype_name(problem.rounded));
  check_operands(problem.student, "student");
  check_operands(problem.teacher, "teacher");
  expect(problem.pass != Pass::kBackward || problem.wants_gradients(), "want_d_hidden",
         "a gradient in a backward pass", "none");
  return Planner(problem).plan();
}

}  // namespace logitless
