"""Which adapters and which base model are evaluated."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import yaml

from gtpo.arguments import PromptArguments, stored_prompt
from gtpo.errors import UsageError
from gtpo.evaluation import targets
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.targets import (
    Target,
    base_model,
    choose_4bit,
    choose_model,
    choose_prompts,
    find_targets,
    max_lora_rank,
    newest_run,
    refuse_large_model_without_gpu,
    same_model,
)
from gtpo.models.tiny import TINY_BASE
from gtpo.runs.directory import RunDirectory


def test_the_newest_finished_run_is_found(outputs: Path) -> None:
    assert newest_run().path == Path("outputs/demo/newer")
    assert find_targets([str(newest_run().path)], None) == [
        Target("demo-newer", Path("outputs/demo/newer/adapter"), "last"),
    ]
    shutil.rmtree(outputs / "demo")
    assert find_targets([str(newest_run().path)], None, "best") == [
        Target("older@best", Path("outputs/older/best"), "best")
    ]
    shutil.rmtree(outputs / "older")
    with pytest.raises(UsageError, match="no finished run under outputs/: train one"):
        newest_run()


def test_runs_and_adapter_directories_and_base_are_targets(outputs: Path) -> None:
    found = find_targets(["base", "outputs/older", "outputs/older/best", "outputs/demo/newer/"], None)
    assert [target.label for target in found] == ["", "older", "older-best", "demo-newer"]
    assert [target.adapter for target in found] == [
        None,
        Path("outputs/older/adapter"),
        Path("outputs/older/best"),
        Path("outputs/demo/newer/adapter"),
    ]
    [target] = find_targets(["outputs/unfinished"], None, "50")
    assert target == Target("unfinished@50", Path("outputs/unfinished/checkpoint-50"), "50")
    assert find_targets(["outputs/older/adapter"], None) == [Target("older", Path("outputs/older/adapter"))]
    assert find_targets([], "tiny") == [Target("")]


@pytest.mark.parametrize(
    ("names", "checkpoint", "message"),
    [
        (
            ["outputs/oldest"],
            "last",
            r"outputs/oldest does not exist: the newest finished runs are outputs/older, outputs/demo/newer\.$",
        ),
        (
            ["outputs/unfinished"],
            "last",
            "unfinished has no adapter/adapter_config.json: its adapters are .*checkpoint-50,",
        ),
        (["outputs/older"], "9", "older has no checkpoint-9/.*: its adapters are adapter, best, the newest finished"),
        (
            ["outputs"],
            "last",
            r"outputs has no .* no adapter, the newest finished runs are outputs/older, outputs/demo/newer\.$",
        ),
        (["outputs/demo"], "9", r"outputs/demo has no .*, the newest finished runs are outputs/demo/newer\.$"),
        (["outputs/nope"], "last", r"^outputs/nope does not exist: the newest finished runs are outputs/older, outp"),
        (["outputs/older/best"], "best", "--checkpoint best selects an adapter of a run, and outputs/older/best is an"),
        (["base"], "last", "--runs base alone does not name a base model"),
        (["outputs/older", "outputs/older/"], "last", r"--runs has duplicate labels \(older, older\)"),
    ],
)
def test_what_is_not_an_adapter_is_refused(outputs: Path, names: list[str], checkpoint: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_targets(names, None, checkpoint)


def test_of_several_runs_the_unfinished_one_is_skipped(outputs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = find_targets(["base", "outputs/older", "outputs/unfinished"], None)
    assert [target.label for target in found] == ["", "older"]
    assert "skipped: outputs/unfinished has no adapter" in caplog.text
    (Path("outputs") / "failed").mkdir()
    for names in (["outputs/failed", "outputs/unfinished"], ["base", "outputs/failed"]):
        with pytest.raises(UsageError, match=r"outputs/failed has no adapter/.*: it has no adapter, the newest"):
            find_targets(names, None)


def edit_config(adapter: Path | None, **changes: object) -> None:
    assert adapter
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_adapter_names_its_base_model(outputs: Path, tiny: Path) -> None:
    older, newer = find_targets(["outputs/older", "outputs/demo/newer"], None)
    assert older.adapter and newer.adapter
    assert base_model([older, newer], None) == str(tiny)
    assert base_model([Target("")], "qwen") == "Qwen/Qwen2.5-3B-Instruct"
    edit_config(newer.adapter, base_model_name_or_path="meta-llama/Llama-3.1-8B-Instruct")
    with pytest.raises(
        UsageError, match=r"older/adapter was trained from .*tiny0 and outputs/demo/newer/.* from meta-"
    ):
        base_model([older, newer], None)
    edit_config(newer.adapter, base_model_name_or_path="elsewhere/outputs/tiny/base-1")
    with pytest.raises(UsageError, match=r"--model 'elsewhere/outputs/tiny/base-1' is not a directory: pick tiny"):
        choose_model([newer], None)
    edit_config(newer.adapter, base_model_name_or_path=None)
    with pytest.raises(UsageError, match="has no base_model_name_or_path"):
        base_model([newer], None)
    (older.adapter / "adapter_model.safetensors").rename(older.adapter / "adapter_model.bin")
    with pytest.raises(UsageError, match=r"older/adapter has no adapter_model.safetensors: save it again with PEFT"):
        base_model([older], None)
    with pytest.raises(UsageError, match=r"older/adapter/adapter_model.bin is a pickle"):
        find_targets(["outputs/older"], None)


def test_a_relative_base_model_is_found_above_the_adapter(
    outputs: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of earlier revisions name the tiny base by its path below the directory where they were started."""
    shutil.copytree(tiny, outputs / "tiny" / "base-1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    [older] = find_targets(["../outputs/older"], None)
    edit_config(older.adapter, base_model_name_or_path="outputs/tiny/base-1")
    assert base_model([older], None) == str(outputs / "tiny" / "base-1")
    edit_config(older.adapter, base_model_name_or_path="some/hub-model")
    assert base_model([older], None) == "some/hub-model"


def test_the_base_model_of_a_moved_checkout_is_that_of_the_run(outputs: Path, tmp_path: Path) -> None:
    """PEFT stores an absolute path; the run's --model is relative to the directory in which it started."""
    (outputs / "sft" / "merged").mkdir(parents=True)
    [older] = find_targets(["outputs/older"], None)
    gone = str(tmp_path / "gone" / "outputs" / "sft" / "merged")
    edit_config(older.adapter, base_model_name_or_path=gone)
    (outputs / "older" / "config.yaml").write_text("seed: 1\n")
    assert base_model([older], None) == gone
    (outputs / "older" / "config.yaml").write_text("model: outputs/sft/merged\n")
    assert base_model([older], None) == "outputs/sft/merged"


def test_the_shipped_base_takes_the_place_of_a_tiny_base_that_is_gone(outputs: Path) -> None:
    [older] = find_targets(["outputs/older"], None)
    edit_config(older.adapter, base_model_name_or_path=f"/gone/outputs/tiny/{TINY_BASE.name}")
    for model in (None, "tiny"):
        assert choose_model([older], model) == str(TINY_BASE)
    edit_config(older.adapter, base_model_name_or_path="/gone/outputs/tiny/base-1")  # of other settings
    with pytest.raises(UsageError, match="'/gone/outputs/tiny/base-1' is not a directory"):
        choose_model([older], None)


CATASTROPHIC = "([a-z]+)+$"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target_modules": CATASTROPHIC},
            r"target_modules contains '\(\[a-z\]\+\)\+\$', expected the name of a module",
        ),
        ({"exclude_modules": CATASTROPHIC}, "exclude_modules contains"),
        ({"modules_to_save": [CATASTROPHIC]}, "modules_to_save contains"),
        ({"layers_pattern": CATASTROPHIC}, "layers_pattern contains"),
        ({"rank_pattern": {CATASTROPHIC: 2}}, "rank_pattern contains"),
        ({"alpha_pattern": {CATASTROPHIC: 2}}, "alpha_pattern contains"),
        ({"target_modules": 3}, "target_modules contains 3, expected the name of a module"),
        ({"target_modules": [3]}, "target_modules contains 3, expected the name of a module"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING', only LORA adapters can be evaluated"),
        ({"base_model_name_or_path": 3}, "has no base_model_name_or_path"),
        ({"r": "4"}, "the ranks are '4', expected whole numbers"),
        ({"r": None}, "the ranks are None, expected whole numbers"),
        ({"rank_pattern": {"q_proj": 2.5}}, r"the ranks are 4, 2.5, expected whole numbers"),
        ({"rank_pattern": ["q_proj"]}, r"the ranks are 4, \['q_proj'\], expected whole numbers"),
    ],
)
def test_settings_of_an_adapter_are_checked_before_they_are_used(outputs: Path, settings: dict, message: str) -> None:
    edit_config(outputs / "older" / "adapter", **settings)
    with pytest.raises(UsageError, match=f"adapter_config.json:? {message}"):
        find_targets(["outputs/older"], None)


