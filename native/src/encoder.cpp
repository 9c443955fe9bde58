// Making an encoder: every shape checked against the table, then buffers taken.
#include "encoder.h"

#include <cstring>
#include <string>

#include "errors.h"
#include "isa.h"

namespace ridgeline {
namespace {

constexpr int kMostOfAnything = 1 << 24;
constexpr int kManyRows = 1 << 20;

std::string matrix_flaw(const char* name, const rl_matrix& m, int format, int n, int k) {
  if (m.format != format) return std::string(name) + " is not in the format of the first matrix";
  if (!m.data || !m.bias) return std::string(name) + " has no data or no bias";
  if (m.n == n && m.k == k) return "";
  return std::string(name) + " is [" + std::to_string(m.n) + ", " + std::to_string(m.k) + "], not [" + std::to_string(n) + ", " +
         std::to_string(k) + "]";
}

std::string layer_flaw(const rl_encoder& e, const rl_encoder_layer& layer) {
  const int format = e.layers[0].qkv.format;
  std::string flaw = matrix_flaw("qkv", layer.qkv, format, 3 * e.hidden, e.hidden);
  if (flaw.empty()) flaw = matrix_flaw("output", layer.output, format, e.hidden, e.hidden);
  if (flaw.empty()) flaw = matrix_flaw("up", layer.up, format, e.ffn, e.hidden);
  if (flaw.empty()) flaw = matrix_flaw("down", layer.down, format, e.hidden, e.ffn);
  if (flaw.empty() && !(layer.attn_norm && layer.attn_norm_bias && layer.ffn_norm && layer.ffn_norm_bias))
    flaw = "a norm is missing";
  return flaw;
}

std::string encoder_flaw(const rl_encoder& e) {
  for (int value : {e.hidden, e.heads, e.ffn, e.vocab, e.num_layers, e.max_positions, e.max_tokens})
    if (value < 1 || value > kMostOfAnything)
      return "a size of " + std::to_string(value) + " in the table: it must be from 1 to " + std::to_string(kMostOfAnything);
  if (e.hidden % e.heads) return "the heads cannot share the hidden size evenly";
  if (e.types < 0 || e.types > kMostOfAnything || (e.types > 0) != (e.type_rows != nullptr))
    return "types and their embeddings come together";
  if (e.first_position < 0 || e.first_position >= e.max_positions)
    return "a first position of " + std::to_string(e.first_position);
  if (e.activation != RL_GELU_ERF && e.activation != RL_GELU_TANH && e.activation != RL_RELU)
    return "no such activation: " + std::to_string(e.activation);
  if (!e.words || !e.positions || !e.norm || !e.norm_bias || !e.layers) return "embeddings, their norm or layers are missing";
  if (e.layers[0].qkv.format != RL_F32 && e.layers[0].qkv.format != RL_BF16) return "matrices are neither float32 nor bfloat16";
  for (int i = 0; i < e.num_layers; i++) {
    const std::string flaw = layer_flaw(e, e.layers[i]);
    if (!flaw.empty()) return "layer " + std::to_string(i) + ": " + flaw;
  }
  return "";
}

const float* padded_copy(rl_encoder_model& model, const float* values, int n) {
  std::vector<float> copy(size_t(round_up(n, kPanel)));
  std::memcpy(copy.data(), values, size_t(n) * sizeof(float));
  model.padded.push_back(std::move(copy));
  return model.padded.back().data();
}

void take_tables(rl_encoder_model& m, const rl_encoder& table) {
  m.spec = table;
  m.layers.assign(table.layers, table.layers + table.num_layers);
  m.spec.layers = m.layers.data();
  m.spec.norm = padded_copy(m, table.norm, table.hidden);
  m.spec.norm_bias = padded_copy(m, table.norm_bias, table.hidden);
  for (rl_encoder_layer& layer : m.layers) {
    for (rl_matrix* matrix : {&layer.qkv, &layer.output, &layer.up, &layer.down})
      matrix->bias = padded_copy(m, matrix->bias, matrix->n);
    for (const float** norm : {&layer.attn_norm, &layer.attn_norm_bias, &layer.ffn_norm, &layer.ffn_norm_bias})
      *norm = padded_copy(m, *norm, table.hidden);
  }
}

// A row longer than its values by an odd number of cache lines: rows that are read together then fall into different sets of
// the first-level cache, whatever the model's sizes.
int stride_of(int n) {
  const int lines = round_up(n, kPanel) / kPanel;
  return (lines % 2 ? lines : lines + 1) * kPanel;
}

void take_buffers(rl_encoder_model& m) {
  const rl_encoder& e = m.spec;
  const size_t tokens = size_t(e.max_tokens);
  m.head_dim = e.hidden / e.heads;
  m.hidden_stride = stride_of(e.hidden);
  m.qkv_stride = stride_of(3 * e.hidden);
  m.ffn_stride = stride_of(e.ffn);
  m.residual = Memory(tokens * size_t(m.hidden_stride) * 4);
  m.context = Memory(tokens * size_t(m.hidden_stride) * 4);
  m.qkv = Memory((tokens * size_t(m.qkv_stride) + kPanel) * 4);  // the last head's values are read in whole vectors
  m.ffn = Memory(tokens * size_t(m.ffn_stride) * 4);
  const int longest = std::min(e.max_tokens, e.max_positions - e.first_position), widest = padded_k(std::max(e.hidden, e.ffn));
  m.rounded = m.layers[0].qkv.format == RL_BF16;
  size_t scratch = m.kernels->text_scratch_floats(longest, m.head_dim) * 4;
  if (m.rounded) {
    m.input_kind = m.kernels->input_kind(RL_BF16, kManyRows, false);
    m.inputs = Memory((tokens + size_t(m.kernels->own_rows)) * size_t(widest) * 2);
    scratch = std::max(m.kernels->text_bf16_scratch_floats(longest, m.head_dim) * 4, m.kernels->panel_scratch_bytes(widest));
  }
  for (int i = 0; i < m.pool->size(); i++) m.scratch.emplace_back(scratch);
}

}  // namespace
}  // namespace ridgeline

using namespace ridgeline;

int64_t rl_encoder_model::bytes() const {
  size_t total = residual.bytes() + qkv.bytes() + context.bytes() + ffn.bytes() + inputs.bytes();
  for (const Memory& memory : scratch) total += memory.bytes();
  return int64_t(total);
}

extern "C" rl_encoder_model* rl_encoder_create(const rl_encoder* encoder, const char* isa, int32_t threads) {
  const Kernels* kernels = find_kernels(isa ? isa : "");
  if (!kernels) {
    fail("the instruction set '" + std::string(isa) + "' does not run here; these do: " + rl_available_isas());
    return nullptr;
  }
  const std::string flaw = encoder_flaw(*encoder);
  if (!flaw.empty()) {
    fail(flaw);
    return nullptr;
  }
  try {
    auto model = std::make_unique<rl_encoder_model>();
    model->kernels = kernels;
    take_tables(*model, *encoder);
    model->pool = std::make_unique<ThreadPool>(std::max(1, threads), kernels->start_thread);
    take_buffers(*model);
    return model.release();
  } catch (const std::bad_alloc&) {
    fail("not enough memory for the buffers of a call");
  } catch (const std::exception& error) {
    fail(std::string("threads cannot be started: ") + error.what());
  }
  return nullptr;
}

extern "C" void rl_encoder_free(rl_encoder_model* model) { delete model; }
extern "C" const char* rl_encoder_isa(const rl_encoder_model* model) { return model->kernels->name; }
extern "C" int64_t rl_encoder_bytes(const rl_encoder_model* model) { return model->bytes(); }
