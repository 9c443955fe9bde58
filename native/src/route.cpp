#include "route.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ridgeline {
namespace {

constexpr float kLeast = -std::numeric_limits<float>::max(), kNever = -std::numeric_limits<float>::infinity();

void softmax(float* x, int n) {
  float most = kNever, total = 0.0f;
  for (int i = 0; i < n; i++) most = std::max(most, x[i]);
  for (int i = 0; i < n; i++) total += x[i] = std::exp(x[i] - most);
  for (int i = 0; i < n; i++) x[i] /= total;
}

// The index of the largest value, the first of equal ones. At least one must be above kNever.
int best_of(const float* x, int n) {
  int best = 0;
  for (int i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

// Leaves only the experts of the best groups.
void keep_groups(const rl_experts& e, float* choice, float* merits) {
  const int size = e.num / e.groups;
  for (int group = 0; group < e.groups; group++) {
    const float* x = choice + group * size;
    float first = kNever, second = kNever;
    for (int i = 0; i < size; i++)
      if (x[i] > first) second = first, first = x[i];
      else if (x[i] > second) second = x[i];
    merits[group] = std::max(kLeast, size > 1 ? first + second : first);
  }
  for (int kept = 0; kept < e.top_groups; kept++) merits[best_of(merits, e.groups)] = kNever;
  for (int group = 0; group < e.groups; group++)
    if (merits[group] > kNever) std::fill_n(choice + group * size, size, kNever);
}

// Each time the best expert that is left, with its share of a softmax over those that are left and near it.
void sparsemixer(const rl_experts& e, const float* logits, float* left, int32_t* chosen, float* shares) {
  for (int i = 0; i < e.num; i++) left[i] = logits[i] > kLeast ? logits[i] : kLeast;  // also where it is not a number
  for (int place = 0; place < e.per_token; place++) {
    const int expert = best_of(left, e.num);
    const float best = left[expert];
    float total = 0.0f;
    for (int i = 0; i < e.num; i++) {
      const bool far = (best - logits[i]) / std::max(std::fabs(logits[i]), best) > e.margin;
      if (left[i] > kNever && !far) total += std::exp(logits[i] - best);
    }
    left[expert] = kNever;
    chosen[place] = expert;
    shares[place] = 1.0f / total;
  }
}

}  // namespace

void route(const rl_experts& e, float* scores, int32_t* chosen, float* shares) {
  const int stride = round_up(e.num + 1, kPanel);
  float* choice = scores + stride;
  if (e.scores == RL_SPARSEMIXER) return sparsemixer(e, scores, choice, chosen, shares);
  if (e.scores == RL_SOFTMAX) softmax(scores, e.num);
  else
    for (int i = 0; i < e.num; i++) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  for (int i = 0; i < e.num; i++) {
    const float value = e.choice_bias ? scores[i] + e.choice_bias[i] : scores[i];
    choice[i] = value > kLeast ? value : kLeast;  // also where it is not a number
  }
  if (e.groups > 1) keep_groups(e, choice, choice + stride);
  float total = 0.0f;
  for (int place = 0; place < e.per_token; place++) {
    const int expert = best_of(choice, e.num);
    choice[expert] = kNever;
    chosen[place] = expert;
    total += shares[place] = scores[expert];
  }
  for (int place = 0; place < e.per_token; place++) shares[place] = (e.normalized ? shares[place] / total : shares[place]) * e.scale;
}

}  // namespace ridgeline
