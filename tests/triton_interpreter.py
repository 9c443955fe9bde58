"""Triton 3.6's interpreter, mended where it differs from a GPU. Importing this mends it; tests of kernels do.

It keeps scalars as arrays of one element, of which numpy 2.4 no longer makes ints; it multiplies the bits of
bfloat16 matrices as if they were integers; it multiplies with the BLAS, where the bits of a row depend on the
rows beside it and on the instruction set; it cuts float32 to bfloat16 where hardware rounds; and it replaces
the whole language again at every call of one kernel function by another, which is most of its time.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor
_convert = interpreter._convert_float
_patch_lang = interpreter._patch_lang
_languages: dict[Any, set[Any]] = {}  # of a kernel function: the modules that it calls the language by
_replaced: set[Any] = set()  # those in use by a kernel that runs


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot(_: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """numpy's einsum: its loops compute every element alike, whatever stands beside it."""
    left, right = (_values(x).astype(d.data.dtype, copy=False) for x in (a, b))
    product = np.einsum("...ik,...kj->...ij", left, right)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _values(x: Any) -> Any:
    if x.dtype == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
        return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)
    return x.data


def _converted(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded).reshape(values.shape)
    if source == tl.bfloat16 and target == tl.float32:
        wide = np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16
        return wide.reshape(values.shape)
    return _convert(values, source, target, rounding_mode)


class _Scope(interpreter._LangPatchScope):
    """What to put back when a kernel ends; nothing, if another one runs around it."""

    def __init__(self, scope: Any = None, modules: frozenset[Any] = frozenset()) -> None:
        super().__init__()
        self._scope, self._modules = scope, modules

    def restore(self) -> None:
        if self._scope is not None:
            self._scope.restore()
            _replaced.difference_update(self._modules)


def _replaced_once(function: Any) -> Any:
    modules = _languages.get(function)
    if modules is None:
        found = (value for value in function.__globals__.values() if inspect.ismodule(value))
        modules = _languages[function] = {value for value in found if value in (tl, tl.core)}
    if modules <= _replaced:
        return _Scope()
    fresh = frozenset(modules - _replaced)
    scope = _Scope(_patch_lang(function), fresh)
    _replaced.update(fresh)
    return scope


interpreter._patch_lang = _replaced_once
interpreter._patch_lang_tensor = _patched
interpreter._convert_float = _converted
interpreter.InterpreterBuilder.create_dot = _dot
