"""One memory plan covers the served model and its drafter; what was planned is what the drafter takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ridgeline import LLM
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import OutOfMemoryPlan
from ridgeline.engine.run.drafters.build import head_cache_bytes
from ridgeline.engine.run.drafters.chain_drafter import ChainDrafter
from ridgeline.engine.speculate.speculation import Speculation
from ridgeline.engine.start.cuda_build import CudaBuild
from ridgeline.engine.start.device_memory import DeviceMemory
from ridgeline.engine.start.drafter.build import DrafterBuild, head_footprint
from ridgeline.engine.start.drafter.choice import DraftModel, SpeculationChoice
from ridgeline.engine.start.loading import StepSizes
from ridgeline.engine.start.memory import (
    GIB,
    DeviceRoom,
    DrafterFootprint,
    Footprint,
    MemoryPlan,
    draft_model_plan,
    plan_memory,
)
from ridgeline.engine.start.memory_receipt import PARTS, MemoryReceipt, receipt_of
from ridgeline.models.drafters.eagle3_config import Eagle3Config
from ridgeline.models.drafters.mtp import MtpModule
from ridgeline.models.drafters.mtp_config import mtp_config
from ridgeline.models.spec.read_spec import read_spec
from tests.engine.speculate.option_cases import served, work
from tests.engine.speculate.small_heads import (
    SIZES,
    SPEC,
    WEIGHTS,
    random_head,
    random_medusa,
)
from tests.engine.test_cuda_build import QWEN3_8B
from tests.gpu.engines import torch_runner
from tests.tiny_thinker import save_thinker

QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
H200 = 138 * GIB
GPU_SIZES = StepSizes(step_tokens=8192, prefill_chunk=8192, max_running=256)


def config_at(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cuda_build(config: EngineConfig, path: Path, free_bytes: int) -> CudaBuild:
    build = CudaBuild(config, path, read_spec(path), 1)
    build._device.free_at_start = free_bytes
    return build


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return config_at(tmp_path / "8b", QWEN3_8B)


@pytest.fixture
def draft(tmp_path: Path) -> DraftModel:
    path = config_at(tmp_path / "small", QWEN3_06B)
    return DraftModel(path, read_spec(path))


def planned(
    target: Path, choice: SpeculationChoice, free_bytes: int = H200
) -> tuple[MemoryPlan, DrafterBuild]:
    config, spec = EngineConfig(), read_spec(target)
    drafter = DrafterBuild(choice, config, spec, lambda own, path, _: cuda_build(own, path, free_bytes))
    own = cuda_build(config, target, free_bytes).footprint(GPU_SIZES)
    return plan_memory(spec, config, own, 0, drafter.footprint(GPU_SIZES, own)), drafter


def total(plan: MemoryPlan) -> int:
    model = plan.weights_bytes + plan.kv_bytes + plan.activation_bytes + plan.reserve_bytes
    return model + plan.drafter_bytes + plan.drafter_kv_bytes + plan.drafter_reserve_bytes


def test_a_draft_model_on_a_gpu_is_part_of_the_plan(target, draft):
    """8B with 0.6B on an H200, with the defaults. Planned one after the other, the second found no room."""
    plan, drafter = planned(target, SpeculationChoice("model", model=draft))
    assert 0 <= int(0.9 * H200) - total(plan) < 16 * (147_456 + 114_688)
    assert plan.kv_bytes == plan.kv_tokens * 147_456
    assert plan.drafter_kv_bytes == plan.kv_tokens * 114_688
    assert plan.drafter_bytes > 2 * draft.spec.parameters
    assert plan.kv_tokens > 300_000
    own = draft_model_plan(plan, drafter.footprint(GPU_SIZES, None), draft.spec.max_context)
    assert (own.num_blocks, own.kv_tokens) == (plan.num_blocks, plan.kv_tokens)
    assert own.weights_bytes == pytest.approx(2 * draft.spec.parameters, rel=1e-3)
    assert own.kv_bytes == plan.drafter_kv_bytes


def test_without_a_drafter_nothing_is_planned_for_one(target):
    plan, _ = planned(target, SpeculationChoice("suffix"))
    assert plan.drafter_bytes == plan.drafter_kv_bytes == plan.drafter_reserve_bytes == 0
    assert 0 <= int(0.9 * H200) - total(plan) < 16 * 147_456


def test_a_draft_head_on_a_gpu_is_part_of_the_plan(target):
    head = Eagle3Config.for_target(read_spec(target), 32_000, 4, "8b")
    plan, _ = planned(target, SpeculationChoice("head", head=head))
    assert 0 <= int(0.9 * H200) - total(plan) < 16 * 147_456
    assert plan.drafter_sequences == GPU_SIZES.max_running
    keys_and_values, kept = (4096 + 4) * 2 * 8 * 128 * 2, 64 * 3 * 4096 * 2
    assert plan.drafter_kv_bytes == 256 * (keys_and_values + kept)
    assert plan.drafter_bytes > 2 * head.parameters + plan.drafter_kv_bytes


def test_where_memory_is_short_a_head_has_room_for_fewer_sequences(target):
    head = Eagle3Config.for_target(read_spec(target), 32_000, 4, "8b")
    plan, _ = planned(target, SpeculationChoice("head", head=head), free_bytes=24 * GIB)
    assert 1 <= plan.drafter_sequences < 32
    assert plan.kv_bytes > 4 * plan.drafter_kv_bytes
    assert total(plan) <= 0.9 * 24 * GIB


def simple_plan(config: EngineConfig, drafter: DrafterFootprint, free_bytes: int = 8 * GIB) -> MemoryPlan:
    room = DeviceRoom(free_bytes, 10**9, "lower --step-tokens")
    footprint = Footprint(GIB, 1 << 16, GIB // 8, GIB // 4, room)
    return plan_memory(SPEC, config, footprint, 0, drafter)


def test_a_drafter_that_does_not_fit_is_named():
    big = DrafterFootprint(weights_bytes=7 * GIB)
    with pytest.raises(OutOfMemoryPlan, match=r"8\.00 GiB and .* \(7\.00 GiB of them for --speculate\)"):
        simple_plan(EngineConfig(), big)
    twin = DrafterFootprint(kv_bytes_per_token=1 << 16)
    with pytest.raises(OutOfMemoryPlan, match=r"12\.21 GiB \(with the draft model's\).* --kv-tokens"):
        simple_plan(EngineConfig(kv_tokens=100_000), twin)
    assert simple_plan(EngineConfig(kv_tokens=40_000), twin).kv_tokens == 40_000


def test_a_size_in_gib_is_that_of_both_caches():
    twin = DrafterFootprint(kv_bytes_per_token=1 << 16)
    plan = simple_plan(EngineConfig(kv_memory_gib=2.0), twin)
    assert plan.kv_bytes == plan.drafter_kv_bytes == GIB


def test_a_heads_weights_take_what_is_planned(tmp_path):
    model = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    path = config_at(tmp_path / "mimo", QWEN3_06B | model | {"num_nextn_predict_layers": 1})
    mimo = mtp_config(read_spec(path), path)
    with torch.device("meta"):
        module = MtpModule(mimo, torch.empty(0))
    for head in (random_head(), random_medusa(), random_medusa(layers=2), module):
        taken = sum(each.nbytes for each in head.parameters())
        assert head_footprint(head.config, 4, StepSizes(40, 40, 16)).weights_bytes == taken


def test_a_heads_cache_grows_to_what_is_planned():
    head, most = random_head(), 6
    sizes = StepSizes(SIZES.step_tokens, SIZES.step_tokens, most)
    runner = torch_runner(SPEC, WEIGHTS, SIZES)
    drafter = ChainDrafter(head, WEIGHTS.embed.tensor, 1.0, runner, most)
    assert head_cache_bytes(drafter) == 0
    served(runner, SIZES, work(), Speculation(drafter, SPEC.vocab_size, 2))
    assert head_cache_bytes(drafter) == most * head_footprint(head.config, 4, sizes).kv_bytes_per_sequence


def test_an_engine_and_its_draft_model_share_one_plan(tmp_path, weights_are_not_kept):
    save_thinker(tmp_path)
    llm = LLM(
        str(tmp_path),
        backend="torch",
        speculate=str(tmp_path),
        kv_memory_gib=0.01,
        max_context=512,
        threads=1,
    )
    plan, built = llm.engine.plan, llm.engine
    assert plan.kv_bytes == plan.drafter_kv_bytes <= 0.005 * GIB
    assert len(built.core.speculation.drafter._free) == plan.num_blocks
    assert built.budget.bytes["drafter"] == built.budget.bytes["weights"]
    assert built.budget.bytes["drafter_kv"] == plan.drafter_kv_bytes


# ── the receipt ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_receipt_has_the_drafter_where_there_is_one():
    def receipt(drafter: int) -> MemoryReceipt:
        sizes = dict.fromkeys(PARTS, GIB) | {"drafter": drafter, "drafter_kv": 2 * drafter}
        return MemoryReceipt(sizes, sizes, GIB, GIB, GIB, GIB)

    assert (
        "drafter 1.00 (planned 1.00) · its KV cache 2.00 (planned 2.00) · graphs" in receipt(GIB).lines()[0]
    )
    assert "drafter" not in receipt(0).lines()[0]
    assert receipt_of(receipt(GIB).as_bytes()) == receipt(GIB)


def test_a_drafters_memory_is_counted_as_its_own_and_not_as_graphs(monkeypatch):
    used = {"allocated": 0, "reserved": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: used["reserved"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 - used["reserved"], 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: used["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: used["reserved"])
    device = DeviceMemory()
    device.free_at_start = 1000

    def grow(size: int) -> None:
        used["allocated"] += size
        used["reserved"] += size

    device.mark("start")
    grow(100)
    device.mark("weights")
    grow(60)  # 40 of them KV
    device.mark("runner")
    kv = 30
    grow(55)
    device.count_drafter(lambda: kv)
    grow(7)
    seen = device.receipt({}, kv_bytes=40).observed
    assert seen == {
        "weights": 100,
        "kv": 40,
        "activations": 20,
        "drafter": 25,
        "drafter_kv": 30,
        "graphs": 7,
        "libraries": 0,
    }
    kv += 9  # a head's cache has grown
    grow(9)
    seen = device.receipt({}, kv_bytes=40).observed
    assert (seen["drafter_kv"], seen["graphs"]) == (39, 7)
