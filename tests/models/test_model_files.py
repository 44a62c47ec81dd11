"""Files of a local model or adapter: damage is named before anything is loaded, and nothing is unpickled."""

import pickle
import shutil
from pathlib import Path

import pytest

from gtpo.errors import UsageError
from gtpo.models.files import check_model_files


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
