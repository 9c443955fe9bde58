"""The C interface of the native library (native/include/ridgeline_native.h), mirrored for ctypes.

`library` is its only caller. Contains the header's enums, structs and functions, finds and loads the shared
object, and checks arguments. Nothing here knows the purpose of a call.
"""

from __future__ import annotations

import ctypes
import platform
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ABI_VERSION = 8  # RL_ABI_VERSION
ALIGNMENT = 64  # bytes; of every packed matrix

_SUFFIX = "dylib" if platform.system() == "Darwin" else "so"
LIBRARY_PATH = Path(__file__).with_name(f"libridgeline_native.{_SUFFIX}")


class NativeError(Exception):
    """The native library rejected a call, or an instruction set was requested that this CPU lacks."""


class NativeUnavailable(NativeError):
    """This installation has no usable native library; the message says why and what to do."""


class Format(IntEnum):
    """How a packed matrix stores its weights (rl_format)."""

    F32 = 0
    BF16 = 1
    Q4_H = 2
    Q4_HM = 3
    Q4_K = 4
    Q4_Z = 5
    Q8_H = 6
    Q8_FM = 7
    Q8_C = 8
    Q6_K = 9
    F8 = 10


class KvFormat(IntEnum):
    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2
    RELU = 3


class NormKind(IntEnum):
    RMS = 0
    LAYER = 1


class QkNorm(IntEnum):
    """The norm of queries and keys around their rotation (rl_qk_norm)."""

    PLAIN = 0
    HEAD = 1
    PROJECTION = 2
    HEADS = 3
    UNIT = 4
    SCALED = 5


class FfnKind(IntEnum):
    GATED = 0
    PLAIN = 1
    EXPERTS = 2


class Scores(IntEnum):
    """How a router's outputs become scores (rl_scores)."""

    SOFTMAX = 0
    SIGMOID = 1
    SPARSEMIXER = 2


class Pooling(IntEnum):
    """How a text's token vectors are combined (rl_pooling)."""

    NONE = 0
    FIRST = 1
    MEAN = 2
    MAX = 3
    MEAN_ROOT = 4
    LAST = 5


class Peak(IntEnum):
    F32 = 0
    BF16 = 1
    INT8 = 2


@cache
def load() -> Any:
    """The library, loaded once. NativeUnavailable if it is missing, broken or has another version."""
    if not LIBRARY_PATH.exists():
        raise NativeUnavailable(
            f"{LIBRARY_PATH} is missing: ridgeline was installed without its native library. "
            "Install a C++ compiler and reinstall (in a checkout: make native)"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        version = library.rl_abi_version()
        if version == ABI_VERSION:
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{LIBRARY_PATH} cannot be loaded: {error}. Reinstall ridgeline") from error
    raise NativeUnavailable(
        f"{LIBRARY_PATH} has interface version {version}, but ridgeline needs {ABI_VERSION}. "
        "Reinstall ridgeline (in a checkout: make native)"
    )


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns 0, or -1 with a reason."""
    if getattr(load(), name)(*arguments):
        raise NativeError(f"{name}: {last_error()}")


def last_error() -> str:
    return str(load().rl_last_error().decode(errors="replace"))


def address(array: NDArray[Any], dtype: DTypeLike, shape: tuple[int, ...], what: str) -> int:
    """The address of the array's data, if it has the type and shape the library reads, without gaps."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        gaps = "" if array.flags.c_contiguous else ", not contiguous"
        raise NativeError(
            f"{what} must be a contiguous {np.dtype(dtype).name} array of shape {list(shape)}, "
            f"not {array.dtype.name} of shape {list(array.shape)}{gaps}"
        )
    return array.ctypes.data


def check_buffer(data: NDArray[np.uint8], size: int, what: str) -> None:
    """Reject a packed matrix's buffer that is too small for the kernels, or not aligned."""
    start = address(data, np.uint8, (size,), what)
    if start % ALIGNMENT:
        raise NativeError(f"{what} must be aligned to {ALIGNMENT} bytes")


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class CNorm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


EXPERTS_INTS = (
    *("num", "per_token", "size", "scores", "normalized", "scales_input"),
    *("groups", "top_groups", "shared_gate"),
)
EXPERTS_FLOATS = ("scale", "clamp", "margin")


class CExperts(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in EXPERTS_INTS),
        *((name, c_float) for name in EXPERTS_FLOATS),
        ("router", CMatrix),
        ("choice_bias", c_void_p),
        ("gate_up", CMatrix),
        ("down", CMatrix),
    )


