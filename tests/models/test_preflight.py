"""The checks of a GPU machine, on a CPU: nvidia-smi, torch.cuda, the Hub and the PATH are replaced."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl.trainer.grpo_trainer  # noqa: F401  # before subprocess is replaced
from datasets import Dataset
from helpers.refusals import refused
from helpers.scripts import run_process
from helpers.settings import parsed
from huggingface_hub.errors import LocalTokenNotFoundError
from pytest import LogCaptureFixture, MonkeyPatch

import train_gtpo
from gtpo.arguments import Settings
from gtpo.cli import presets as cli
from gtpo.models import backend, plan, preflight
from gtpo.models.backend import check_driver, load_backend
from gtpo.models.memory import GIB
from gtpo.models.preflight import check_machine
from gtpo.models.source import ModelSource, model_source

OLD = "550.54.15"


def see_gpu(monkeypatch: MonkeyPatch, seen: bool) -> None:
    for module in (backend, cli, preflight):
        monkeypatch.setattr(module, "gpu_is_available", lambda: seen)


def set_driver(monkeypatch: MonkeyPatch, found: str) -> None:
    monkeypatch.setattr("subprocess.run", lambda command, **_: SimpleNamespace(stdout=f"{found}\n"))


def set_free(monkeypatch: MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (int(gib * GIB), 80 * GIB))


@pytest.fixture
def machine(monkeypatch: MonkeyPatch) -> None:
    """A GPU machine on which every check passes."""
    set_driver(monkeypatch, "580.65.06")
    set_free(monkeypatch, 79.0)
    monkeypatch.setattr("shutil.which", lambda name, path=None: name)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr("gtpo.models.preflight.is_installed", lambda package: True)  # vLLM
    monkeypatch.setattr(torch.version, "cuda", "12.8")  # an installation replaces this PyTorch
    see_gpu(monkeypatch, True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def settings_of(*argv: str, model: str = "llama") -> Settings:
    """The settings of a run on a GPU; a dry run, in which Transformers accepts bfloat16 on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "gpu_is_available", lambda: False)
        settings = parsed("--model", model, "--dry_run", *argv)
    settings.run.dry_run = False
    settings.given["use_cpu"] = False
    return settings


# ---- the machine ----