def test_settings_of_an_adapter_that_are_a_list_are_refused(outputs: Path) -> None:
    (outputs / "older" / "adapter" / "adapter_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"adapter_config.json has no base_model_name_or_path"):
        find_targets(["outputs/older"], None)


def test_names_that_peft_writes_are_accepted(outputs: Path) -> None:
    for names in (["q_proj", "model.layers.0.self_attn.v_proj"], "all-linear", None):
        rank_pattern = {r"^model\.layers\.0\.self_attn\.q_proj": 2}
        edit_config(outputs / "older" / "adapter", target_modules=names, rank_pattern=rank_pattern)
        [target] = find_targets(["outputs/older"], None)
        assert max_lora_rank([target]) == 4


def test_damaged_weights_of_an_adapter_are_refused_among_several(outputs: Path) -> None:
    weights = outputs / "older" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"older/adapter/adapter_model.safetensors is incomplete or damaged"):
        find_targets(["outputs/demo/newer", "outputs/older"], None)


def test_model_can_only_name_a_copy_of_the_base_model(outputs: Path, tiny: Path, tmp_path: Path) -> None:
    [older] = find_targets(["outputs/older"], None)
    copy = shutil.copytree(tiny, tmp_path / "copies" / tiny.name)
    assert choose_model([older], None) == str(tiny)
    with pytest.raises(UsageError, match=r"--model .* is not the model that the adapter was trained from, .*tiny0"):
        choose_model([older], str(copy))  # both exist, so it is another model
    moved = str(tmp_path / "moved" / tiny.name)
    edit_config(older.adapter, base_model_name_or_path=moved)
    assert choose_model([older], str(copy)) == str(copy)
    with pytest.raises(UsageError, match=r"outputs/older is not the model that the adapter was trained from"):
        choose_model([older], str(outputs / "older"))


