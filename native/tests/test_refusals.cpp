// Invalid arguments are rejected with a reason before any kernel reads them, and the model still works afterwards.
#include <functional>
#include <limits>

#include "tiny_model.h"

namespace {

constexpr int kHuge = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();
std::string isa;

// ---- models ----

void refused_model(const char* what, const std::function<void(TinyModel&)>& spoil, const char* words) {
  for (uint64_t seed = 1; seed <= 3; seed++) {
    TinyModel tiny(seed, kAnyFormat, RL_KV_BF16, true);
    spoil(tiny);
    about("a model with %s, seed %d", what, int(seed));
    rl_model* model = rl_model_create(&tiny.decoder, isa.c_str(), 2);
    if (CHECK(model == nullptr) && !CHECK(std::string(rl_last_error()).find(words) != std::string::npos))
      std::fprintf(stderr, "  the reason was: %s\n", rl_last_error());
    rl_model_free(model);
  }
}

void tables_that_do_not_fit_are_refused() {
  using Spoil = std::function<void(TinyModel&)>;
  int32_t rl_decoder::* const sizes[] = {&rl_decoder::hidden, &rl_decoder::heads, &rl_decoder::kv_heads, &rl_decoder::head_dim,
                                         &rl_decoder::vocab, &rl_decoder::num_layers,
                                         &rl_decoder::max_context, &rl_decoder::num_blocks, &rl_decoder::max_step_tokens};
  for (auto size : sizes)
    for (int value : {0, -1, kLeast, kHuge}) refused_model("a size out of all bounds", [&](TinyModel& t) { t.decoder.*size = value; }, "size");
  for (auto size : {&rl_decoder::hidden, &rl_decoder::heads, &rl_decoder::vocab, &rl_decoder::head_dim})
    for (int value : {kHuge, kHuge - 1, 1 << 30, 1 << 16})
      refused_model("a size its matrices do not have", [&](TinyModel& t) { t.decoder.*size = value; }, "");

  const std::pair<const char*, Spoil> cases[] = {
      {"head size|odd head", [](TinyModel& t) { t.decoder.head_dim = 7; }},
      {"head size|wide head", [](TinyModel& t) { t.decoder.head_dim = 258; }},
      {"evenly|5 heads on 3 KV heads", [](TinyModel& t) { t.decoder.heads = 5, t.decoder.kv_heads = 3; }},
      {"KV format|no such KV format", [](TinyModel& t) { t.decoder.kv_format = 4; }},
      {"KV format|a negative KV format", [](TinyModel& t) { t.decoder.kv_format = -1; }},
      {"activation|no such activation", [](TinyModel& t) { t.layer(0).activation = 4; }},
      {"layers|no layers", [](TinyModel& t) { t.decoder.layers = nullptr; }},
      {"final norm|no final norm", [](TinyModel& t) { t.decoder.final_norm = {}; }},
      {"embedding|no embedding", [](TinyModel& t) { t.decoder.embedding.data = nullptr; }},
      {"embedding|a narrow embedding", [](TinyModel& t) { t.decoder.embedding.k--; }},
      {"lm_head|a short head", [](TinyModel& t) { t.decoder.lm_head.n--; }},
      {"lm_head|a head of no format", [](TinyModel& t) { t.decoder.lm_head.format = RL_F8 + 1; }},
      {"layer 0: qkv|a short qkv", [](TinyModel& t) { t.layer(0).qkv.n -= 2; }},
      {"layer 0: output|a transposed output", [](TinyModel& t) { std::swap(t.layer(0).output.n, t.layer(0).output.k), t.layer(0).output.n++; }},
      {"layer 0: output|an output of a negative format", [](TinyModel& t) { t.layer(0).output.format = -1; }},
      {"one scale|rows too wide for one scale",
       [](TinyModel& t) { t.layer(0).output.k = 1 << 17, t.layer(0).output.format = RL_Q8_C; }},
      {"norm|no such norm", [](TinyModel& t) { t.decoder.norm_kind = 2; }},
      {"attn_norm|a bias of RMSNorm",
       [](TinyModel& t) { t.decoder.norm_kind = RL_RMS_NORM, t.layer(0).attn_norm = {t.decoder.final_norm.weight, t.decoder.final_norm.weight}, t.decoder.final_norm.bias = nullptr; }},
      {"post_ffn_norm|a norm's bias without its weight",
       [](TinyModel& t) { t.decoder.norm_kind = RL_LAYER_NORM, t.layer(0).post_ffn_norm = {nullptr, t.decoder.final_norm.weight}; }},
      {"norm|one head norm of two",
       [](TinyModel& t) { t.layer(0).qk_norm = RL_QK_NORM_HEAD, t.layer(0).q_norm = t.decoder.final_norm.weight, t.layer(0).k_norm = nullptr; }},
      {"qk_norm|no such norm of heads", [](TinyModel& t) { t.layer(0).qk_norm = 6; }},
      {"q_norm|scaled queries without factors",
       [](TinyModel& t) { t.layer(0).qk_norm = RL_QK_SCALED, t.layer(0).q_norm = t.layer(0).k_norm = nullptr; }},
      {"q_norm|a norm of heads with weights that it does not have",
       [](TinyModel& t) { t.layer(0).qk_norm = RL_QK_NORM_UNIT, t.layer(0).q_norm = t.layer(0).k_norm = t.decoder.final_norm.weight; }},
      {"qk_norm|a norm of heads that is not asked for",
       [](TinyModel& t) { t.layer(0).qk_norm = RL_QK_PLAIN, t.layer(0).q_norm = t.layer(0).k_norm = t.decoder.final_norm.weight; }},
      {"positions|too few positions", [](TinyModel& t) { t.decoder.positions = t.decoder.embedding, t.decoder.positions.n = 199; }},
      {"positions|narrow positions", [](TinyModel& t) { t.decoder.positions = t.decoder.embedding, t.decoder.positions.k++; }},
      {"window|chunks without a window", [](TinyModel& t) { t.layer(0).window = 0, t.layer(0).chunked = 1; }},
      {"FFN|no such FFN", [](TinyModel& t) { t.layer(0).ffn_kind = 3; }},
      {"FFN size|an FFN of no size", [](TinyModel& t) { t.layer(0).ffn_kind = RL_FFN_GATED, t.layer(0).ffn = 0; }},
      {"FFN size|a negative FFN", [](TinyModel& t) { t.layer(0).ffn = -1; }},
      {"rotary|an odd rotary size", [](TinyModel& t) { t.layer(0).rotary_dim = 3; }},
      {"rotary|a rotary size beyond the head", [](TinyModel& t) { t.layer(0).rotary_dim = t.decoder.head_dim + 2; }},
      {"rotary|a negative rotary size", [](TinyModel& t) { t.layer(0).rotary_dim = -2; }},
      {"rotary|no rotary tables", [](TinyModel& t) { t.layer(0).rotary_dim = 2, t.layer(0).sine = nullptr; }},
      {"window|a negative window", [](TinyModel& t) { t.layer(0).window = -1; }},
      {"layer |a flaw in the last layer", [](TinyModel& t) { t.layer(t.decoder.num_layers - 1).window = kLeast; }},
  };
  for (const auto& [text, spoil] : cases) {
    const std::string both = text;
    refused_model(both.substr(both.find('|') + 1).c_str(), spoil, both.substr(0, both.find('|')).c_str());
  }
}

// The first layer with this FFN, of the first seeds that have one.
void refused_ffn(const char* what, int kind, const std::function<void(rl_layer&)>& spoil, const char* words) {
  int found = 0;
  for (uint64_t seed = 1; seed <= 60 && found < 3; seed++) {
    TinyModel tiny(seed, kAnyFormat, RL_KV_BF16, true);
    rl_layer* layer = nullptr;
    for (int i = 0; i < tiny.decoder.num_layers && !layer; i++)
      if (tiny.layer(i).ffn_kind == kind && tiny.layer(i).ffn) layer = &tiny.layer(i);
    if (!layer) continue;
    found++;
    spoil(*layer);
    about("an FFN with %s, seed %d", what, int(seed));
    CHECK(rl_model_create(&tiny.decoder, isa.c_str(), 2) == nullptr);
    if (!CHECK(std::string(rl_last_error()).find(words) != std::string::npos)) std::fprintf(stderr, "  the reason was: %s\n", rl_last_error());
  }
  CHECK(found > 0);
}

void ffns_that_do_not_fit_are_refused() {
  for (int kind : {RL_FFN_GATED, RL_FFN_PLAIN, RL_FFN_EXPERTS}) {
    refused_ffn("an unpadded gate_up", kind, [](rl_layer& l) { l.gate_up.n--; }, "gate_up");
    refused_ffn("a wide down", kind, [](rl_layer& l) { l.down.k++; }, "down");
    refused_ffn("a down of a negative format", kind, [](rl_layer& l) { l.down.format = -1; }, "down");
    refused_ffn("another size", kind, [](rl_layer& l) { l.ffn += 33; }, "gate_up");
  }
  const std::pair<const char*, std::function<void(rl_experts&)>> cases[] = {
      {"size|no experts", [](rl_experts& e) { e.num = 0; }},
      {"size|too many experts", [](rl_experts& e) { e.num = kHuge; }},
      {"size|experts of no size", [](rl_experts& e) { e.size = 0; }},
      {"size|no groups", [](rl_experts& e) { e.groups = 0; }},
      {"size|no experts for a token", [](rl_experts& e) { e.per_token = -1; }},
      {"cannot use|more experts for a token than there are", [](rl_experts& e) { e.per_token = e.num + 1; }},
      {"evenly|uneven groups", [](rl_experts& e) { e.groups = e.num + 1; }},
      {"groups|more best groups than groups", [](rl_experts& e) { e.top_groups = e.groups + 1; }},
      {"experts|groups of too few experts", [](rl_experts& e) { e.groups = e.num, e.top_groups = 1, e.per_token = 2; }},
      {"scores|no such scores", [](rl_experts& e) { e.scores = 3; }},
      {"sparsemixer|a margin below 0", [](rl_experts& e) { e.scores = RL_SPARSEMIXER, e.choice_bias = nullptr, e.margin = -1; }},
      {"clamp|a negative clamp", [](rl_experts& e) { e.clamp = -1; }},
      {"clamp|a clamp that is no number", [](rl_experts& e) { e.clamp = std::numeric_limits<float>::quiet_NaN(); }},
      {"router|a short router", [](rl_experts& e) { e.router.n--; }},
      {"router|a router without its shared gate", [](rl_experts& e) { e.shared_gate = !e.shared_gate; }},
      {"gate_up|one expert's gate_up too few", [](rl_experts& e) { e.gate_up.n -= 2 * round_to(e.size, 16); }},
      {"down|no data for down", [](rl_experts& e) { e.down.data = nullptr; }},
      {"down|a wide down of experts", [](rl_experts& e) { e.down.k++; }},
  };
  for (const auto& [text, spoil] : cases) {
    const std::string both = text;
    refused_ffn(both.substr(both.find('|') + 1).c_str(), RL_FFN_EXPERTS,
                [&](rl_layer& l) { spoil(l.experts); }, both.substr(0, both.find('|')).c_str());
  }
}

// A kernel that promises any amount of memory gives the model; what must not happen is anything but these two.
void more_memory_than_there_is_is_refused() {
  TinyModel tiny(1, RL_F32, RL_KV_F32, true);
  tiny.decoder.num_blocks = 1 << 24;
  about("2^24 blocks");
  rl_model* model = rl_model_create(&tiny.decoder, isa.c_str(), 2);
  CHECK(model ? rl_model_bytes(model) > int64_t(16) << 30 : std::string(rl_last_error()).find("memory") != std::string::npos);
  rl_model_free(model);
}

void an_instruction_set_that_is_none_is_refused() {
  TinyModel tiny(1, RL_F32, RL_KV_F32, true);
  for (const char* name : {"sse9", "AVX512", "portable,avx2", " "}) {
    about("the instruction set '%s'", name);
    CHECK(rl_model_create(&tiny.decoder, name, 1) == nullptr);
    CHECK(std::string(rl_last_error()).find(name) != std::string::npos);
  }
  about("no name: the best");
  rl_model* best = rl_model_create(&tiny.decoder, nullptr, 1);
  if (CHECK(best != nullptr)) CHECK(std::string(rl_available_isas()).rfind(rl_model_isa(best), 0) == 0);
  rl_model_free(best);
  for (int threads : {0, -5}) {
    about("%d threads are one", threads);
    rl_model* model = rl_model_create(&tiny.decoder, isa.c_str(), threads);
    CHECK(model != nullptr && isa == rl_model_isa(model) && rl_model_bytes(model) > 0);
    rl_model_free(model);
  }
}

// ---- steps ----

void steps_that_make_no_sense_are_refused_and_change_nothing() {
  struct Spoilt {
    const char *what, *words;
    std::function<void(StepArrays&, rl_step&)> spoil;
  };
  const Spoilt cases[] = {
      {"no tokens", "tokens", [](StepArrays&, rl_step& s) { s.num_tokens = 0; }},
      {"fewer than no tokens", "tokens", [](StepArrays&, rl_step& s) { s.num_tokens = kLeast; }},
      {"too many tokens", "tokens", [](StepArrays&, rl_step& s) { s.num_tokens = 65; }},
      {"2^31 tokens", "tokens", [](StepArrays&, rl_step& s) { s.num_tokens = kHuge; }},
      {"no rows", "rows", [](StepArrays&, rl_step& s) { s.num_rows = 0; }},
      {"-1 rows", "rows", [](StepArrays&, rl_step& s) { s.num_rows = -1; }},
      {"2^31 rows", "rows", [](StepArrays&, rl_step& s) { s.num_rows = kHuge; }},
      {"a row left out", "rows", [](StepArrays&, rl_step& s) { s.num_rows--; }},
      {"a start above 0", "rows", [](StepArrays& a, rl_step&) { a.starts[0] = 1; }},
      {"a start below 0", "rows", [](StepArrays& a, rl_step&) { a.starts[0] = -1; }},
      {"an empty row", "row 1", [](StepArrays& a, rl_step&) { a.starts[2] = a.starts[1]; }},
      {"a row that ends before it starts", "row", [](StepArrays& a, rl_step&) { a.starts[1] = a.starts[2] + 1; }},
      {"a row beyond the tokens", "row", [](StepArrays& a, rl_step&) { a.starts[1] = kHuge; }},
      {"a row of negative starts", "row", [](StepArrays& a, rl_step&) { a.starts[1] = kLeast; }},
      {"an end beyond the tokens", "rows", [](StepArrays& a, rl_step&) { a.starts.back() = kHuge; }},
      {"a token id of -1", "token id -1", [](StepArrays& a, rl_step&) { a.tokens[3] = -1; }},
      {"a token id beyond the vocabulary", "token id", [](StepArrays& a, rl_step&) { a.tokens.back() = kHuge; }},
      {"the first id that is no token", "token id", [](StepArrays& a, rl_step&) { a.tokens[0] = 1000; }},
      {"a position of -1", "position", [](StepArrays& a, rl_step&) { a.positions.back() = -1; }},
      {"the least position", "position", [](StepArrays& a, rl_step&) { a.positions.back() = kLeast; }},
      {"the largest position", "position", [](StepArrays& a, rl_step&) { a.positions.back() = kHuge; }},
      {"positions that reach beyond the largest", "position", [](StepArrays& a, rl_step&) { a.positions[0] = kHuge; }},
      {"a position beyond the context", "context", [](StepArrays& a, rl_step&) { a.positions.back() = 200; }},
      {"a gap between positions", "consecutive", [](StepArrays& a, rl_step&) { a.positions[2] = 7; }},
      {"positions that go back", "consecutive", [](StepArrays& a, rl_step&) { a.positions[2] = 0; }},
      {"a table too short", "block table", [](StepArrays& a, rl_step&) { a.positions.back() = 199; }},
      {"no table", "block table", [](StepArrays&, rl_step& s) { s.table_width = 0; }},
      {"a table of width -1", "block table", [](StepArrays&, rl_step& s) { s.table_width = -1; }},
      {"block -1", "block -1", [](StepArrays& a, rl_step&) { a.tables[1] = -1; }},
      {"a block beyond the cache", "block 60", [](StepArrays& a, rl_step&) { a.tables[0] = 60; }},
      {"block 2^31", "block", [](StepArrays& a, rl_step&) { a.tables[0] = kHuge; }},
      {"logits of token -1", "logits", [](StepArrays& a, rl_step&) { a.logit_rows[0] = -1; }},
      {"logits of a token that is not there", "logits", [](StepArrays& a, rl_step& s) { a.logit_rows[0] = s.num_tokens; }},
      {"logits of a token twice", "order", [](StepArrays& a, rl_step&) { a.logit_rows[1] = a.logit_rows[0]; }},
      {"-1 logits", "logits", [](StepArrays&, rl_step& s) { s.num_logits = -1; }},
      {"more logits than tokens", "logits", [](StepArrays& a, rl_step& s) {
         a.logit_rows.push_back(0), s.logit_rows = a.logit_rows.data(), s.num_logits++;
       }},
  };
  TinyModel tiny(5, kAnyFormat, RL_KV_INT8, true);
  Random random(5);
  const std::vector<Sequence> sequences = random_sequences(tiny, random, {25, 18, 20});
  Session session(tiny.decoder, isa, 2);
  const std::vector<Piece> pieces = {{&sequences[0], 0, 25}, {&sequences[1], 0, 18}, {&sequences[2], 0, 1}};
  const Logits before = session.step(pieces);
  for (const Spoilt& c : cases) {
    StepArrays arrays(pieces);
    rl_step step = arrays.step();
    c.spoil(arrays, step);
    Aligned<float> logits(1);  // nothing may be written
    const float untouched = logits[0];
    about("a step with %s", c.what);
    int32_t best = kHuge;
    CHECK_REFUSED(rl_step_execute(session.model.get(), &step, logits.data(), &best), c.words);
    CHECK(std::memcmp(&logits[0], &untouched, 4) == 0);
    CHECK_EQUAL(best, kHuge);
  }
  about("logits that nobody takes");
  const StepArrays arrays(pieces);
  const rl_step step = arrays.step();
  CHECK_REFUSED(rl_step_execute(session.model.get(), &step, nullptr, nullptr), "no place");
  about("the model after all those refusals");
  CHECK(same_bits(session.step(pieces), before));
}

void blocks_that_are_none_are_not_copied() {
  TinyModel tiny(2, RL_F32, RL_KV_INT8, true);
  Session session(tiny.decoder, isa, 1);
  const int blocks = tiny.decoder.num_blocks;
  for (int bad : {-1, blocks, kHuge, kLeast}) {
    about("block %d of %d", bad, blocks);
    CHECK_REFUSED(rl_copy_block(session.model.get(), bad, 0), "block");
    CHECK_REFUSED(rl_copy_block(session.model.get(), 0, bad), "block");
  }
  CHECK_OK(rl_copy_block(session.model.get(), 0, blocks - 1));
}

}  // namespace

int main() {
  isa = isa_under_test();
  tables_that_do_not_fit_are_refused();
  ffns_that_do_not_fit_are_refused();
  more_memory_than_there_is_is_refused();
  an_instruction_set_that_is_none_is_refused();
  steps_that_make_no_sense_are_refused_and_change_nothing();
  blocks_that_are_none_are_not_copied();
  return report();
}
