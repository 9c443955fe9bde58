"""Flags of vLLM and llama.cpp: the same setting as ours, a note, or a reason."""

from __future__ import annotations

import argparse

import pytest

from ridgeline.cli.flags.alias_table import ALIASES, IGNORED, REFUSED
from ridgeline.cli.flags.suggest import flag_suggestion
from ridgeline.cli.main import build_parser, main
from ridgeline.lab.bench.config import ClosedLoop, OpenLoop, config_of
from ridgeline.lab.bench.options import BenchOptions
from ridgeline.lab.traffic.options import TrafficOptions
from ridgeline.lab.traffic.source import build_traffic
from ridgeline.options import build, given_flags


def parsed(*words: str) -> argparse.Namespace:
    args, unknown = build_parser([words[0]]).parse_known_args(words)
    assert not unknown
    return args


def parser_of(verb: str) -> argparse.ArgumentParser:
    top = build_parser([verb])
    (actions,) = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    found: argparse.ArgumentParser = actions.choices[verb]
    return found


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--max-model-len 4096", "--max-context 4096"),
        ("--max-model-len 32K", "--max-context 32768"),
        ("--max-model-len 32k", "--max-context 32000"),
        ("--gpu-memory-utilization 0.8", "--memory-fraction 0.8"),
        ("--max-num-seqs 8", "--max-running 8"),
        ("--max-num-batched-tokens 512", "--step-tokens 512"),
        ("--dtype bfloat16", "--weights bfloat16"),
        ("--dtype int8", "--weights int8"),
        ("--dtype half", "--weights float16"),
        ("--kv-cache-dtype int8", "--kv-dtype int8"),
        ("--kv-cache-memory-bytes 2G", "--kv-memory-gib 2"),
        ("--enable-prefix-caching", "--prefix-cache"),
        ("--no-enable-prefix-caching", "--no-prefix-cache"),
        ("--enforce-eager", "--no-cuda-graphs"),
        ("--tool-call-parser hermes", "--tool-parser hermes"),
        ("--tool-call-parser llama3_json", "--tool-parser llama3"),
        ("--api-key one --api-key two", "--api-keys one --api-keys two"),
        ('--allowed-origins ["a","b"]', "--cors-origins a --cors-origins b"),
        ("-c 2048", "--max-context 2048"),
        ("-np 4", "--max-running 4"),
        ("-t 2", "--threads 2"),
        ("-ctk q8_0 -ctv q8_0", "--kv-dtype int8"),
        ("-v", "--log-level debug"),
    ],
)
def test_a_flag_of_another_tool_sets_what_ours_sets(theirs: str, ours: str) -> None:
    for section in ("engine", "server"):
        expected = given_flags(parsed("serve", *ours.split()), section)
        assert given_flags(parsed("serve", *theirs.split()), section) == expected
    assert ours.partition(" ")[0] in parser_of("serve")._option_string_actions


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--dtype bfloat16 --weights int8", "--dtype and --weights"),
        ("--weights int8 --dtype int8", "--weights and --dtype"),
        ("-c 2048 --max-model-len 4096", "-c and --max-model-len"),
    ],
)
def test_two_names_of_one_setting_are_refused(
    words: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *words.split(), "--print-config"])
    assert stop.value.code == 2
    assert f"{names} are one setting; give one of them" in capsys.readouterr().err


def test_of_one_flag_given_twice_the_last_wins() -> None:
    words = ("--dtype", "half", "--dtype", "float", "--max-context", "1", "--max-context", "2")
    assert given_flags(parsed("serve", *words), "engine") == {"weights": "float32", "max_context": 2}


def test_a_context_of_0_is_the_models_own() -> None:
    assert given_flags(parsed("serve", "-c", "0"), "engine") == {"max_context": None}


def test_the_model_can_be_named_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", "gemma3", "--print-config"]) == 0
    assert 'model = "gemma3"' in capsys.readouterr().out