def test_the_largest_rank_of_the_adapters(outputs: Path) -> None:
    found = find_targets(["base", "outputs/older", "outputs/demo/newer"], None)
    assert max_lora_rank(found[:1]) is None
    assert max_lora_rank(found) == 4
    edit_config(found[1].adapter, rank_pattern={"v_proj": 9})
    assert max_lora_rank(found) == 9


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-3B-Instruct", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit", True),
        ("Qwen/Qwen2.5-3B-Instruct", "unsloth/Qwen2.5-3B-Instruct-bnb-4bit", True),
        ("here/outputs/tiny/base-1", "/was/there/outputs/tiny/base-1", True),
        ("here/outputs/tiny/base-1", "here/../here/outputs/tiny/base-1", True),
        ("here/outputs/tiny/base-1", "here/outputs/tiny/base-2", False),
        ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct", False),
        ("Qwen/Qwen2.5-3B-Instruct", "someone/Qwen2.5-3B-Instruct", False),
    ],
)
def test_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a: str, b: str, same: bool) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base-1", "base-2"):
        (tmp_path / "here" / "outputs" / "tiny" / name).mkdir(parents=True)
    assert same_model(a, b) is same
    assert same_model(b, a) is same


def test_the_papers_models_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "gpu_is_available", lambda: False)
    unsloth = "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit"
    for name in ("llama", "qwen", "Qwen/Qwen2.5-3B-Instruct", unsloth, "someone/some-model-bnb-4bit"):
        with pytest.raises(UsageError, match="needs a GPU and PyTorch sees none here"):
            refuse_large_model_without_gpu(name)
    refuse_large_model_without_gpu("HuggingFaceTB/SmolLM2-135M-Instruct")
    monkeypatch.setattr(targets, "gpu_is_available", lambda: True)
    refuse_large_model_without_gpu("llama")


# 4-bit weights


@pytest.fixture
def trained(outputs: Path) -> list[Target]:
    """Adapters of a 4-bit run and of a 16-bit run, one outside a run, and the base."""
    for run, value in (("older", "true"), ("demo/newer", "false")):
        (outputs / run / "config.yaml").write_text(f"load_in_4bit: {value}\n")
    shutil.copytree(outputs / "older" / "adapter", outputs / "copied")
    return find_targets(["outputs/older", "outputs/demo/newer", "outputs/copied", "base"], None)


