"""Measured initial entropies, kept for the next run of the same base model.

A record belongs to a key: the weights, the prompts as tokens, and every setting that determines what is sampled. A key
that differs in anything has another file, and a file that cannot be read is measured again.
"""

import hashlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gtpo.files import write_atomically

logger = logging.getLogger(__name__)

Record = dict[str, Any]


def policy_digest(policy: torch.nn.Module) -> str | None:
    """SHA-256 of the weights that a policy computes with, or None where this process holds only a part of them.

    A LoRA adapter whose B is zero changes nothing and does not count, whatever the random values of A.
    """
    if any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in policy.parameters()):
        return None
    weights = {name: value for name, value in policy.state_dict().items() if torch.is_tensor(value)}
    if not any(value.any() for name, value in weights.items() if ".lora_B." in name):
        weights = {name: value for name, value in weights.items() if ".lora_A." not in name and ".lora_B." not in name}
    digest = hashlib.sha256()
    for name, value in sorted((name.replace(".base_layer.", "."), value) for name, value in weights.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_record(directory: Path, key: dict[str, Any]) -> Record | None:
    """The record that was kept under exactly this key; None if there is none, or its file cannot be read."""
    path = path_of(directory, key)
    try:
        stored = json.loads(path.read_bytes())
        record: Record = stored["record"]
        entropies = record["per_prompt"]
        if stored["key"] == key and math.isclose(sum(entropies) / len(entropies), record["initial_entropy"]):
            return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        logger.debug("%s cannot be read", path, exc_info=True)
    logger.warning("%s is not the record of this policy: measured again", path)
    return None


def keep_record(directory: Path, key: dict[str, Any], record: Record) -> None:
    """Keep a record under its key; a directory that cannot be written is a warning."""
    path = path_of(directory, key)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"key": key, "record": record}, indent=2))
    except OSError as error:
        logger.warning("the initial entropy is not kept for the next run: %s", error)


def path_of(directory: Path, key: dict[str, Any]) -> Path:
    """The file of a key."""
    return directory / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
