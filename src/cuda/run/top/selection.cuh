#pragma once
// Selects the largest logits of a row, with a block of threads.
#include <limits>

#include "core/top_k.h"
#include "cuda/engines/logits.h"

namespace logitless::cuda {

template <class T>
__device__ inline bool comes_before(const TopEntry<T>& a, const TopEntry<T>& b) {
  return logitless::is_better(a.z, a.column, b.z, b.column);
}

// An entry that every logit is better than.
template <class T>
__device__ inline TopEntry<T> no_entry() {
  return {-std::numeric_limits<T>::infinity(), std::numeric_limits<int32_t>::max()};
}

// Collects entries that may be among the best k, and from time to time drops all others. All threads of the
// block call all methods together, except add() and offer(). The result does not depend on timing: no two
// entries have the same column.
template <int kThreads, class T>
class TopSelection {
 public:
  static constexpr int kRoom = 2048;
  // Entries that may come between begin() or settle() and the next settle().
  static constexpr int kAtOnce = kRoom / 2;
  struct Shared {
    TopEntry<T> entries[kRoom];
    int count;
  };

  __device__ TopSelection(Shared& shared, int k) : shared_(shared), k_(k), least_(no_entry<T>()) {}

  // least: the entry that others must beat. Entries to keep, at most kMostTopK, follow by add().
  __device__ void begin(const TopEntry<T>& least) {
    least_ = least;
    __syncthreads();  // entries of the last row are read
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
  }

  __device__ void add(const TopEntry<T>& entry) { shared_.entries[atomicAdd(&shared_.count, 1)] = entry; }
  __device__ void offer(const TopEntry<T>& entry) {
    if (comes_before(entry, least_)) add(entry);
  }

  // Makes room for another kAtOnce entries.
  __device__ void settle() {
    __syncthreads();
    const bool is_full = shared_.count > kRoom - kAtOnce;
    __syncthreads();  // all have read it
    if (is_full) cut();
  }

  // Leaves the best k, in order; if there are fewer, no_entry() follows.
  __device__ void cut() {
    __syncthreads();
    const int count = shared_.count;
    int size = 2;
    while (size < count || size < k_) size *= 2;
    for (int i = count + static_cast<int>(threadIdx.x); i < size; i += kThreads)
      shared_.entries[i] = no_entry<T>();
    sort(size);
    if (threadIdx.x == 0) shared_.count = count < k_ ? count : k_;
    least_ = shared_.entries[k_ - 1];
    __syncthreads();
  }

  // Valid after cut().
  __device__ const TopEntry<T>& least() const { return least_; }
  __device__ const TopEntry<T>& entry(int i) const { return shared_.entries[i]; }
  __device__ int count() const { return shared_.count; }

 private:
  // Bitonic; size is a power of 2.
  __device__ void sort(int size) {
    for (int run = 2; run <= size; run *= 2) {
      for (int step = run / 2; step > 0; step /= 2) {
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < size / 2; i += kThreads) {
          const int at = 2 * i - (i & (step - 1));
          const TopEntry<T> a = shared_.entries[at], b = shared_.entries[at + step];
          if (comes_before(b, a) == ((at & run) == 0)) {
            shared_.entries[at] = b;
            shared_.entries[at + step] = a;
          }
        }
      }
    }
    __syncthreads();
  }

  Shared& shared_;
  const int k_;
  TopEntry<T> least_;
};

// Merges `columns` logits of a row into its best k, which are in order; first: there are none yet.
// entry_at(j) returns an entry.
template <int kThreads, class T, class EntryAt>
__device__ void join_to_best(TopSelection<kThreads, T>& selection, TopEntry<T>* best, int k, bool first,
                             int64_t columns, const EntryAt& entry_at) {
  selection.begin(first ? no_entry<T>() : best[k - 1]);
  if (!first && threadIdx.x < k) selection.add(best[threadIdx.x]);
  constexpr int64_t kStretch = TopSelection<kThreads, T>::kAtOnce - kMostTopK;
  for (int64_t start = 0; start < columns; start += kStretch) {
    const int64_t end = start + kStretch < columns ? start + kStretch : columns;
    for (int64_t j = start + threadIdx.x; j < end; j += kThreads) selection.offer(entry_at(j));
    selection.settle();
  }
  selection.cut();
  if (threadIdx.x < k) best[threadIdx.x] = selection.entry(static_cast<int>(threadIdx.x));
}

}  // namespace logitless::cuda
