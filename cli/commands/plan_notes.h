#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>

#include "commands/context.h"

namespace logitless::cli {

// What plans do not say of themselves, beside the others of a list, the fastest first, each an object of
// plan_json() with "fits" and "chosen" too.

// Adds "slow", whether a plan takes more than ten times as long as the first, and "why_not": of one that fits
// and is predicted to be faster than the chosen one, why that was preferred; else empty. "config" of plans
// that are alike but for workspace gets words that tell them apart.
void add_notes(nlohmann::ordered_json& plans, const Problem& problem);

// Sentences below the list, for people.
nlohmann::ordered_json notes_of(const nlohmann::ordered_json& plans, const Problem& problem);

// Where the predicted times come from: {"measured": whether the kernels were timed on such a device, "basis":
// text}.
nlohmann::ordered_json times_json(const nlohmann::ordered_json& plan, const DeviceChoice& device);

}  // namespace logitless::cli
