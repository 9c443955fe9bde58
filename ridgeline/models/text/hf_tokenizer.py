"""A tokenizer read from a Hugging Face directory: tokenizer.json and the small JSON files next to it.

tokenizer.json is used unchanged, including whether it adds BOS and EOS; tokenizer_config.json provides what
`transformers` takes from it: special tokens and the chat template. Called by `Tokenizer.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ridgeline.models.errors import BrokenModel
from ridgeline.models.files.config_values import ConfigValues, read_json_object
from ridgeline.models.files.conversion import missing_tokenizer
from ridgeline.models.spec.readers.end_tokens import read_tokenizer_config, token_text
from ridgeline.models.text.tokenizer_parts import TokenizerParts


def read_hf_tokenizer(directory: Path) -> TokenizerParts:
    config = read_tokenizer_config(directory)
    special_tokens = _special_tokens(config)
    backend = _read_backend(directory / "tokenizer.json")
    try:
        _add_configured_tokens(backend, config, special_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BrokenModel(
            f"{directory / 'tokenizer_config.json'}: its added tokens are invalid: {error!r}"
        ) from error
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        add_bos=None,
        add_eos=None,
        chat_template=_chat_template(directory, config),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise missing_tokenizer(path.parent)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise BrokenModel(f"{path}: is not a tokenizer: {error}") from error
    backend.no_truncation()  # a prompt is never truncated silently
    backend.no_padding()
    return backend


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, and the extra ones of some models (image_token, …)."""
    extra = config.get("extra_special_tokens")
    named = {**config, **(extra if isinstance(extra, dict) else {})}
    texts = {name: token_text(value) for name, value in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Add tokens that the configuration declares and tokenizer.json lacks, and mark special ones."""
    declared = {int(index): token for index, token in config.get("added_tokens_decoder", {}).items()}
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    missing = [AddedToken(**token) for _, token in sorted(declared.items()) if token["content"] not in known]
    backend.add_tokens(missing)
    known |= {token.content: token.special for token in missing}
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = [token_text(token) for token in listed] if isinstance(listed, list) else []
    unmarked = [text for text in (*special_tokens.values(), *others) if text and not known.get(text)]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unmarked])


def _chat_template(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Template files take precedence over the configuration; several templates are a table by name."""
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        templates = {name: _read_template(path) for name, path in files.items()}
        return templates["default"] if list(templates) == ["default"] else templates
    configured = config.get("chat_template")
    if not configured and (directory / "chat_template.json").is_file():
        configured = read_json_object(directory / "chat_template.json").get("chat_template")
    if not isinstance(configured, list):
        return ConfigValues({"chat_template": configured}, str(directory)).optional_text("chat_template")
    entries = [ConfigValues(entry, f"{directory}: chat_template") for entry in configured]
    return {entry.text("name"): entry.text("template") for entry in entries}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise BrokenModel(f"{path}: is not UTF-8 text: {error}") from error
