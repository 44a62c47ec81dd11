"""The checks of a GPU machine, on a CPU: nvidia-smi, torch.cuda, the Hub and the PATH are replaced."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import trl
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer  # noqa: F401  # before subprocess is replaced
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.scripts import run_process
from helpers.settings import parsed
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from pytest import LogCaptureFixture, MonkeyPatch

from gtpo.arguments import Settings
from gtpo.cli import parse as cli
from gtpo.models import backend, preflight
from gtpo.models.backend import load_backend
from gtpo.models.memory import GIB
from gtpo.models.preflight import check_machine, checks, describe_dry_run

TABLES = tables_of(__file__)


RESPONSE = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
GATED = GatedRepoError("403", response=RESPONSE)


@dataclass
class Machine:
    """A GPU machine on which every check passes; a test changes one thing."""

    cache: Path
    driver: str = "580.65.06"
    capability: tuple[int, int] = (8, 0)
    free: float = 79.0  # of 80 GiB
    errors: dict[str, Exception] = field(default_factory=dict)  # of requests to the Hub
    requests: list[str] = field(default_factory=list)

    def ask(self, request: str) -> None:
        self.requests.append(request)
        if request in self.errors:
            raise self.errors[request]


def see_gpu(monkeypatch: MonkeyPatch, seen: bool) -> None:
    for module in (backend, cli, preflight):
        monkeypatch.setattr(module, "gpu_is_available", lambda: seen)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "hub")
    machine.cache.mkdir()

    replacements: dict[str, Any] = {
        "subprocess.run": lambda command, **_: SimpleNamespace(stdout=f"{machine.driver}\n"),
        "shutil.which": lambda name, path=None: name,
        "torch.cuda.get_device_capability": lambda *_: tuple(machine.capability),
        "torch.cuda.mem_get_info": lambda *_: (int(machine.free * GIB), 80 * GIB),
        "huggingface_hub.constants.HF_HUB_CACHE": str(machine.cache),
        "huggingface_hub.get_session": lambda: SimpleNamespace(head=lambda url, timeout: machine.ask("head")),
        "huggingface_hub.auth_check": lambda model: machine.ask("auth_check"),
        "huggingface_hub.whoami": lambda: machine.ask("whoami"),
        "gtpo.models.preflight.is_installed": lambda package: True,  # vLLM
    }
    for name, value in replacements.items():
        monkeypatch.setattr(name, value)
    see_gpu(monkeypatch, True)
    monkeypatch.setenv("HF_HUB_CACHE", str(machine.cache))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine


def settings_of(*argv: str, model: str = "llama") -> Settings:
    """The settings of a run on a GPU; a dry run, in which Transformers accepts bfloat16 on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "gpu_is_available", lambda: False)
        settings = parsed("--model", model, "--dry_run", *argv)
    settings.run.dry_run = False
    settings.given["use_cpu"] = False
    return settings


def faults(backend: str = "unsloth", *argv: str) -> list[tuple[str, bool, str]]:
    """The checks that fail: name, whether it is fatal, and the sentence."""
    found = checks(settings_of(*argv), backend)
    return [(check.name, check.fatal, check.fault) for check in found if check.fault]


# ---- the machine ----


OLD = "550.54.15"
IN_16_BITS = ("transformers", "--load_in_4bit", "false", "--use_vllm", "false")


def test_an_older_driver_is_named_without_a_gpu(
    machine: Machine, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """PyTorch says it in a warning only, and the run would start on the CPU or ask for a GPU."""
    machine.driver = OLD
    see_gpu(monkeypatch, False)
    with refused(f"{OLD}.*R580"):
        parsed("--model", "llama")
    with refused(f"{OLD}.*R580"):
        load_backend("unsloth", "a/b")
    cli.preset_for("gtpo", "a/b")
    assert [OLD in message for message in caplog.messages] == [True]
    cli.preset_for("gtpo", "tiny")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the CPU is what the user wants
    cli.preset_for("gtpo", "a/b")
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("change", "name", "fatal", "words"), TABLES["a_fault_of_the_machine"])
def test_a_fault_of_the_machine(
    change: dict[str, Any], name: str | None, fatal: bool, words: str, machine: Machine, monkeypatch: MonkeyPatch
) -> None:
    cuda = change.get("cuda", "12.8")
    monkeypatch.setattr(torch.version, "cuda", cuda)  # an installation replaces this PyTorch
    vars(machine).update(change)
    found = faults()
    assert [fault[:2] for fault in found] == ([(name, fatal)] if name else [])
    assert not name or words in found[0][2]


# ---- the Hub ----


def test_a_gated_model_is_fatal_without_a_copy_of_unsloth(machine: Machine) -> None:
    machine.errors["auth_check"] = GATED
    assert [fault[:2] for fault in faults(*IN_16_BITS)] == [("access to the model", True)]
    assert [fault[:2] for fault in faults()] == [("access to the model", False)]


