"""`ridgeline chat`: history, commands, figures, and Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ridgeline.cli.answers import AnswerStats, Message, Piece
from ridgeline.cli.chat import Chat, deferred_interrupt
from ridgeline.cli.sampling import Sampling
from ridgeline.engine.errors import InvalidRequest

STATS = AnswerStats(
    prompt_tokens=20,
    cached_tokens=16,
    output_tokens=3,
    ttft_s=0.01,
    decode_s=0.1,
    e2e_s=0.2,
    finish_reason="stop",
)


class Parrot:
    """Answers every question with its number; can be told to fail, or to be interrupted midway."""

    model = "parrot"

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.fails = False
        self.interrupt_after: int | None = None
        self.closed = 0

    def chat(self, messages: list[Message], sampling: Sampling) -> Iterator[Piece]:
        if self.fails:
            raise InvalidRequest("messages", "too long")
        self.asked.append(messages)
        try:
            for number, text in enumerate(("answer ", str(len(self.asked)))):
                yield Piece(text)
                if number == self.interrupt_after:
                    os.kill(os.getpid(), signal.SIGINT)
            yield Piece("", STATS)
        finally:
            self.closed += 1

    def complete(self, prompt: str, sampling: Sampling) -> Iterator[Piece]:
        raise AssertionError("a chat goes through the template")


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


def talk(parrot: Parrot, *lines: str, system: str = "") -> tuple[Chat, str]:
    out = io.StringIO()
    chat = Chat(parrot, Sampling(), system, out)
    chat.loop(iter(lines))
    return chat, out.getvalue()


def roles(messages: list[Message]) -> list[str]:
    return [f"{message['role']}:{message['content']}" for message in messages]


def test_each_answer_is_followed_by_its_figures(parrot: Parrot) -> None:
    _, shown = talk(parrot, "hello")
    assert shown == "answer 1\n[TTFT 10 ms · 20.0 tok/s · 3 tokens · prompt 20 (16 cached) · stop]\n"


def test_a_known_limit_stands_beside_the_speed() -> None:
    known = replace(STATS, decode_limit_per_s=80.0)
    assert "20.0 tok/s (25% of this machine's limit, 80) · 3 tokens" in known.line()
    assert known.as_dict()["tokens_per_s_limit"] == 80.0
    assert STATS.as_dict()["tokens_per_s_limit"] is None


def test_the_conversation_so_far_goes_with_every_question(parrot: Parrot) -> None:
    talk(parrot, "one", "two", system="Be brief")
    assert roles(parrot.asked[1]) == ["system:Be brief", "user:one", "assistant:answer 1", "user:two"]


def test_reset_forgets_the_talk_but_not_the_system_message(parrot: Parrot) -> None:
    talk(parrot, "one", "/reset", "two", system="Be brief")
    assert roles(parrot.asked[1]) == ["system:Be brief", "user:two"]


def test_a_new_system_message_begins_a_new_conversation(parrot: Parrot) -> None:
    talk(parrot, "one", "/system Rhyme", "two")
    assert roles(parrot.asked[1]) == ["system:Rhyme", "user:two"]


def test_exit_leaves_help_lists_and_unknown_commands_are_named(parrot: Parrot) -> None:
    _, shown = talk(parrot, "/help", "/nope", "", "/exit", "never asked")
    assert "/reset" in shown
    assert "unknown command /nope" in shown
    assert parrot.asked == []


def test_a_path_is_a_question_and_not_a_command(parrot: Parrot) -> None:
    talk(parrot, "/etc/passwd is which file?")
    assert len(parrot.asked) == 1


def test_a_refused_question_is_shown_and_forgotten(parrot: Parrot) -> None:
    parrot.fails = True
    chat, shown = talk(parrot, "much too long")
    assert "error: messages: too long" in shown
    assert chat.messages == []


def test_ctrl_c_stops_the_answer_keeps_what_was_said_and_goes_on(parrot: Parrot) -> None:
    parrot.interrupt_after = 0
    chat, shown = talk(parrot, "one")
    assert "[stopped]" in shown
    assert roles(chat.messages) == ["user:one", "assistant:answer 1"]  # the piece in flight still arrived
    assert parrot.closed == 1  # closing the stream is what frees the request
    parrot.interrupt_after = None
    chat.take("two")
    assert len(parrot.asked) == 2


def test_a_second_ctrl_c_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background of a shell
    with deferred_interrupt() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
