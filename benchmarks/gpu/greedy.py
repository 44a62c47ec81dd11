"""Greedy tokens with and without an adapter: ``python greedy.py vllm|transformers MODEL ADAPTER OUTPUT N``.

The samplers are those of evaluate.py. ``OUTPUT`` is JSON: token ids under "prompts", "base" and "adapter", one list per
prompt, up to N tokens of each completion. A script, because vLLM keeps its memory until its process exits.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
PROBLEMS = 8


def greedy_tokens(backend: str, model: str, adapter: Path, tokens: int) -> dict[str, list[list[int]]]:
    from gtpo.data.arithmetic import arithmetic
    from gtpo.data.load import Problem
    from gtpo.evaluation import sampling

    def keep_ids(request: Any, ids: Any, finished: bool, tokenizer: Any) -> dict[str, Any]:
        return {"id": request.id, "sample": request.sample, "ids": [int(token) for token in ids]}

    settings = sampling.Sampling(k=1, temperature=0.0, max_new_tokens=tokens, batch_size=PROBLEMS)
    sampler: Any
    if backend == "vllm":
        rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
        sampler = sampling.VLLMSampler(model, settings, rank, gpu_memory_utilization=0.4)
    else:
        sampler = sampling.TransformersSampler(model, settings)
    problems = []
    for number, row in enumerate(arithmetic("test", PROBLEMS, 0)):
        problems.append(Problem(str(number), row["question"], row["gold"]))
    requests = sampling.make_requests(sampler, problems, settings)
    result = {"prompts": [request.prompt_ids for request in requests]}
    for name, directory in (("base", None), ("adapter", adapter)):
        with patch.object(sampling, "to_row", keep_ids):  # the rows of evaluate.py have text in place of ids
            rows = [row for batch in sampler.sample(requests, set(), directory) for row in batch]
        rows.sort(key=lambda row: int(row["id"]))
        result[name] = [row["ids"] for row in rows]
    return result


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    backend, model, adapter, output, tokens = sys.argv[1:]
    found = greedy_tokens(backend, model, Path(adapter), int(tokens))
    Path(output).write_text(json.dumps(found), encoding="utf-8")
