#include "train/stop_signal.h"

namespace headroom::train {
namespace {

volatile std::sig_atomic_t stop_received = 0;

void remember(int) {
  stop_received = 1;
}

}  // namespace

StopSignal::StopSignal() {
  stop_received = 0;
  struct sigaction action {};
  action.sa_handler = remember;
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, &old_interrupt_);
  sigaction(SIGTERM, &action, &old_terminate_);
}

StopSignal::~StopSignal() {
  sigaction(SIGINT, &old_interrupt_, nullptr);
  sigaction(SIGTERM, &old_terminate_, nullptr);
}

bool StopSignal::received() const {
  return stop_received != 0;
}

}  // namespace headroom::train
