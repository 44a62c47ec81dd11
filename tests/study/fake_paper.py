"""A finished run at paper scale, without its training."""

import json

from gtpo.runs.directory import write_manifest
from study.stages import Stage


def finish(run: Stage, steps: int, collapses: bool) -> None:
    """Formatting rises to 98 % and, if it collapses, falls to 80 % halfway; a checkpoint is at the last step."""
    run.run.adapter.mkdir(parents=True, exist_ok=True)
    (run.run.adapter / "adapter_config.json").write_text("{}")
    checkpoint = run.run.checkpoint(steps)
    checkpoint.mkdir(exist_ok=True)
    for name in ("adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"):
        (checkpoint / name).write_text("")
    write_manifest(checkpoint)
    rows = [
        {"step": step, "formatting": 80.0 if collapses and step > steps // 2 else 98.0} for step in range(1, steps + 1)
    ]
    run.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
