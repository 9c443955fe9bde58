"""Text to token ids and back, and messages to token ids, the same for every kind of model file.

Used by the server and the in-process `LLM`; the engine sees ids only. `encode_chat` is the only way from
messages to ids: the template's text is encoded without adding BOS, so a prompt never starts with two.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ridgeline.models.errors import TemplateError
from ridgeline.models.files.gguf import GgufFile
from ridgeline.models.text.chat_template import MISSING_TEMPLATE, ChatTemplate
from ridgeline.models.text.detokenizer import TokenSpelling, spelling_of
from ridgeline.models.text.gguf_tokenizer import read_gguf_tokenizer
from ridgeline.models.text.hf_tokenizer import read_hf_tokenizer
from ridgeline.models.text.tokenizer_parts import TokenizerParts

MAX_ID = 2**32 - 1
SHORT_CHARACTERS = 4096  # about a millisecond of encoding
PIECE_CHARACTERS = 16_384
PARTS_AT_ONCE = 32  # of `encode_starts`; bounds the memory of a long text's offsets
TOKENS_OF_A_CUT = 16  # more than a text gains when it is cut in the middle of a word
MOST_TOKENS_OF_A_CHARACTER = 4  # its bytes in UTF-8


class CutText(NamedTuple):
    """A text's token ids up to the limit, and its full number of tokens."""

    ids: list[int]
    tokens: int


class TextPair(NamedTuple):
    """Two texts as one: token ids, the text each belongs to, and whether something was cut."""

    ids: list[int]
    types: list[int]
    is_cut: bool


