"""`LLM` with adapters: one or one for each prompt, alone or together, warm or cold."""

import asyncio
import json
import shutil

import pytest
from preempted import preempted_adapters
from tiny_adapters import adapters, write_adapter
from tiny_llm import ids, open_tiny, write_config

from quire import AsyncLLM, BeamSearchParams, LoRARequest, RequestError, SamplingParams
from quire.api import cli

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [ids(40, salt) for salt in range(6)]
SETTINGS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "num_blocks": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    with open_tiny(folder, "cpu", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return adapters(tmp_path_factory.mktemp("adapters"), 4)


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def alone(llm, prompt, adapter):
    llm.reset_prefix_cache()
    return tokens(llm.generate([prompt], GREEDY, False, lora_request=adapter))[0]


def test_a_mixed_batch_gives_what_each_gives_alone(llm, four):
    each = [None, *four, None]
    wanted = [alone(llm, prompt, adapter) for prompt, adapter in zip(PROMPTS, each, strict=True)]
    base = [alone(llm, prompt, None) for prompt in PROMPTS]
    assert [a == b for a, b in zip(wanted, base, strict=True)] == [True, *[False] * 4, True]
    llm.reset_prefix_cache()
    for _ in ("cold", "warm"):
        outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=each)
        assert tokens(outputs) == wanted
    assert [output.num_cached_tokens for output in outputs] == [39] * 6
    stats = llm.stats()["adapters"]
    assert stats["in_host"] == 3 and stats["in_slots"] == 2 and stats["loads"] > 4


def test_an_answer_is_the_same_by_every_way(llm, four):
    [adapter, other, *_] = four
    wanted = alone(llm, PROMPTS[0], adapter)
    assert wanted != alone(llm, PROMPTS[0], other)
    *_, last = llm.stream(PROMPTS[0], GREEDY, lora_request=adapter)
    assert tokens([last]) == [wanted]
    three = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=3)
    assert tokens(llm.generate([PROMPTS[0]], three, False, lora_request=adapter)) == [wanted * 3]
    params = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    assert tokens(llm.beam_search([PROMPTS[0]], params, False, lora_request=adapter)) == [wanted]


def test_drafts_of_a_model_without_adapters_change_nothing(folder, four):
    """The drafter has none; what it guesses wrong is drawn again."""
    with open_tiny(folder, "cpu", **SETTINGS) as llm:
        wanted = [alone(llm, PROMPTS[0], adapter) for adapter in (None, *four[:2])]
    settings = SETTINGS | {"speculative": str(folder), "num_speculative_tokens": 3}
    with open_tiny(folder, "cpu", **settings) as llm:
        prompts, each = [PROMPTS[0]] * 3, [None, *four[:2]]
        outputs = llm.generate(prompts, GREEDY, False, lora_request=each)
        assert tokens(outputs) == wanted and llm.stats()["speculation"]["drafted"]


@pytest.mark.parametrize("budget", [13, 64])
def test_chunks_preemption_and_a_disk_change_nothing(folder, four, tmp_path, budget):
    with open_tiny(folder, "cpu", **SETTINGS) as llm:
        each = [None, *four, four[0]]
        wanted = [alone(llm, *pair) for pair in zip(PROMPTS, each, strict=True)]
    # Two sequences begin, and have no room to end.
    settings = SETTINGS | {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": budget}
    settings |= {"ssd_cache_dir": str(tmp_path / "ssd"), "ssd_cache_bytes": "64MB"}
    for _ in ("cold", "from the disk"):
        with open_tiny(folder, "cpu", **settings) as llm:
            preempted = preempted_adapters(llm)
            outputs = llm.generate(PROMPTS, GREEDY, False, lora_request=each)
            assert tokens(outputs) == wanted
            assert any(preempted)
    assert all(output.cached_tokens_by_tier.get("ssd") for output in outputs)


def test_what_cannot_be_is_said_before_anything_is_started(llm, four, tmp_path):
    with pytest.raises(RequestError, match="2 prompts came with 1 adapters"):
        llm.generate(PROMPTS[:2], GREEDY, False, lora_request=[four[0]])
    with pytest.raises(RequestError, match="LoRARequest, not str"):
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=["n0"])
    with pytest.raises(RequestError, match=str(tmp_path / "nothing")):
        nothing = LoRARequest("nothing", 1, str(tmp_path / "nothing"))
        llm.generate(PROMPTS[:1], GREEDY, False, lora_request=nothing)
    for bad in ({"lora_name": ""}, {"lora_int_id": 0}, {"lora_path": None}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "b", **bad})
    assert llm.stats()["requests"] == {"running": 0, "loading": 0, "waiting": 0}


def test_a_folder_with_other_weights_needs_another_number(llm, four, tmp_path):
    path = str(shutil.copytree(four[0].lora_path, tmp_path / "changing"))
    old = LoRARequest("changing", 1, path)
    wanted = alone(llm, PROMPTS[0], four[0])
    assert alone(llm, PROMPTS[0], old) == wanted
    write_adapter(tmp_path / "changing", seed=99)
    assert alone(llm, PROMPTS[0], old) == wanted  # as it was read
    new = llm.generate([PROMPTS[0]], GREEDY, False, lora_request=LoRARequest("changing", 2, path))
    assert tokens(new)[0] != wanted and new[0].num_cached_tokens == 0
    llm.generate(PROMPTS[:3], GREEDY, False, lora_request=four[1:])  # they take its place
    [output] = llm.generate([PROMPTS[0]], GREEDY, False, lora_request=old)
    assert "has changed since it was loaded" in output.error


def test_an_llm_without_adapters_says_what_to_set(folder, four):
    with open_tiny(folder, "cpu", num_blocks=64) as llm:
        with pytest.raises(RequestError, match="enable_lora=True"):
            llm.generate(PROMPTS[:1], GREEDY, False, lora_request=four[0])
        assert llm.stats()["adapters"] == {}


def test_an_async_llm_answers_with_them_too(folder, llm, four):
    wanted = [alone(llm, PROMPTS[0], adapter) for adapter in four[:2]]

    async def answers():
        settings = {"load_format": "dummy", "dtype": "float32", "device": "cpu", **SETTINGS}
        async with AsyncLLM(str(folder), use_tqdm=False, **settings) as engine:

            async def one(adapter):
                prompt = {"prompt_token_ids": PROMPTS[0]}
                stream = engine.generate(prompt, GREEDY, lora_request=adapter)
                return [output async for output in stream][-1]

            return await asyncio.gather(*map(one, four[:2]))

    assert tokens(asyncio.run(answers())) == wanted


def test_the_command_line_takes_one(folder, llm, four, capsys):
    settings = ["--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    settings += ["--num-blocks", "64", "--temperature", "0", "--max-tokens", "12", "--ignore-eos"]
    prompt = ["--prompt-ids", ",".join(map(str, PROMPTS[0])), "--json"]
    command = ["generate", str(folder), *settings, *prompt]
    assert cli.main([*command, "--lora-modules", f"one={four[0].lora_path}"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [told["token_ids"]] == alone(llm, PROMPTS[0], four[0])
    assert cli.main([*command, "--lora-modules", "nothing"]) == 2
    assert "--lora-modules has name=path" in capsys.readouterr().err
