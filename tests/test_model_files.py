"""Files of a local model or adapter: damage is named before anything is loaded, and nothing is unpickled."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gtpo.errors import UsageError
from gtpo.model_files import check_model_files


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "model")


def test_a_complete_model_is_accepted(model: Path) -> None:
    check_model_files(model)


@pytest.mark.parametrize("size", [0, 7, 5000, -1])
def test_weights_that_are_cut_are_refused(model: Path, size: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        UsageError, match=r"model/model\.safetensors is incomplete or damaged \(.+\): download or save it"
    ):
        check_model_files(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_weight_that_is_not_finite_is_refused_by_name(model: Path, value: float, dtype: torch.dtype) -> None:
    weights = {name: weight.to(dtype) for name, weight in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors")
    check_model_files(model)
    weights["model.norm.weight"][7] = value
    save_file(weights, model / "model.safetensors")
    with pytest.raises(UsageError, match=r"contains NaN or infinite weights \(model\.norm\.weight\): use a checkpoint"):
        check_model_files(model)


def test_quantized_and_empty_weights_are_accepted(model: Path) -> None:
    weights = {
        "integers": torch.full((4,), 255, dtype=torch.uint8),
        "floats": torch.full((4,), float("nan")).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
    }
    save_file(weights, model / "model.safetensors")
    check_model_files(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "adapter_model.bin"])
def test_pickled_weights_are_refused_and_not_read(model: Path, tmp_path: Path, name: str) -> None:
    class Malicious:
        def __reduce__(self) -> tuple:
            return open, (str(tmp_path / "ran"), "w")

    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(UsageError, match=f"model has its weights in {name}, a pickle, .* save it with save_pretrained"):
        check_model_files(model)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_json_that_is_cut_is_refused_by_name(model: Path, name: str) -> None:
    (model / name).write_text((model / name).read_text()[:-3])
    with pytest.raises(UsageError, match=rf"model/{name} is not valid JSON \(.+\): download or save it again"):
        check_model_files(model)
