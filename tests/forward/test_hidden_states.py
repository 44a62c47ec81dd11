"""Hidden states with each prompt encoded once: against one completion at a time, without padding, in float64."""

import inspect
from functools import partial
from typing import Any

import torch
from helpers import canned
from helpers.canned import GROUP
from helpers.files import tables_of
from helpers.refusals import refused
from peft import LoraConfig, get_peft_model
from pytest import LogCaptureFixture, MonkeyPatch, mark, raises
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from gtpo.forward.hidden_states import (
    Packing,
    _agree,
    _rows_of_similar_length,
    are_equal,
    cache_name,
    can_encode_prompts_once,
    hidden_states_by_prompt,
    hidden_states_packed,
    hidden_states_per_completion,
)

TABLES = tables_of(__file__)

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
LINEAR = {"llama": 7, "mistral": 7, "gpt2": 4}  # families, and the number of linear modules of a layer
PAD = 0
FIVE = [7, 0, 8, 9, 5]
THREE = [4, 8, 9]
ONE = [6]  # 0 in the text of a prompt is a token like any other
BATCHES: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "one prompt": ([FIVE] * 4, [[3, 4, 5, 6], [3], [9, 0], [5, 5, 5]]),
    "interleaved prompts of different lengths": (
        [FIVE, THREE, FIVE, ONE, THREE, FIVE],
        [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [3, 4], [9], [1, 2, 0, 3], [0]],
    ),
    "completions of one token": ([THREE, THREE, FIVE], [[3], [4], [5]]),
    "an empty completion": ([THREE, THREE], [[], [4, 5]]),
    "different prompts": ([FIVE, THREE, ONE], [[3, 4], [5], [6, 7, 8]]),
}


