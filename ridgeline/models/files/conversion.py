"""Errors for checkpoints that cannot be served directly, with the command that converts them.

Called by the readers of model files when they reject one. Never converts anything itself: the commands need
transformers, and pickles run their author's code.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ridgeline.models.errors import BrokenModel, UnsupportedModel
from ridgeline.models.files.config_values import read_json_object

ADAPTER_CONFIG = "adapter_config.json"
# Other vocabulary formats, and the packages transformers needs to read each.
OLD_TOKENIZERS = {
    "tokenizer.model": "sentencepiece protobuf",
    "spiece.model": "sentencepiece protobuf",
    "*.tiktoken": "tiktoken",
    "vocab.json": "",
    "vocab.txt": "",
}


def is_adapter(directory: Path) -> bool:
    """Whether the directory has only a PEFT adapter's weights; merged models may keep adapter_config.json."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return False
    others = [file for file in directory.glob("*.safetensors") if not file.name.startswith("adapter_")]
    return not others and not any(directory.glob("pytorch_model*.bin"))


def adapter_refusal(directory: Path) -> UnsupportedModel:
    config = read_json_object(directory / ADAPTER_CONFIG)
    base = str(config.get("base_model_name_or_path") or "BASE-MODEL")
    source, target = _places(directory, "-merged")
    merging = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
        f"M.from_pretrained({source!r}, torch_dtype='auto').merge_and_unload().save_pretrained({target!r}); "
        f"T.from_pretrained({base!r}).save_pretrained({target!r})"
    )
    return UnsupportedModel(
        f"{directory}: is a PEFT adapter ({config.get('peft_type', 'of an unknown type')}) for {base}, and "
        f"adapters are not supported yet. Merge it into the model and serve {target}: "
        f"pip install peft transformers && {_command(merging)}"
    )


def pickle_refusal(path: Path) -> UnsupportedModel:
    """path: the pickle, in a model directory or on its own."""
    refused = (
        f"{path}: is a pickle, and loading a pickle runs code from its author; "
        "use the model's .safetensors or .gguf files, or convert to safetensors"
    )
    is_read_by_transformers = path.match("pytorch_model*.bin") and (path.parent / "config.json").is_file()
    if not is_read_by_transformers:
        return UnsupportedModel(refused)
    source, target = _places(path.parent, "-safetensors")
    return UnsupportedModel(
        f"{refused} if you trust its author, then serve {target}: "
        f"pip install transformers torch && {_conversion(path.parent, source, target)}"
    )


def no_weights(directory: Path) -> BrokenModel:
    """For a hub model, whose pickles are never downloaded, or for a directory that has none."""
    message = f"{directory}: contains no weights (model.safetensors, its index, or a .gguf file)"
    if _hub_name(directory) is None:
        return BrokenModel(message)
    source, target = _places(directory, "-safetensors")
    return BrokenModel(
        f"{message}. If {source} has only pickles (pytorch_model.bin) and you trust its author, convert it "
        f"and serve {target}: pip install transformers torch && {_conversion(directory, source, target)}"
    )


def missing_tokenizer(directory: Path) -> BrokenModel:
    missing = f"{directory}: has no tokenizer.json"
    source, target = _places(directory, "-tokenizer")
    # A hub model: the older files are not downloaded, and the snapshot belongs to the hub's cache.
    if source != str(directory):
        return BrokenModel(
            f"{missing}. Save the model with a tokenizer.json, then serve {target}: "
            f"pip install transformers torch sentencepiece protobuf tiktoken && "
            f"{_conversion(directory, source, target)}"
        )
    for pattern, packages in OLD_TOKENIZERS.items():
        if found := sorted(directory.glob(pattern)):
            saving = (
                "from transformers import AutoTokenizer as T; "
                f"T.from_pretrained({source!r}).save_pretrained({source!r})"
            )
            return BrokenModel(
                f"{missing}, and {found[0].name} is not supported. Convert it: "
                f"{' '.join(f'pip install transformers {packages}'.split())} && {_command(saving)}"
            )
    return BrokenModel(f"{missing}; copy it from the source of the weights")


def _conversion(directory: Path, source: str, target: str) -> str:
    kind = _auto_class(directory)
    return _command(
        f"from transformers import {kind} as M, AutoTokenizer as T; "
        f"M.from_pretrained({source!r}, torch_dtype='auto').save_pretrained({target!r}); "
        f"T.from_pretrained({source!r}).save_pretrained({target!r})"
    )


def _auto_class(directory: Path) -> str:
    architectures: Any = read_json_object(directory / "config.json").get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "ForCausalLM"
    for task in ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification"):
        if name.endswith(task):
            return "AutoModelForCausalLM" if task == "ForConditionalGeneration" else f"AutoModel{task}"
    return "AutoModel"


def _places(directory: Path, suffix: str) -> tuple[str, str]:
    """(the model's name for transformers, where to save another); a hub snapshot is named by its id."""
    hub_name = _hub_name(directory)
    if hub_name is not None:
        return hub_name, f"./{hub_name.rpartition('/')[2]}"
    return str(directory), f"{str(directory).rstrip('/')}{suffix}"


def _hub_name(directory: Path) -> str | None:
    if directory.parent.name != "snapshots":
        return None
    return directory.parent.parent.name.removeprefix("models--").replace("--", "/")


def _command(code: str) -> str:
    is_plain = not set(code) & set('"$`\\!')
    return f'python -c "{code}"' if is_plain else f"python -c {shlex.quote(code)}"
