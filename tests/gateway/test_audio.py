"""Audio is booked and limited by its length, speech by its characters, and never by its bytes."""

from __future__ import annotations

import asyncio
import io
import struct
import wave
from pathlib import Path
from typing import Any

import pytest

from ridgeline.gateway.objects.audio_length import audio_length_s
from ridgeline.gateway.tenants.keys import Limits
from tests.gateway.scripted_upstream import Asked, always, whole
from tests.gateway.test_trust import TRANSCRIPTIONS, scripted
from tests.gateway.waiting import until

SPEECH = "/v1/audio/speech"
MINUTE = [{"name": "*", "targets": ("up/*",), "price_minute": 0.006}]  # 100 microdollars a second
TOKENS = [{"name": "*", "targets": ("up/*",), "price_in": 2.5, "price_out": 10.0}]
CHARACTERS = [{"name": "*", "targets": ("up/*",), "price_characters": 15.0}]
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "media"


def wav(seconds: float, hz: int = 8000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(hz)
        file.writeframes(b"\0\0" * round(seconds * hz))
    return out.getvalue()


def flac(seconds: float, hz: int = 16_000) -> bytes:
    packed = hz << 44 | 0 << 41 | 15 << 36 | round(seconds * hz)
    return b"fLaC\x80\0\0\x22" + b"\0" * 10 + packed.to_bytes(8, "big") + b"\0" * 16 + b"x" * 500


def mp3(seconds: float) -> bytes:
    """MPEG 1, layer 3, 32 kbit/s at 32 kHz, behind an ID3 tag."""
    return b"ID3\x04\0\0\0\0\0\x0a" + b"\0" * 10 + b"\xff\xfb\x18\xc0" + b"\0" * round(seconds * 4000)


def ogg(seconds: float) -> bytes:
    first = b"OggS\0\x02" + struct.pack("<q", 0) + b"\0" * 14 + b"OpusHead\x01\x01" + b"\0" * 9
    return first + b"x" * 300 + b"OggS\0\x04" + struct.pack("<q", round(seconds * 48_000)) + b"\0" * 40


def m4a(seconds: float) -> bytes:
    movie = b"mvhd" + b"\0" * 12 + struct.pack(">II", 1000, round(seconds * 1000)) + b"\0" * 80
    movie = struct.pack(">I", len(movie) + 4) + movie
    sound = struct.pack(">I4s", 508, b"mdat") + b"x" * 500
    return (
        struct.pack(">I4s", 16, b"ftyp")
        + b"M4A \0\0\0\0"
        + sound
        + struct.pack(">I4s", len(movie) + 8, b"moov")
        + movie
    )


def webm(seconds: float) -> bytes:
    return (
        b"\x1a\x45\xdf\xa3\x80"
        + b"\x2a\xd7\xb1\x83\x0f\x42\x40"
        + b"\x44\x89\x88"
        + struct.pack(">d", seconds * 1000)
        + b"x" * 300
    )


def upload(sound: bytes, **fields: str) -> dict[str, Any]:
    return {"files": {"file": ("a.bin", sound)}, "data": {"model": "m", **fields}}


def length_of(sound: bytes) -> tuple[float, bool]:
    return audio_length_s(lambda at, most: sound[at : at + most], len(sound))


@pytest.mark.parametrize("make", [wav, flac, mp3, ogg, m4a, webm])
def test_a_container_tells_its_length(make: Any) -> None:
    for seconds in (0.5, 7.25, 90.0):
        found, is_told = length_of(make(seconds))
        assert (found, is_told) == (pytest.approx(seconds, rel=0.01), True)


@pytest.mark.parametrize(("name", "seconds"), [("jfk.wav", 11.0), ("llamacpp_test-2.mp3", 17.476)])
def test_recordings_have_the_length_that_a_player_shows(name: str, seconds: float) -> None:
    file = SHARED / name
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    assert length_of(file.read_bytes()) == (pytest.approx(seconds, rel=0.001), True)


def test_a_header_cannot_make_an_hour_a_second() -> None:
    claimed, _ = length_of(flac(1.0) + b"x" * 192_000 * 60)
    assert claimed >= 60
    streamed = wav(30.0)
    assert length_of(streamed[:40] + struct.pack("<I", 10) + streamed[44:])[0] == pytest.approx(
        30.0, rel=0.01
    )


@pytest.mark.parametrize("sound", [b"", b"\0" * 8000, b"RIFF", b"ID3", b"\xff\xff\xff\xff", wav(3.0)[:20]])
def test_a_file_that_does_not_tell_is_guessed_at_32_kbit_a_second(sound: bytes) -> None:
    assert length_of(sound) == (len(sound) / 4000, False)


@pytest.mark.parametrize(
    ("answer", "row"),
    [
        ({"text": "hi"}, (9000, 0, 0, "counted")),
        ({"text": "hi", "duration": 9.5}, (9500, 0, 0, "reported")),
        ({"text": "hi", "usage": {"type": "duration", "seconds": 10}}, (10_000, 0, 0, "reported")),
        (b"1\n00:00 --> 00:09\nhi\n", (9000, 0, 0, "counted")),
        (
            b'data: {"type":"transcript.text.done","text":"hi","usage":{"type":"duration","seconds":9}}\n\n',
            (9000, 0, 0, "reported"),
        ),
    ],
)
async def test_a_transcription_is_booked_by_what_was_reported_or_by_its_seconds(
    tmp_path: Path, answer: Any, row: tuple[Any, ...]
) -> None:
    async with scripted(tmp_path, always(200, answer), models=MINUTE) as (stage, _):
        assert (await stage.http.post(TRANSCRIPTIONS, **upload(wav(9.0)))).status_code == 200
        (booked,) = await stage.rows(1)
        names = ("audio_ms", "tokens_in", "tokens_out", "usage_source")
        assert tuple(booked[name] for name in names) == row
        assert booked["cost_pusd"] == row[0] * 10**5


async def test_a_transcription_priced_by_tokens_is_booked_by_those_reported_or_by_an_estimate(
    tmp_path: Path,
) -> None:
    told = {
        "text": "hi",
        "usage": {"type": "tokens", "input_tokens": 90, "output_tokens": 5, "total_tokens": 95},
    }
    answers = iter([told, {"text": "ten tokens of text or so"}])

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, next(answers)))

    async with scripted(tmp_path, answer, models=TOKENS) as (stage, _):
        for _ in range(2):
            await stage.http.post(TRANSCRIPTIONS, **upload(wav(9.0)))
        first, second = await stage.rows(2)
        assert (first["tokens_in"], first["tokens_out"], first["usage_source"]) == (90, 5, "reported")
        assert (second["tokens_in"], second["usage_source"]) == (90, "estimated")  # 10 a second
        assert 4 <= second["tokens_out"] <= 10


