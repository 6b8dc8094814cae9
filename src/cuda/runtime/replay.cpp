#include "cuda/runtime/replay.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cuda/runtime/captures.h"
#include "cuda/runtime/check.h"

namespace logitless::cuda {
namespace {

// A run that comes only twice is not worth a graph.
constexpr int64_t kRunsBefore = 2;
// A limit over all plans: recordings take device memory, which no budget counts.
constexpr int kMostRecordings = 256;

bool is_on() {
  const char* graphs = std::getenv("LOGITLESS_CUDA_GRAPHS");
  return graphs == nullptr || std::string_view(graphs) != "0";
}

std::unique_ptr<const Recording> record(const std::function<void(const Queue&)>& work) {
  const BesideCaptures beside_captures;
  try {
    auto made = std::make_unique<Recording>();
    work(Queue(made.get()));
    made->finish();
    return made;
  } catch (const Error&) {  // too long, on several streams, or wrong in a way that the run itself reports
    cudaGetLastError();
    return nullptr;
  }
}

}  // namespace

Replay::Replay() : records_(is_on()) {}

Replay::Seen& Replay::seen(const RunPointers& pointers) {
  auto at = std::ranges::find(seen_, pointers, &Seen::pointers);
  if (at == seen_.end()) {
    at = std::ranges::min_element(seen_, {}, &Seen::last);
    *at = {pointers, 0, 0, nullptr};
  }
  at->last = ++runs_;
  return *at;
}

const Recording* Replay::recording_of(const RunPointers& pointers,
                                      const std::function<void(const Queue&)>& work) {
  Seen& now = seen(pointers);
  if (now.recording == nullptr && ++now.times > kRunsBefore && Recording::alive() < kMostRecordings) {
    now.recording = record(work);
    records_ = now.recording != nullptr;
  }
  return now.recording.get();
}

void Replay::run(const RunPointers& pointers, cudaStream_t stream,
                 const std::function<void(const Queue&)>& work) {
  // Does not wait for a thread that plays or records at the moment. A caller's own graph captures the run
  // itself.
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock && records_ && !is_capturing(stream)) {
    if (const Recording* recording = recording_of(pointers, work); recording != nullptr) {
      recording->play(stream);
      return;
    }
  }
  work(stream);
}

}  // namespace logitless::cuda
