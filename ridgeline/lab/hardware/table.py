"""The accelerators that the planner knows, as data: every cell with its source.

Read through `find_chip`; docs/hardware.md is generated from it. Figures are dense. A figure published
only with sparsity is halved, and the source says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.lab.hardware.chip import Chip

GIB = 1 << 30
MIB = 1 << 20
TERA = 1e12
GIGA = 1e9

CHIP_FIELDS = (
    "memory_bytes", "bytes_per_s", "link_bytes_per_s", "internode_bytes_per_s", "gpus_per_node",
    "link_domain", "watts", "usd_per_hour",
)  # fmt: skip

AICONFIGURATOR = "ai-dynamo/aiconfigurator 095f58a5, systems/{file}.yaml"
BLACKWELL = "NVIDIA Blackwell datasheet, by way of "
BLACKWELL_ULTRA = "NVIDIA Blackwell Ultra datasheet, by way of "
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"
ADA = "NVIDIA Ada GPU architecture whitepaper, appendix A"
MI300X = "AMD Instinct MI300X data sheet"
RUNPOD_NOVEMBER = (
    "runpod.io/pricing, Secure Cloud, read 2026-11-09 (datareceipts/data-receipts, 109-gpu-pricing)"
)
RUNPOD_OCTOBER = "runpod.io/pricing, Pods, read 2026-10-07 (api-evangelist/runpod, plans)"


def _chip(
    name: str,
    title: str,
    *,
    memory_bytes: int,
    bytes_per_s: float,
    flops: Mapping[str, float],
    link_bytes_per_s: float,
    internode_bytes_per_s: float | None,
    gpus_per_node: int,
    watts: float,
    source: str,
    link_domain: int | None = None,
    usd_per_hour: float | None = None,
    sources: Mapping[str, str] | None = None,
) -> Chip:
    """`source` applies to every cell that `sources` does not name."""
    cells = [*CHIP_FIELDS, *(f"flops.{unit}" for unit in flops)]
    if usd_per_hour is None:
        cells.remove("usd_per_hour")
    if internode_bytes_per_s is None:
        cells.remove("internode_bytes_per_s")
    return Chip(
        name=name,
        title=title,
        memory_bytes=memory_bytes,
        bytes_per_s=bytes_per_s,
        flops=dict(flops),
        link_bytes_per_s=link_bytes_per_s,
        internode_bytes_per_s=internode_bytes_per_s,
        gpus_per_node=gpus_per_node,
        link_domain=link_domain or gpus_per_node,
        watts=watts,
        usd_per_hour=usd_per_hour,
        sources={**dict.fromkeys(cells, source), **(sources or {})},
    )


def _system(file: str, above: str = "") -> str:
    return above + AICONFIGURATOR.format(file=file)


CHIPS: tuple[Chip, ...] = (
    _chip(
        "a100",
        "NVIDIA A100 SXM 80 GB",
        memory_bytes=80 * GIB,
        bytes_per_s=2_039 * GIGA,
        flops={"bf16": 312 * TERA, "int8": 624 * TERA},
        link_bytes_per_s=300 * GIGA,
        internode_bytes_per_s=25 * GIGA,
        gpus_per_node=8,
        watts=400,
        usd_per_hour=1.79,
        source=_system("a100_sxm"),
        sources={"usd_per_hour": RUNPOD_NOVEMBER},
    ),
    _chip(
        "h100",
        "NVIDIA H100 SXM 80 GB",
        memory_bytes=80 * GIB,
        bytes_per_s=3_350 * GIGA,
        flops={"bf16": 989 * TERA, "fp8": 1_978 * TERA, "int8": 1_978 * TERA},
        link_bytes_per_s=450 * GIGA,
        internode_bytes_per_s=50 * GIGA,
        gpus_per_node=8,
        watts=700,
        usd_per_hour=3.99,
        source=_system("h100_sxm"),
        sources={"usd_per_hour": RUNPOD_NOVEMBER},
    ),
    _chip(
        "h200",
        "NVIDIA H200 SXM 141 GB",
        memory_bytes=141 * GIB,
        bytes_per_s=4_800 * GIGA,
        flops={"bf16": 989 * TERA, "fp8": 1_978 * TERA, "int8": 1_978 * TERA},
        link_bytes_per_s=450 * GIGA,
        internode_bytes_per_s=50 * GIGA,
        gpus_per_node=8,
        watts=700,
        usd_per_hour=4.59,
        source=_system("h200_sxm"),
        sources={"usd_per_hour": RUNPOD_OCTOBER},
    ),
    _chip(
        "b200",
        "NVIDIA B200 SXM 180 GB",
        memory_bytes=180 * GIB,
        bytes_per_s=7_700 * GIGA,
        flops={"bf16": 2_250 * TERA, "fp8": 4_500 * TERA, "fp4": 9_000 * TERA, "int8": 4_500 * TERA},
        link_bytes_per_s=900 * GIGA,
        internode_bytes_per_s=100 * GIGA,
        gpus_per_node=8,
        watts=1_000,
        usd_per_hour=6.79,
        source=_system("b200_sxm", BLACKWELL),
        sources={"usd_per_hour": RUNPOD_OCTOBER},
    ),
    _chip(
        "gb200",
        "NVIDIA GB200 NVL72, one GPU of it",
        memory_bytes=189_471 * MIB,
        bytes_per_s=8_000 * GIGA,
        flops={"bf16": 2_500 * TERA, "fp8": 5_000 * TERA, "fp4": 10_000 * TERA, "int8": 5_000 * TERA},
        link_bytes_per_s=900 * GIGA,
        internode_bytes_per_s=900 * GIGA,
        gpus_per_node=4,
        link_domain=72,
        watts=1_200,
        usd_per_hour=10.50,
        source=_system("gb200", BLACKWELL),
        sources={
            "usd_per_hour": "coreweave.com/pricing, $42.00 for 4 GPUs on demand, read 2026-09-20 "
            "(api-evangelist/coreweave, plans)"
        },
    ),
    _chip(
        "b300",
        "NVIDIA B300 SXM 288 GB",
        memory_bytes=275_040 * MIB,
        bytes_per_s=7_750 * GIGA,
        flops={"bf16": 2_250 * TERA, "fp8": 4_500 * TERA, "fp4": 14_000 * TERA, "int8": 153.5 * TERA},
        link_bytes_per_s=900 * GIGA,
        internode_bytes_per_s=100 * GIGA,
        gpus_per_node=8,
        watts=1_100,
        usd_per_hour=7.89,
        source=_system("b300_sxm", BLACKWELL_ULTRA),
        sources={"usd_per_hour": RUNPOD_OCTOBER},
    ),
    _chip(
        "gb300",
        "NVIDIA GB300 NVL72, one GPU of it",
        memory_bytes=284_208 * MIB,
        bytes_per_s=8_000 * GIGA,
        flops={"bf16": 2_500 * TERA, "fp8": 5_000 * TERA, "fp4": 15_000 * TERA, "int8": 165 * TERA},
        link_bytes_per_s=900 * GIGA,
        internode_bytes_per_s=900 * GIGA,
        gpus_per_node=4,
        link_domain=72,
        watts=1_400,
        source=_system("gb300", BLACKWELL_ULTRA),
    ),
    _chip(
        "l4",
        "NVIDIA L4 24 GB",
        memory_bytes=24 * GIB,
        bytes_per_s=300 * GIGA,
        flops={"bf16": 121 * TERA, "fp8": 242 * TERA, "int8": 242 * TERA},
        link_bytes_per_s=32 * GIGA,
        internode_bytes_per_s=25 * GIGA,
        gpus_per_node=8,
        watts=72,
        source=_system("l4"),
    ),
    _chip(
        "l40s",
        "NVIDIA L40S 48 GB",
        memory_bytes=46_068 * MIB,
        bytes_per_s=864 * GIGA,
        flops={"bf16": 362.05 * TERA, "fp8": 733 * TERA, "int8": 733 * TERA},
        link_bytes_per_s=32 * GIGA,
        internode_bytes_per_s=50 * GIGA,
        gpus_per_node=8,
        watts=350,
        usd_per_hour=2.25,
        source=_system("l40s"),
        sources={
            "usd_per_hour": "coreweave.com/pricing, $18.00 for 8 GPUs on demand, read 2026-09-20 "
            "(api-evangelist/coreweave, plans)"
        },
    ),
    _chip(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition 96 GB",
        memory_bytes=97_887 * MIB,
        bytes_per_s=1_792 * GIGA,
        flops={"bf16": 467.8 * TERA, "fp8": 935.6 * TERA, "fp4": 1_871.2 * TERA, "int8": 935.6 * TERA},
        link_bytes_per_s=64 * GIGA,
        internode_bytes_per_s=50 * GIGA,
        gpus_per_node=8,
        watts=600,
        usd_per_hour=2.04,
        source=_system("rtx_pro_6000_server"),
        sources={
            "usd_per_hour": "akash.network/pricing/gpus, Pro 6000 SE, read 2026-09-20 "
            "(api-evangelist/akash, plans)"
        },
    ),
    _chip(
        "rtx-5090",
        "NVIDIA GeForce RTX 5090 32 GB",
        memory_bytes=32 * GIB,
        bytes_per_s=1_792 * GIGA,
        flops={"bf16": 209.5 * TERA, "fp8": 838 * TERA, "fp4": 1_676 * TERA, "int8": 838 * TERA},
        link_bytes_per_s=64 * GIGA,
        internode_bytes_per_s=None,
        gpus_per_node=1,
        watts=575,
        source=RTX_BLACKWELL,
        sources={
            "flops.bf16": RTX_BLACKWELL + ": 419 with sparsity, FP32 accumulation, halved; at higher clocks "
            "xzwgit/gpu-flops-bench measured 254",
            "flops.fp8": RTX_BLACKWELL + ": 1,676 with sparsity, halved; xzwgit/gpu-flops-bench measured 774",
            "flops.fp4": RTX_BLACKWELL
            + ": 3,352 with sparsity, halved; xzwgit/gpu-flops-bench measured 1,617",
            "flops.int8": RTX_BLACKWELL + ": 1,676 with sparsity, halved",
            "link_bytes_per_s": "PCIe 5.0 x16, one direction; the card has no NVLink (NVIDIA product page)",
            "gpus_per_node": "sold as a card, not as a system",
            "link_domain": "sold as a card, not as a system",
        },
    ),
    _chip(
        "rtx-4090",
        "NVIDIA GeForce RTX 4090 24 GB",
        memory_bytes=24 * GIB,
        bytes_per_s=1_008 * GIGA,
        flops={"bf16": 165.2 * TERA, "fp8": 660.6 * TERA, "int8": 660.6 * TERA},
        link_bytes_per_s=32 * GIGA,
        internode_bytes_per_s=None,
        gpus_per_node=1,
        watts=450,
        source=ADA,
        sources={
            "flops.bf16": ADA + ": 330.4 with sparsity, FP32 accumulation, halved",
            "flops.fp8": ADA + ": 1,321.2 with sparsity, FP16 accumulation, halved",
            "flops.int8": ADA + ": 1,321.2 with sparsity, halved",
            "link_bytes_per_s": "PCIe 4.0 x16, one direction; the card has no NVLink (NVIDIA product page)",
            "gpus_per_node": "sold as a card, not as a system",
            "link_domain": "sold as a card, not as a system",
        },
    ),
    _chip(
        "mi300x",
        "AMD Instinct MI300X 192 GB",
        memory_bytes=192 * GIB,
        bytes_per_s=5_300 * GIGA,
        flops={"bf16": 1_307.4 * TERA, "fp8": 2_614.9 * TERA, "int8": 2_614.9 * TERA},
        link_bytes_per_s=448 * GIGA,
        internode_bytes_per_s=50 * GIGA,
        gpus_per_node=8,
        watts=750,
        usd_per_hour=2.59,
        source=MI300X,
        sources={
            "memory_bytes": "ROCm documentation, AMD GPU specifications",
            "link_bytes_per_s": MI300X
            + ": 7 Infinity Fabric links of 128 GB/s both ways, half of it one way",
            "internode_bytes_per_s": "Azure ND MI300X v5: one 400 Gb/s NIC per GPU",
            "usd_per_hour": "DigitalOcean list price, read 2026-10-08 "
            "(huggingface.co/datasets/tokenwatt/gpu-cloud-prices)",
        },
    ),
)
