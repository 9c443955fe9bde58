/* The library's C interface: everything Python needs, nothing else.
 *
 * Functions that can fail return 0, or -1 (pointers: null) with a reason in rl_last_error(). Everything a caller
 * passes is checked before a kernel reads through it. A model is used by one thread at a time; it runs its own. */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RL_ABI_VERSION 8
#define RL_BLOCK_TOKENS 16 /* tokens of a KV block */
#define RL_PANEL 16        /* output rows side by side in a packed matrix */
#define RL_GROUP 32        /* weights of a row that share a scale */

typedef struct rl_model rl_model;

/* How a matrix is packed; the layouts are in src/formats.h. Q4 and Q8 weights are scale · q + minimum, q unsigned. */
enum rl_format {
  RL_F32 = 0,
  RL_BF16 = 1,
  RL_Q4_H = 2,  /* 4 bits, half-precision scale per group, minimum = -8 · scale (GGUF Q4_0) */
  RL_Q4_HM = 3, /* 4 bits, half-precision scale and minimum per group (GGUF Q4_1) */
  RL_Q4_K = 4,  /* 4 bits, 6-bit scale and minimum per group, half-precision units of them per 256 (GGUF Q4_K) */
  RL_Q4_Z = 5,  /* 4 bits, half-precision scale and a zero point per group, minimum = -zero · scale (AWQ, GPTQ) */
  RL_Q8_H = 6,  /* 8 bits, half-precision scale per group, minimum = -128 · scale (GGUF Q8_0) */
  RL_Q8_FM = 7, /* 8 bits, float scale and minimum per group (GGUF Q5_*) */
  RL_Q8_C = 8,  /* 8 bits, float scale per output row (per channel), minimum = -128 · scale */
  RL_Q6_K = 9,  /* 6 bits, 8-bit scale per 16, half-precision unit of it per 256, minimum = -32 · scale (GGUF Q6_K) */
  RL_F8 = 10,   /* 8-bit floats (E4M3), float scale per 128 weights of a row */
};

enum rl_kv_format {
  RL_KV_F32 = 0,
  RL_KV_BF16 = 1,
  RL_KV_INT8 = 2, /* a float scale per token and head */
  RL_KV_INT4 = 3, /* a bfloat16 scale and minimum per token and head */
};
enum rl_activation { RL_SILU = 0, RL_GELU_TANH = 1, RL_GELU_ERF = 2, RL_RELU = 3 };

/* What differs between families, as tags. */
enum rl_norm_kind { RL_RMS_NORM = 0, RL_LAYER_NORM = 1 };
enum rl_qk_norm {
  RL_QK_PLAIN = 0,
  RL_QK_NORM_HEAD = 1,       /* of each head, with one weight for all of them */
  RL_QK_NORM_PROJECTION = 2, /* over all heads */
  RL_QK_NORM_HEADS = 3,      /* of each head, with its own weights */
  RL_QK_NORM_UNIT = 4,       /* of each head after its rotation, without weights */
  RL_QK_SCALED = 5,          /* no norm: queries are multiplied by a factor of their position */
};
enum rl_ffn_kind { RL_FFN_GATED = 0, RL_FFN_PLAIN = 1, RL_FFN_EXPERTS = 2 };
enum rl_scores {
  RL_SOFTMAX = 0,
  RL_SIGMOID = 1,
  RL_SPARSEMIXER = 2, /* each chosen expert has its share of a softmax over those that are left and near it */
};

/* A packed matrix [n, k]: data as rl_pack_* wrote it, 64-byte aligned, kept by the caller. bias: n floats, or null. */
typedef struct {
  int32_t n, k, format;
  const uint8_t* data;
  const float* bias;
} rl_matrix;

/* A norm's float weights, ready to multiply with (Gemma's 1 included). No weight: no norm. bias: LayerNorm alone, or null. */
typedef struct {
  const float *weight, *bias;
} rl_norm;