def batch_of(prompts: list[list[int]], completions: list[list[int]]) -> dict[str, Tensor]:
    """TRL's layout; a column wider than needed on both sides, as a micro-batch of a larger batch has it."""
    prompt_width = max(map(len, prompts)) + 1
    width = max(map(len, completions)) + 1
    rows = {
        "prompt_ids": [[PAD] * (prompt_width - len(ids)) + ids for ids in prompts],
        "prompt_mask": [[0] * (prompt_width - len(ids)) + [1] * len(ids) for ids in prompts],
        "completion_ids": [ids + [PAD] * (width - len(ids)) for ids in completions],
        "completion_mask": [[1] * len(ids) + [0] * (width - len(ids)) for ids in completions],
    }
    return {name: torch.tensor(row) for name, row in rows.items()}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "mistral":  # a window shorter than most rows
        model: Any = MistralForCausalLM(MistralConfig(sliding_window=4, **SIZES))
    elif family == "gpt2":  # absolute positions
        rates = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, **rates)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = get_peft_model(model.double(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.double()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    return found


def packing(model: Any, fault: str = "") -> Any:
    """A forward with Unsloth's argument: Transformers keeps rows apart by positions that restart."""

    def forward(packed_seq_lengths: Tensor | None = None, **kwargs: Any) -> Any:
        if packed_seq_lengths is not None:
            positions = kwargs["position_ids"]
            starts = (positions[0] == 0).nonzero()[:, 0].tolist()
            assert starts == [0, *packed_seq_lengths.cumsum(0).tolist()[:-1]] and not kwargs["use_cache"]
            if fault == "runs out of memory":
                raise torch.OutOfMemoryError("out of memory")
            if fault == "lets a row see the others":
                kwargs["position_ids"] = torch.arange(positions.shape[1])[None]
        return model(**kwargs)

    return forward


@mark.parametrize("states", [hidden_states_per_completion, hidden_states_by_prompt, hidden_states_packed])
@mark.parametrize("family", LINEAR)
@mark.parametrize("case", BATCHES)
def test_states_and_gradients_equal_one_completion_at_a_time(
    case: str, family: str, states: Any, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("gtpo.forward.hidden_states.PACKED_TOKENS", 20)  # some batches take several forwards
    model = model_of(family)
    decoder = model.get_base_model().base_model
    hidden = states(packing(model), decoder, batch_of(*BATCHES[case]))
    scale = torch.rand(hidden.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (hidden * scale).sum().backward()
    found = gradients(model)

    expected = []
    for prompt, completion in zip(*BATCHES[case], strict=True):
        output = decoder(input_ids=torch.tensor([prompt + completion]), use_cache=False).last_hidden_state[0]
        expected.append(output[len(prompt) - 1 : -1] if completion else output[:0])
    plain = torch.cat(expected)
    torch.testing.assert_close(hidden, plain, rtol=1e-6, atol=1e-7)
    (plain * scale).sum().backward()
    for name, gradient in gradients(model).items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < 1e-6, name  # 2e-7 observed: the norms of Transformers are in float32
    assert len(found) == 2 * 2 * LINEAR[family]  # lora_A and lora_B in two layers


def packed_by(fault: str = "", window: int | None = None) -> tuple[Packing, Tensor | None]:
    model = model_of("llama")
    model.config.sliding_window = window
    found = Packing(possible=True)
    batch = batch_of(*BATCHES["one prompt"])
    return found, found.hidden_states(packing(model, fault), model.get_base_model().model, batch, model.config)


def test_packed_rows_are_verified_again_for_a_longer_batch() -> None:
    model = model_of("llama")
    seen = []
    decoder = model.get_base_model().model
    model.get_base_model().model.embed_tokens.register_forward_hook(lambda m, args, out: seen.append(args[0].shape[1]))
    found = Packing(possible=True)
    for case in ("different prompts", "different prompts", "one prompt", "different prompts"):
        states = found.hidden_states(packing(model), decoder, batch_of(*BATCHES[case]), model.config)
        assert states is not None
    # packed, the longest row and the last one padded, and packed with gradients: twice; then 28 tokens after 15
    assert seen == [15, 7, 15, 15, 30, 9, 30, 15]
    assert found.possible and found.verified == 30


@mark.parametrize("fault", ["runs out of memory", "lets a row see the others"])
def test_rows_run_as_rows_where_the_forward(fault: str, caplog: LogCaptureFixture) -> None:
    found, states = packed_by(fault)
    assert states is None and not found.possible
    assert "run as padded rows" in caplog.text


def test_packed_rows_without_memory_are_not_padded() -> None:
    """Padded rows are larger."""
    model = model_of("llama")
    batch = batch_of(*BATCHES["one prompt"])

    def without_room(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("out of memory")
        return packing(model)(*args, **kwargs)

    found = Packing(possible=True)
    with raises(torch.OutOfMemoryError):
        found.hidden_states(without_room, model.get_base_model().base_model, batch, model.config)
    assert found.possible


@mark.parametrize(("window", "packed"), [(8, False), (9, True)])
def test_rows_longer_than_the_sliding_window_are_not_packed(window: int, packed: bool) -> None:
    found, states = packed_by(window=window)  # the longest row has 5 + 4 tokens
    assert (states is not None) == packed and found.possible


@mark.parametrize(
    ("lengths", "others", "expected"),
    TABLES["rows_of_similar_length_run_together"],
)
def test_rows_of_similar_length_run_together(lengths: list[int], others: int, expected: list[list[int]]) -> None:
    mask = (torch.arange(10) < torch.tensor(lengths)[:, None]).long()
    assert [rows.tolist() for rows in _rows_of_similar_length(mask, others)] == expected


@mark.parametrize(
    ("change", "expected"),
    TABLES["models_that_take_no_cache_while_training"],
)
def test_models_that_take_no_cache_while_training(change: str, expected: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    parameters = {*inspect.signature(model.forward).parameters}
    if change == "gradient checkpointing":
        model.gradient_checkpointing_enable()
    elif change == "dropout":
        get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear"))
    elif change == "a state":
        model._is_stateful = True
    elif change == "no position_ids":
        parameters.remove("position_ids")
    elif change == "no cache":
        parameters.remove(cache_name(parameters))
    assert can_encode_prompts_once(model, parameters) is expected


@mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_goes_by_the_name_that_the_model_has_for_it(name: str) -> None:
    """Transformers 5.24 renamed it; code of a model's own repository keeps the old name."""
    model = model_of("llama")
    decoder = model.get_base_model().model
    own = cache_name(inspect.signature(decoder.forward).parameters)
    inner = decoder.forward

    def forward(**kwargs: Any) -> Any:
        assert "use_cache" in kwargs and (name in kwargs) is kwargs["use_cache"]
        return model(**{own if key == name else key: value for key, value in kwargs.items()})

    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("position_ids", name)]
    decoder.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    decoder.forward.__signature__ = inspect.Signature(parameters)
    assert can_encode_prompts_once(model.get_base_model(), inspect.signature(decoder.forward).parameters)
    assert are_equal(forward, decoder, batch_of(*BATCHES["different prompts"]))


@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@mark.parametrize("case", ["one prompt", "different prompts"])
@mark.parametrize("family", LINEAR)
def test_the_first_batch_accepts_an_exact_cache(family: str, case: str, dtype: torch.dtype) -> None:
    model = model_of(family).to(dtype)
    assert are_equal(model, model.get_base_model().base_model, batch_of(*BATCHES[case]))


def forgets(name: str, forward: Any, **kwargs: Any) -> Any:
    cache = kwargs.get(cache_name(kwargs))
    if name == "cache" and cache and cache.get_seq_length():
        kwargs["attention_mask"][:, : cache.get_seq_length()] = 0
    elif name == "mask" and "position_ids" in kwargs:  # padding of shorter prompts is attended to
        kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
    elif name == "positions" and "position_ids" in kwargs:  # the completion starts at 0 again
        kwargs["position_ids"] = kwargs["position_ids"] - kwargs["position_ids"][:, :1]
    return forward(**kwargs)


@mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@mark.parametrize("name", ["cache", "mask", "positions"])
def test_the_first_batch_refuses_a_model_that_ignores(name: str, dtype: torch.dtype, caplog: LogCaptureFixture) -> None:
    """One prompt, of one length: the batch by itself would not show a mask or positions that are ignored."""
    model = model_of("llama").to(dtype)
    batch = batch_of(*BATCHES["one prompt"])
    assert not are_equal(partial(forgets, name, model), model.get_base_model().model, batch)
    assert "Each prompt is encoded once per completion" in caplog.text


def lfm2() -> Any:
    kinds = ["conv", "full_attention", "conv"]
    return Lfm2ForCausalLM(Lfm2Config(**SIZES | {"num_hidden_layers": 3, "layer_types": kinds}))


def test_a_cache_with_states_is_not_repeated(caplog: LogCaptureFixture) -> None:
    model = lfm2()
    batch = batch_of(*BATCHES["one prompt"])
    assert not can_encode_prompts_once(model, inspect.signature(model.forward).parameters)
    assert not are_equal(model, model.base_model, batch)
    assert "Each prompt is encoded once per completion: the model does not take the cache (" in caplog.text
    assert hidden_states_per_completion(model, model.base_model, batch).shape == (10, 32)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@mark.parametrize("rope", [{"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, LONGROPE])
def test_positions_that_depend_on_the_longest_row(rope: dict[str, Any]) -> None:
    model = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, max_position_embeddings=16, **SIZES))
    assert not can_encode_prompts_once(model, inspect.signature(model.forward).parameters)


@mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.05), (torch.float16, 1.02)])
def test_states_agree_up_to_the_rounding_of_autocast(dtype: torch.dtype, factor: float) -> None:
    """Which leaves the states of a norm in float32; the square root of its eps is 0.09, or 0.03."""
    plain = torch.ones(2, 3, 4)
    with torch.autocast("cpu", dtype):
        assert _agree(factor * plain, plain) and not _agree(1.1 * plain, plain)
    assert not _agree(factor * plain, plain) and _agree((1 + 1e-4) * plain, plain)


def test_a_decoder_that_returns_logits_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))  # as Llama4ForCausalLM, whose base model it is itself
    with refused(r"^the forward of this model does not return hidden states of its LlamaForCa"):
        hidden_states_per_completion(model, model, batch_of(*BATCHES["one prompt"]))


def rows_of_a_step(trainer: Any) -> list[int]:
    """Rows in each call of the model that has gradients."""
    seen = []
    embedding = trainer.model.get_base_model().get_input_embeddings()
    embedding.register_forward_hook(
        lambda module, args, out: seen.append(len(args[0])) if torch.is_grad_enabled() else None
    )
    trainer.train()
    return seen


@mark.parametrize(
    ("batch", "micro_batches", "expected"),
    [
        (GROUP // 2, 2, [1, GROUP // 4, GROUP // 4] * 2),  # the prompt, then the completions in two batches by length
        (1, GROUP, [1] * GROUP),  # nothing to share
    ],
)
def test_a_training_step_encodes_the_prompt_once(batch: int, micro_batches: int, expected: Any, build: Any) -> None:
    trainer = build("gtpo", per_device_train_batch_size=batch, gradient_accumulation_steps=micro_batches)
    assert rows_of_a_step(trainer) == expected


def test_after_a_differing_first_batch_prompts_are_not_shared(build: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("gtpo.forward.hidden_states.are_equal", lambda *args: False)
    assert rows_of_a_step(build("gtpo")) == [GROUP]


def test_gradient_checkpointing_may_be_enabled_after_the_first_batch(build: Any) -> None:
    """Transformers then leaves the cache empty: completions would not see their prompt."""
    trainer = build("grpo")
    batch = canned.batch_of(trainer)
    before, _ = trainer._logps_and_entropy(trainer.model, batch)
    assert trainer._route.is_verified and trainer._route.may_share
    trainer.model.get_base_model().gradient_checkpointing_enable()
    after, _ = trainer._logps_and_entropy(trainer.model, batch)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