@pytest.mark.parametrize("error", [RepositoryNotFoundError, HfHubHTTPError])
def test_other_errors_of_the_hub_are_left_to_the_download(error: Any, machine: Machine) -> None:
    machine.errors["auth_check"] = error("404", response=RESPONSE)
    assert faults(*IN_16_BITS) == []


def test_no_access_is_asked_for_a_cached_model(machine: Machine) -> None:
    """A token without access may train it."""
    snapshot = machine.cache / "models--meta-llama--Llama-3.1-8B-Instruct"
    for part, text in (("refs/main", "0123"), ("snapshots/0123/config.json", "{}")):
        (snapshot / part).parent.mkdir(parents=True)
        (snapshot / part).write_text(text)
    assert faults(*IN_16_BITS) == machine.requests == []


def test_no_access_is_asked_without_the_hub(machine: Machine) -> None:
    machine.errors["head"] = httpx.ConnectError("Name or service not known")
    assert faults(*IN_16_BITS) == []
    assert machine.requests == ["head"]


@pytest.mark.parametrize("model", ["tiny", "{directory}", "a/b/c", "./missing/model"])
def test_what_is_no_hub_id_is_not_looked_up(model: str, machine: Machine, tmp_path: Path) -> None:
    settings = settings_of()
    settings.model.model = model.format(directory=tmp_path)
    list(checks(settings, "unsloth"))
    assert machine.requests == []


def test_an_upload_is_checked_before_the_training(machine: Machine, monkeypatch: MonkeyPatch) -> None:
    see_gpu(monkeypatch, False)
    check_machine(settings_of(model="tiny"), "transformers")
    settings = settings_of("--push_to_hub", "true", model="tiny")
    check_machine(settings, "transformers")
    assert machine.requests == ["whoami"]
    machine.errors["whoami"] = LocalTokenNotFoundError("Token is required.\nMore.")
    with refused("--push_to_hub: Token is required: `hf auth login`"):
        check_machine(settings, "transformers")


# ---- when they run ----


def test_a_fatal_fault_stops_and_others_are_warnings(
    machine: Machine, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    machine.free = 31.5
    check_machine(settings_of(), "unsloth")
    assert len(caplog.messages) == 1 and "vLLM reserves 32.0 GiB" in caplog.text
    monkeypatch.setenv("RANK", "1")
    check_machine(settings_of(), "unsloth")
    assert len(caplog.messages) == 1
    machine.free = 2.0
    with refused("2.0 of 80.0 GiB"):
        check_machine(settings_of(), "unsloth")


def test_cpu_and_dry_run_are_not_checked(machine: Machine, monkeypatch: MonkeyPatch) -> None:
    machine.free = 0
    settings = settings_of()
    settings.run.dry_run = True
    check_machine(settings, "unsloth")
    settings = settings_of()
    settings.given["use_cpu"] = True
    check_machine(settings, "unsloth")
    assert "error" not in describe_dry_run(settings, "unsloth", 10)
    see_gpu(monkeypatch, False)
    check_machine(settings_of(), "unsloth")


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft"])
def test_scripts_check_before_they_download(
    script: str, machine: Machine, monkeypatch: MonkeyPatch, here: Path
) -> None:
    """Neither rows nor model are loaded, and nothing is written."""
    main = __import__(script).main
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--model", "llama", "--backend", "transformers"])
    settings = settings_of()
    settings.method = script.removeprefix("train_")
    monkeypatch.setattr(f"{script}.parse", lambda *_: settings)
    monkeypatch.setattr("gtpo.data.load.load_train", lambda *_: pytest.fail("rows were loaded"))
    monkeypatch.setattr("gtpo.models.load.build_policy", lambda *_: pytest.fail("the model was loaded"))
    machine.free = 2.0
    with refused("2.0 of 80.0 GiB"):
        main()


# ---- the command ----


def test_a_fatal_check_is_printed_and_exits_with_2(
    machine: Machine, monkeypatch: MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["preflight.py"])
    machine.errors["auth_check"] = GATED
    preflight.main()
    shown = capsys.readouterr().out
    assert shown.startswith("ok: driver, compute capability\nwarning: meta-llama")  # Unsloth trains on its own copy
    machine.driver = OLD
    see_gpu(monkeypatch, False)
    with pytest.raises(SystemExit, match="2"):
        preflight.main()
    assert capsys.readouterr().out.startswith("error: the NVIDIA driver")


def test_the_command_runs_on_a_python_without_packages(tmp_path: Path) -> None:
    """``-S`` leaves out site-packages; an old driver is the one fault that does not depend on this machine."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {OLD}\n")
    smi.chmod(0o755)
    command = [sys.executable, "-S", "-m", "gtpo.models.preflight", "--model", "qwen"]
    ended = run_process(command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, code=2)
    assert ended.stderr == ""
    assert f"error: the NVIDIA driver is {OLD}" in ended.stdout


def test_first_light_checks_the_machine_before_it_installs() -> None:
    command = ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", "first-light"]
    shown = run_process(command).stdout
    assert 0 <= shown.find("preflight") < shown.find("pip install")
