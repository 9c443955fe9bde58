"""Readers of traces: what the published files hold, and what is said of broken ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ridgeline.lab.errors import BadInput
from ridgeline.lab.traffic.describe import describe
from ridgeline.lab.traffic.request import Traffic
from ridgeline.lab.traffic.traces import read_azure, read_burstgpt, read_mooncake, read_recorded

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace_file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, "utf-8")
    return path


# ── the published ones, with the figures that their descriptions state ───────────────────────────────────


def test_azures_code_trace_is_read_whole(shared_data: Path) -> None:
    found = describe(read_azure(shared_data / "azure-llm-2023" / "AzureLLMInferenceTrace_code.csv"))
    assert found.requests == 8819
    assert found.rps == pytest.approx(2.6, abs=0.05)
    assert found.gap_cv == pytest.approx(13, abs=0.5)
    assert (round(found.input.mean), round(found.output.mean), found.input.max) == (2048, 28, 7437)
    assert any("no request for 217 s before line 8102" in note for note in found.notes)


def test_azures_conversation_trace_is_read_whole(shared_data: Path) -> None:
    found = describe(read_azure(shared_data / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv"))
    assert found.requests == 19366
    assert found.rps == pytest.approx(5.5, abs=0.05)
    assert found.gap_cv == pytest.approx(1.1, abs=0.02)
    assert (round(found.input.mean), round(found.output.mean), found.input.max) == (1155, 211, 14050)
    assert found.notes == ()


@pytest.fixture(scope="module")
def mooncake(shared_data: Path) -> Traffic:
    return read_mooncake(shared_data / "mooncake" / "conversation_trace.jsonl")


def test_mooncakes_trace_shares_the_prefixes_that_it_states(mooncake: Traffic) -> None:
    found = describe(mooncake)
    assert found.requests == 12031
    assert found.rps == pytest.approx(3.4, abs=0.05)
    assert (round(found.input.mean), round(found.output.mean), found.input.max) == (12035, 343, 126195)
    assert found.prefix_blocks == 182_790
    assert found.ideal_block_hit == pytest.approx(0.366, abs=0.0005)


def test_mooncakes_arrivals_are_spread_within_their_steps_of_three_seconds(mooncake: Traffic) -> None:
    moments = [request.at for request in mooncake.requests]
    assert moments == sorted(moments)
    assert len(set(moments)) == len(moments)
    # Within a step arrivals are independent: gaps as of a Poisson process, not bunches with silences.
    assert describe(mooncake).gap_cv == pytest.approx(1.0, abs=0.1)
    assert any("steps of 3 s" in note for note in mooncake.notes)


def test_spreading_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"timestamp":{3000 * (i // 5)},"input_length":9,"output_length":1}}\n' for i in range(50)
    )
    path = trace_file(tmp_path, rows)
    assert read_mooncake(path, seed=3) == read_mooncake(path, seed=3)
    assert read_mooncake(path, seed=3).requests != read_mooncake(path, seed=4).requests


def test_fine_stamps_are_left_as_they_are(tmp_path: Path) -> None:
    rows = "".join(f'{{"timestamp":{20 * (i // 2)},"input_length":9,"output_length":1}}\n' for i in range(50))
    found = read_mooncake(trace_file(tmp_path, rows))
    assert [request.at for request in found.requests] == pytest.approx([0.02 * (i // 2) for i in range(50)])
    assert found.notes == ()


def test_two_requests_with_one_millisecond_stamp_move_no_arrival(tmp_path: Path) -> None:
    """A sparse trace with exact stamps, one of them twice: the gaps are long, but no grid explains them."""
    random = np.random.default_rng(7)
    moments = np.sort(random.choice(np.arange(1, 600_000), 2000, replace=False))
    moments[1] = moments[0]
    rows = "".join(f'{{"timestamp":{at},"input_length":9,"output_length":1}}\n' for at in moments)
    found = read_mooncake(trace_file(tmp_path, rows))
    assert [request.at for request in found.requests] == pytest.approx(
        ((moments - moments[0]) / 1000).tolist()
    )
    assert found.notes == ()


def test_stamps_of_a_second_are_spread_within_the_second_however_sparse_they_are(tmp_path: Path) -> None:
    seconds = [4 * i for i in range(50)] + [201, 201, 207]
    rows = "".join(f'{{"timestamp":{1000 * at},"input_length":9,"output_length":1}}\n' for at in seconds)
    found = read_mooncake(trace_file(tmp_path, rows), seed=1)
    late = [
        request.at + found.requests[0].at - at for request, at in zip(found.requests, seconds, strict=True)
    ]
    assert max(late) - min(late) < 1.0
    assert found.requests[50].at != found.requests[51].at
    assert any("steps of 1 s" in note for note in found.notes)


# ── broken ones ──────────────────────────────────────────────────────────────────────────────────────────

BROKEN_AZURE = (
    HEAD
    + "2023-11-16 18:15:46.6805900,374,44\n"
    + "2023-11-16 18:15:50.9951690,twelve,109\n"
    + "yesterday,396,109\n"
    + "2023-11-16 18:15:51.2\n"
    + "\n"
    + "2023-11-16 18:15:52.0,0,10\n"
    + "2023-11-16 18:15:53.0,10,-1\n"
    + '2023-11-16 18:15:53.5,"11",12\n'
    + "2023-11-16 18:15:48.0,20,30\n"
    + "2023-11-16 18:15:54.0,20,30\n"
)


def test_broken_rows_are_listed_by_line_with_reasons(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read_azure(trace_file(tmp_path, BROKEN_AZURE))
    message = str(caught.value)
    assert "6 bad rows" in message
    assert "line 3: ContextTokens 'twelve' cannot be read" in message
    assert "line 4: TIMESTAMP 'yesterday' cannot be read" in message
    assert "line 5: has 1 columns, not 3" in message
    assert "line 7: input tokens are 0, not at least 1" in message
    assert "line 8: GeneratedTokens '-1' cannot be read" in message
    assert "and 1 more" in message
    assert "--skip-bad-rows" in message


def test_skipped_rows_are_counted_and_unsorted_ones_sorted(tmp_path: Path) -> None:
    found = read_azure(trace_file(tmp_path, BROKEN_AZURE), skip_bad_rows=True)
    assert [request.input_tokens for request in found.requests] == [374, 20, 11, 20]
    assert [round(request.at, 3) for request in found.requests] == [0.0, 1.319, 6.819, 7.319]
    assert any(note.startswith("5 bad rows were left out (line 3:") for note in found.notes)
    assert "1 rows were out of order and were sorted" in found.notes
    assert "1 lines are empty, the first of them line 6" in found.notes


def test_an_unsorted_row_is_named_with_the_line_before_it(tmp_path: Path) -> None:
    rows = HEAD + "2023-11-16 18:00:05,1,1\n2023-11-16 18:00:02,1,1\n2023-11-16 18:00:06,1,1\n"
    with pytest.raises(BadInput, match=r"1 bad rows: line 3: comes 3\.000 s before line 2, out of order"):
        read_azure(trace_file(tmp_path, rows))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not a complete JSON object"),
        ("[]", "Expected 'object', got 'array'"),
        ('{"timestamp": 5, "input_length": 10}', "missing required field 'output_length'"),
        ('{"timestamp": 5, "input_length": "x", "output_length": 1}', "Expected 'int', got 'str'"),
        (
            '{"timestamp": 5, "input_length": 513, "output_length": 1, "hash_ids": [1, 2, 3]}',
            "513 tokens are 2 b",
        ),
        ('{"timestamp": 5, "input_length": 513, "output_length": 0}', "output tokens are 0"),
        ('{"timestamp": 1e999, "input_length": 5, "output_length": 1}', ""),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path: Path, line: str, reason: str) -> None:
    good = '{"timestamp": 0, "input_length": 10, "output_length": 1}\n'
    with pytest.raises(BadInput) as caught:
        read_mooncake(trace_file(tmp_path, good + line + "\n" + good.replace("0", "9", 1)))
    assert "1 bad rows: line 2: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("read", [read_azure, read_mooncake, read_recorded, read_burstgpt])
def test_a_file_without_requests_is_refused(tmp_path: Path, read: Callable[..., Traffic]) -> None:
    with pytest.raises(BadInput, match=r"contains no requests|should name the columns"):
        read(trace_file(tmp_path, ""))


def test_a_missing_file_and_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.csv: cannot be read: No such file"):
        read_azure(tmp_path / "nowhere.csv")
    with pytest.raises(BadInput, match=r"line 1 should name the columns .*; GeneratedTokens not found"):
        read_azure(trace_file(tmp_path, "TIMESTAMP,ContextTokens\n"))


def test_bytes_that_are_no_text_are_a_bad_row_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(HEAD.encode() + b"2023-11-16 18:00:05,1,1\n\xff\xfe\x00,1,1\n")
    with pytest.raises(BadInput, match="line 3: TIMESTAMP"):
        read_azure(path)


# ── other formats ────────────────────────────────────────────────────────────────────────────────────────


def test_recordings_are_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    rows = (
        '{"timestamp":2000.5,"input_length":70,"output_length":5,"hash_ids":[7,8],"block_tokens":64}\n'
        '{"timestamp":1000.25,"input_length":64,"output_length":9,"hash_ids":[7],"block_tokens":64}\n'
        '{"timestamp":1500,"input_length":64,"output_length":0,"hash_ids":[7],"block_tokens":64}\n'
    )
    found = read_recorded(trace_file(tmp_path, rows))
    assert [(r.at, r.input_tokens, r.prefix) for r in found.requests] == [
        (0, 64, (7,)),
        (1.00025, 70, (7, 8)),
    ]
    assert found.prefix_block_tokens == 64
    assert found.notes == ("1 requests without an output token were left out",)


def test_a_recording_of_several_models_is_noted(tmp_path: Path) -> None:
    rows = "".join(
        f'{{"timestamp":{i},"input_length":5,"output_length":1,"block_tokens":64,"model":"{name}"}}\n'
        for i, name in enumerate("bab")
    )
    assert read_recorded(trace_file(tmp_path, rows)).notes == ("requests were for 2 models: a, b",)


def test_blocks_of_two_sizes_do_not_mix(tmp_path: Path) -> None:
    rows = (
        '{"timestamp":1,"input_length":70,"output_length":5,"hash_ids":[7,8],"block_tokens":64}\n'
        '{"timestamp":2,"input_length":70,"output_length":5,"hash_ids":[7]}\n'
    )
    with pytest.raises(BadInput, match="line 2: block_tokens is 512, but 64 in earlier rows"):
        read_recorded(trace_file(tmp_path, rows))


def test_burstgpts_failures_are_left_out_and_its_seconds_spread(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n5,ChatGPT,10,0,10,API log\n"
        "5,GPT-4,20,7,27,API log\n6,GPT-4,1,1,2,API log\n"
    )
    found = read_burstgpt(trace_file(tmp_path, head + rows), seed=1)
    assert [(r.input_tokens, r.output_tokens) for r in found.requests] == [(472, 18), (20, 7), (1, 1)]
    assert 0 < found.requests[1].at < 1
    assert "1 requests without an output token were left out" in found.notes
