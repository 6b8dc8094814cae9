#pragma once

#include <cstdint>

namespace logitless::cli {

// The most memory this process has had resident since the last reset, or since its start where the system
// cannot reset it (only Linux can); 0 where it cannot say.
int64_t peak_resident_bytes();
// False when the peak goes on counting from the start.
bool reset_peak_resident_bytes();

// Gives memory that was freed back to the system, so that it does not count as resident.
void release_free_memory();

}  // namespace logitless::cli
