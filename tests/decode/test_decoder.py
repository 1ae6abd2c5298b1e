"""Bugs these tests would catch: a kind of prompt read as another; a batch whose texts come back in
another order; a wrong call that is found after a minute of decoding, or not at all; names that load
the wrong kind of drafter; a router that reads the chat template; the GPU's kernel on a CPU; a model
whose state cannot be rolled back taken for one whose state can.

Tiny random models; everything is exact, for float32 texts are compared with the same model's own.
"""

import json
import logging
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeDrafter, FakeTarget, FakeTokenizer, ScriptedPolicy, whole_prefix

import decode.decoder
import decode.resolve
import decode.verification
from decode import Sampling, SpeculativeDecoder
from decode.clock import VirtualClock
from decode.types import Policy, Prior, Target
from decode.verification import select_verifier

V = 12
CONTEXT = whole_prefix(V)
PIECES = [bytes([97 + i]) for i in range(V)]


class Tokenizer(FakeTokenizer):
    """Letters a..l; the template wraps a message in k and l."""

    chat_template = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        first = [0] if add_special_tokens else []
        return SimpleNamespace(input_ids=[*first, *(self.pieces.index(c.encode()) for c in text)])

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"k{m['content']}l" for m in messages)


def decoder(**settings: Any) -> SpeculativeDecoder:
    target = FakeTarget(CONTEXT, V, max_context=20)
    settings = {"tokenizer": Tokenizer(PIECES), "clock": VirtualClock(), **settings}
    return SpeculativeDecoder(
        target, {"same": FakeDrafter(CONTEXT)}, ScriptedPolicy([("same", 3)]), **settings
    )


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "e"}, {"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        ("bcd", [[0, 1, 2, 3]]),
        (["bc", "d"], [[0, 1, 2], [0, 3]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (torch.tensor([1, 2, 3]), [[1, 2, 3]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([torch.tensor([1, 2]), torch.tensor([3])], [[1, 2], [3]]),
        (said("b"), [[10, 4, 11, 10, 1, 11]]),
        ([said("b"), said("cc")], [[10, 4, 11, 10, 1, 11], [10, 4, 11, 10, 2, 2, 11]]),
        (("bc", "d"), [[0, 1, 2], [0, 3]]),
    ],
)
def test_every_kind_of_prompt_is_read(prompts: Any, token_ids: list[list[int]]) -> None:
    result = decoder().generate(prompts, 5)
    wanted = decoder().generate(token_ids, 5)
    assert result.token_ids == wanted.token_ids
    assert result.texts == wanted.texts
    assert result.texts == ["".join(chr(97 + t) for t in ids) for ids in result.token_ids]
    assert [m.num_prompt_tokens for m in result.metrics] == [len(ids) for ids in token_ids]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"prompts": []}, "no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1] * 20]}, "has 20 tokens, but the context holds 20"),
        ({"prompts": [1.5]}, "not float"),
        ({"prompts": [[1, V]]}, "outside 0..11"),
        ({"prompts": "b", "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompts": "b", "stop": [""]}, "empty string"),
        ({"prompts": ["b", "c"], "request_ids": ["x"]}, "request_ids has 1 entries for 2"),
        ({"prompts": ["b", "c"], "request_ids": ["x", "x"]}, "one id twice"),
        ({"prompts": ["b", "c"], "router_texts": ["x"]}, "router_texts has 1"),
    ],
)
def test_a_wrong_call_is_one_sentence_before_anything_is_decoded(
    call: dict[str, Any], words: str
) -> None:
    one = decoder()
    with pytest.raises(ValueError, match=words) as caught:
        one.generate(**call)
    assert "\n" not in str(caught.value)
    assert not one.target.widths  # type: ignore[attr-defined]