@pytest.fixture
def bitsandbytes(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_installed", lambda package: package == "bitsandbytes")


def test_the_base_has_the_precision_of_training(trained: list[Target], bitsandbytes: None) -> None:
    in_4bit, in_16bit, elsewhere, base = trained
    assert choose_4bit(None, [in_4bit, base]) is True
    assert choose_4bit(None, [Target("older@best", Path("outputs/older/best"), "best")]) is True
    for others in ([in_16bit], [elsewhere], [in_16bit, elsewhere, base], [base]):
        assert choose_4bit(None, others) is False


def test_the_flag_decides_the_precision(trained: list[Target], bitsandbytes: None) -> None:
    assert choose_4bit(False, trained[:1]) is False and choose_4bit(True, trained[1:]) is True
    with pytest.raises(
        UsageError, match=r"older/adapter was trained on 4-bit weights and outputs/copied was not: set --load_in_4bit"
    ):
        choose_4bit(None, trained)
    assert choose_4bit(True, trained) is True


def test_without_a_gpu_an_adapter_of_a_4bit_run_is_evaluated_with_a_warning(
    trained: list[Target], no_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_4bit(None, trained[1:]) is False and not caplog.messages
    assert choose_4bit(None, trained[:1]) is False
    assert caplog.messages == [
        "outputs/older/adapter was trained on 4-bit weights, which need a GPU: it is evaluated on 16- or 32-bit weights"
    ]


def test_without_bitsandbytes_an_adapter_of_a_4bit_run_is_evaluated_with_a_warning(
    trained: list[Target], gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "is_installed", lambda package: False)
    assert choose_4bit(None, trained[:1]) is False and "which need bitsandbytes" in caplog.text


# ---- prompts ----

THINK = "<think> </think> <answer> </answer>"


@pytest.fixture
def prompted(outputs: Path) -> list[Target]:
    """A run of <think> without a system prompt, a run of an earlier revision, and the base model."""
    (outputs / "older" / "config.yaml").write_text(yaml.safe_dump({"tags": THINK, "system_prompt": "none"}))
    (outputs / "demo/newer" / "config.yaml").write_text(yaml.safe_dump({"model": "tiny"}))
    found = find_targets(["outputs/older", "outputs/demo/newer"], None)
    return [*found, Target("")]


def test_adapters_are_asked_as_they_were_trained(prompted: list[Target], caplog: pytest.LogCaptureFixture) -> None:
    think, earlier, base = prompted
    expected = PromptArguments(tags=THINK, system_prompt="none")
    assert choose_prompts({}, [think, earlier]) == [expected, PromptArguments()]
    assert caplog.messages == [f"the prompt of older has --tags '{THINK}', --system_prompt 'none'"]
    assert choose_prompts({}, [base, think]) == [expected, expected]  # the base model as its run
    assert choose_prompts({}, [base]) == [PromptArguments()]
    run = RunDirectory(think.adapter.parent)
    for model in (run.merged, run.model):
        assert choose_prompts({}, [base], str(model)) == [PromptArguments()]  # it does not exist
        model.mkdir()
        assert choose_prompts({}, [base], str(model)) == [expected]


def test_flags_decide_the_prompt(prompted: list[Target]) -> None:
    with pytest.raises(
        UsageError, match=r"older/adapter and .*newer/adapter were trained with different --tags, .*set --t"
    ):
        choose_prompts({}, prompted)
    asked = EvaluationArguments(tags="a b c d", system_prompt="Be brief.").prompt
    assert choose_prompts(asked, prompted) == [PromptArguments(tags="a b c d", system_prompt="Be brief.")] * 3


def test_stored_texts_are_not_looked_up_as_files(prompted: list[Target], tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    stored = {"system_prompt": str(secret), "chat_template": str(secret)}
    (tmp_path / "outputs/older/config.yaml").write_text(yaml.safe_dump(stored))
    [prompt] = choose_prompts({}, prompted[:1])
    assert (prompt.system_prompt, prompt.chat_template) == (str(secret), str(secret))
    assert yaml.safe_load(yaml.safe_dump(vars(prompt))) == vars(prompt)  # plain strings
    assert PromptArguments(**stored_prompt(vars(prompt))) == prompt  # as for --regrade
    asked = EvaluationArguments(system_prompt=str(secret)).prompt
    assert choose_prompts(asked, prompted[:1])[0].system_prompt == "of the user"
