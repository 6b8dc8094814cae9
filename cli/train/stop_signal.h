#pragma once

#include <csignal>

namespace headroom::train {

// While it lives, the first SIGINT or SIGTERM is remembered instead of ending the process; the second ends
// it.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  bool received() const;

 private:
  struct sigaction old_interrupt_ {};
  struct sigaction old_terminate_ {};
};

}  // namespace headroom::train