/* Routed experts. Of the stacked matrices expert e has the panels e · (panels / num) and up, its last one padded with zero rows. */
typedef struct {
  int32_t num, per_token;
  int32_t size;               /* of one expert */
  int32_t scores;             /* rl_scores; the first two over all experts */
  int32_t normalized;         /* the chosen experts' weights are divided by their sum */
  int32_t scales_input;       /* weights multiply an expert's input, not its output */
  int32_t groups, top_groups; /* experts are chosen within the best groups; a group is as good as its two best experts */
  int32_t shared_gate;        /* the sigmoid of one more router output scales the part that all tokens use */
  float scale;                /* of the weights */
  float clamp;                /* 0: none; else g · sigmoid(1.702 · g) · (u + 1), with gate and up limited */
  float margin;               /* RL_SPARSEMIXER: logits up to this share below the best are near it */
  rl_matrix router;           /* [num, with a shared gate num + 1; hidden] */
  const float* choice_bias;   /* [num], added to the scores for the choice alone; or null */
  rl_matrix gate_up;          /* [num · 2 · size rounded up to 16, hidden], panels alternate */
  rl_matrix down;             /* [num · hidden rounded up to 16, size] */
} rl_experts;

/* One layer: attention, then an FFN, each with its norm before and after it where there is one. */
typedef struct {
  rl_matrix qkv; /* q rows, then k rows, then v rows; the two halves of a rotated head are [first half, second half] */
  rl_matrix output;
  rl_norm attn_norm, post_attn_norm, ffn_norm, post_ffn_norm;
  const float *q_norm, *k_norm; /* RL_QK_NORM_HEAD: [head_dim]; RL_QK_NORM_UNIT: null; RL_QK_SCALED: q_norm [max_context], the
                                   factors, and null; else [heads · head_dim] and [kv_heads · head_dim] */
  const float* sinks;           /* [heads]: a score that takes part in the softmax and has no value; or null */
  const float *cosine, *sine;   /* [max_context][rotary_dim / 2] */
  float attention_scale, attention_softcap; /* softcap 0: none */
  int32_t rotary_dim;
  int32_t window;  /* 0: full attention */
  int32_t chunked; /* the window does not slide: it begins anew every `window` tokens */
  int32_t qk_norm; /* rl_qk_norm */
  int32_t parallel; /* both parts read the layer's input */
  int32_t ffn_kind, activation; /* rl_ffn_kind, rl_activation */
  int32_t ffn;       /* inner size; of experts: of the part that all tokens use, 0 for none */
  rl_matrix gate_up; /* panels alternate: 16 gate rows, 16 up rows, …; ffn padded up to a multiple of 16 with zero rows.
                        RL_FFN_PLAIN: the up rows alone */
  rl_matrix down;
  rl_experts experts; /* read for RL_FFN_EXPERTS alone */
} rl_layer;

typedef struct {
  int32_t hidden, heads, kv_heads, head_dim, vocab;
  int32_t num_layers, max_context;
  int32_t num_blocks, kv_format, max_step_tokens;
  int32_t deterministic; /* one arithmetic for every number of rows: alone = batched = chunked, bit for bit */
  int32_t norm_kind;     /* rl_norm_kind, of every norm */
  float norm_eps, embedding_scale;
  float residual_scale;             /* of what a layer's parts add */
  float logit_scale, logit_softcap; /* the scale comes first; softcap 0: none */
  rl_matrix embedding; /* [vocab, hidden]; the same data as lm_head where tied */
  rl_matrix positions; /* [at least max_context, hidden], added to the embeddings; no data: none */
  rl_matrix lm_head;
  rl_norm final_norm;
  const rl_layer* layers;
} rl_decoder;

/* One step: rows (sequences) packed one after the other along the token axis. */
typedef struct {
  int32_t num_tokens, num_rows, num_logits, table_width;
  int32_t deterministic;       /* this step with the arithmetic of a deterministic model: that of a single row */
  const int32_t* token_ids;    /* [num_tokens] */
  const int32_t* positions;    /* [num_tokens], consecutive inside a row */
  const int32_t* query_starts; /* [num_rows + 1] */
  const int32_t* block_tables; /* [num_rows][table_width] */
  const int32_t* logit_rows;   /* [num_logits], indices into the tokens, ascending */
} rl_step;

