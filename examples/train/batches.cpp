#include "train/batches.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace logitless::train {
namespace {

void append(std::span<const int32_t> text, int64_t start, int64_t length, Batch& batch) {
  const auto from = text.begin() + start;
  batch.tokens.insert(batch.tokens.end(), from, from + length);
  batch.targets.insert(batch.targets.end(), from + 1, from + length + 1);
}

// Places where a sequence and the token after it fit.
int64_t places(std::span<const int32_t> text, const BatchShape& shape, const char* what) {
  const int64_t count = static_cast<int64_t>(text.size()) - shape.length;
  if (count < 1) {
    throw std::runtime_error(std::string(what) + " text: expected more than " + std::to_string(shape.length) +
                             " tokens, one sequence, got " + std::to_string(text.size()) +
                             "; give more text or a shorter sequence");
  }
  return count;
}

}  // namespace

RandomBatches::RandomBatches(std::span<const int32_t> text, const BatchShape& shape, uint64_t seed)
    : text_(text), shape_(shape), random_(seed) {
  places(text, shape, "training");
}

Batch RandomBatches::next() {
  Batch batch;
  const int64_t count = places(text_, shape_, "training");
  for (int64_t b = 0; b < shape_.batch; ++b) append(text_, random_.below(count), shape_.length, batch);
  return batch;
}

std::vector<Batch> even_batches(std::span<const int32_t> text, const BatchShape& shape, int64_t count) {
  const int64_t last = places(text, shape, "validation") - 1;
  const int64_t fitting = (last + shape.length) / shape.length;  // sequences that do not overlap
  const int64_t full = std::max<int64_t>(1, fitting / shape.batch);
  std::vector<Batch> batches(static_cast<size_t>(std::min(count, full)));
  const auto sequences = static_cast<int64_t>(batches.size()) * shape.batch;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t start = sequences == 1 ? 0 : last * s / (sequences - 1);
    append(text, start, shape.length, batches[static_cast<size_t>(s / shape.batch)]);
  }
  return batches;
}

}  // namespace logitless::train
