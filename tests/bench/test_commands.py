"""`quire bench` from the command line, on a model that takes a moment."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from quire.api import cli
from quire.bench.report import machine_rates
from quire.bench.report.profiler_trace import WINDOW

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10_001,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module", autouse=True)
def quick_rates() -> Any:
    """Figures of a small copy and a small product: what is made of them is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_rates, "CPU_COPY_BYTES", 1 << 20)
        patch.setattr(machine_rates, "CPU_MATRIX", 64)
        machine_rates.measured_rates.cache_clear()
        yield
    machine_rates.measured_rates.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    settings = "--load-format dummy --device cpu --dtype float32 --num-blocks 4096"
    return f"{folder} {settings}"


class Bench:
    """Runs a benchmark; what it printed and what it wrote."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, line: str) -> tuple[str, dict[str, Any]]:
        path = self.folder / "figures.json"
        status = cli.main(["bench", *shlex.split(line), "--json", str(path)])
        out, err = self.capsys.readouterr()
        assert status == 0, err
        self.told = err.splitlines()
        return out, json.loads(path.read_text())

    def refusal(self, line: str) -> str:
        status = cli.main(["bench", *shlex.split(line)])
        out, err = self.capsys.readouterr()
        *_, last = err.splitlines()
        assert (status, out, err.count("error: ")) == (2, "", 1)
        return last


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


def check_ratio(row: dict[str, Any], figure: str) -> None:
    """The part of the limit that was reached, by time or by speed."""
    ratio = row["limit"] / row[figure]["median"]
    expected = 100 / ratio if "tok/s" in figure else 100 * ratio
    assert row["% of limit"] == pytest.approx(expected)


def test_throughput(bench: Bench, model: str, tmp_path: Path) -> None:
    out, result = bench(f"throughput {model} --workload cpu --repeat 2 --profile {tmp_path}/traces")
    [row] = result["rows"]
    assert len(row["output tok/s"]["runs"]) == 2
    assert row["computed"] == 6829 and row["cached"] == 0 and row["steps"] >= 64
    assert 0 < row["% outside model"] < 100
    check_ratio(row, "output tok/s")
    limit = result["limits"]["quire"]
    assert limit["seconds"] == pytest.approx(limit["prompts"] + limit["weights"] + limit["kv"])
    assert result["rates"].keys() == {"copy_bytes_per_s", "matrix_operations_per_s"}
    assert result["machine"].keys() >= {"cpu", "threads", "torch", "python", "quire"}
    assert result["machine"]["cpu"] in out and "% of limit" in out

    profile = result["profile"]
    assert profile["count"] == 20 and 0 <= profile["idle_share"] < 1
    assert len(profile["costs"]) == 10
    assert "profile of 20 steady steps" in out and "outside torch's operators" in out
    events = json.loads((tmp_path / "traces" / "throughput-cpu.json").read_text())["traceEvents"]
    assert any(event["name"] == WINDOW for event in events)


def test_prefix_shows_caching_on_and_off(bench: Bench, model: str) -> None:
    out, result = bench(f"throughput {model} --workload prefix --repeat 1")
    on, off = result["rows"]
    assert (on["caching"], off["caching"], off["cached"]) == ("on", "off", 0)
    assert on["cached"] == 69 * 512 and on["computed"] + on["cached"] == off["computed"]
    assert result["limits"]["on"]["prompts"] < result["limits"]["off"]["prompts"]
    assert "caching makes it" in out


@pytest.mark.parametrize("workload", ["stream", "beams"])
def test_transformers_beside_it(bench: Bench, model: str, workload: str) -> None:
    pytest.importorskip("transformers")
    flags = f"--workload {workload} --repeat 1 --compare transformers"
    out, result = bench(f"throughput {model} {flags}")
    assert [row["engine"] for row in result["rows"]] == ["quire", "transformers"]
    for row in result["rows"]:
        check_ratio(row, "output tok/s")
    assert "times as fast as transformers" in out


def test_decode(bench: Bench, model: str) -> None:
    pytest.importorskip("transformers")
    out, result = bench(f"decode {model} --streams 1,3 --repeat 2 --compare transformers")
    assert [row["streams"] for row in result["rows"]] == [1, 3]
    for row in result["rows"]:
        pairs = zip(row["quire ms"]["runs"], row["transformers ms"]["runs"], strict=True)
        assert row["ratio"]["runs"] == [pytest.approx(his / ours) for ours, his in pairs]
    assert "64 tokens in, then 32 steps" in out and "processor time" in out
    _, result = bench(f"decode {model} --streams 2 --repeat 1")
    assert result["rows"][0].keys() == {"streams", "quire ms"}


def test_one_rank_as_if_it_were_several(bench: Bench, model: str) -> None:
    out, result = bench(f"throughput {model} --workload stream --repeat 2 --compare ranks")
    assert [row["engine"] for row in result["rows"]] == ["quire", "quire over a group"]
    assert len(result["ratio"]["runs"]) == 2 and result["ratio"]["median"] > 0
    assert "one rank over a group of its own takes" in out


def test_stream1(bench: Bench, model: str) -> None:
    _, result = bench(f"latency {model} --workload stream1 --repeat 2")
    assert bench.told[0] == f"Loading {model.split()[0]}: its shape, with random weights"
    runs = [line.split(",")[0] for line in bench.told if "stream1: " in line]
    assert runs == [f"  stream1: {done} of 2 runs" for done in range(3)]
    [row] = result["rows"]
    assert len(row["ms per token"]["runs"]) == len(row["first token ms"]["runs"]) == 2
    check_ratio(row, "ms per token")


def test_prefill(bench: Bench, model: str, tmp_path: Path) -> None:
    trace = tmp_path / "prefill.json"
    out, result = bench(
        f"latency {model} --workload prefill --lengths 64,200 --repeat 2 --profile {trace}"
    )
    assert [row["tokens in"] for row in result["rows"]] == [64, 200]
    for row in result["rows"]:
        check_ratio(row, "ms")
    assert "profile of 1 prompt of 200 tokens" in out and trace.exists()


def test_cached(bench: Bench, model: str) -> None:
    _, result = bench(f"latency {model} --workload cached --lengths 900 --repeat 3")
    [row] = result["rows"]
    assert row["cached"] == 896  # whole blocks, of all but the last token
    assert len(row["cold ms"]["runs"]) == len(row["cached ms"]["runs"]) == 3
    check_ratio(row, "cached ms")


def test_experts(bench: Bench) -> None:
    _, result = bench(
        "experts --device cpu --dtype float32 --experts 4 --top-k 2 --hidden 32 --features 32 "
        "--tokens 1,3 --repeat 1"
    )
    rows = result["rows"]
    assert [row["tokens"] for row in rows] == [1, 3] * 5
    formats = {"numbers", "fp8 by row", "fp8 in blocks", "4 bits in groups", "MXFP4"}
    assert {row["weights"] for row in rows} == formats
    assert all(0 < row["% of limit"] < 100 for row in rows)


def test_attention(bench: Bench, tmp_path: Path) -> None:
    out, result = bench(
        "attention --device cpu --dtype float32 --heads 4 --kv-heads 2 --head-dim 16 --pool 1MiB "
        f"--decode 3x50 --prefill 1x20+30 --repeat 2 --profile {tmp_path}"
    )
    assert [row["case"] for row in result["rows"]] == ["decode 3 × 50", "prefill 1 × 20 behind 30"]
    for row in result["rows"]:
        shares = [100 * row["limit"] / each for each in row["µs"]["runs"]]
        assert row["% of limit"]["runs"] == pytest.approx(shares)
    assert "2 KV heads, 2 query heads each" in out
    assert result["profile"]["count"] == 8 and (tmp_path / "attention.json").exists()


def test_adapters_in_turns_with_none(bench: Bench, model: str) -> None:
    flags = "--workload stream1 --adapters 3 --max-loras 2 --rank 4 --max-model-len 800 --repeat 1"
    out, figures = bench(f"adapters {model} {flags}")
    assert "3 adapters of rank 4 in 2 slots" in out
    [row] = figures["rows"]
    without, with_them = row["tok/s without"]["runs"], row["tok/s with"]["runs"]
    assert row["with / without"]["runs"] == [with_them[0] / without[0]]


@pytest.mark.gpu
class TestOnAGpu:
    def test_decodes_are_captured_and_profiled(self, bench: Bench, tmp_path: Path) -> None:
        out, result = bench(
            "attention --device cuda --pool 1GB --layers 4 --decode 8x512 --prefill 1x256+256 "
            f"--repeat 2 --profile {tmp_path}"
        )
        for row in result["rows"]:
            shares = [100 * row["limit"] / each for each in row["µs"]["runs"]]
            assert row["% of limit"]["runs"] == pytest.approx(shares, rel=0.3)  # rates change
        assert result["profile"]["on_gpu"] and "the GPU was idle for" in out
        assert result["machine"]["gpu"] in out

    def test_steady_steps_have_an_idle_share(self, bench: Bench, tmp_path: Path) -> None:
        config = CONFIG | {"hidden_size": 64, "intermediate_size": 128}
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = f"{tmp_path} --load-format dummy --device cuda --num-blocks 1024"
        _, result = bench(f"latency {model} --workload stream1 --repeat 1 --profile {tmp_path}")
        profile = result["profile"]
        assert profile["on_gpu"] and profile["count"] == 200 and 0 <= profile["idle_share"] < 1


def test_index(bench: Bench) -> None:
    out, result = bench("index --tokens 1024 --repeat 2")
    assert len(result["operations"]) == 8 and "empty slots" in out


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "index", "--tokens", "64", "--repeat", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["waste"] and "µs per block" in err


REFUSALS = [
    ("throughput {model} --workload nano", "--max-model-len 4,096 is more than the 1,024 posi"),
    (
        "throughput {model} --workload prefix --max-model-len 700",
        "799 tokens with its answer and --max-model-len is 700; raise it",
    ),
    ("latency {model} --workload prefill --lengths 64,1024", "choose shorter --lengths"),
    ("latency {model} --workload cached", "4,097 tokens with its answer"),
    (
        "latency {model} --workload cached --no-enable-prefix-caching",
        "needs the prefix cache; leave out --no-enable-prefix-caching",
    ),
    ("latency {model} --workload stream1 --max-model-len 512", "768 tokens with its answer"),
    ("latency {model} --lengths 64", "--lengths is for prefill and cached; stream1 has its own"),
    ("latency {model} --lengths 64,x", "--lengths: takes whole numbers from 1 with commas"),
    ("latency {model} --workload prefil", "did you mean prefill?"),
    ("throughput --repeat 0", "--repeat/--repeats: takes a whole number from 1, not '0'"),
    ("throughput --json nowhere/at/all.json", "is in a folder that does not exist; make it first"),
    ("attention --decode 64", "--decode: takes SEQUENCESxTOKENS such as 64x4096"),
    ("attention --pool much", "--pool: takes a size in bytes such as 8GiB, not 'much'"),
    ("attention --heads 5 --kv-heads 2", "give a multiple"),
    ("attention --device cpu --decode 99x9999", "raise --pool, or lower --layers or the case"),
    ("attention --max-num-seqs 4", "no flag --max-num-seqs"),
    ("attention --block-size 12", "--block-size must be a power of two"),
    ("index --tokens 8", "--tokens 8 fill no block"),
]


@pytest.mark.parametrize(("line", "sentence"), REFUSALS)
def test_a_mistake_is_one_sentence(bench: Bench, model: str, line: str, sentence: str) -> None:
    assert sentence in bench.refusal(line.format(model=model))


@pytest.mark.parametrize("name", ["throughput", "latency", "attention", "index"])
def test_help_has_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", name, "--help"])
    lines = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    examples = [line for line in lines if line.startswith("  quire bench ")]
    assert len(examples) >= 2
    for line in examples:
        assert cli.make_parser().parse_args(shlex.split(line)[1:]).benchmark == name
