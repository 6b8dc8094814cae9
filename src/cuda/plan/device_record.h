#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/runtime/device.h"

namespace logitless::cuda {

// A run that `logitless tune` timed.
struct TimedRun {
  int64_t tokens = 0, vocab = 0, hidden = 0;
  std::string engine;
  Work work = Work::kLoss;
  double median_seconds = 0;
  int64_t repeats = 0;
  std::string plan;  // for people
};

// The least values that a record may hold. A rate of 0 was not measured.
inline constexpr double kLeastRate = 1e6;  // so that units such as TFLOP/s are refused
inline constexpr double kLeastShare = 1e-3;

// Measurements of one kind of device as JSON: {"format", "device", "driver", "logitless", "file", "date",
// "rates", "engines", "runs"}. tune/tune.h writes records. A record is used on devices of its name, compute
// capability and number of multiprocessors. One in the user's folder comes before one that is built in.
struct DeviceRecord {
  Device device;  // its name, capability, processors and measurements
  int driver_version = 0;
  std::string library_version, date;
  std::vector<TimedRun> runs;
};

// Returns why this build cannot read and write records; empty if it can.
std::string why_no_records();
std::string text_of(const DeviceRecord& record);
// Throws kInvalidArgument, which names the member. `source` is the file, for messages.
DeviceRecord parse_record(const std::string& text, const std::string& source);

// Returns the file of a device's record in the user's folder: LOGITLESS_DEVICE_RECORDS, else
// XDG_CONFIG_HOME/logitless/devices, else HOME/.config/logitless/devices. Empty if there is no such folder to
// name, or if LOGITLESS_DEVICE_RECORDS is set and empty.
std::string record_path(const Device& device);
// Sets the measurements of a device that has a record. For a file that is no record it notes why.
void add_record(Device& device);

}  // namespace logitless::cuda
