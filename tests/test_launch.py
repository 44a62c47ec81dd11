"""Which processes a run has, and what a launcher asks for: one source, and a start that contradicts it is refused."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.files import read_json
from helpers.refusals import refused
from helpers.runs import checkpoint, rows_of
from helpers.scripts import ROOT, run_process, user_environment
from helpers.settings import parsed

from gtpo.processes import check_launch, check_launched, is_main_process, launched_with, local_rank, rank, world_size
from gtpo.runs.start import check_run, start_run

TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
OF_ACCELERATE = {  # what `accelerate launch` of several processes sets
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_CPU_AFFINITY": "True",
}
OF_ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "1.0",
}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "LOCAL_RANK": "-1", "WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"PMI_SIZE": "1"},
        {"PMI_SIZE": "2"} | TORCHRUN,
        TORCHRUN | OF_ACCELERATE | {"ACCELERATE_USE_FSDP": "true"},
        TORCHRUN | OF_ACCELERATE | OF_ZERO3,
        {"ACCELERATE_LOG_LEVEL": "info", "ACCELERATE_DEBUG_MODE": "true"},
    ],
    ids=str,
)
def test_a_launch_without_contradiction_starts(environment: dict[str, str]) -> None:
    check_launch(environment)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK=1 without LOCAL_RANK and WORLD_SIZE .* unset RANK, or start it with"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without LOCAL_RANK and RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2 without LOCAL_RANK in"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 without RANK and WORLD_SIZE"),
        (TORCHRUN | {"RANK": "2"}, "RANK=2 LOCAL_RANK=1 WORLD_SIZE=2 in"),
        ({"RANK": "one"}, "RANK=one in the environment: expected a number"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 without"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 without"),
        ({"ACCELERATE_USE_CPU": "true"}, "--cpu` starts one process for any --num_processes"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "DYNAMO_BACKEND=INDUCTOR .*--torch_compile true"),
        (OF_ZERO3 | {"ACCELERATE_USE_DEEPSPEED": "false"}, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 .* unset it"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "PARALLELISM_CONFIG=true .*changes what a run computes"),
        ({"ACCELERATE_DOWNCAST_BF16": "true"}, "DOWNCAST_BF16"),
        ({"ACCELERATE_SOMETHING_NEW": "yes"}, "SOMETHING_NEW"),
    ],
    ids=str,
)
def test_a_launch_that_contradicts_itself_or_the_settings_is_refused(environment: dict[str, str], message: str) -> None:
    with refused(message):
        check_launch(environment)


def test_rank_and_size_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert (rank(), local_rank(), world_size(), is_main_process()) == (1, 1, 2, False)
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")
    assert (rank(), local_rank(), world_size(), is_main_process()) == (0, 0, 1, True)
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert local_rank() == 0


def state(size: int = 1, this: int = 0, kind: str = "NO", **args: object) -> SimpleNamespace:
    distributed = SimpleNamespace(num_processes=size, process_index=this, distributed_type=kind)
    return SimpleNamespace(
        **{"bf16": False, "fp16": False, "mixed_precision": "no"} | args, distributed_state=distributed
    )


def test_accelerate_has_to_know_the_same_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launched(state())
    with refused("process 0 of 1 by RANK and WORLD_SIZE, and 0 of 2 by Accelerate"):
        check_launched(state(size=2))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    check_launched(state(size=2, this=1))
    with refused("process 1 of 2 .*, and 0 of 2"):
        check_launched(state(size=2))


@pytest.mark.parametrize("kind", ["NO", "MULTI_CPU"])
def test_fsdp_without_gpus_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would train a whole model in each process, in silence."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_launched(state(kind="MULTI_GPU"))
    with refused("FSDP shards over GPUs"):
        check_launched(state(kind=kind))


@pytest.mark.parametrize(
    ("asked", "flags"),
    [("bf16", []), ("fp16", []), ("fp8", []), ("no", ["--bf16", "true"]), ("bf16", ["--bf16", "true"])],
)
def test_a_precision_that_no_setting_says_is_refused(
    asked: str, flags: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    if flags:
        assert parsed("--output_dir", "run", *flags).trainer.mixed_precision == "bf16"
        return
    with refused(f"ACCELERATE_MIXED_PRECISION={asked} .*--bf16 and --fp16"):
        parsed("--output_dir", "run")


def test_what_the_launcher_set_is_stored() -> None:
    environment = {"HOME": "/", "FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_CPU_AFFINITY": "1"}
    assert [*launched_with(environment)] == ["ACCELERATE_CPU_AFFINITY", "ACCELERATE_USE_FSDP", "FSDP_VERSION"]


def test_a_stray_rank_starts_nothing(tmp_path: Path) -> None:
    """It would train to the end and leave no adapter: every file is that of process 0."""
    command = [sys.executable, ROOT / "train_grpo.py", "--model", "tiny", "--dataset", "arithmetic", "--max_steps", "1"]
    process = run_process([*map(str, command)], cwd=tmp_path, env=user_environment() | {"RANK": "1"}, code=2)
    assert "RANK=1 without" in process.stderr and not [*tmp_path.iterdir()]


# ---- a run that is resumed in another number of processes ----


def sizes(run: Path, processes: int, monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, ...]:
    """Micro-batch, accumulation, steps of a generation and rows of an evaluation of the run there."""
    monkeypatch.setattr("gtpo.cli.parse.world_size", lambda: processes)  # torch would wait for the others
    monkeypatch.setattr("gtpo.cli.build.check_launched", lambda args: None)
    settings = parsed("--resume", str(run), *argv)
    trainer, given = settings.trainer, settings.given
    return (
        trainer.per_device_train_batch_size,
        trainer.gradient_accumulation_steps,
        given.get("steps_per_generation") or 0,
        trainer.per_device_eval_batch_size,
    )


@pytest.mark.parametrize(
    ("stored", "before", "now", "argv", "expected"),
    [  # G = 4
        ((8, 1, 0), 2, 2, (), (8, 1, 0)),
        ((8, 1, 0), 2, 1, (), (8, 2, 0)),
        ((16, 1, 0), 1, 2, (), (8, 1, 0)),
        ((2, 4, 0), 1, 2, (), (2, 2, 0)),
        ((8, 6, 0), 1, 4, (), (6, 2, 0)),  # no more than the 8 that fit
        ((4, 2, 4), 2, 1, (), (4, 4, 8)),
        ((4, 2, 4), 1, 2, (), (4, 1, 2)),
        ((8, 1, 0), 2, 1, ("--per_device_train_batch_size", "16"), (16, 1, 0)),
        ((8, 1, 0), 2, 1, ("--gradient_accumulation_steps", "4"), (4, 4, 0)),
    ],
)
def test_sizes_that_nobody_named_follow_the_number_of_processes(
    stored: tuple[int, int, int],
    before: int,
    now: int,
    argv: tuple[str, ...],
    expected: tuple[int, int, int],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    words = [str(word) for name, value in zip(names, stored, strict=True) if value for word in (f"--{name}", value)]
    with monkeypatch.context() as patched:
        patched.setattr("gtpo.cli.parse.world_size", lambda: before)
        patched.setattr("gtpo.cli.build.check_launched", lambda args: None)
        patched.setattr("gtpo.runs.start.world_size", lambda: before)
        patched.setattr("gtpo.runs.provenance.world_size", lambda: before)
        words += ["--prompts_per_step", str(stored[0] * stored[1] * before // 4)]
        settings = parsed("--output_dir", "run", "--G", "4", "--max_steps", "10", *words)
        check_run(settings, rows_of(30))
        start_run(settings)
    checkpoint(here / "run", 5)
    assert read_json(here / "run" / "environment.json")["world_size"] == before
    batch, accumulation, steps, _ = sizes(here / "run", now, monkeypatch, *argv)
    assert (batch, accumulation, steps) == expected
    assert batch * accumulation * now == stored[0] * stored[1] * before
    monkeypatch.setattr("gtpo.runs.start.world_size", lambda: now)
    assert check_run(parsed("--resume", "run", *argv), rows_of(30))


def test_another_number_that_does_not_divide_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parsed("--output_dir", "run", "--G", "4", "--prompts_per_step", "2", "--max_steps", "10")
    check_run(settings, rows_of(30))
    start_run(settings)
    checkpoint(here / "run", 5)
    with refused("3 process"):
        sizes(here / "run", 3, monkeypatch)


@pytest.mark.parametrize(
    ("wrote", "environment", "message"),
    [
        ("pytorch_model_fsdp.bin", {}, "was written with FSDP, and this run is started without: .*--model run/checkp"),
        ("pytorch_model_fsdp_0/a", {}, "with FSDP, and this run is started without"),
        ("global_step5/a", {}, "with DeepSpeed, and"),
        ("other", {"ACCELERATE_USE_FSDP": "true"}, "without FSDP and DeepSpeed, and this run is started with FSDP"),
        ("global_step5/a", {"ACCELERATE_USE_FSDP": "true"}, "with DeepSpeed, and this run is started with FSDP"),
        ("pytorch_model_fsdp.bin", {"ACCELERATE_USE_FSDP": "true"}, ""),
        ("global_step5/a", {"ACCELERATE_USE_DEEPSPEED": "true"}, ""),
    ],
)
def test_a_sharded_checkpoint_needs_its_launcher(
    wrote: str, environment: dict[str, str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parsed("--output_dir", "run", "--max_steps", "10")
    check_run(settings, rows_of(30))
    start_run(settings)
    file = checkpoint(here / "run", 5) / wrote
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    resumed = parsed("--resume", "run")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if message:
        with refused(message):
            check_run(resumed, rows_of(30))
    else:
        assert check_run(resumed, rows_of(30))
