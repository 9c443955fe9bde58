// The one way the library says no: a reason for the caller, kept per thread.
#pragma once
#include <string>

namespace ridgeline {

int fail(const std::string& reason);  // keeps the reason for rl_last_error, returns -1

}  // namespace ridgeline
