"""The bytes that the GPU decoder preallocates besides weights and KV cache: arithmetic only, no torch.

One entry per buffer of `cuda_buffers`, and the buffers of the runner and its sampler. The memory plan uses
the sum before anything is loaded, so an entry may be a little too large, but never too small.
"""

from __future__ import annotations

from ridgeline.models.spec.ffn import Dense, Experts
from ridgeline.models.spec.mixers import Attention
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.weights.low_bits.plan import NOTHING_LOW, LowBitPlan
from ridgeline.ops.low_bit_formats import ScratchSizes

LADDER_STEP = 32  # decode batches are padded to a size that has a graph
SPLIT_TOKENS = 256  # larger steps do not split products
# A partial sum for each program: tiles on all multiprocessors.
SPLITS_MOST, SPLIT_NUMBERS = 16, 200 * 128 * 256
GATHER_TOKENS_MOST, GATHER_UNIT = 1 << 17, 128
BLOCK_TOKENS = 16
SMS = 132
PART_PROGRAMS, PARTS_MOST, PARTS_OF_MANY = 8 * SMS, 64, 2  # programs for few decode rows, parts of each row
PREFIX_PARTS_MOST, PREFIX_TILE_HEADS = 16, 128  # of a shared prefix, and the heads of its tiles
EXPERT_TILE, SORTED_PAIRS = 16, 256  # rows of the smallest tile of experts, pairs sorted by a program
ROW_NUMBERS = 4096  # for a sequence's sampling: parameters, biases, end tokens
LOGPROB_PART_TOKENS, LOGPROB_PART_BYTES = 2048, 192
FLOAT_BYTES, INT_BYTES = 4, 4


