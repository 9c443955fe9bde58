"""TextStream: stop strings at every border of tokens and chunks, and streamed text equal to the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.client.text import TextStream
from ridgeline.engine.schedule.request import FinishReason, SamplingParams
from ridgeline.engine.schedule.step import SeqDelta
from ridgeline.models.text.tokenizer import Tokenizer
from ridgeline.telemetry.timing import TimingRecord


@pytest.fixture(scope="module")
def tokenizer(smollm2_path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


def stream(tokenizer, tokens, params, sizes=None, finish=FinishReason.LENGTH, stop_token=None):
    """All chunks of `tokens` cut into deltas of the given sizes; the last delta carries the finish."""
    text_stream = TextStream(tokenizer, params, 0)
    sizes = sizes or [1] * len(tokens)
    chunks, start = [], 0
    for number, size in enumerate(sizes):
        part = tokens[start : start + size]
        start += size
        last = number == len(sizes) - 1
        delta = SeqDelta(
            "r",
            0,
            part,
            finish_reason=finish if last else None,
            stop_token=stop_token if last else None,
            timing=TimingRecord(arrival=1.0) if last or number == 0 else None,
        )
        chunk = text_stream.push(delta, step_end=10.0 + number)
        if chunk is not None:
            chunks.append(chunk)
    return chunks


TEXT = "The quick brown fox → jumps 🦊 over the lazy dog.\n\nUSER: and then? 日本語 ends here."


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("USER:",), TEXT[: TEXT.index("USER:")]),
        (("\n\nUSER",), TEXT[: TEXT.index("\n\n")]),
        (("🦊",), TEXT[: TEXT.index("🦊")]),
        (("本",), TEXT[: TEXT.index("本")]),
        (("wn fo",), TEXT[: TEXT.index("wn fo")]),
        (("zebra", "dog", "lazy"), TEXT[: TEXT.index("lazy")]),
        (("here.x", "nowhere"), TEXT),  # only a beginning of it comes: nothing may stay held back
        (("T",), ""),
    ],
)
def test_a_stop_string_is_found_wherever_tokens_break(tokenizer, stop, expected):
    tokens = tokenizer.encode(TEXT)
    params = SamplingParams(stop=stop)
    for chunk_size in (1, 2, 3, 7, len(tokens)):
        sizes = [chunk_size] * (len(tokens) // chunk_size)
        sizes += [len(tokens) - sum(sizes)] if sum(sizes) < len(tokens) else []
        chunks = stream(tokenizer, tokens, params, sizes)
        assert "".join(chunk.text for chunk in chunks) == expected
        stopped = expected != TEXT
        assert chunks[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert (chunks[-1].stop_reason in stop) is stopped


def test_the_stop_string_stays_if_asked_for(tokenizer):
    params = SamplingParams(stop=("lazy",), include_stop=True)
    chunks = stream(tokenizer, tokenizer.encode(TEXT), params)
    assert "".join(chunk.text for chunk in chunks).endswith("the lazy")


def test_tokens_are_counted_up_to_the_one_that_completed_the_stop(tokenizer):
    tokens = tokenizer.encode("one two three four five")
    for size in (1, len(tokens)):
        sizes = [size] * (len(tokens) // size)
        chunks = stream(tokenizer, tokens, SamplingParams(stop=("three",)), sizes)
        assert [token for chunk in chunks for token in chunk.tokens] == tokens[:3]
        assert chunks[-1].timing.output_tokens == 3
        assert chunks[-1].timing.end_reason == "stop"


def test_nothing_comes_after_a_stop(tokenizer):
    text_stream = TextStream(tokenizer, SamplingParams(stop=("two",)), 0)
    for token in tokenizer.encode("one two"):
        text_stream.push(SeqDelta("r", 0, [token]), 1.0)
    assert text_stream.stopped_by_text
    assert text_stream.push(SeqDelta("r", 0, tokenizer.encode(" three")), 2.0) is None


def test_stop_strings_do_not_stop_before_min_tokens(tokenizer):
    tokens = tokenizer.encode("stop stop stop stop")
    params = SamplingParams(stop=("stop",), min_tokens=2)
    text = "".join(chunk.text for chunk in stream(tokenizer, tokens, params))
    assert text == "stop stop "


def test_a_stop_token_is_counted_but_not_shown(tokenizer):
    tokens = tokenizer.encode("hello world")
    hidden = stream(tokenizer, tokens, SamplingParams(), finish=FinishReason.STOP, stop_token=tokens[-1])
    assert "".join(chunk.text for chunk in hidden) == "hello"
    assert hidden[-1].stop_reason == tokens[-1]
    assert hidden[-1].tokens == [tokens[-1]]
    params = SamplingParams(include_stop=True)
    shown = stream(tokenizer, tokens, params, finish=FinishReason.STOP, stop_token=tokens[-1])
    assert "".join(chunk.text for chunk in shown) == "hello world"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_streamed_equals_whole_for_any_tokens_and_any_split(tokenizer, data):
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=40))
    stops = data.draw(st.lists(st.sampled_from(["a", "th", ". ", "\n", "é", "e s"]), max_size=3))
    params = SamplingParams(stop=tuple(stops))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=10)) | {len(tokens)})
    sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    split = stream(tokenizer, tokens, params, sizes)
    whole = stream(tokenizer, tokens, params, [len(tokens)])
    assert "".join(c.text for c in split) == "".join(c.text for c in whole)
    assert split[-1].finish_reason == whole[-1].finish_reason
    text, full = "".join(c.text for c in whole), tokenizer.decode(tokens)
    assert full.startswith(text)
    assert not any(stop in text for stop in stops)
    assert (text == full) or any(full.startswith(text + stop) for stop in stops)


def test_the_first_chunks_record_grows_with_the_stream(tokenizer):
    tokens = tokenizer.encode("one two three four")
    chunks = stream(tokenizer, tokens, SamplingParams(), finish=None)
    assert chunks[0].timing is not None
    assert chunks[0].timing.token_times == [10.0 + step for step in range(len(tokens))]