def test_an_older_driver_is_named_without_a_gpu(
    machine: None, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """PyTorch says it in a warning only, and the run would start on the CPU or ask for a GPU."""
    set_driver(monkeypatch, OLD)
    see_gpu(monkeypatch, False)
    with refused(f"{OLD}.*R580"):
        parsed("--model", "llama")
    with refused(f"{OLD}.*R580"):
        load_backend("unsloth")
    cli.preset_for("gtpo", model_source("a/b"))
    assert [OLD in message for message in caplog.messages] == [True]
    cli.preset_for("gtpo", model_source("tiny"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the CPU is what the user wants
    cli.preset_for("gtpo", model_source("a/b"))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        ("595.10", "12.8", None),
        (OLD, "12.8", OLD),
        (OLD, "13.0", None),  # CUDA forward compatibility
        ("NVIDIA-SMI has failed", "12.8", "nvidia-smi"),
    ],
)
def test_drivers_of_cuda_13(driver: str, cuda: str, words: str | None, machine: None, monkeypatch: MonkeyPatch) -> None:
    set_driver(monkeypatch, driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert words in str(check_driver()) if words else check_driver() is None


# ---- a run ----


def test_an_upload_is_checked_before_the_training(machine: None, monkeypatch: MonkeyPatch) -> None:
    def whoami() -> None:
        raise LocalTokenNotFoundError("Token is required.\nMore.")

    monkeypatch.setattr("huggingface_hub.whoami", whoami)
    check_machine(settings_of(model="tiny"), "transformers")
    settings = settings_of("--push_to_hub", "true", model="tiny")
    with refused("--push_to_hub: Token is required: `hf auth login`"):
        check_machine(settings, "transformers")
    settings.run.dry_run = True  # a plan is for another machine
    check_machine(settings, "transformers")


def test_weights_that_do_not_fit_stop_and_less_memory_is_a_warning(
    machine: None, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    check_machine(settings_of(), "unsloth")
    [saved] = caplog.messages
    assert "--load_in_4bit false fits this GPU and would save" in saved
    set_free(monkeypatch, 31.5)
    check_machine(settings_of(), "unsloth")
    assert len(caplog.messages) == 3 and "vLLM reserves 32.0 GiB" in caplog.messages[-1]
    monkeypatch.setenv("RANK", "1")
    check_machine(settings_of(), "unsloth")
    assert len(caplog.messages) == 3
    set_free(monkeypatch, 2.0)
    with refused("2.0 of 80.0 GiB"):
        check_machine(settings_of(), "unsloth")
    settings = settings_of()
    settings.run.dry_run = True
    check_machine(settings, "unsloth")
    settings.run.dry_run = False
    settings.given["use_cpu"] = True
    check_machine(settings, "unsloth")
    see_gpu(monkeypatch, False)
    check_machine(settings_of(), "unsloth")


def test_scripts_check_before_they_download(machine: None, monkeypatch: MonkeyPatch, here: Path) -> None:
    """Neither rows nor model are loaded, and nothing is written."""
    monkeypatch.setattr(sys, "argv", ["train_gtpo.py", "--model", "llama", "--backend", "transformers"])
    settings = settings_of()
    monkeypatch.setattr("train_gtpo.parse", lambda *_: settings)
    monkeypatch.setattr("gtpo.training.loop.load_rows", lambda *_: pytest.fail("rows were loaded"))
    monkeypatch.setattr("gtpo.models.load.build_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    set_free(monkeypatch, 2.0)
    with refused("2.0 of 80.0 GiB"):
        train_gtpo.main()


QUESTION = {"prompt": [{"role": "user", "content": "1 + 1?"}], "answer": "2"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "# The rows are on the Hub, and a dry run does not read them."),
        ([{"prompt": "", "answer": ""}] * 2, "# The rows are on the Hub, and a dry run does not read them."),
        ([QUESTION], "# The tokenizer of owner/name is not on this machine, so no prompt is shown."),
    ],
)
def test_a_plan_says_why_it_shows_no_prompt(rows: list[Any], said: str, monkeypatch: MonkeyPatch) -> None:
    """Nothing is downloaded, and the Hub is not asked whether it can be reached."""
    options: list[Any] = []

    def from_pretrained(path: str, **given: Any) -> None:
        options.append((path, given["local_files_only"]))
        raise OSError("not in the cache")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    monkeypatch.setattr("gtpo.models.load.load_config", lambda path, **given: options.append((path, given)))
    monkeypatch.setattr("gtpo.models.source.hub_is_reachable", lambda: pytest.fail("the Hub was asked"))
    settings = replace(settings_of(model="tiny"), source=ModelSource("owner/name", "owner/name", "owner/name"))
    described = plan._describe_first_row(settings, Dataset.from_list(rows))
    assert described == f"{said}\n"
    asked = [("owner/name", {"local_files_only": True}), ("owner/name", True)]
    assert options == (asked if "tokenizer" in said else [])


# ---- the command ----


def test_the_command_refuses_what_cannot_train(machine: None, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["preflight.py"])
    preflight.main()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (7, 0))
    with refused(r"7\.0"):
        preflight.main()
    see_gpu(monkeypatch, False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with refused("no NVIDIA GPU"):
        preflight.main()


def test_the_command_runs_on_a_python_without_packages(tmp_path: Path) -> None:
    """``-S`` leaves out site-packages; an old driver is the one fault that does not depend on this machine."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {OLD}\n")
    smi.chmod(0o755)
    command = [sys.executable, "-S", "-m", "gtpo.models.preflight"]
    ended = run_process(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, code=2)
    assert f"the NVIDIA driver is {OLD}" in ended.stderr


def test_first_light_checks_the_machine_before_it_installs() -> None:
    command = ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", "first-light"]
    shown = run_process(command).stdout
    assert 0 <= shown.find("preflight") < shown.find("pip install")
