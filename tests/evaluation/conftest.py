"""Adapters of the tiny model, a working directory with runs, and completions whose scores are known."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.files import write_lines
from helpers.scripts import Command
from pytest import MonkeyPatch, TempPathFactory, fixture

from gtpo.arguments import PromptArguments
from gtpo.data.load import load_benchmark
from gtpo.evaluation.storage import problems_hash


@fixture(scope="session")
def adapters(tiny: Path, tmp_path_factory: TempPathFactory) -> list[Path]:
    """Two adapters of the tiny model with different weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directories = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        directories.append(tmp_path_factory.mktemp("adapter"))
        get_peft_model(model, lora).save_pretrained(directories[-1])
    return directories


@fixture(scope="session")
def ask_greedily(tiny: Path) -> Callable[..., tuple[str, int]]:
    """``ask_greedily(messages, adapter)``: a completion by Transformers, without padding; its number of tokens."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)

    def ask(messages: Any, adapter: Path | None = None) -> tuple[str, int]:
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, adapter) if adapter else model
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)

    return ask


@fixture
def outputs(adapters: list[Path], here: Path) -> Path:
    """A working directory whose outputs/ has an older and a newer finished run, and an unfinished one."""
    directory = here / "outputs"
    for age, name in enumerate(("demo/newer", "older")):
        shutil.copytree(adapters[0], directory / name / "adapter")
        written = time.time() - 1000 * age
        os.utime(directory / name / "adapter" / "adapter_config.json", (written, written))
    shutil.copytree(adapters[1], directory / "older" / "best")
    shutil.copytree(adapters[1], directory / "unfinished" / "checkpoint-50")
    shutil.copytree(adapters[1], directory / "unfinished" / "adapter.tmp")
    return directory


@fixture
def run_evaluate(monkeypatch: MonkeyPatch) -> Command:
    """``run_evaluate(*argv)``: evaluate.py with a command line."""
    import evaluate

    def run(*argv: object) -> None:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, argv)])
        evaluate.main()

    return run


ANSWER = "<reasoning>\nso\n</reasoning>\n<answer>\n{}\n</answer>"


@fixture
def texts_by_hand() -> dict[str, list[str]]:
    """Three problems, k = 4. r: correct, w and v: two wrong answers, x: no answer, f: correct without the format.

    problem | samples | c | first correct | majority of 4
    0       | w r r f | 3 | 2nd           | correct (3 votes)
    1       | w w v r | 1 | 4th           | wrong (2 votes)
    2       | x w v x | 0 | none          | wrong (tie: w occurs first)
    """
    golds = [problem.gold for problem in load_benchmark("arithmetic")[:3]]
    texts = {}
    for i, (gold, samples) in enumerate(zip(golds, ("wrrf", "wwvr", "xwvx"), strict=True)):
        written = {name: ANSWER.format(int(gold) + more) for more, name in enumerate("rwv")}
        written |= {"x": "I do not know.", "f": f"<answer>{gold}</answer>"}
        texts[f"arithmetic/{i}"] = [written[sample] for sample in samples]
    return texts


@fixture
def store(tmp_path: Path) -> Callable[..., Path]:
    """``store(texts, label, settings, about)``: a complete completion file of arithmetic; texts by problem."""

    def write(texts: dict[str, list[str]], label: str = "run", settings: Mapping = {}, about: Mapping = {}) -> Path:
        rows = load_benchmark("arithmetic")[: len(texts)]
        path = tmp_path / label / "arithmetic.jsonl"
        path.parent.mkdir(parents=True)
        sizes = {"problems": len(rows), "problems_hash": problems_hash(rows), "k": len(texts["arithmetic/0"])}
        head = {
            "settings": sizes | vars(PromptArguments()) | settings,
            "about": {"model": "some/model", "adapter": None, "data": {"source": "arithmetic"}} | about,
        }
        lines: list[dict] = [
            {"id": problem, "sample": sample, "completion": text, "tokens": 10 + sample, "finished": True}
            for problem, completions in texts.items()
            for sample, text in enumerate(completions)
        ]
        lines[0]["finished"] = False
        write_lines(path, [head, *reversed(lines)])  # vLLM finishes them in any order
        return path

    return write
