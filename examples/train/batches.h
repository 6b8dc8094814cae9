#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "train/random.h"

namespace logitless::train {

struct Batch {
  std::vector<int32_t> tokens;   // [batch * length]
  std::vector<int32_t> targets;  // [batch * length], the token that follows
};

struct BatchShape {
  int64_t batch;   // sequences
  int64_t length;  // tokens of each
  int64_t tokens() const { return batch * length; }
};

// Sequences from random places of `text`; the stream depends on the seed alone.
class RandomBatches {
 public:
  RandomBatches(std::span<const int32_t> text, const BatchShape& shape, uint64_t seed);
  Batch next();

 private:
  std::span<const int32_t> text_;
  BatchShape shape_;
  Random random_;
};

// `count` batches of sequences spread evenly over `text`; fewer when it is too short for that many.
std::vector<Batch> even_batches(std::span<const int32_t> text, const BatchShape& shape, int64_t count);

}  // namespace logitless::train
