"""Measured serving points: the table that the analytic model is fitted and scored on.

Reads `measured-serving/serving_points.csv` of the AIConfigurator repository and the
configs of its models. Ambiguities of the table are resolved here, once, by named rules, which
docs/planner-accuracy.md lists. Never uses a measured time to resolve anything.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ridgeline.lab.errors import BadInput
from ridgeline.lab.hardware.find_chip import find_chip
from ridgeline.lab.perfmodel.deployment import Deployment
from ridgeline.lab.perfmodel.step_formula import ClosedLoop, closed_loop
from ridgeline.models.spec.find_spec import find_spec
from ridgeline.models.spec.model_spec import ModelSpec
from ridgeline.models.spec.precision import Precision

# Model as named in the table → config; equal architectures have equal configs, and count as one model.
CONFIGS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai--DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3": "deepseek-ai--DeepSeek-V3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-ai--DeepSeek-V3",
    "Qwen/Qwen3.5-397B-A17B": "Qwen--Qwen3.5-397B-A17B",
    "openai/gpt-oss-120b": "openai--gpt-oss-120b",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama--Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "Qwen/Qwen3-32B": "Qwen--Qwen3-32B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen--Qwen3-32B",
    "moonshotai/Kimi-K2.5": "moonshotai--Kimi-K2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B",
    "zhipuai/GLM-5": "zai-org--GLM-5",
}


@dataclass(frozen=True)
class MeasuredPoint:
    line: int
    name: str
    group: tuple[str, str, str, str]  # (model, engine, chip, precision): what is held out together
    deployment: Deployment
    batch: int  # requests in flight; of a disaggregated deployment, at one decode worker
    isl: int
    osl: int
    disaggregated: bool
    batch_known: bool  # False: a disaggregated row with only the total concurrency
    tpot_s: float
    ttft_s: float

    @property
    def is_mixture(self) -> bool:
        return self.deployment.shape.is_mixture

    @property
    def loop(self) -> ClosedLoop:
        return closed_loop(self.deployment, self.batch, self.isl, self.osl, disaggregated=self.disaggregated)


def read_points(data: Path) -> list[MeasuredPoint]:
    """From a folder that contains `measured-serving` and `configs`."""
    table = data / "measured-serving" / "serving_points.csv"
    try:
        with table.open(newline="") as file:
            return list(_points(csv.DictReader(file), data / "configs", table))
    except OSError as error:
        raise BadInput(f"{table}: cannot be read: {error.strerror}") from error


def _points(rows: csv.DictReader[str], configs: Path, table: Path) -> Iterator[MeasuredPoint]:
    for row in rows:
        try:
            yield _point(row, rows.line_num, configs)
        except KeyError as error:
            raise BadInput(f"{table}:{rows.line_num}: no column or no model {error}") from error
        except (ValueError, BadInput) as error:
            raise BadInput(f"{table}:{rows.line_num}: {error}") from error


def _point(row: dict[str, str], line: int, configs: Path) -> MeasuredPoint:
    side = "" if row["mode"] == "agg" else "decode_"
    config = CONFIGS[row["model_path"]]
    precision = _precision(config, row["gemm_quant_mode"], row["moe_quant_mode"])
    spread = _spread(
        *(_count(row[f"{side}{name}_size"]) for name in ("tp", "attention_dp", "moe_tp", "moe_ep"))
    )
    tp, attention_dp, moe_tp, ep = spread
    deployment = Deployment(
        shape=_shape(configs / f"{config}_config.json"),
        chip=find_chip(row["system"].removesuffix("_sxm")),
        backend=row["backend"],
        precision=precision,
        kv_precision="fp8"
        if row["backend"] == "trtllm" and precision.linear in ("fp8", "nvfp4")
        else "bfloat16",
        tp=tp,
        pp=_count(row[f"{side}pp_size"]),
        ep=ep,
        attention_dp=attention_dp,
        moe_tp=moe_tp,
    )
    batch, known = _batch(row, side, attention_dp)
    return MeasuredPoint(
        line=line,
        name=row["id"],
        group=(config, row["backend"], row["system"], row["precision"] or "bf16"),
        deployment=deployment,
        batch=batch,
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        disaggregated=bool(side),
        batch_known=known,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
    )


def _precision(config: str, gemm: str, moe: str) -> Precision:
    """Blank means 16 bits. gpt-oss is published with MXFP4 experts; int4 keeps all but experts at 16 bits."""
    if config == "openai--gpt-oss-120b":
        return Precision.named("mxfp4")
    if moe == "int4_wo":
        return Precision("bfloat16", "int4")
    return Precision(gemm or "bf16", moe or "bf16")


def _spread(tp: int, attention_dp: int, moe_tp: int, ep: int) -> tuple[int, int, int, int]:
    """Rows of T chips with "tp T, ep T" have sizes multiplied: (T², 1, T, T), (1, T², T, T), (T, T, 1, T²).

    The table contains the same measurements again as T chips; ids such as `tp4_ep4` confirm it.
    """
    if ep > 1 and moe_tp == ep and tp * attention_dp == ep * ep and max(tp, attention_dp) == ep * ep:
        return (ep, 1, 1, ep) if tp > 1 else (1, ep, 1, ep)
    if ep > 1 and tp == attention_dp and ep == tp * tp:
        return tp, 1, 1, tp
    return tp, attention_dp, moe_tp, ep


def _batch(row: dict[str, str], side: str, attention_dp: int) -> tuple[int, bool]:
    """Requests in flight: `_cN` of the id; else the batch of each attention rank times the ranks."""
    stated = re.search(r"_c(\d+)_", row["id"])
    if not side:
        ranks = _count(row["attention_dp_size"])
        return (int(stated[1]) if stated else _count(row["batch_size"]) * ranks), True
    if row["decode_batch_size"]:
        return _count(row["decode_batch_size"]) * attention_dp, True
    return (int(stated[1]) if stated else 1), False


def _count(text: str) -> int:
    """Blank and 0 mean no division."""
    return int(float(text)) if text and float(text) else 1


@cache
def _shape(path: Path) -> ModelSpec:
    return find_spec(path)