def test_streaming_refuses_at_the_call_and_not_at_the_first_chunk() -> None:
    with pytest.raises(ValueError, match="one prompt, not 2"):
        decoder().stream(["b", "c"])
    with pytest.raises(ValueError, match="empty"):
        decoder().stream([[]])


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    bare = decoder(tokenizer=None)
    assert bare.generate([1, 2], 4).texts == [""]
    assert [c.text for c in bare.stream([1, 2], 4)] == [""] * 1
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate("b")
    with pytest.raises(ValueError, match="needs a tokenizer"):
        bare.generate([1], stop="x")


def test_other_couplings_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="coupling=maximal is unknown; use rejection or gumbel"):
        decoder(coupling="maximal")


def test_the_router_reads_what_the_person_wrote() -> None:
    asked: list[tuple[str, int]] = []
    opened: list[Prior | None] = []

    class Router:
        def prior(self, text: str, num_prompt_tokens: int, sampling: Sampling) -> Prior:
            asked.append((text, num_prompt_tokens))
            return Prior({"same": 1.0}, {"same": 1.0}, {"same": 0.0}, {"same": 1.0})

    class Watching(ScriptedPolicy):
        def open(self, request: Any) -> Any:
            opened.append(request.prior)
            return super().open(request)

    target = FakeTarget(CONTEXT, V)
    routed = SpeculativeDecoder(
        target,
        {"same": FakeDrafter(CONTEXT)},
        Watching([("same", 1)]),
        Router(),
        tokenizer=Tokenizer(PIECES),
    )
    routed.generate([said("bcd")], 2)
    routed.generate(["bc"], 2)
    routed.generate([[3, 1]], 2)
    routed.generate(["bc"], 2, router_texts=["what was meant"])
    assert asked == [("bcd", 8), ("bc", 3), ("db", 2), ("what was meant", 3)]
    assert all(prior is not None and prior.mean == {"same": 1.0} for prior in opened)


# ---------------------------------------------------------------------------------------- names


def test_drafters_are_found_by_kind_folder_or_model_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[str, str]] = []

    class Point(EntryPoint):
        def load(self) -> Any:
            return lambda name, target: loaded.append((self.name, name)) or FakeDrafter(CONTEXT)

    points = [Point(kind, "-", "-") for kind in ("ngram", "lm", "heads")]
    monkeypatch.setattr(decode.resolve, "entry_points", lambda group: points)
    (tmp_path / "drafter.json").write_text(json.dumps({"kind": "heads"}))
    target = FakeTarget(CONTEXT, V)
    names = {"a": "ngram", "b": tmp_path, "c": "someone/model"}
    made = SpeculativeDecoder(target, names, ScriptedPolicy([("a", 1)]))
    assert loaded == [("ngram", "ngram"), ("heads", str(tmp_path)), ("lm", "someone/model")]
    assert list(made.drafters) == ["a", "b", "c"]
    assert list(SpeculativeDecoder(target, "x/y", ScriptedPolicy([])).drafters) == ["drafter"]
    (tmp_path / "drafter.json").write_text(json.dumps({"kind": "unheard"}))
    with pytest.raises(ValueError, match="'unheard', which is not installed"):
        SpeculativeDecoder(target, tmp_path)
    with pytest.raises(ValueError, match="cannot be named 'off'"):
        SpeculativeDecoder(target, {"off": FakeDrafter(CONTEXT)}, ScriptedPolicy([]))


def test_the_default_policy_is_named_once_with_what_it_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        made = SpeculativeDecoder(FakeTarget(CONTEXT, V), {"same": FakeDrafter(CONTEXT)})
    assert type(made.policy).__name__ == "PosteriorPolicy"
    lines = [r.message for r in caplog.records if "policy posterior" in r.message]
    assert len(lines) == 1
    assert "ms" in lines[0]
    assert made.generate([1, 2], 12).token_ids == decoder().generate([1, 2], 12).token_ids


