// What is computed row by row between the matrix products, against double precision: norms, rotary embedding, gates,
// caps, sums. Sizes that fill no vector evenly, in memory that ends where the row ends.
#include <algorithm>
#include <vector>

#include "isa.h"
#include "quantized.h"
#include "packed.h"

namespace {

using ridgeline::Kernels;

const int kSizes[] = {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 255, 256, 576, 1001};

// The values in memory of exactly their size.
Aligned<float> exactly(const std::vector<float>& values) {
  Aligned<float> memory(values.size());
  std::copy(values.begin(), values.end(), memory.data());
  return memory;
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

void a_norm_divides_by_the_root_of_the_mean_square(const Kernels& kernels) {
  for (int n : kSizes)
    for (float size : {0.0f, 1e-6f, 1.0f, 1e4f})
      for (float eps : {1e-6f, 1e-5f}) {
        about("%d values of size %g, eps %g", n, size, eps);
        Random random{uint64_t(n)};
        const std::vector<float> x = random_floats(random, n, size), weight = random_floats(random, n);
        const Aligned<float> from = exactly(x), weights = exactly(weight);
        Aligned<float> out(x.size()), in_place = exactly(x);
        kernels.rms_norm(from.data(), weights.data(), eps, n, out.data());
        kernels.rms_norm(in_place.data(), weights.data(), eps, n, in_place.data());
        double squares = 0;
        for (float value : x) squares += double(value) * value;
        const double inverse = 1 / std::sqrt(squares / n + double(eps));
        for (int i = 0; i < n; i++) {  // every square is rounded with the sums it goes into, and the root halves that
          CHECK_NEAR(out[i], x[i] * inverse * weight[i], (n + 8) * kUnit * std::fabs(x[i] * inverse * weight[i]));
          CHECK(same_bits(in_place[i], out[i]));
        }
      }
}

// Rows end where they end: nothing beyond them is read or written. With no bias none is added.
void a_layer_norm_centres_and_divides(const Kernels& kernels) {
  for (int n : kSizes)
    for (bool biased : {true, false}) {
      about("%d values, bias %d", n, biased);
      Random random{uint64_t(n)};
      const std::vector<float> x = random_floats(random, n), weight = random_floats(random, n), bias = random_floats(random, n);
      const Aligned<float> weights = exactly(weight), biases = exactly(bias);
      Aligned<float> out = exactly(x);
      kernels.layer_norm(out.data(), weights.data(), biased ? biases.data() : nullptr, 1e-5f, n, out.data());
      double mean = 0, squares = 0;
      for (float value : x) mean += double(value) / n;
      for (float value : x) squares += (value - mean) * (value - mean);
      const double inverse = 1 / std::sqrt(squares / n + 1e-5);
      for (int i = 0; i < n; i++) {
        const double normed = (x[i] - mean) * inverse * weight[i], added = biased ? bias[i] : 0.0;
        CHECK_NEAR(out[i], normed + added, (n + 8) * kUnit * (std::fabs(weight[i]) * (1 + inverse) * 4 + std::fabs(added)));
      }
    }
}

void a_sum_of_scaled_rows_is_that_of_doubles(const Kernels& kernels) {
  for (int n : kSizes) {
    about("%d values", n);
    Random random{uint64_t(n)};
    const std::vector<float> x = random_floats(random, n), y = random_floats(random, n);
    const Aligned<float> from = exactly(x);
    for (float scale : {1.0f, 0.3f}) {
      Aligned<float> out = exactly(y);
      kernels.add_scaled(from.data(), scale, n, out.data());
      for (int i = 0; i < n; i++) CHECK_NEAR(out[i], double(scale) * x[i] + y[i], 2 * kUnit * (std::fabs(scale * x[i]) + std::fabs(y[i])));
      for (int i = 0; i < n && scale == 1.0f; i++) CHECK(same_bits(out[i], x[i] + y[i]));
    }
  }
}

void a_head_turns_by_its_angles_and_the_rest_of_it_stays(const Kernels& kernels) {
  for (int rotary = 2; rotary <= 256; rotary += rotary < 40 ? 2 : 12)
    for (int rest : {0, 1, 6, 32}) {
      about("%d of %d values turn", rotary, rotary + rest);
      Random random{uint64_t(rotary)};
      const int half = rotary / 2;
      const std::vector<float> head = random_floats(random, rotary + rest);
      std::vector<float> cosine(static_cast<size_t>(half)), sine(static_cast<size_t>(half));
      for (int i = 0; i < half; i++) {
        const float angle = random.uniform(-10.0f, 10.0f);
        cosine[i] = std::cos(angle), sine[i] = std::sin(angle);
      }
      const Aligned<float> cosines = exactly(cosine), sines = exactly(sine);
      Aligned<float> out = exactly(head);
      kernels.rope(out.data(), cosines.data(), sines.data(), rotary);
      for (int i = 0; i < half; i++) {
        const double a = head[i], b = head[half + i], c = cosine[i], s = sine[i];
        CHECK_NEAR(out[i], a * c - b * s, 2 * kUnit * (std::fabs(a * c) + std::fabs(b * s)));
        CHECK_NEAR(out[half + i], b * c + a * s, 2 * kUnit * (std::fabs(b * c) + std::fabs(a * s)));
      }
      for (int i = rotary; i < rotary + rest; i++) CHECK(same_bits(out[i], head[i]));
    }
}

// Numbers where exponentials overflow, vanish or change their branch, and ordinary ones.
std::vector<float> telling_numbers(int count) {
  std::vector<float> x = {0.0f,   -0.0f,   1e-40f, -1e-40f, 1e-20f, -1e-20f, 1e-6f, -1e-6f, 0.5f,  -0.5f, 3.0f,
                          -3.0f,  9.0f,    -9.0f,  20.0f,   -20.0f, 43.4f,   -43.6f, 86.0f, -86.0f, 87.0f, -87.0f,
                          87.5f,  -87.5f,  88.8f,  -88.8f,  104.0f, -104.0f, 1e4f,  -1e4f,  1e13f, -1e13f, 1e30f, -1e30f};
  Random random;
  while (int(x.size()) < count) x.push_back(random.normal() * (x.size() % 2 ? 1.0f : 8.0f));
  x.resize(size_t(count));
  return x;
}

// The exponential is good to 2e-7; the quotients and products after it add three roundings. A GELU's tanh is near -1 for
// negative inputs, where 1 + tanh keeps the absolute error only. Beyond exp(-87) both count as zero.
double activated(int activation, double x) {
  const double inner = std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x);
  switch (activation) {
    case RL_SILU: return x / (1 + std::exp(-x));
    case RL_GELU_TANH: return 0.5 * x * (1 + std::tanh(inner));
    case RL_GELU_ERF: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    default: return std::max(0.0, x);
  }
}

void a_gate_is_its_activation_times_up(const Kernels& kernels) {
  for (int activation : {RL_SILU, RL_GELU_TANH, RL_GELU_ERF, RL_RELU})
    for (int n : {16, 32, 48, 256, 1024}) {
      const std::vector<float> x = telling_numbers(n);
      Random random;
      std::vector<float> up = random_floats(random, n);
      const Aligned<float> gates = exactly(x), ups = exactly(up);
      Aligned<float> out(x.size());
      kernels.gate(activation, gates.data(), ups.data(), n, out.data());
      for (int i = 0; i < n; i++) {
        about("activation %d of %g times %g", activation, x[i], up[i]);
        const double g = x[i], u = up[i];
        const double expected = activated(activation, g) * u;
        CHECK_NEAR(out[i], expected, activation == RL_SILU ? 5e-7 * std::fabs(expected) + 1e-37 * std::fabs(g * u) + 1e-44
                                                           : 5e-7 * std::fabs(g * u) + 1e-44);
      }
      Aligned<float> alone = exactly(x);
      kernels.activate(activation, alone.data(), n);
      for (int i = 0; i < n; i++) {
        about("activation %d of %g", activation, x[i]);
        CHECK_NEAR(alone[i] * double(up[i]), out[i], 2 * kUnit * std::fabs(double(out[i])) + 1e-44);
      }
    }
}

void a_clamped_gate_limits_both_and_adds_one(const Kernels& kernels) {
  for (float limit : {0.5f, 7.0f}) {
    const std::vector<float> x = telling_numbers(256);
    Random random;
    const std::vector<float> up = random_floats(random, x.size(), 4.0f);
    const Aligned<float> gates = exactly(x), ups = exactly(up);
    Aligned<float> out(x.size());
    kernels.gate_clamped(limit, gates.data(), ups.data(), int(x.size()), out.data());
    for (size_t i = 0; i < x.size(); i++) {
      about("%g and %g within %g", x[i], up[i], limit);
      const double g = std::min(x[i], limit), u = std::max(-limit, std::min(up[i], limit)) + 1.0;
      const double expected = g / (1 + std::exp(-1.702 * g)) * u;
      CHECK_NEAR(out[i], expected, 1e-6 * std::fabs(expected) + 1e-6 * std::fabs(g) * kUnit + 1e-30);
    }
  }
}

void a_cap_bends_values_towards_it_and_touches_no_others(const Kernels& kernels) {
  for (int n : kSizes)
    for (float cap : {1.0f, 30.0f, 50.0f}) {
      const std::vector<float> x = telling_numbers(n);
      Aligned<float> out = exactly(x);
      kernels.softcap(out.data(), n, cap);
      for (int i = 0; i < n; i++) {
        about("%g of %d, cap %g", x[i], n, cap);
        CHECK_NEAR(out[i], cap * std::tanh(double(x[i]) / cap), 5e-7 * cap);  // 2 · sigmoid - 1: an absolute error
        CHECK(std::fabs(out[i]) <= cap);
      }
    }
}

// A value that is not a number must not become one: a broken row shows.
void a_nan_stays_a_nan(const Kernels& kernels) {
  for (int n : {16, 32, 48})
    for (int at = 0; at < n; at++) {
      about("value %d of %d", at, n);
      Random random;
      std::vector<float> x = random_floats(random, n);
      const Aligned<float> ones = exactly(std::vector<float>(size_t(n), 1.0f));
      x[at] = NAN;
      Aligned<float> out = exactly(x);
      kernels.softcap(out.data(), n, 30.0f);
      for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]) == (i == at));
      kernels.layer_norm(x.data(), ones.data(), nullptr, 1e-6f, n, out.data());
      for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]));
      kernels.gate_clamped(7.0f, x.data(), ones.data(), n, out.data());
      for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]) == (i == at));
      kernels.gate_clamped(7.0f, ones.data(), x.data(), n, out.data());
      for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]) == (i == at));
      for (int activation : {RL_SILU, RL_GELU_TANH, RL_GELU_ERF, RL_RELU}) {
        kernels.gate(activation, x.data(), ones.data(), n, out.data());
        for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]) == (i == at));
        kernels.gate(activation, ones.data(), x.data(), n, out.data());
        for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]) == (i == at));
      }
      kernels.rms_norm(x.data(), ones.data(), 1e-6f, n, out.data());
      for (int i = 0; i < n; i++) CHECK(std::isnan(out[i]));
    }
}

}  // namespace

int main() {
  const Kernels& kernels = *ridgeline::find_kernels(isa_under_test());
  a_norm_divides_by_the_root_of_the_mean_square(kernels);
  a_layer_norm_centres_and_divides(kernels);
  a_sum_of_scaled_rows_is_that_of_doubles(kernels);
  a_head_turns_by_its_angles_and_the_rest_of_it_stays(kernels);
  a_gate_is_its_activation_times_up(kernels);
  a_clamped_gate_limits_both_and_adds_one(kernels);
  a_cap_bends_values_towards_it_and_touches_no_others(kernels);
  a_nan_stays_a_nan(kernels);
  return report();
}