LAYER_NORMS = ("attn_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")
LAYER_FLOATS = ("attention_scale", "attention_softcap")
LAYER_INTS = (
    *("rotary_dim", "window", "chunked", "qk_norm", "parallel"),
    *("ffn_kind", "activation", "ffn"),
)


class CLayer(ctypes.Structure):
    _fields_ = (
        ("qkv", CMatrix),
        ("output", CMatrix),
        *((name, CNorm) for name in LAYER_NORMS),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks", "cosine", "sine")),
        *((name, c_float) for name in LAYER_FLOATS),
        *((name, c_int32) for name in LAYER_INTS),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("experts", CExperts),
    )


DECODER_INTS = (
    *("hidden", "heads", "kv_heads", "head_dim", "vocab", "num_layers", "max_context"),
    *("num_blocks", "kv_format", "max_step_tokens", "deterministic", "norm_kind"),
)
DECODER_FLOATS = ("norm_eps", "embedding_scale", "residual_scale", "logit_scale", "logit_softcap")


class CDecoder(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in DECODER_INTS),
        *((name, c_float) for name in DECODER_FLOATS),
        ("embedding", CMatrix),
        ("positions", CMatrix),
        ("lm_head", CMatrix),
        ("final_norm", CNorm),
        ("layers", POINTER(CLayer)),
    )


class CStep(ctypes.Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in ("num_tokens", "num_rows", "num_logits", "table_width", "deterministic")
        ),
        *(
            (name, c_void_p)
            for name in ("token_ids", "positions", "query_starts", "block_tables", "logit_rows")
        ),
    )


ENCODER_MATRICES = ("qkv", "output", "up", "down")
ENCODER_NORMS = ("attn_norm", "attn_norm_bias", "ffn_norm", "ffn_norm_bias")


class CEncoderLayer(ctypes.Structure):
    _fields_ = (
        *((name, CMatrix) for name in ENCODER_MATRICES),
        *((name, c_void_p) for name in ENCODER_NORMS),
    )


ENCODER_INTS = (
    *("hidden", "heads", "ffn", "vocab", "types", "num_layers", "max_positions", "first_position"),
    *("activation", "max_tokens"),
)


class CEncoder(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ENCODER_INTS),
        ("norm_eps", c_float),
        *((name, c_void_p) for name in ("words", "positions", "type_rows", "norm", "norm_bias")),
        ("layers", POINTER(CEncoderLayer)),
    )


class CTexts(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "num_texts")),
        *((name, c_void_p) for name in ("token_ids", "type_ids", "text_starts")),
    )


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "rl_abi_version": (c_int32, []),
    "rl_last_error": (c_char_p, []),
    "rl_available_isas": (c_char_p, []),
    "rl_packed_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "rl_pack_float": (c_int32, [c_int32, c_int32, c_int32, c_void_p, c_void_p]),
    "rl_pack_gguf": (c_int32, [*[c_int32] * 4, c_void_p, c_int32, c_void_p, c_void_p]),
    "rl_pack_codes": (c_int32, [*[c_int32] * 3, *[c_void_p] * 4]),
    "rl_unpack": (c_int32, [POINTER(CMatrix), c_int32, c_int32, c_void_p]),
    "rl_model_create": (c_void_p, [POINTER(CDecoder), c_char_p, c_int32]),
    "rl_model_free": (None, [c_void_p]),
    "rl_model_isa": (c_char_p, [c_void_p]),
    "rl_model_bytes": (c_int64, [c_void_p]),
    "rl_copy_block": (c_int32, [c_void_p, c_int32, c_int32]),
    "rl_step_execute": (c_int32, [c_void_p, POINTER(CStep), c_void_p, c_void_p]),
    "rl_expert_counts": (c_int32, [c_void_p, c_int32, c_void_p, c_int32]),
    "rl_encoder_create": (c_void_p, [POINTER(CEncoder), c_char_p, c_int32]),
    "rl_encoder_free": (None, [c_void_p]),
    "rl_encoder_isa": (c_char_p, [c_void_p]),
    "rl_encoder_bytes": (c_int64, [c_void_p]),
    "rl_encoder_execute": (c_int32, [c_void_p, POINTER(CTexts), c_int32, c_int32, c_void_p]),
    "rl_measure_read": (c_double, [c_void_p, c_int64, c_int32]),
    "rl_measure_peak": (c_double, [c_char_p, c_int32, c_int32]),
}