def test_an_ignored_flag_prints_a_note_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-ngl", "99", "--trust-remote-code", "-fa", "--print-config"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("[engine]")
    notes = shown.err.splitlines()
    assert notes[0].startswith("note: -ngl (llama.cpp) is ignored: all layers run on the GPU")
    assert [note.split()[1] for note in notes] == ["-ngl", "--trust-remote-code", "-fa"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-tp 2", "-tp 2: a model runs on one device; only 1 is accepted; for several"),
        ("-fa model.gguf", "-fa model.gguf: the backend chooses its attention kernel; give on, off or auto"),
        ("--revision main", "--revision (vLLM) has no equal: write the revision into MODEL"),
        ("-hf org/name", "-hf (llama.cpp) has no equal: give the hub id as MODEL"),
        ("--kv-cache-dtype fp8_e5m2", "argument --kv-cache-dtype: invalid choice: 'fp8_e5m2'"),
        ("--max-model-len long", "argument --max-model-len: 'long' cannot be read"),
    ],
)
def test_what_cannot_be_the_same_is_refused_with_a_reason(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", *words.split()])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"ridgeline serve: {said}")


def test_sampling_flags_of_llama_cpp_work_in_run() -> None:
    words = ("-n", "5", "--temp", "0.5", "--repeat-penalty", "1.1")
    assert given_flags(parsed("run", *words, "hello"), "sampling") == {
        "max_tokens": 5,
        "temperature": 0.5,
        "repetition_penalty": 1.1,
    }


def test_bench_flags_have_the_names_of_vllm_bench_serve() -> None:
    words = ["--num-prompts", "200", "--request-rate", "4", "--max-concurrency", "8", "--input-len", "100"]
    args = parsed("bench", "http://127.0.0.1:8000", *words)
    assert given_flags(args, "traffic") == {"requests": 200, "rate": 4.0, "input": "100"}
    assert given_flags(args, "bench") == {"max_concurrency": 8}
    assert given_flags(parsed("bench", "http://x", "--request-rate", "inf"), "traffic") == {"rate": None}


def test_aliases_are_not_in_the_help() -> None:
    assert "--max-num-batched-tokens" not in parser_of("serve").format_help()


def test_every_row_of_the_table_reaches_a_parser() -> None:
    known = {flag for verb in ("serve", "run", "bench") for flag in parser_of(verb)._option_string_actions}
    for row in (*ALIASES, *IGNORED, *REFUSED):
        assert set(row.flags) <= known, row


@pytest.mark.parametrize(
    ("verb", "flag", "meant"),
    [
        ("serve", "--context-length", "--max-context"),
        ("serve", "--num-ctx", "--max-context"),
        ("serve", "--max-batch-size", "--max-running"),
        ("serve", "--max-queue", "--max-waiting"),
        ("serve", "--vram", "--memory-fraction"),
        ("serve", "--bind", "--host"),
        ("serve", "--tls-cert", "--ssl-certfile"),
        ("serve", "--quantize", "--weights"),
        ("serve", "--device", "--backend"),
        ("serve", "--disable-prefix-caching", "--no-prefix-cache"),
        ("run", "--num-predict", "--max-tokens"),
        ("bench", "--qps", "--rate"),
        ("bench", "--users", "--concurrency"),
    ],
)
def test_an_unknown_flag_is_answered_by_its_meaning(verb: str, flag: str, meant: str) -> None:
    assert flag_suggestion(flag, parser_of(verb)).startswith(f"; did you mean {meant} (")


def test_a_misspelling_is_answered_by_its_spelling_and_nonsense_by_nothing() -> None:
    assert flag_suggestion("--max-contxt", parser_of("serve")) == "; did you mean --max-context?"
    assert flag_suggestion("--xyzzy", parser_of("serve")) == ""


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-model-lenn", "--max-model-len"),
        ("--gpu-memory-utilisation", "--gpu-memory-utilization"),
        ("--enable-prefix-cachin", "--enable-prefix-caching"),
    ],
)
def test_a_misspelt_flag_of_another_tool_is_answered_by_its_own_spelling(flag: str, meant: str) -> None:
    assert flag_suggestion(flag, parser_of("serve")) == f"; did you mean {meant}?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], "ridgeline: unknown verb 'serv'; did you mean `serve`?"),
        (["pull", "x"], "ridgeline: unknown verb 'pull'; did you mean `ridgeline models pull`?"),
        (["models", "lst"], "ridgeline models: unknown action 'lst'; did you mean `list`?"),
        (["xyzzy"], "ridgeline: unknown verb 'xyzzy' (see"),
    ],
)
def test_an_unknown_verb_names_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ("--request-rate inf --max-concurrency 3", ClosedLoop(3)),
        ("--request-rate 5 --max-concurrency 3", OpenLoop(3)),
        ("--concurrency 4", ClosedLoop(4)),
    ],
)
def test_a_concurrency_without_a_rate_is_a_closed_loop(flags: str, mode: ClosedLoop | OpenLoop) -> None:
    args = parsed("bench", "http://127.0.0.1:1", *flags.split())
    traffic = build_traffic(build(TrafficOptions, given_flags(args, "traffic")))
    assert config_of(args.url, build(BenchOptions, given_flags(args, "bench")), traffic).mode == mode
