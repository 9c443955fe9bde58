// Which experts a token uses, and with what weights.
#pragma once
#include "../include/ridgeline_native.h"
#include "formats.h"

namespace ridgeline {

// Floats that a row of router outputs must have room for: they are followed by what the choice is made of.
inline int route_floats(const rl_experts& e) { return 3 * round_up(e.num + 1, kPanel); }

// One token: from the router's outputs, which are overwritten by the scores, to per_token different experts, best first, and
// their weights. Of equal scores the expert with the smaller number is chosen. Outputs that are not finite give weights that
// are not, and still different experts.
void route(const rl_experts& e, float* outputs, int32_t* chosen, float* shares);

}  // namespace ridgeline
