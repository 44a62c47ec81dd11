"""The adapter of a `vllm serve`; tests/backends/test_vllm_cpu.py has a real one."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.refusals import refused
from peft import get_peft_model_state_dict
from pytest import MonkeyPatch, fixture
from safetensors.torch import load_file

from gtpo.forward.vllm_lora import AdapterGeneration, graph_sizes, lora_options

LOGPROBS = {"tokens": ["token_id:7"], "token_logprobs": [-0.5], "top_logprobs": [{}]}
COMPLETION = {"token_ids": [7], "logprobs": LOGPROBS}


@fixture
def server(monkeypatch: MonkeyPatch) -> Iterator[Any]:
    """Answers as vLLM 0.27.1, and keeps what it was asked and the weights of each adapter."""
    seen = SimpleNamespace(asked=[], weights=[], status=200)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "base"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.asked.append((self.path, body.get("lora_name") or body["model"]))
            if path := body.get("lora_path"):
                seen.weights.append(load_file(Path(path, "adapter_model.safetensors")))
            prompts = [prompt for prompt in body.get("prompt", ()) for _ in range(body["n"])]
            self.answer({"choices": [COMPLETION | {"prompt_token_ids": prompt} for prompt in prompts]}, seen.status)

        def answer(self, content: Any, status: int = 200) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

    monkeypatch.setattr("trl.generation.vllm_client.is_vllm_available", lambda *_: True)
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever).start()
        url = f"http://127.0.0.1:{http.server_port}/"
        seen.settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        yield seen
        http.shutdown()


def test_a_server_gets_each_adapter_by_a_new_name(server: Any, build: Any) -> None:
    trainer = build("gtpo", "run", **server.settings)
    generation = trainer.vllm_generation
    generation.generate([[5]], None, num_generations=1)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += weight.requires_grad
    generation.sync_weights()
    found = generation.generate([[5, 6]] * 4, None, num_generations=2)
    assert found == ([[5, 6]] * 4, [[7]] * 4, [[[-0.5]]] * 4, [[[7]]] * 4)
    first = server.asked[0][1]
    second = server.asked[2][1]
    assert first != second
    load = "/v1/load_lora_adapter"
    unload = "/v1/unload_lora_adapter"
    complete = "/v1/completions"
    assert server.asked == [(load, first), (complete, first), (load, second), (unload, first), (complete, second)]
    for name, weight in get_peft_model_state_dict(trainer.model).items():
        torch.testing.assert_close([each[name] for each in server.weights], [weight - 1, weight])


def test_a_server_without_lora_is_refused_before_training(server: Any, build: Any) -> None:
    server.status = 404
    with refused(r"404.*vllm serve .* --enable-lora --max-lora-rank 8 "):
        build("gtpo", "run", **server.settings)


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_prefix_cache_is_reset_with_each_adapter(sleeps: bool, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """On a stand-in for the engine: its cache was computed with the adapter before."""
    done: list[Any] = []

    class Engine:
        adapter: Any = None

        def wake_up(self, tags: list[str]) -> None:
            done.append(("wake up", tags))

        def reset_prefix_cache(self) -> None:
            done.append(("reset", self.adapter.version))

    request = SimpleNamespace(LoRARequest=lambda name, version, path: SimpleNamespace(version=version))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    generation = AdapterGeneration.__new__(AdapterGeneration)
    generation.llm = Engine()
    generation.enable_sleep_mode = sleeps
    for version in (1, 2):
        generation._version = version
        generation._hand_over(tmp_path)
    woken = [("wake up", ["weights"])] * sleeps
    assert done == [*woken, ("reset", 1), *woken, ("reset", 2)]


@pytest.mark.parametrize(
    ("sequences", "expected"),
    [(1, [1]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_graphs_have_the_sizes_that_occur(sequences: int, expected: list[int]) -> None:
    assert graph_sizes(sequences) == expected


def test_an_engine_is_asked_for_a_rank_that_it_accepts() -> None:
    """Those of vLLM's ``MaxLoRARanks``; of a larger rank itself, which vLLM then refuses."""
    accepted = [1, 8, 16, 32, 64, 128, 256, 320, 512]
    for below, rank in pairwise([0, *accepted]):
        for wanted in (below + 1, rank):
            assert lora_options(wanted) == {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    assert lora_options(513)["max_lora_rank"] == 513
