"""Subjects: the engine here and a live server give the same scores; servers that cannot score say so."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from ridgeline.engine.errors import InvalidRequest
from ridgeline.engine.schedule.request import SamplingParams
from ridgeline.lab.errors import BadInput, LabError
from ridgeline.lab.evaluate.run import refuse_impossible
from ridgeline.lab.evaluate.scoring.likelihood import Pair
from ridgeline.lab.evaluate.subjects.answers import echoed, prompt_entries
from ridgeline.lab.evaluate.subjects.local import LocalSubject, engine_settings, identity_of, served_weights
from ridgeline.lab.evaluate.subjects.remote import RemoteSubject
from ridgeline.lab.evaluate.subjects.subject import Prompt, parse_subject
from ridgeline.lab.evaluate.subjects.tokens import token_pair
from ridgeline.lab.evaluate.tasks.items import Choices, Program
from ridgeline.lab.evaluate.tasks.table import Task

PAIRS = [
    Pair("The capital of France is", " Paris"),
    Pair("The capital of France is", " a banana"),
    Pair("", "Once upon a time there was a river."),
]


def test_a_subject_is_a_model_or_a_url_with_settings():
    spec = parse_subject("smollm2-135m,weights=int8,deterministic=true")
    assert (spec.name, spec.is_url) == ("smollm2-135m", False)
    assert engine_settings(spec) == {"weights": "int8", "deterministic": True}
    assert parse_subject("http://127.0.0.1:8000,model=x").is_url
    for text in ("m,weights", "m,weights=", ",weights=int8", "m,weights=int8,weights=int4"):
        with pytest.raises(BadInput):
            parse_subject(text)
    with pytest.raises(BadInput, match="unknown engine setting"):
        engine_settings(parse_subject("m,wheights=int8"))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ("", "stored"),
        (",weights=int4", "int4"),
        (",weights=int4,quantization_keep=layers.0", "int4, kept layers.0"),
        (",weights=int4,quantization_keep=layers.0+attention.o", "int4, kept attention.o layers.0"),
        (',weights=int4,quantization_keep=["layers.0"]', "int4, kept layers.0"),
        (",quantization_keep=ffn", "stored, kept ffn"),
        (",weights=bfloat16,quantization_keep=ffn", "bfloat16"),
    ],
)
def test_a_verdict_names_what_the_policy_keeps_in_16_bits(settings, weights):
    assert served_weights(engine_settings(parse_subject(f"m{settings}"))) == weights


def letters(text, special):
    return [0] * special + [ord(letter) for letter in text]


def test_a_pair_is_cut_where_the_context_ends():
    cut = token_pair(Pair("ab ", "c"), letters, 7, 100)
    assert (cut.ids, cut.start) == ([0, 97, 98, 32, 99], 3)
    assert token_pair(Pair("", "ab"), letters, 7, 100).ids == [7, 97, 98]
    assert token_pair(Pair("", "ab"), letters, None, 100) == ([97, 98], 1)
    short = token_pair(Pair("abcdef", "gh"), letters, 7, 4)
    assert (short.ids, short.start) == ([101, 102, 103, 104], 2)


@pytest.mark.parametrize(("pair", "prefix"), [(("", "abcd"), 7), (("", "abcde"), None), (("ab", "cdef"), 7)])
def test_a_text_longer_than_the_context_is_refused(pair, prefix):
    with pytest.raises(LabError, match="tokens, and 3 fit into the context"):
        token_pair(Pair(*pair), letters, prefix, 4)


def test_a_changed_model_has_another_identity(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"one")
    first = identity_of(tmp_path / "model.gguf")
    assert first == identity_of(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"other")
    assert identity_of(tmp_path / "model.gguf") != first


@pytest.fixture(scope="module")
def local(smollm2_path):
    subject = LocalSubject(parse_subject("smollm2-135m,deterministic=true,kv_tokens=4096"))
    yield subject
    subject.close()


@pytest.fixture(scope="module")
def remote(live_server):
    return RemoteSubject(parse_subject(live_server.base_url))


def test_a_likely_continuation_scores_higher(local):
    likely, unlikely, text = local.score(PAIRS, 0, 2)
    assert likely.likelihood.logprob > unlikely.likelihood.logprob
    assert text.likelihood.tokens == 9
    assert text.tokens is None


def test_top_tokens_hold_most_of_the_mass(local):
    (found,) = local.score(PAIRS[2:], 256, 1)
    tokens = found.tokens
    assert tokens is not None
    assert tokens.top_ids.shape == (9, 256)
    mass = np.exp(tokens.top_logprobs.astype(np.float64)).sum(1)
    assert ((mass > 0.5) & (mass <= 1 + 1e-5)).all()
    assert (np.diff(tokens.top_logprobs, axis=1) <= 0).all()


def test_more_top_tokens_than_256_are_refused():
    SamplingParams(prompt_logprobs=256)
    for name, most in (("prompt_logprobs", 256), ("logprobs", 20)):
        with pytest.raises(InvalidRequest, match=f"between 0 and {most}"):
            SamplingParams(**{name: most + 1})


def test_a_server_scores_like_the_engine(local, remote):
    assert remote.refuse_scoring() is None
    assert remote.facts["scoring"] == "prompt_logprobs"
    for own, theirs in zip(local.score(PAIRS[:2], 0, 2), remote.score(PAIRS[:2], 0, 2), strict=True):
        assert own.likelihood.logprob == pytest.approx(theirs.likelihood.logprob, abs=1e-4)
        assert own.likelihood[1:] == theirs.likelihood[1:]
    (text,) = remote.score(PAIRS[2:], 20, 1)
    assert text.tokens is not None
    assert text.tokens.top_ids.shape[1] == 20


def test_a_server_with_its_tokenizer_begins_texts_like_the_engine(local, remote, live_server):
    assert remote.prefix is None  # the server adds no token, and its EOS is not known
    assert "not scored" in remote.facts["first_word"]
    told = RemoteSubject(parse_subject(f"{live_server.base_url},tokenizer=smollm2-135m"))
    assert told.prefix == local.prefix
    (own,), (theirs,) = local.score(PAIRS[2:], 20, 1), told.score(PAIRS[2:], 20, 1)
    assert own.likelihood.logprob == pytest.approx(theirs.likelihood.logprob, abs=1e-3)
    assert own.tokens is not None
    assert theirs.tokens is not None
    assert own.tokens.prefix == theirs.tokens.prefix == local.prefix
    assert np.array_equal(own.tokens.tokens, theirs.tokens.tokens)


def test_an_echo_scores_like_prompt_logprobs(remote):
    expected = remote.score(PAIRS[:2], 0, 1)
    remote._way = "echo"
    try:
        found = remote.score(PAIRS[:2], 0, 1)
    finally:
        remote._way = "ids"
    for one, other in zip(expected, found, strict=True):
        assert one.likelihood.logprob == pytest.approx(other.likelihood.logprob, abs=1e-4)
        assert one.likelihood.tokens == other.likelihood.tokens
        assert one.likelihood.is_greedy == other.likelihood.is_greedy


def test_a_server_completes_like_the_engine(local, remote):
    prompts = [Prompt("One, two, three,", 6, ()), Prompt("A list:\n1.", 12, ("\n",))]
    assert [a.text for a in local.complete(prompts, 2)] == [a.text for a in remote.complete(prompts, 2)]


class ChatOnly(BaseHTTPRequestHandler):
    """A hosted server: chat, no completions, no log-probabilities of prompts."""

    def _answer(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        self._answer(200, {"data": [{"id": "hosted"}]})

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            return self._answer(404, {"error": {"message": "no such path"}})
        message = {"role": "assistant", "content": "The answer is 7.\nQuestion: next"}
        return self._answer(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 9}})

    def log_message(self, *_):
        pass


@pytest.fixture
def chat_only():
    with ThreadingHTTPServer(("127.0.0.1", 0), ChatOnly) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield RemoteSubject(parse_subject(f"http://127.0.0.1:{server.server_address[1]}"))
        server.shutdown()
        thread.join()


def test_a_server_without_log_probabilities_is_refused_by_name(chat_only):
    task = Task("arc_easy", (Choices("1", "q", ("a", "b"), 0),), "acc")
    with pytest.raises(LabError, match=r"arc_easy: .* gives no log-probabilities of a prompt.*gsm8k"):
        refuse_impossible(chat_only, [task])
    (answer,) = chat_only.complete([Prompt("q", 8, ("Question:",))], 1)
    assert (answer.text, answer.tokens) == ("The answer is 7.\n", 9)
    programs = Task("humaneval", (Program("1", "def f():", "f", "def check(c): pass"),), "pass@1")
    with pytest.raises(LabError, match=r"humaneval: .* has only a chat endpoint"):
        refuse_impossible(chat_only, [programs])


class Scoring(ChatOnly):
    """Scores prompts without ranks; no token of a prompt is the best. Completions can be denied."""

    denied = 0
    asked: ClassVar[list[int]] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            return self._answer(200, {"tokens": [ord(letter) for letter in body["prompt"]]})
        if self.denied:
            return self._answer(self.denied, {"error": {"message": "not for you"}})
        if "prompt_logprobs" not in body:
            return self._answer(200, {"choices": [{"text": "x"}]})
        self.asked.append(body["prompt_logprobs"])
        best = {"1": {"logprob": -0.1}} if body["prompt_logprobs"] else {}
        entries = [None, *({str(id): {"logprob": -3.0}} | best for id in body["prompt"][1:])]
        return self._answer(200, {"choices": [{"text": "x", "prompt_logprobs": entries}]})


@pytest.fixture
def scoring():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scoring) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_server_without_ranks_is_asked_for_the_best_token(scoring):
    (found,) = RemoteSubject(parse_subject(scoring)).score([Pair("ab", " c")], 0, 1)
    assert not found.likelihood.is_greedy
    assert 0 not in Scoring.asked


def test_a_server_that_denies_completions_is_not_taken_for_a_chat_server(scoring, monkeypatch):
    monkeypatch.setattr(Scoring, "denied", 403)
    with pytest.raises(LabError, match=r"/v1/completions answered 403: not for you"):
        RemoteSubject(parse_subject(scoring))


def test_an_answer_that_ignores_the_field_is_not_a_score():
    for answer in ({"choices": [{"text": "x"}]}, {"choices": [{"prompt_logprobs": [None]}]}):
        with pytest.raises(LabError):
            prompt_entries(answer, [1, 2])
        with pytest.raises(LabError):
            echoed(answer, 0, 3)
    only_generated = {"token_logprobs": [-1.0], "text_offset": [9], "top_logprobs": [{"x": -1.0}]}
    with pytest.raises(LabError, match="does not echo"):
        echoed({"choices": [{"logprobs": only_generated}]}, 0, 9)


def test_an_unreachable_server_is_one_line():
    with pytest.raises(LabError, match=r"127\.0\.0\.1:9"):
        RemoteSubject(parse_subject("http://127.0.0.1:9"))
