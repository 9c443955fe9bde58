// Making a model: its table checked (model_checks.cpp), then cache and buffers taken.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "errors.h"
#include "isa.h"
#include "route.h"

namespace ridgeline {

static thread_local std::string last_error;

int fail(const std::string& reason) {
  last_error = reason;
  return -1;
}

namespace {

// Kernels read biases in whole panels.
void pad_bias(rl_model& model, rl_matrix& m) {
  if (!m.bias) return;
  std::vector<float> padded(size_t(num_panels(m.n)) * kPanel);
  std::memcpy(padded.data(), m.bias, size_t(m.n) * sizeof(float));
  model.biases.push_back(std::move(padded));
  m.bias = model.biases.back().data();
}

std::vector<rl_matrix*> matrices_of(rl_layer& layer) {
  std::vector<rl_matrix*> all = {&layer.qkv, &layer.output};
  if (layer.ffn) all.insert(all.end(), {&layer.gate_up, &layer.down});
  if (layer.ffn_kind == RL_FFN_EXPERTS) all.insert(all.end(), {&layer.experts.router, &layer.experts.gate_up, &layer.experts.down});
  return all;
}

void take_cache(rl_model& m) {
  const rl_decoder& d = m.spec;
  m.padded_dim = round_up(d.head_dim, 16);
  m.head_bytes = kv_bytes(d.kv_format, m.padded_dim);
  m.block_bytes = 2 * m.head_bytes * size_t(d.kv_heads) * size_t(d.num_layers);
  // An odd number of cache lines: else one head's blocks would fall into the same few sets of the caches.
  if (m.block_bytes / 64 % 2 == 0) m.block_bytes += 64;
  m.cache = Memory(size_t(d.num_blocks) * m.block_bytes);
  m.block_scales = d.kv_format >= RL_KV_INT8 ? size_t(2 * d.kv_heads * kBlock) * size_t(d.num_layers) : 0;
  m.cache_scales = Memory(size_t(d.num_blocks) * m.block_scales * sizeof(float));
}

// Returns the number of entries a step may have; 0 without experts.
size_t take_expert_buffers(rl_model& m) {
  ExpertBuffers& x = m.experts;
  int most = 0, per_token = 0;
  for (const rl_layer& layer : m.layers) {
    if (layer.ffn_kind != RL_FFN_EXPERTS) continue;
    most = std::max(most, layer.experts.num), per_token = std::max(per_token, layer.experts.per_token);
    x.logits_stride = std::max(x.logits_stride, route_floats(layer.experts));
    x.inner_stride = std::max(x.inner_stride, round_up(layer.experts.size, kGroup));
  }
  const size_t tokens = size_t(m.spec.max_step_tokens), entries = tokens * size_t(per_token);
  x.logits = Memory(tokens * size_t(x.logits_stride) * 4);
  x.normed = Memory(most ? tokens * size_t(m.hidden_stride) * 4 : 0);
  x.inner = Memory(entries * size_t(x.inner_stride) * 4);
  x.outer = Memory(entries * size_t(m.hidden_stride) * 4);
  for (std::vector<int32_t>* values : {&x.chosen, &x.entry_of, &x.token_of}) values->resize(entries);
  x.shares.resize(entries), x.share_of.resize(entries);
  x.first.resize(size_t(most) + 1), x.active.reserve(size_t(most));
  x.most = size_t(most), x.tokens.resize(m.layers.size() * size_t(most));
  return entries;
}

void take_buffers(rl_model& m) {
  const rl_decoder& d = m.spec;
  int ffn = 0;
  for (const rl_layer& layer : m.layers) ffn = std::max(ffn, layer.ffn);
  m.hidden_stride = round_up(d.hidden, kGroup);
  m.ffn_stride = round_up(ffn, kGroup);
  m.qkv_stride = round_up((d.heads + 2 * d.kv_heads) * d.head_dim, kGroup);
  m.attention_stride = round_up(d.heads * d.head_dim, kGroup);
  const size_t entries = take_expert_buffers(m);
  m.widest = std::max({m.hidden_stride, m.ffn_stride, m.attention_stride, m.experts.inner_stride});
  const size_t tokens = size_t(d.max_step_tokens), widest = size_t(m.widest);
  m.residual = Memory(tokens * m.hidden_stride * 4);
  m.qkv = Memory(tokens * m.qkv_stride * 4);
  m.attention = Memory(tokens * m.attention_stride * 4);
  m.gated = Memory(tokens * m.ffn_stride * 4);
  m.branch = Memory(tokens * m.hidden_stride * 4);
  // Inputs: of a step's tokens, or of the entries of its experts, whose rows are shorter.
  const size_t values = std::max(tokens * widest, entries * size_t(std::max(m.hidden_stride, m.experts.inner_stride)));
  // AMX reads whole tiles of 16 rows, the last one beyond the step's rows.
  m.input_high = Memory((values + 16 * widest) * 4);
  m.input_low = Memory(values + 16 * widest);
  m.input_scales = Memory(values / kGroup * 4);
  m.input_sums = Memory(values / kGroup * 2 * 4);  // up to two of a group
  m.panel_scratch = round_up64(m.kernels->panel_scratch_bytes(int(widest)));
  m.normed_offset = m.panel_scratch + 2 * tokens * kPanel * 4;
  m.own_inputs_offset = m.normed_offset + widest * 4;
  const size_t own_values = widest * size_t(m.kernels->own_rows);
  for (int i = 0; i < m.pool->size(); i++)
    m.scratch.emplace_back(m.own_inputs_offset + own_values * 5 + 3 * own_values / kGroup * 4);
}

}  // namespace
}  // namespace ridgeline

using namespace ridgeline;

int64_t rl_model::bytes() const {
  size_t total = 0;
  for (const Memory* memory : {&cache, &cache_scales, &residual, &qkv, &attention, &gated, &branch, &input_high, &input_low,
                               &input_scales, &input_sums, &experts.logits, &experts.normed, &experts.inner, &experts.outer})
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
    for (rl_layer& layer : model->layers)
      for (rl_matrix* m : matrices_of(layer)) pad_bias(*model, *m);
    pad_bias(*model, model->spec.lm_head);
    model->spec.layers = model->layers.data();
    model->pool = std::make_unique<ThreadPool>(std::max(1, threads), kernels->start_thread);
    take_cache(*model);
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

extern "C" int rl_expert_counts(const rl_model* model, int32_t layer, int64_t* out, int32_t num) {
  if (layer < 0 || layer >= model->spec.num_layers) return fail("there is no layer " + std::to_string(layer));
  const rl_layer& of = model->layers[size_t(layer)];
  if (of.ffn_kind != RL_FFN_EXPERTS || of.experts.num != num)
    return fail("layer " + std::to_string(layer) + " does not have " + std::to_string(num) + " experts");
  const ExpertBuffers& x = model->experts;
  std::copy_n(x.tokens.begin() + ptrdiff_t(size_t(layer) * x.most), num, out);
  return 0;
}

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
