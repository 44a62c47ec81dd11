"""Generation without vLLM: the tokens and probabilities of ``model.generate``; weights are restored exactly."""

from typing import Any
from unittest import mock

import torch
import transformers
from helpers.files import tables_of
from helpers.refusals import refused
from peft import LoraConfig, get_peft_model
from pytest import FixtureRequest, MonkeyPatch, fixture, mark, raises
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from gtpo.forward import generation
from gtpo.forward.generation import fast_layers, generate

TABLES = tables_of(__file__)

VOCABULARY = 24
ENDS = [2, 7, 13, 17]
PAD = 0
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_llama(adapter: dict[str, Any] | None = None, **config: Any) -> Any:
    """A Llama with confident predictions, with a LoRA adapter of large weights."""
    torch.manual_seed(0)
    shape = LlamaConfig(**SHAPE | {"num_hidden_layers": 3, "initializer_range": 0.3} | config)
    lora = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | (adapter or {})
    model = LlamaForCausalLM(shape)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return get_peft_model(model, LoraConfig(**lora))


def settings(**changed: Any) -> GenerationConfig:
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    tokens = {"max_new_tokens": 12, "eos_token_id": ENDS, "pad_token_id": PAD}
    return GenerationConfig(**sampling | tokens | changed)


def padded(*prompts: list[int]) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


ONE = padded(*[[5, 6, 7, 8, 9]] * 6)
SEVERAL = padded(*[[5, 6, 7, 8, 9]] * 3, *[[11, 0, 3]] * 3, [4], [0, 4], *[[11, 0, 3]] * 2)  # 0, the padding, too


@fixture(params=[generation.LARGE, 1], ids=["unpacked", "packed"])
def packed(request: FixtureRequest, monkeypatch: MonkeyPatch) -> bool:
    """Weights as small as these are packed only in the second case."""
    monkeypatch.setattr(generation, "LARGE", request.param)
    return request.param == 1


def greedy(model: Any, prompts: Any, end: Any = ENDS) -> list[list[int]]:
    config = settings(do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=end)
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    return generate(lm, *prompts, config).tolist()


def greedy_of_transformers(model: Any, prompts: Any, end: Any = ENDS) -> list[list[int]]:
    config = settings(do_sample=False, temperature=None, top_p=None, top_k=None, eos_token_id=end)
    return model.generate(input_ids=prompts[0], attention_mask=prompts[1], generation_config=config).tolist()


@mark.usefixtures("packed")
@mark.parametrize("prompts", [ONE, SEVERAL], ids=["one", "several"])
@mark.parametrize("end", [2, ENDS, None])
def test_greedy_tokens_are_those_of_generate(prompts: Any, end: Any) -> None:
    model = tiny_llama()
    expected = greedy_of_transformers(model, prompts, end)
    with mock.patch.object(LlamaForCausalLM, "generate", side_effect=AssertionError("not covered")):
        assert greedy(model, prompts, end) == expected


def naive_logits(model: Any, tokens: list[int]) -> Tensor:
    """The next token's logits: a forward of one row, without padding, cache or merging."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def recorded(model: Any, prompts: Any, config: GenerationConfig) -> tuple[list[list[int]], list[dict[tuple, Tensor]]]:
    """The rows, and for each step the distribution of the next token by the row's tokens so far."""
    steps: list[Tensor] = []
    sample = generation._sample

    def noting(scores: Tensor, draws: Tensor) -> Tensor:
        steps.append(scores.softmax(-1))
        return sample(scores, draws)

    with mock.patch.object(generation, "_sample", noting):
        rows = generate(model.get_base_model(), *prompts, config)
    return rows.tolist(), steps


@mark.usefixtures("packed")
@mark.parametrize("bias", [False, True])
def test_tokens_are_drawn_from_the_plain_distribution(bias: bool) -> None:
    model = tiny_llama(attention_bias=bias)
    torch.manual_seed(3)
    rows, steps = recorded(model, SEVERAL, settings(temperature=0.7))
    width = SEVERAL[0].shape[1]
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*SEVERAL, strict=True)]
    sizes = set()
    for step, found in enumerate(steps):
        open_ = [i for i, row in enumerate(rows) if not set(ENDS) & set(row[width : width + step])]
        assert len(found) == len(open_)  # finished rows are not computed
        sizes.add(len(open_))
        for distribution, i in zip(found, open_, strict=True):
            expected = (naive_logits(model, prompts[i] + rows[i][width : width + step]) / 0.7).softmax(-1)
            torch.testing.assert_close(distribution, expected, atol=2e-5, rtol=1e-4)
    assert len(sizes) > 3


