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
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM accepts as max_lora_rank


def lora_options(rank: int) -> dict[str, Any]:
    """What an engine needs for one adapter of a rank at a time."""
    return {"enable_lora": True, "max_lora_rank": min((r for r in RANKS if r >= rank), default=rank), "max_loras": 1}


class AdapterGeneration(VLLMGeneration):
    """TRL's vLLM in the training process, except that the engine gets the adapter itself.

    TRL merges the adapter and copies all weights at each step. It cannot do so with a 4-bit base, it rounds an update
    of 1e-6 of a 16-bit weight away, and a 16-bit base drifts (huggingface/trl#4973, #6688). ``trainer`` is a
    GRPOTrainer with a PEFT model, initialized with ``use_vllm=False``; its arguments have the rest.
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self._adapters = tempfile.TemporaryDirectory(prefix="gtpo-adapter-")
        self._version = 0
        super().__init__(
            trainer.model,
            trainer.accelerator,
            trainer.processing_class,
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_length=args.vllm_max_model_length,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            enable_sleep_mode=args.vllm_enable_sleep_mode,
            model_impl=args.vllm_model_impl,
            repetition_penalty=args.repetition_penalty,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_completion_length=args.max_completion_length,
            generation_kwargs=args.generation_kwargs,
        )

    def _init_vllm(self) -> None:
        from vllm import LLM

        class Engine(LLM):
            adapter = None  # the newest LoRARequest

            def generate(self, *args: Any, **kwargs: Any) -> Any:
                return super().generate(*args, lora_request=self.adapter, **kwargs)

            def sleep(self, level: int) -> None:
                super().sleep(min(level, 1))  # 2 discards the base, which is not handed over again

        process, size = self.accelerator.process_index, self.tensor_parallel_size
        if size > 1:
            groups = [list(range(first, first + size)) for first in range(0, self.accelerator.num_processes, size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        for name, value in {
            "RANK": process,
            "LOCAL_RANK": self.accelerator.local_process_index,
            "WORLD_SIZE": self.accelerator.num_processes,
        }.items():  # vLLM's external launcher reads them
            os.environ[name] = str(value)
        ensure_master_addr_port()
        config = self.model.active_peft_config
        is_4bit = any(type(module).__name__ == "Linear4bit" for module in self.model.modules())
        self.llm = Engine(
            model=self.model.name_or_path,
            tensor_parallel_size=size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_length,
            max_num_seqs=self.max_num_seqs,
            enable_sleep_mode=self.enable_sleep_mode,
            model_impl=self.model_impl,
            distributed_executor_backend="external_launcher",
            seed=process // size,  # the same in a group
            max_num_batched_tokens=4096,  # as TRL: the activations of 32,768 would take the memory of training
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            quantization="bitsandbytes" if is_4bit else None,
            **lora_options(max([config.r, *config.rank_pattern.values()])),
        )
        if self.enable_sleep_mode:
            self.llm.sleep(1)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Hand the adapter over. Each process writes it, to a temporary directory from which its engine reads it."""
        from vllm.lora.request import LoRARequest

        if self.enable_sleep_mode:
            clear_device_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        weights = [weight for name, weight in self.model.named_parameters() if self.model.prefix in name]
        with self._dist.gather_params(weights):  # of ZeRO-3; FSDP2 has distributed tensors
            state = get_peft_model_state_dict(
                self.model, adapter_name=self.model.active_adapter, save_embedding_layers=False
            )
            state = {name: getattr(w, "full_tensor", lambda w=w: w)().detach().cpu() for name, w in state.items()}
        shutil.rmtree(self._path(), ignore_errors=True)
        self._version += 1
        self.model.active_peft_config.save_pretrained(self._path())
        save_file(state, self._path() / "adapter_model.safetensors")
        # The name is part of the key of vLLM's prefix cache.
        self.llm.adapter = LoRARequest(f"policy-{self._version}", self._version, str(self._path()))
        self.llm.reset_prefix_cache()

    def _path(self) -> Path:
        return Path(self._adapters.name, str(self._version))
