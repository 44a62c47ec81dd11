"""Rollouts from vLLM with the adapter as a LoRA request: the base is neither merged nor copied at each step."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed
from accelerate.utils.memory import clear_device_cache
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from gtpo.errors import UsageError
from gtpo.processes import is_main_process

OF_VLLM = (  # arguments of TRL whose names begin with vllm_
    "mode",
    "structured_outputs_regex",
    "server_base_url",
    "server_host",
    "server_port",
    "server_timeout",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_length",
    "enable_sleep_mode",
    "model_impl",
)
OF_SAMPLING = (
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_completion_length",
    "generation_kwargs",
)
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts as max_lora_rank


def lora_options(rank: int) -> dict[str, Any]:
    """What an engine needs for one adapter of a rank at a time."""
    accepted = [most for most in RANKS if most >= rank]
    return {"enable_lora": True, "max_lora_rank": min(accepted, default=rank), "max_loras": 1}


def graph_sizes(sequences: int) -> list[int]:
    """Batch sizes of the CUDA graphs for so many completions at once, which end one by one.

    vLLM pads a batch to the next size. Its own list goes to twice as many, and has no size between multiples of 8.
    """
    return sorted({size for size in (1, 2, 4, *range(8, sequences, 8)) if size < sequences} | {sequences})


class AdapterGeneration(VLLMGeneration):
    """TRL's vLLM in the training process, except that the engine gets the adapter itself.

    TRL merges the adapter and copies all weights at each step. It cannot do so with a 4-bit base, it rounds an update
    of 1e-6 of a 16-bit weight away, and a 16-bit base drifts (huggingface/trl#4973, #6688). ``trainer`` is a
    GRPOTrainer with a PEFT model, initialized with ``use_vllm=False``; its arguments have the rest.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        shared = args.output_dir if args.vllm_mode == "server" else tempfile.gettempdir()
        os.makedirs(shared, exist_ok=True)
        self._adapters = tempfile.TemporaryDirectory(prefix="gtpo-adapter-", dir=os.path.abspath(shared))
        self._version = 0
        options = {name: getattr(args, name) for name in OF_SAMPLING}
        options |= {name: getattr(args, f"vllm_{name}") for name in OF_VLLM}
        super().__init__(
            trainer.model,
            trainer.accelerator,
            trainer.processing_class,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            **options,
        )

    def _init_vllm(self) -> None:
        from vllm import LLM

        class Engine(LLM):
            adapter = None  # the newest LoRARequest

            def generate(self, *args: Any, **kwargs: Any) -> Any:
                return super().generate(*args, lora_request=self.adapter, **kwargs)

            def sleep(self, level: int) -> None:
                super().sleep(min(level, 1))  # 2 discards the base, which is not handed over again

        accelerator = self.accelerator
        process = accelerator.process_index
        size = self.tensor_parallel_size
        if size > 1:
            groups = [list(range(first, first + size)) for first in range(0, accelerator.num_processes, size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        os.environ.update(  # vLLM's external launcher reads them
            RANK=str(process),
            LOCAL_RANK=str(accelerator.local_process_index),
            WORLD_SIZE=str(accelerator.num_processes),
        )
        ensure_master_addr_port()
        self.llm = Engine(
            model=self.model.name_or_path,
            tensor_parallel_size=size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_length,
            max_num_seqs=self.max_num_seqs,
            compilation_config={"cudagraph_capture_sizes": graph_sizes(self.max_num_seqs)},
            enable_sleep_mode=self.enable_sleep_mode,
            model_impl=self.model_impl,
            distributed_executor_backend="external_launcher",
            seed=process // size,  # the same in a group
            max_num_batched_tokens=4096,  # as TRL: the activations of 32,768 would take the memory of training
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            hf_overrides={"head_dtype": "float32"},  # summed in float32, as the trainer's head
            **self._base_options(),
        )
        if self.enable_sleep_mode:
            self.llm.sleep(1)
        self._llm_weights_sleeping = self.enable_sleep_mode
        accelerator.wait_for_everyone()

    def _base_options(self) -> dict[str, Any]:
        """For the engine of this base model and adapter."""
        config = self.model.active_peft_config
        is_4bit = any(type(module).__name__ == "Linear4bit" for module in self.model.modules())
        options = lora_options(max([config.r, *config.rank_pattern.values()]))
        if is_4bit:
            options["quantization"] = "bitsandbytes"
        return options

    def sync_weights(self) -> None:
        """Hand the adapter over. Each process with an engine writes it, to a directory where the engine reads it."""
        weights = [weight for name, weight in self.model.named_parameters() if self.model.prefix in name]
        with self._dist.gather_params(weights):  # of ZeRO-3; FSDP2 has distributed tensors
            state = get_peft_model_state_dict(
                self.model, adapter_name=self.model.active_adapter, save_embedding_layers=False
            )
            for name, weight in state.items():
                if hasattr(weight, "full_tensor"):
                    weight = weight.full_tensor()
                state[name] = weight.detach().cpu()
        if self.mode == "server" and not is_main_process():
            return
        shutil.rmtree(self._path(), ignore_errors=True)
        self._version += 1
        self.model.active_peft_config.save_pretrained(self._path())
        save_file(state, self._path() / "adapter_model.safetensors")
        self._hand_over(self._path())

    def _hand_over(self, adapter: Path) -> None:
        from vllm.lora.request import LoRARequest

        if self.enable_sleep_mode:
            clear_device_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        # The name is part of the key of vLLM's prefix cache.
        self.llm.adapter = LoRARequest(f"policy-{self._version}", self._version, str(adapter))
        self.llm.reset_prefix_cache()

    def _path(self) -> Path:
        return Path(self._adapters.name, str(self._version))


class AdapterServer(AdapterGeneration):
    """The same with `vllm serve`: the main process writes the adapter to the run directory, the server reads it there.

    TRL's client then generates with the adapter's name. The first hand-over is before training.
    """

    def _init_vllm(self) -> None:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self._url = url.rstrip("/")
        if is_main_process():
            self.vllm_client = VLLMClient(self._url, connection_timeout=self.server_timeout)
        self.sync_weights()
        self.accelerator.wait_for_everyone()

    def _hand_over(self, adapter: Path) -> None:
        if reason := self._post("load_lora_adapter", lora_name=self._name(), lora_path=str(adapter)):
            flags = ""
            for name, value in self._base_options().items():
                flags += f" --{name.replace('_', '-')}"
                if value is not True:
                    flags += f" {value}"
            raise UsageError(
                f"the vLLM server at {self._url} does not load the adapter ({reason}): start one replica with "
                f"`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {self.model.name_or_path}{flags} --logprobs-mode "
                f"processed_logprobs` where {adapter} can be read."
            )
        self.vllm_client.model = self._name()
        if self._version > 1:
            self._post("unload_lora_adapter", lora_name=self._name(self._version - 1))

    def _post(self, what: str, **body: str) -> str | None:
        """Why the server refused; TRL's session tries again while it does not answer."""
        address = f"{self._url}/v1/{what}"
        answer = self.vllm_client.session.post(address, json=body, timeout=self.server_timeout)
        if answer.ok:
            return None
        return f"{answer.status_code}: {answer.text[:200]}"

    def _name(self, version: int | None = None) -> str:
        """Of this run alone: the server keeps the names of earlier runs, and their prefix cache."""
        return f"{Path(self._adapters.name).name}-{version or self._version}"


ENGINES = {"colocate": AdapterGeneration, "server": AdapterServer}  # by TRL's vllm_mode