def test_samples_have_the_frequencies_of_the_distribution() -> None:
    scores = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 2.5, -9.0])
    generator = torch.Generator().manual_seed(0)
    count = 200_000
    draws = torch.rand(count, dtype=torch.float64, generator=generator)
    tokens = generation._sample(scores.expand(count, -1), draws)
    observed = torch.bincount(tokens, minlength=6)
    expected = scores.softmax(-1) * count
    assert observed[3] == 0
    possible = expected > 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: p = 0.001
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert generation._sample(torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2), edges).tolist() == [1, 2]


def test_nan_probabilities_raise_the_error_of_multinomial() -> None:
    with raises(RuntimeError, match="probability tensor contains"):
        generation._sample(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), torch.zeros(2, dtype=torch.float64))


def test_a_completion_does_not_depend_on_the_others() -> None:
    model = tiny_llama()
    torch.manual_seed(5)
    rows = generate(model.get_base_model(), *SEVERAL, settings())
    torch.manual_seed(5)
    going_on = generate(model.get_base_model(), *SEVERAL, settings(eos_token_id=None))
    width = SEVERAL[0].shape[1]
    ended = 0
    for row, other in zip(rows[:, width:].tolist(), going_on[:, width:].tolist(), strict=True):
        ends = [place for place, token in enumerate(other) if token in ENDS]
        length = ends[0] + 1 if ends else len(other)
        ended += len(ends) > 0
        assert row[:length] == other[:length]
    assert 0 < ended < len(rows)


def test_finished_rows_leave_the_cache_at_once() -> None:
    """Each layer frees their keys when it selects, not at its next token: of all layers together that is a cache."""
    layer = generation._RoomyLayer(room=8)
    layer.update(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4))
    kept = layer.keys[[0, 2]].clone()
    layer.batch_select_indices(torch.tensor([0, 2]))
    assert layer.keys.equal(kept) and layer.values.shape == (2, 2, 5, 4)
    assert layer.keys.untyped_storage().data_ptr() == layer.buffers[0].untyped_storage().data_ptr()


@mark.parametrize(
    "changed",
    [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"temperature": 0.2}],
    ids=lambda changed: next(iter(changed)),
)
def test_sampling_settings_act_as_in_transformers(changed: dict[str, Any]) -> None:
    model = tiny_llama()
    torch.manual_seed(3)
    rows, steps = recorded(model, SEVERAL, settings(eos_token_id=None, max_new_tokens=3, **changed))
    mine = [step.clone() for step in steps]
    scores = model.generate(
        input_ids=torch.tensor(rows)[:, :-1],
        attention_mask=torch.cat([SEVERAL[1], torch.ones(len(rows), 2, dtype=torch.long)], dim=1),
        generation_config=settings(max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **changed),
    ).scores[0]
    torch.testing.assert_close(mine[-1], scores.softmax(-1), atol=2e-5, rtol=1e-4)
    torch.manual_seed(3)
    plain = recorded(model, SEVERAL, settings(eos_token_id=None, max_new_tokens=3))[1]
    assert (mine[0] - plain[0]).abs().max() > 0.05


# Layers


def test_fast_layers_are_equal_and_restored_exactly(packed: bool) -> None:
    model = tiny_llama()
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    hidden = {32: torch.randn(2, 3, 32), 48: torch.randn(2, 3, 48)}
    layers = {name: each for name, each in model.named_modules() if name.endswith(("_proj", "lm_head"))}
    assert len(layers) == 3 * 7 + 1
    with torch.no_grad():
        expected = {name: layer(hidden[layer.in_features]) for name, layer in layers.items()}
        with fast_layers(model.get_base_model(), 2):
            found = {name: layer(hidden[layer.in_features]) for name, layer in layers.items()}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    adapted = [name for name in layers if not name.endswith("lm_head")]
    assert sum(torch.equal(found[name], expected[name]) for name in adapted) < 2  # it was another formula
    for name, weight in model.named_parameters():
        assert weight.data_ptr() == before[name][0] and torch.equal(weight, before[name][1])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_exception_restores_the_layers() -> None:
    model = tiny_llama()
    for target in ("_sample", "_prefill"):
        with mock.patch.object(generation, target, side_effect=KeyboardInterrupt), raises(KeyboardInterrupt):
            generate(model.get_base_model(), *ONE, settings())
    second = model.get_base_model().model.layers[1].self_attn.q_proj
    with mock.patch.object(second, "get_delta_weight", side_effect=MemoryError), raises(MemoryError):
        generate(model.get_base_model(), *ONE, settings())
    assert not any("forward" in module.__dict__ for module in model.modules())