@pytest.mark.parametrize("name", ["ucb1", "thompson", "posterior", "off"])
def test_policies_are_found_by_name(name: str) -> None:
    made = SpeculativeDecoder(FakeTarget(CONTEXT, V), {"same": FakeDrafter(CONTEXT)}, name)
    assert isinstance(made.policy, Policy) or name == "off"
    assert made.generate([1, 2], 12).token_ids == decoder().generate([1, 2], 12).token_ids


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"policy=best is not known; choose one of .*posterior"):
        SpeculativeDecoder(FakeTarget(CONTEXT, V), {"same": FakeDrafter(CONTEXT)}, "best")


def test_what_verifies_is_named_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode.verification, "_said", set())
    with caplog.at_level(logging.INFO):
        assert [select_verifier("cpu").name for _ in range(3)] == ["reference"] * 3
    assert len(caplog.records) == 1
    monkeypatch.setattr(decode.verification, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Triton"):
        select_verifier("cuda:0")


# --------------------------------------------------------------------------- transformers targets


def tiny(kind: str, **settings: Any) -> Any:
    import transformers

    shape = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2} | settings
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


LLAMA = {
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 48,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "eos_token_id": 30,
}
SAMPLED = Sampling(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5)
MODELS = {
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 6, "num_key_value_heads": 1},  # shorter than the text
    "GPTNeoX": LLAMA,
}


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_text_equals_generate_of_the_same_model(kind: str) -> None:
    model = tiny(kind, **MODELS[kind])
    prompts: Sequence[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8], [9]]
    script = ScriptedPolicy([("ngram", 4), ("off", 0), ("random", 2)])
    pool = {"ngram": "ngram", "random": FakeDrafter(whole_prefix(31))}
    made = SpeculativeDecoder(model, pool, script)
    assert isinstance(made.target, Target)
    assert made.target.eos_token_ids == {30}
    result = made.generate(prompts, 38)
    for prompt, ids in zip(prompts, result.token_ids, strict=True):
        own = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=38)
        assert ids == own[0, len(prompt) :].tolist()
    assert any(r.num_accepted < r.num_drafted for row in result.records for r in row)


def test_the_context_ends_where_the_models_positions_do() -> None:
    result = SpeculativeDecoder(tiny("Llama", **LLAMA | {"eos_token_id": None})).generate(
        [5] * 9, 99
    )
    assert len(result.token_ids[0]) == 48 - 9
    assert result.metrics[0].finish_reason == "context"


def test_prefill_computes_the_head_for_one_position_at_most() -> None:
    model = tiny("Llama", **LLAMA)
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda module, given, out: sizes.append(out.shape[1]))
    made = SpeculativeDecoder(model)
    sizes.clear()
    made.generate([list(range(1, 20))], 3)
    assert sizes[0] == 1
    assert sum(sizes) <= 1 + 3


def test_a_model_without_a_cache_of_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be rolled back"):
        SpeculativeDecoder(tiny("Mamba", state_size=4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
def test_on_cuda_the_triton_kernel_verifies_and_changes_nothing(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32: the same draws through kernel and reference, over ragged rows."""
    from kernels.coupled_reference import couple
    from kernels.reference import verify

    model = tiny("Llama", **LLAMA).to("cuda")
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [3, 3]]
    script = [("ngram", 4), ("random", 3)]
    pool = {"ngram": "ngram", "random": FakeDrafter(whole_prefix(31))}
    made = SpeculativeDecoder(model, pool, ScriptedPolicy(script))
    result = made.generate(prompts, 30, sampling)
    assert {m.verifier for m in result.metrics} == {"triton"}
    reference = decode.verification.Verifier("reference", verify, couple)
    monkeypatch.setattr(decode.decoder, "select_verifier", lambda device: reference)
    checked = SpeculativeDecoder(model, pool, ScriptedPolicy(script)).generate(
        prompts, 30, sampling
    )
    assert checked.token_ids == result.token_ids
    assert any(r.num_accepted < r.num_drafted for row in result.records for r in row)
