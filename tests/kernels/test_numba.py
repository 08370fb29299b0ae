"""What is peculiar to the compiled CPU kernels: threads, rounding, and doing without them."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from activations import EXACT

from quire.kernels.activation import Activation
from quire.kernels.backend import backend_for
from quire.kernels.plain import HeadScale, PlainOps, Rotation

numba = pytest.importorskip("numba")

from quire.kernels.numba import NumbaBackend, machine_code, object_file  # noqa: E402
from quire.kernels.numba import backend as backend_module  # noqa: E402
from quire.kernels.numba.host import is_x86_linux  # noqa: E402
from quire.kernels.numba.kernel import PARALLEL, Kernel  # noqa: E402
from quire.kernels.numba.kernels import GateArguments  # noqa: E402


@pytest.fixture
def backend():
    return NumbaBackend()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 1000])
def test_long_contexts(backend, step, window):
    lengths = [(1, 8191), (1, 8192), (1, 8193), (1, 1), (1, 4000)]
    made = step(lengths, kv_heads=1, group=4, head_dim=64, block_size=16, window=window)
    out = made.on("cpu").run(backend, window)
    torch.testing.assert_close(out, made.expected(window), rtol=0, atol=1e-5)


class TestThreads:
    def test_their_number_changes_no_bit(self, backend, step, threads):
        made = step([(1, 700), (1, 130), (1, 129), (1, 1)], head_dim=64)
        rows = torch.randn(100, 512)
        results = []
        for count in (1, 2, 5):
            threads(count)
            results.append(
                (made.on("cpu").run(backend), backend.act_and_mul(rows, Activation.SILU))
            )
        for result in results[1:]:
            assert all(map(torch.equal, result, results[0]))

    @pytest.mark.skipif(PARALLEL is None, reason="kernels run on the calling thread here")
    def test_there_are_none_but_torchs(self, backend, step):
        def running():
            return set(os.listdir("/proc/self/task"))

        torch.randn(600, 600) @ torch.randn(600, 600)
        before = running()
        made = step([(1, 3000), (1, 3000)], head_dim=64).on("cpu")
        made.run(backend)
        backend.act_and_mul(torch.randn(300, 1024), Activation.SILU)
        # Threads of earlier tests may end meanwhile: what counts is that none begins.
        assert running() <= before

    def test_several_callers_at_once(self, backend, step):
        steps = [step([(1, 300 + seed), (1, 40)], head_dim=64, seed=seed) for seed in range(8)]
        expected = [made.on("cpu").run(backend) for made in steps]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                found = pool.map(lambda made: made.on("cpu").run(backend), steps)
                assert all(map(torch.equal, found, expected))


class TestNumbers:
    def test_bfloat16_is_rounded_as_torch_does(self, backend):
        torch.manual_seed(0)
        stream = torch.randn(64, 256).bfloat16()
        delta = (torch.randn(64, 256) * 2.0 ** torch.randint(-12, 4, (64, 256))).bfloat16()
        expected = stream + delta
        backend.add_rms_norm(stream, delta, torch.ones(256, dtype=torch.bfloat16), 1e-5)
        assert torch.equal(stream, expected)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("activation", Activation)
    def test_what_is_no_number_stays_so(self, backend, step, activation, dtype):
        gate_up = torch.ones(1, 64, dtype=dtype)
        gate_up[0, 3], gate_up[0, 40] = torch.nan, torch.inf
        gate_up[0, 5] = -torch.nan
        out = backend.act_and_mul(gate_up, activation)[0]
        assert out.isnan().nonzero().flatten().tolist() == [3, 5]
        assert out[8] == torch.inf
        made = step([(1, 9), (1, 20)], head_dim=32, dtype=dtype)
        made.q[1, 2] = torch.nan
        attended = made.on("cpu").run(backend)
        assert attended[1, 2].isnan().all()
        assert not attended[0].isnan().any() and not attended[1, :2].isnan().any()

    def test_the_gate_is_exact_over_its_whole_range(self, backend):
        gate = torch.linspace(-100, 100, 16_384)
        gate_up = torch.stack((gate, torch.ones_like(gate)))[None].flatten(1)
        for activation, exact in EXACT.items():
            out = backend.act_and_mul(gate_up, activation)[0].double()
            rtol = 5e-7 if activation is Activation.SILU else 3e-5  # the cube's, in an exponent
            torch.testing.assert_close(out, exact(gate.double()), rtol=rtol, atol=2e-36)


class TestMixedTypes:
    def test_weights_in_float32_have_kernels_too(self, backend, step, monkeypatch):
        """Gemma's norms beside bfloat16: nothing of them is left to torch."""
        for name in ("add_rms_norm", "rotate_and_write"):
            monkeypatch.delattr(PlainOps, name)
        dtype = torch.bfloat16
        backend.add_rms_norm(torch.randn(3, 64).to(dtype), None, torch.ones(64), 1e-6)
        made = step([(1, 9)], head_dim=32, dtype=dtype)
        qkv = torch.cat((made.q, made.k, made.v), dim=1).flatten(1)
        scale = HeadScale(torch.ones(made.q.shape[1] + made.k.shape[1], 32), 1e-6)
        rotation = Rotation(*torch.rand(2, len(qkv), 1, 32, dtype=dtype))
        backend.begin(made.batch)
        backend.rotate_and_write(qkv, scale, rotation, made.pages, made.batch)