class Tokenizer:
    """A model's tokenizer. Immutable after loading, and thread-safe."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._add_bos, self._add_eos = parts.add_bos, parts.add_eos
        self._bytes: dict[int, bytes] = {}  # cache of token_bytes
        self._whole_texts: dict[int, str | None] = {}  # cache of whole_text
        self._literal_backend: tokenizers.Tokenizer | None = None
        self._literal_lock = threading.Lock()
        decoder = self._backend.decoder
        self.spelling: TokenSpelling | None = (
            None if decoder is None else spelling_of(json.loads(decoder.__getstate__()))
        )
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = parts.special_tokens
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.added_tokens = {token.content: index for index, token in added.items()}
        self.adds_bos = self.bos_id is not None and self.encode("")[:1] == [self.bos_id]
        self.chat_template = (
            None if parts.chat_template is None else ChatTemplate(parts.chat_template, **parts.special_tokens)
        )

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """From a Hugging Face directory or a .gguf file."""
        path = Path(path)
        return cls(read_hf_tokenizer(path)) if path.is_dir() else cls.from_gguf(GgufFile(path))

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        return cls(read_gguf_tokenizer(file.metadata, str(file.path)))

    def encode(self, text: str, add_special: bool = True, allow_special: bool = True) -> list[int]:
        """`add_special`: add BOS and EOS if the model needs them. `allow_special` False: the text of a
        special token, such as <|im_end|>, is encoded as ordinary text; for untrusted text.
        """
        own_ends = self._add_bos is None  # the backend's post-processor adds BOS and EOS itself
        try:
            ids = _encoded(self._backend, text, add_special and own_ends)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the text cannot be encoded as UTF-8: {_unencodable(text)}") from error
        if not allow_special and not self.special_ids.isdisjoint(ids):
            ids = _encoded(self._literal(), text, add_special and own_ends)
        if add_special and self._add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self._add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def tokens_beyond(self, text: str, limit: int) -> int | None:
        """About how many tokens the text has, if more than `limit`; None if it may be fewer.

        Encodes a piece at a time and stops beyond the limit: encoding megabytes takes seconds of a core, and
        creating their ids holds the GIL. A text of a few thousand characters is not checked.
        """
        if len(text) <= max(PIECE_CHARACTERS, limit // MOST_TOKENS_OF_A_CHARACTER):
            return None
        counted = end = 0
        while end < len(text):
            piece = text[end : end + PIECE_CHARACTERS]
            end += len(piece)
            try:
                counted += len(self._backend.encode_batch_fast([piece], add_special_tokens=False)[0])
            except (TypeError, UnicodeEncodeError):
                return None  # `encode` reports what is wrong with it
            counted -= TOKENS_OF_A_CUT
            if counted > limit:
                return counted * len(text) // end
        return None

    def encode_all(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        """Encode texts with their special tokens, as one batch, cut to `longest`. For encoders."""
        return [each.ids for each in self.encode_cut(texts, MAX_ID if longest is None else longest)]

    def encode_cut(self, texts: Sequence[str], longest: int) -> list[CutText]:
        """The same, each with its length before the cut. The text is cut, never a special token.

        Ids beyond the cut are never created: for a text of megabytes that alone would take long.
        """
        if self._add_bos is not None:  # a GGUF tokenizer: its special tokens are added here
            whole = [self.encode(text) for text in texts]
            return [CutText(ids[:longest], len(ids)) for ids in whole]
        added = self._backend.num_special_tokens_to_add(False)
        cut = []
        for each in self._backend.encode_batch_fast(list(texts), add_special_tokens=False):
            tokens = len(each) + added
            if tokens > longest:
                each.truncate(max(longest - added, 0))
            cut.append(CutText(self._backend.post_process(each).ids, tokens))
        return cut

    def encode_starts(self, text: str) -> tuple[array[int], array[int]]:
        """Token ids without special tokens, and the character at which each begins. For retrieval.

        A long text is encoded in parts, on several threads, cut where a word ends.
        """
        ids, starts = array("i"), array("i")
        parts = list(_parts_at_spaces(text, PIECE_CHARACTERS))
        for first in range(0, len(parts), PARTS_AT_ONCE):
            some = parts[first : first + PARTS_AT_ONCE]
            encodings = self._backend.encode_batch(
                [text[begin:end] for begin, end in some], add_special_tokens=False
            )
            for (begin, _), encoding in zip(some, encodings, strict=True):
                ids.extend(encoding.ids)
                starts.extend([begin + offset[0] for offset in encoding.offsets])
        return ids, starts

    def special_ends(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after the ids of one text."""
        bare, whole = self.encode("a", add_special=False), self.encode("a")
        at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], longest: int) -> list[TextPair]:
        """Two texts in a cross-encoder's format; if a pair is too long, the longer text is cut."""
        room = max(longest - self._backend.num_special_tokens_to_add(True), 0)
        firsts, seconds = (
            self._backend.encode_batch_fast([pair[side] for pair in pairs], add_special_tokens=False)
            for side in (0, 1)
        )
        joined = []
        for first, second in zip(firsts, seconds, strict=True):
            is_cut = len(first) + len(second) > room
            if is_cut:
                shorter = min(len(first), len(second), room // 2)
                first.truncate(min(len(first), room - min(len(second), room - shorter)))
                second.truncate(room - len(first))
            both = self._backend.post_process(first, second)
            joined.append(TextPair(both.ids, both.type_ids, is_cut))
        return joined

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> list[int]:
        """Messages as the model's prompt. Raises TemplateError if the template is missing or rejects them."""
        text = self.render_chat(messages, tools, add_generation_prompt, **template_vars)
        return self.encode(text, add_special=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> str:
        """The text that `encode_chat` encodes, for display."""
        if self.chat_template is None:
            raise TemplateError(MISSING_TEMPLATE)
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_vars
        )

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of these tokens; ids outside the vocabulary are ignored."""
        if self.spelling is None:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
            return text
        skipped = self.special_ids if skip_special else frozenset()
        return self.spelling.to_text(b"".join([self.token_bytes(i) for i in ids if i not in skipped]))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; they may be only part of a character."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
        if token is None:
            return b""
        data = token.encode() if self.spelling is None else self.spelling.to_bytes(token)
        self._bytes[token_id] = data
        return data

    def whole_text(self, token_id: int) -> str | None:
        """The token's text if its bytes are whole characters; None if they are parts of some."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        try:
            text = self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if 0 <= token_id < self.vocab_size:  # other ids are unbounded: not cached
            self._whole_texts[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        """One token for display; bytes that are not a character are shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        index: int | None = None if token is None else self._backend.token_to_id(token)
        return index

    def _literal(self) -> tokenizers.Tokenizer:
        """A copy that does not recognise special tokens. Made on first use: few texts contain any, and the
        switch applies to the whole object, so changing it on the shared one would affect other threads.
        """
        with self._literal_lock:
            if self._literal_backend is None:
                copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
                copy.encode_special_tokens = True
                self._literal_backend = copy
            return self._literal_backend


def _parts_at_spaces(text: str, longest: int) -> Iterator[tuple[int, int]]:
    """Parts of at most `longest` characters, each up to a space where there is one."""
    begin = 0
    while begin < len(text):
        end = begin + longest
        if end < len(text):
            newline, space = text.rfind("\n", begin, end), text.rfind(" ", begin, end)
            end = max(newline, space) if max(newline, space) > begin else end
        yield begin, min(end, len(text))
        begin = end


def _encoded(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    """The ids. A single text is encoded with the GIL held, which for a long one would stop all other threads
    for seconds; a batch, even of one, is encoded without it.
    """
    if len(text) <= SHORT_CHARACTERS:
        ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    return ids


def _unencodable(text: str) -> str:
    surrogate = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), None)
    return "it is not a string" if surrogate is None else f"a lone surrogate at position {surrogate}"