@mark.parametrize(
    "change",
    [
        {"use_dora": True},
        {"lora_dropout": 0.1},
        {"lora_bias": True},
        "two adapters",
        "16-bit weights",
        "disabled",
        "merged",
        "hook",
    ],
    ids=str,
)
def test_layers_that_cannot_be_merged_stay(change: Any) -> None:
    model = tiny_llama(change if isinstance(change, dict) else None, attention_bias=True)
    lm = model.get_base_model()
    layer = lm.model.layers[0].self_attn.q_proj
    if change == "two adapters":
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "second"])
    elif change == "16-bit weights":
        layer.base_layer.bfloat16()
    elif change == "disabled":
        layer.enable_adapters(False)
    elif change == "merged":
        layer.merge()
    elif change == "hook":
        layer.base_layer.forward = layer.base_layer.forward
    with fast_layers(lm, 2):
        assert ("forward" in layer.__dict__) is False
    if change in ({"use_dora": True}, "two adapters"):
        assert greedy(model, SEVERAL) == greedy_of_transformers(model, SEVERAL)


def test_nothing_is_packed_under_autocast(packed: bool) -> None:
    """oneDNN has no product of packed float32 weights and bfloat16 states."""
    model = tiny_llama().get_base_model()
    with torch.autocast("cpu", torch.bfloat16):
        assert generate(model, *ONE, settings()).shape[0] == 6
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # as accelerate does for bf16
    with fast_layers(model, 2):
        assert [module for module in model.modules() if "forward" in module.__dict__] == [model]
    assert generate(model, *ONE, settings()).shape[0] == 6 and "forward" in model.__dict__


def test_lora_of_a_parameter_is_part_of_the_rollouts(packed: bool) -> None:
    """PEFT changes the weight in the forward of the layer around."""
    adapter = {"target_modules": [], "target_parameters": ["q_proj.weight", "up_proj.weight"]}
    model = tiny_llama(adapter)
    assert greedy(model, SEVERAL) == greedy_of_transformers(model, SEVERAL)
    with model.disable_adapter():
        assert greedy(model, SEVERAL) != greedy_of_transformers(tiny_llama(adapter), SEVERAL)


def test_draws_are_exact_in_a_large_vocabulary() -> None:
    """After a likely token, float32 sums do not grow by probabilities of 1e-9."""
    scores = torch.full((4, 200_000), 1e-9).log()
    scores[:, 0] = 0
    pi = scores.softmax(-1).double()
    expected = torch.tensor([0, 101, 1000, 150_003])
    places = pi[:, 0] + pi[:, 1] * (expected - 0.5)
    assert torch.equal(generation._sample(scores, places / pi.sum(-1)), expected)


# What model.generate does


@mark.parametrize(
    "changed",
    TABLES["other_settings_go_to_transformers"],
    ids=lambda changed: next(iter(changed)),
)
def test_other_settings_go_to_transformers(changed: dict[str, Any]) -> None:
    lm = tiny_llama().get_base_model()
    config = settings(**changed)
    with mock.patch.object(LlamaForCausalLM, "generate", return_value="theirs") as theirs:
        assert generate(lm, *ONE, config) == "theirs"
    assert theirs.call_args.kwargs["generation_config"] is config
    assert theirs.call_args.kwargs["attention_mask"] is ONE[1]


@mark.parametrize("own", ["generation config", "inputs", "a device without float64"])
def test_what_a_model_brings_itself_goes_to_transformers(own: str, monkeypatch: MonkeyPatch) -> None:
    lm = tiny_llama().get_base_model()
    if own == "inputs":
        monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", lambda self, *args, **kwargs: {})
    elif own == "generation config":
        lm.generation_config.no_repeat_ngram_size = 2
    else:
        monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("mps"))
    with mock.patch.object(LlamaForCausalLM, "generate", return_value="theirs"):
        assert generate(lm, *ONE, settings()) == "theirs"


@mark.parametrize(
    ("family", "config", "is_covered"),
    TABLES["families"],
)
def test_families(family: str, config: dict[str, Any], is_covered: bool) -> None:
    name = f"{family}Text" if family == "Gemma3" else family
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{name}Config")(**SHAPE | config))
    kind = type(model)
    with mock.patch.object(kind, "generate", autospec=True, side_effect=kind.generate) as theirs:
        found = greedy(model, SEVERAL)
    assert theirs.called is not is_covered
    assert found == greedy_of_transformers(model.eval(), SEVERAL)


def test_gradient_checkpointing_is_refused_in_training_mode() -> None:
    model = tiny_llama()
    model.get_base_model().gradient_checkpointing_enable()
    expected = greedy_of_transformers(model.eval(), SEVERAL)
    assert greedy(model, SEVERAL) == expected
    with refused(r"call model\.eval\(\) before"):
        greedy(model.train(), SEVERAL)