async def test_a_transcription_that_its_client_left_is_booked_by_its_seconds(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never(_: Asked, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await asyncio.sleep(60)

    async with scripted(tmp_path, never, models=MINUTE) as (stage, _):
        request = asyncio.create_task(stage.http.post(TRANSCRIPTIONS, **upload(wav(9.0))))
        await asked.wait()
        (state,) = stage.parts.deadlines.live
        state.read_on_s = 0.05
        request.cancel()
        (row,) = await stage.rows(1)
        assert (row["audio_ms"], row["usage_source"], row["cost_pusd"]) == (9000, "estimated", 9000 * 10**5)


async def test_audio_is_limited_by_its_seconds_and_not_by_its_bytes(tmp_path: Path) -> None:
    key = {"limits": Limits(tokens_per_minute=1000)}
    async with scripted(tmp_path, always(200, {"text": "hi"}), key, models=MINUTE) as (stage, _):
        sound = wav(60.0, 16_000)  # 1.9 MB: 480,000 tokens, were they text
        answer = await stage.http.post(TRANSCRIPTIONS, **upload(sound))
        assert answer.status_code == 200
        await until(lambda: bool(stage.written_rows()))
        refused = await stage.http.post(TRANSCRIPTIONS, **upload(sound))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        refused = await stage.http.post(TRANSCRIPTIONS, **upload(wav(101.0)))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "request_over_limit")


async def test_audio_costs_are_reserved_by_the_minute(tmp_path: Path) -> None:
    key = {"limits": Limits(daily_usd=0.01)}
    async with scripted(tmp_path, always(200, {"text": "hi"}), key, models=MINUTE) as (stage, upstream):
        refused = await stage.http.post(TRANSCRIPTIONS, **upload(wav(120.0)))
        assert refused.status_code in (400, 429)
        assert not upstream.asked
        assert (await stage.http.post(TRANSCRIPTIONS, **upload(wav(60.0)))).status_code == 200


@pytest.mark.parametrize(
    ("models", "source", "characters"), [(CHARACTERS, "counted", 12), (TOKENS, "estimated", 12)]
)
async def test_speech_is_booked_by_its_characters(
    tmp_path: Path, models: Any, source: str, characters: int
) -> None:
    async with scripted(tmp_path, always(200, wav(2.0)), models=models) as (stage, _):
        body = {"model": "m", "input": 'Grüße "dir" \U0001f600'[:12], "voice": "alloy"}
        assert (await stage.http.post(SPEECH, json=body)).content == wav(2.0)
        (row,) = await stage.rows(1)
        assert (row["characters"], row["usage_source"]) == (characters, source)
        if models is CHARACTERS:
            assert row["cost_pusd"] == characters * 15 * 10**6
        else:
            assert (row["tokens_in"] > 0, row["tokens_out"]) == (True, 42)  # 21 a second