int32_t rl_abi_version(void);
const char* rl_last_error(void);
/* Comma-separated names of the instruction sets that run here, best first: amx, avx512, avx512vnni, avxvnni,
 * avx2, portable. */
const char* rl_available_isas(void);

/* ---- packing ---- */

int64_t rl_packed_bytes(int32_t format, int32_t n, int32_t k); /* -1: no such format or shape */
/* Packs floats [n, k] into any format, rounding or quantizing as needed; a value that is not finite is refused. */
int rl_pack_float(int32_t format, int32_t n, int32_t k, const float* source, uint8_t* out);
/* Packs GGUF blocks without loss: Q4_0 → RL_Q4_H, Q4_1 → RL_Q4_HM, Q8_0 → RL_Q8_H, Q4_K → RL_Q4_K, Q6_K → RL_Q6_K, and Q5_0, Q5_1,
 * Q5_K → RL_Q8_FM. `type` is GGUF's number; `format` must be the one named. Row r of the result is row row_map[r] of
 * the source (null: r; -1: a row of zeros), which has source_rows rows. Scales that are not finite are refused. */
int rl_pack_gguf(int32_t type, int32_t format, int32_t n, int32_t k, const uint8_t* source, int32_t source_rows,
                 const int32_t* row_map, uint8_t* out);
/* Packs codes [n, k] as they are, a byte each. RL_F8: E4M3 numbers, scales [n, k / 128 rounded up], no zeros. RL_Q4_Z: 0 … 15, scales
 * that half precision holds and zeros of 0 … 15, both [n, k / 32 rounded up]. A NaN code and a scale that is not finite are refused. */
int rl_pack_codes(int32_t format, int32_t n, int32_t k, const uint8_t* codes, const float* scales, const uint8_t* zeros,
                  uint8_t* out);
/* The floats of rows [first, first + count) of a packed matrix: what every kernel computes with. */
int rl_unpack(const rl_matrix* matrix, int32_t first, int32_t count, float* out);

/* ---- models ---- */

/* isa: a name of rl_available_isas, or null for the best. The decoder's tables are copied; weights are not. */
rl_model* rl_model_create(const rl_decoder* decoder, const char* isa, int32_t threads);
void rl_model_free(rl_model* model);
const char* rl_model_isa(const rl_model* model);
int64_t rl_model_bytes(const rl_model* model); /* KV cache and step buffers, weights not counted */
int rl_copy_block(rl_model* model, int32_t source, int32_t target);
/* For each of a layer's `num` experts, the tokens that chose it since the model was created. Between steps. */
int rl_expert_counts(const rl_model* model, int32_t layer, int64_t* out, int32_t num);
/* One forward pass. logits: [num_logits][vocab]. best: [num_logits], the index of each row's largest logit, the first of
 * equal ones; -1 where the largest is not finite or a logit of the row is not a number. Either may be null: without
 * logits, megabytes less are written. */
int rl_step_execute(rl_model* model, const rl_step* step, float* logits, int32_t* best);

/* ---- encoders: a text in, one vector out; one forward pass, nothing is kept between calls ---- */

typedef struct rl_encoder_model rl_encoder_model;

/* One layer: attention, add, norm; FFN, add, norm. Matrices are all RL_F32 or all RL_BF16; none may lack its bias. */
typedef struct {
  rl_matrix qkv; /* q rows, then k rows, then v rows */
  rl_matrix output, up, down;
  const float *attn_norm, *attn_norm_bias, *ffn_norm, *ffn_norm_bias; /* [hidden] */
} rl_encoder_layer;

typedef struct {
  int32_t hidden, heads, ffn, vocab, types, num_layers;
  int32_t max_positions;   /* rows of `positions` */
  int32_t first_position;  /* of a text's first token: 0, or what lies below it is never used (RoBERTa) */
  int32_t activation;      /* rl_activation, but RL_SILU */
  int32_t max_tokens;      /* of one call */
  float norm_eps;
  const float *words, *positions, *type_rows;  /* [vocab][hidden], [max_positions][hidden], [types][hidden] or null */
  const float *norm, *norm_bias;               /* of the embeddings */
  const rl_encoder_layer* layers;
} rl_encoder;

