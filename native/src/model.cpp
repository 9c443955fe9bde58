// Making a model: every shape checked against the table, then cache and buffers taken.
#include "model.h"

#include <cmath>
#include <cstring>
#include <string>

#include "errors.h"
#include "isa.h"

namespace ridgeline {

static thread_local std::string last_error;

int fail(const std::string& reason) {
  last_error = reason;
  return -1;
}

namespace {

constexpr int kMostOfAnything = 1 << 24;  // of layers, rows, tokens, …: products of two stay far inside 64 bits
constexpr int kMostBytesSummed = 1 << 16;  // byte products that fit a 32-bit sum, for one scale per output

std::string shape(int n, int k) { return "[" + std::to_string(n) + ", " + std::to_string(k) + "]"; }

// A reason why the matrix cannot be what it is said to be; empty if it can.
std::string matrix_flaw(const char* name, const rl_matrix& m, int n, int k) {
  if (!known_format(m.format)) return std::string(name) + " has no known format: " + std::to_string(m.format);
  if (!m.data) return std::string(name) + " has no data";
  if (m.format == RL_Q8_C && m.k > kMostBytesSummed)
    return std::string(name) + ": one scale per output is for rows of up to " + std::to_string(kMostBytesSummed) + " weights";
  if (m.n != n || m.k != k) return std::string(name) + " is " + shape(m.n, m.k) + ", not " + shape(n, k);
  return "";
}

std::string layer_flaw(const rl_decoder& d, const rl_layer& layer) {
  const int q_rows = d.heads * d.head_dim, kv_rows = d.kv_heads * d.head_dim;
  std::string flaw = matrix_flaw("qkv", layer.qkv, q_rows + 2 * kv_rows, d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("output", layer.output, d.hidden, q_rows);
  if (flaw.empty()) flaw = matrix_flaw("gate_up", layer.gate_up, 2 * round_up(d.ffn, kPanel), d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("down", layer.down, d.hidden, d.ffn);
  if (!flaw.empty()) return flaw;
  if (!layer.attn_norm || !layer.ffn_norm) return "a layer's norms are missing";
  if (!layer.q_norm != !layer.k_norm) return "q_norm and k_norm come together";
  if (layer.rotary_dim < 0 || layer.rotary_dim % 2 || layer.rotary_dim > d.head_dim)
    return "a rotary size of " + std::to_string(layer.rotary_dim);
  if (layer.rotary_dim && (!layer.cosine || !layer.sine)) return "the rotary tables are missing";
  if (layer.window < 0) return "a negative window";
  return "";
}

std::string decoder_flaw(const rl_decoder& d) {
  for (int value : {d.hidden, d.heads, d.kv_heads, d.head_dim, d.ffn, d.vocab, d.num_layers, d.max_context, d.num_blocks,
                    d.max_step_tokens})
    if (value < 1 || value > kMostOfAnything)
      return "a size of " + std::to_string(value) + " in the table: it must be from 1 to " + std::to_string(kMostOfAnything);
  if (int64_t(d.heads) * d.head_dim > kMostOfAnything) return "too many heads of this size";
  if (d.head_dim % 2 || d.head_dim > kMaxHeadDim)
    return "a head size of " + std::to_string(d.head_dim) + ": it must be even and at most " + std::to_string(kMaxHeadDim);
  if (d.heads % d.kv_heads) return "the heads cannot share the KV heads evenly";
  for (int k : {d.hidden, d.ffn, d.heads * d.head_dim})
    if (k % kGroup && k > (1 << 14)) return "rows of " + std::to_string(k) + " weights are no whole groups of 32";
  if (d.kv_format < RL_KV_F32 || d.kv_format > RL_KV_INT8) return "no such KV format: " + std::to_string(d.kv_format);
  if (d.activation != RL_SILU && d.activation != RL_GELU_TANH) return "no such activation: " + std::to_string(d.activation);
  if (!d.layers || !d.final_norm) return "layers or the final norm are missing";
  std::string flaw = matrix_flaw("embedding", d.embedding, d.vocab, d.hidden);
  if (flaw.empty()) flaw = matrix_flaw("lm_head", d.lm_head, d.vocab, d.hidden);
  for (int i = 0; i < d.num_layers && flaw.empty(); i++) {
    flaw = layer_flaw(d, d.layers[i]);
    if (!flaw.empty()) flaw = "layer " + std::to_string(i) + ": " + flaw;
  }
  return flaw;
}

// Kernels read biases in whole panels.
void pad_bias(rl_model& model, rl_matrix& m) {
  if (!m.bias) return;
  std::vector<float> padded(size_t(num_panels(m.n)) * kPanel);
  std::memcpy(padded.data(), m.bias, size_t(m.n) * sizeof(float));
  model.biases.push_back(std::move(padded));
  m.bias = model.biases.back().data();
}

void take_buffers(rl_model& m) {
  const rl_decoder& d = m.spec;
  m.padded_dim = round_up(d.head_dim, 16);
  m.hidden_stride = round_up(d.hidden, kGroup);
  m.ffn_stride = round_up(d.ffn, kGroup);
  m.qkv_stride = round_up((d.heads + 2 * d.kv_heads) * d.head_dim, kGroup);
  m.attention_stride = round_up(d.heads * d.head_dim, kGroup);
  const size_t element = d.kv_format == RL_KV_F32 ? 4 : d.kv_format == RL_KV_BF16 ? 2 : 1;
  m.head_bytes = size_t(m.padded_dim) * kBlock * element;
  m.block_bytes = 2 * m.head_bytes * size_t(d.kv_heads) * size_t(d.num_layers);
  // An odd number of cache lines: else one head's blocks would fall into the same few sets of the caches.
  if (m.block_bytes / 64 % 2 == 0) m.block_bytes += 64;
  m.cache = Memory(size_t(d.num_blocks) * m.block_bytes);
  m.block_scales = d.kv_format == RL_KV_INT8 ? size_t(2 * d.kv_heads * kBlock) * size_t(d.num_layers) : 0;
  m.cache_scales = Memory(size_t(d.num_blocks) * m.block_scales * sizeof(float));

  m.widest = std::max({m.hidden_stride, m.ffn_stride, m.attention_stride});
  const size_t tokens = size_t(d.max_step_tokens), widest = size_t(m.widest);
  m.residual = Memory(tokens * m.hidden_stride * 4);
  m.qkv = Memory(tokens * m.qkv_stride * 4);
  m.attention = Memory(tokens * m.attention_stride * 4);
  m.gated = Memory(tokens * m.ffn_stride * 4);
  m.branch = Memory(tokens * m.hidden_stride * 4);
  // AMX reads whole tiles of 16 rows, the last one beyond the step's rows.
  m.input_high = Memory((tokens + 16) * widest * 4);
  m.input_low = Memory((tokens + 16) * widest);
  m.input_scales = Memory(tokens * widest / kGroup * 4);
  m.input_sums = Memory(tokens * widest / kGroup * 4);
  m.panel_scratch = round_up64(m.kernels->panel_scratch_bytes(int(widest)));
  m.normed_offset = m.panel_scratch + 2 * tokens * kPanel * 4;
  m.own_inputs_offset = m.normed_offset + widest * 4;
  const size_t own_values = widest * size_t(m.kernels->own_rows);
  for (int i = 0; i < m.pool->size(); i++)
    m.scratch.emplace_back(m.own_inputs_offset + own_values * 5 + 2 * own_values / kGroup * 4);
}

}  // namespace
}  // namespace ridgeline

using namespace ridgeline;

int64_t rl_model::bytes() const {
  size_t total = 0;
  for (const Memory* memory : {&cache, &cache_scales, &residual, &qkv, &attention, &gated, &branch, &input_high, &input_low,
                               &input_scales, &input_sums})
    total += memory->bytes();
  for (const Memory& memory : scratch) total += memory.bytes();
  return int64_t(total);
}

KvHead rl_model::kv_head(int layer, int head, const int32_t* block_table) const {
  const size_t heads = size_t(spec.kv_heads), keys = 2 * heads * size_t(layer) + size_t(head), values = keys + heads;
  return {spec.kv_format,
          padded_dim,
          cache.data() + keys * head_bytes,
          cache.data() + values * head_bytes,
          cache_scales.floats() + keys * kBlock,
          cache_scales.floats() + values * kBlock,
          block_bytes,
          block_scales,
          block_table};
}

extern "C" int32_t rl_abi_version(void) { return RL_ABI_VERSION; }
extern "C" const char* rl_last_error(void) { return last_error.c_str(); }

extern "C" const char* rl_available_isas(void) {
  static const std::string names = available_isas();
  return names.c_str();
}

extern "C" rl_model* rl_model_create(const rl_decoder* decoder, const char* isa, int32_t threads) {
  const Kernels* kernels = find_kernels(isa ? isa : "");
  if (!kernels) {
    fail("the instruction set '" + std::string(isa) + "' does not run here; these do: " + rl_available_isas());
    return nullptr;
  }
  const std::string flaw = decoder_flaw(*decoder);
  if (!flaw.empty()) {
    fail(flaw);
    return nullptr;
  }
  try {
    auto model = std::make_unique<rl_model>();
    model->spec = *decoder;
    model->kernels = kernels;
    model->layers.assign(decoder->layers, decoder->layers + decoder->num_layers);
    model->biases.reserve(size_t(decoder->num_layers) * 4 + 2);
    for (rl_layer& layer : model->layers)
      for (rl_matrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) pad_bias(*model, *m);
    pad_bias(*model, model->spec.lm_head);
    model->spec.layers = model->layers.data();
    model->pool = std::make_unique<ThreadPool>(std::max(1, threads), kernels->start_thread);
    take_buffers(*model);
    return model.release();
  } catch (const std::bad_alloc&) {
    fail("not enough memory for the KV cache and the step's buffers");
  } catch (const std::exception& error) {
    fail(std::string("threads cannot be started: ") + error.what());
  }
  return nullptr;
}

extern "C" void rl_model_free(rl_model* model) { delete model; }
extern "C" const char* rl_model_isa(const rl_model* model) { return model->kernels->name; }
extern "C" int64_t rl_model_bytes(const rl_model* model) { return model->bytes(); }

extern "C" int rl_copy_block(rl_model* model, int32_t source, int32_t target) {
  const int blocks = model->spec.num_blocks;
  if (source < 0 || target < 0 || source >= blocks || target >= blocks)
    return fail("block " + std::to_string(source) + " to " + std::to_string(target) + " of a cache of " + std::to_string(blocks));
  auto copy = [&](const Memory& cache, size_t bytes) {
    if (bytes) std::memcpy(cache.data() + size_t(target) * bytes, cache.data() + size_t(source) * bytes, bytes);
  };
  copy(model->cache, model->block_bytes);
  copy(model->cache_scales, model->block_scales * sizeof(float));
  return 0;
}