def workspace(
    spec: ModelSpec,
    dtype_bytes: int,
    step_tokens: int,
    max_running: int,
    max_context: int,
    low: LowBitPlan = NOTHING_LOW,
) -> dict[str, int]:
    """Bytes of every buffer, by name."""
    rows = -(-max_running // LADDER_STEP) * LADDER_STEP
    tokens = max(step_tokens, rows)
    kept_rows = 2 * rows  # finished sequences keep theirs until the step in flight has landed
    blocks = -(-max_context // BLOCK_TOKENS)
    hidden, ffn, head = spec.hidden_size, spec.ffn_size, spec.head_dim
    heads, qkv = spec.num_heads * head, (spec.num_heads + 2 * spec.num_kv_heads) * head
    shared = any(isinstance(layer.ffn, Experts) and layer.ffn.shared_size for layer in spec.layers)
    ropes = {mixer.rope for mixer in spec.attentions if mixer.rope is not None}
    return {
        "residual": tokens * hidden * dtype_bytes,
        "normed": (tokens + rows) * hidden * dtype_bytes,
        "branch": tokens * hidden * dtype_bytes,
        "qkv": tokens * qkv * dtype_bytes,
        "q": tokens * heads * dtype_bytes,
        "attended": tokens * heads * dtype_bytes,
        "gate_up": tokens * 2 * gated_size(spec) * dtype_bytes,
        "gated": tokens * ffn * dtype_bytes,
        "partials": _partials(max(qkv, hidden, ungated_size(spec))) * FLOAT_BYTES,
        "logits": rows * spec.vocab_size * dtype_bytes,
        "gather": 2 * spec.num_kv_heads * _gather_tokens(tokens, max_context) * head * dtype_bytes,
        "splits": _decode_parts(rows, spec) * (spec.num_heads * (head + 2) + spec.num_kv_heads) * FLOAT_BYTES,
        "rope": sum(2 * max_context * (rope.dim // 2) * FLOAT_BYTES for rope in ropes),
        "experts": _experts(spec, dtype_bytes, tokens),
        "shared": tokens * hidden * dtype_bytes if shared else 0,
        "shared_scale": tokens * dtype_bytes if shared else 0,
        "low_bits": _low_bits(spec, dtype_bytes, tokens, low),
        "inputs": (20 * tokens + 3 * kept_rows * (blocks + LADDER_STEP)) * INT_BYTES,
        "sampling": _sampling(spec.vocab_size, rows, kept_rows),
    }


def low_scratch_sizes(spec: ModelSpec, low: LowBitPlan, tokens: int) -> ScratchSizes:
    """What products with matrices in 8 and 4 bits share, for steps of up to `tokens` tokens."""
    sizes = ScratchSizes()
    for (number, name), format in low.formats.items():
        layer = spec.layers[number]
        mixer, ffn = layer.mixer, layer.ffn
        assert isinstance(mixer, Attention)
        assert ffn is not None
        hidden, heads = spec.hidden_size, mixer.heads * mixer.head_dim
        if isinstance(ffn, Experts) and name.startswith("experts"):
            pairs = tokens * ffn.per_token
            size = ffn.size
            rows, columns, count = (2 * size, hidden, tokens) if "gate" in name else (hidden, size, pairs)
            sizes = sizes.with_matrix(format, rows, columns, count, stack=True)
            continue
        size = ffn.dense_size
        shape = {
            "qkv": (heads + 2 * mixer.kv_heads * mixer.head_dim, hidden),
            "o": (hidden, heads),
            "gate_up": (2 * size, hidden),
            "up": (size, hidden),
            "down": (hidden, size),
        }[name]
        sizes = sizes.with_matrix(format, *shape, tokens)
    return sizes


def _low_bits(spec: ModelSpec, dtype_bytes: int, tokens: int, low: LowBitPlan) -> int:
    sizes = low_scratch_sizes(spec, low, tokens)
    return sizes.codes + sizes.steps * FLOAT_BYTES + sizes.wide * dtype_bytes


def gated_size(spec: ModelSpec) -> int:
    """Of the widest dense FFN or shared part with a gate."""
    return max(
        (layer.ffn.dense_size for layer in spec.layers if layer.ffn is not None and layer.ffn.gated),
        default=0,
    )


def ungated_size(spec: ModelSpec) -> int:
    """Of the widest dense FFN without a gate; 0 if every layer has one."""
    found = (layer.ffn for layer in spec.layers if isinstance(layer.ffn, Dense) and not layer.ffn.gated)
    return max((ffn.size for ffn in found), default=0)


def _partials(widest: int) -> int:
    """Float32 elements of the widest split product: few parts of many tiles, or many parts of few."""
    whole = SPLIT_TOKENS * widest
    return min(SPLITS_MOST * whole, max(whole, SPLIT_NUMBERS))


def _decode_parts(most_rows: int, spec: ModelSpec) -> int:
    """The most parts of all rows of a decode batch together: few rows are split into many parts."""
    group = spec.num_heads // spec.num_kv_heads
    rows_per_tile = max(1, PREFIX_TILE_HEADS // (1 << (group - 1).bit_length()))
    most = 0
    for rows in range(1, most_rows + 1):
        pairs = rows * spec.num_kv_heads
        splits = max(PARTS_OF_MANY, min(PARTS_MOST, -(-PART_PROGRAMS // pairs)))
        tiles = -(-rows // rows_per_tile) * spec.num_kv_heads
        most = max(most, rows * (splits + max(1, min(PREFIX_PARTS_MOST, SMS // tiles))))
    return most + most_rows


def _experts(spec: ModelSpec, dtype_bytes: int, tokens: int) -> int:
    """The choices, and each pair of a token and an expert."""
    kinds = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, Experts)}
    if not kinds:
        return 0
    num, size = max(ffn.num for ffn in kinds), max(ffn.size for ffn in kinds)
    pairs = tokens * max(ffn.per_token for ffn in kinds)
    choices = pairs * (INT_BYTES + FLOAT_BYTES) + tokens * num * dtype_bytes
    results = pairs * (size + spec.hidden_size) * dtype_bytes
    tiles = num + pairs // EXPERT_TILE + 1
    sort = (pairs + 4 * tiles + (pairs // SORTED_PAIRS + 1) * 2 * (num + 1) + 64) * INT_BYTES
    return choices + results + sort


def _gather_tokens(tokens: int, max_context: int) -> int:
    wanted = (1 + tokens // max(1, max_context)) * max_context
    return min(-(-wanted // GATHER_UNIT) * GATHER_UNIT, GATHER_TOKENS_MOST)


def _sampling(vocab: int, rows: int, kept_rows: int) -> int:
    """Rows' parameters; and, on first use: modified logits, token counts, log-probabilities."""
    state = kept_rows * ROW_NUMBERS * INT_BYTES
    logprobs = kept_rows * -(-vocab // LOGPROB_PART_TOKENS) * LOGPROB_PART_BYTES
    return state + logprobs + 2 * rows * vocab * FLOAT_BYTES