/* Texts one after the other along the token axis, none padded. type_ids: null means all 0. */
typedef struct {
  int32_t num_tokens, num_texts;
  const int32_t* token_ids;   /* [num_tokens] */
  const int32_t* type_ids;    /* [num_tokens] or null */
  const int32_t* text_starts; /* [num_texts + 1] */
} rl_texts;

/* What becomes of a text's token vectors. MEAN_ROOT: their sum over the root of their number. */
enum rl_pooling { RL_POOL_NONE = 0, RL_POOL_FIRST = 1, RL_POOL_MEAN = 2, RL_POOL_MAX = 3, RL_POOL_MEAN_ROOT = 4, RL_POOL_LAST = 5 };

rl_encoder_model* rl_encoder_create(const rl_encoder* encoder, const char* isa, int32_t threads);
void rl_encoder_free(rl_encoder_model* model);
const char* rl_encoder_isa(const rl_encoder_model* model);
int64_t rl_encoder_bytes(const rl_encoder_model* model); /* buffers of a call, weights not counted */
/* out: [num_texts][hidden], with RL_POOL_NONE [num_tokens][hidden]. normalize: to length 1. A text's vectors do not depend on
 * the other texts of the call, bit for bit. */
int rl_encoder_execute(rl_encoder_model* model, const rl_texts* texts, int32_t pooling, int32_t normalize, float* out);

/* ---- vector search: every row is compared with every query, nothing is approximate ---- */

typedef struct rl_scanner rl_scanner;

/* Rows of at most length 1, kept twice: as bytes, which a scan reads, and as floats, which decide. `capacity` rows, a multiple
 * of 32; rl_scan_store fills one. Rows that were never filled must be masked. */
typedef struct {
  int32_t dimensions;
  int64_t capacity;
  uint8_t* panels;      /* [capacity / 16][padded dimensions / 4][16][4], padded to a multiple of 4; aligned to 64 bytes */
  float *scales;        /* [capacity]: a row is about scale times its bytes */
  float *residuals;     /* [capacity]: at least the length of what the bytes leave out */
  float* vectors;       /* [capacity][dimensions] */
} rl_scan_rows;

rl_scanner* rl_scanner_create(const char* isa, int32_t threads);
void rl_scanner_free(rl_scanner* scanner);
const char* rl_scanner_isa(const rl_scanner* scanner);
/* Writes `count` vectors of at most length 1 to the given rows. */
int rl_scan_store(const rl_scan_rows* rows, const float* vectors, const int32_t* at, int32_t count);
/* The k rows of the largest products with each query (at most length 1), best first, the first of equal ones; row -1 where fewer
 * than k are in the mask. mask: [capacity / 16], bit i of a word is row i of its panel. Exact: a row is left out only where
 * bounds on the bytes' error prove that k others are better. rescored: rows compared as floats, over all queries; may be null. */
int rl_scan_search(rl_scanner* scanner, const rl_scan_rows* rows, const uint16_t* mask, const float* queries, int32_t count,
                   int32_t k, int32_t* found, float* scores, int64_t* rescored);
/* The products of rows and queries as bytes, [count][capacity]: for tests. bytes: [count][padded dimensions], within ±127. */
int rl_scan_products(rl_scanner* scanner, const rl_scan_rows* rows, const int8_t* bytes, int32_t count, int32_t* out);

/* ---- ceilings of this machine, best of a few repeats; -1: no memory or threads to measure with ---- */

enum rl_peak { RL_PEAK_F32 = 0, RL_PEAK_BF16 = 1, RL_PEAK_INT8 = 2 };
double rl_measure_read(const void* memory, int64_t bytes, int32_t threads); /* bytes per second of reading; null: a buffer of its own */
double rl_measure_peak(const char* isa, int32_t kind, int32_t threads);     /* operations per second, registers only; 0: the set has no such unit */

#ifdef __cplusplus
}
#endif