class TestWithoutKernels:
    def test_no_numba(self, monkeypatch, caplog):
        for name in [name for name in sys.modules if name.startswith("quire.kernels.numba")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "numba", None)
        with caplog.at_level(logging.WARNING, "quire"):
            assert backend_for(torch.device("cpu")).name == "cpu"
        assert "costs speed" in caplog.text

    def test_a_compiler_that_fails(self, backend, monkeypatch, caplog, step):
        def fail(dtype):
            raise RuntimeError("no such target")

        monkeypatch.setattr(backend_module.silu_kernel, "compile", fail)
        made = step([(1, 9), (6, 6)])
        with caplog.at_level(logging.WARNING, "quire"):
            out = made.on("cpu").run(backend)
        torch.testing.assert_close(out, made.expected(), rtol=0, atol=1e-5)
        assert "no such target" in caplog.text


class TestCompiledKernels:
    """That they are kept on disk, and loaded without the compiler."""

    def test_a_process_that_finds_them_has_no_compiler(self):
        code = (
            "import sys, torch; from quire.kernels.numba import NumbaBackend;"
            "from quire.kernels.activation import Activation;"
            "backend = NumbaBackend(); backend.compile(torch.float32);"
            "print(backend.act_and_mul(torch.ones(1, 64), Activation.SILU)[0, 0].item());"
            "print({'numba', 'llvmlite.binding'} & sys.modules.keys() or 'neither')"
        )
        assert NumbaBackend().compile(torch.float32)  # so that they are on disk
        found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        value, has_compiler = found.stdout.decode().split()
        assert float(value) == pytest.approx(0.731059, rel=1e-5)
        assert has_compiler == ("neither" if is_x86_linux() else "{'llvmlite.binding'}")

    def test_llvm_and_we_load_the_same(self, monkeypatch):
        check_gate(Kernel("token_ops.silu_and_multiply", GateArguments))
        monkeypatch.setattr(object_file, "_X86_64", 0)  # a machine that is not known
        check_gate(Kernel("token_ops.silu_and_multiply", GateArguments))

    @pytest.mark.skipif(not is_x86_linux(), reason="elsewhere LLVM loads all kernels")
    def test_a_file_that_is_not_known_is_refused(self):
        Kernel("token_ops.silu_and_multiply", GateArguments).compile(torch.float32)
        code = machine_code.read("token_ops.silu_and_multiply-float32")
        assert code is not None
        whole = code.content
        assert object_file.load(whole, code.symbol)
        of_arm = whole[:18] + b"\xb7" + whole[19:]
        for spoilt in (b"", whole[:100], whole[: len(whole) // 2], of_arm):
            with pytest.raises(object_file.UnknownObject):
                object_file.load(spoilt, code.symbol)
        with pytest.raises(object_file.UnknownObject, match="another"):
            object_file.load(whole, "another")

    @pytest.mark.parametrize("damage", [b"", b"not machine code"])
    def test_damaged_files_are_compiled_anew(self, monkeypatch, tmp_path: Path, damage):
        monkeypatch.setattr(machine_code, "folders", lambda: [tmp_path])
        Kernel("token_ops.silu_and_multiply", GateArguments).compile(torch.float32)
        (kept,) = tmp_path.iterdir()
        whole = kept.read_bytes()
        kept.write_bytes(damage)
        check_gate(Kernel("token_ops.silu_and_multiply", GateArguments))
        assert len(kept.read_bytes()) == len(whole)

    def test_what_other_sources_made_is_removed(self, monkeypatch, tmp_path: Path):
        monkeypatch.setattr(machine_code, "folders", lambda: [tmp_path])
        code = machine_code.MachineCode("kernel", b"code")
        machine_code.keep("one", code)
        monkeypatch.setattr(machine_code, "_made_from", lambda: "other")
        assert machine_code.read("one") is None
        machine_code.keep("other", code)
        machine_code.keep("one", code)
        assert machine_code.read("one") == machine_code.read("other") == code
        assert len(list(tmp_path.iterdir())) == 2

    def test_another_compiler_makes_others(self, monkeypatch, tmp_path: Path):
        monkeypatch.setattr(machine_code, "folders", lambda: [tmp_path])
        made_for = machine_code._made_for.__wrapped__
        monkeypatch.setattr(machine_code, "_made_for", made_for)
        machine_code.keep("one", machine_code.MachineCode("kernel", b"code"))
        assert machine_code.read("one") is not None
        monkeypatch.setattr("importlib.metadata.Distribution.version", "another")
        assert machine_code.read("one") is None

    def test_a_full_disk_is_left_as_it_was(self, monkeypatch, tmp_path: Path):
        def write_a_part(path: Path, content: bytes) -> None:
            with path.open("wb") as file:
                file.write(content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(machine_code, "folders", lambda: [tmp_path])
        monkeypatch.setattr(Path, "write_bytes", write_a_part)
        machine_code.keep("one", machine_code.MachineCode("kernel", b"code"))
        assert not list(tmp_path.iterdir())

    def test_a_user_without_a_home_has_them_beside_the_sources(self, monkeypatch):
        for name in ("HOME", "QUIRE_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda user: {}[user])
        (folder,) = machine_code.folders()
        assert folder.name == "__pycache__"

    def test_without_a_place_they_are_compiled_each_time(self, monkeypatch, tmp_path: Path):
        """A file system that may only be read: neither beside the sources nor at home."""
        taken = tmp_path / "a file"
        taken.touch()
        monkeypatch.setattr(machine_code, "folders", lambda: [taken, taken / "below"])
        check_gate(Kernel("token_ops.silu_and_multiply", GateArguments))


def check_gate(kernel: Kernel) -> None:
    """Compile it, and compare what it computes."""
    gate_up, out = torch.linspace(-3, 3, 64)[None], torch.empty(1, 32)
    kernel(torch.float32, 1, 0, 1, 32, gate_up.data_ptr(), out.data_ptr())
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
