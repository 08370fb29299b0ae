"""Gluon kernels on a CPU: what they compute, and whether their warps wait for each other rightly.

Triton cannot interpret Gluon. Here a kernel's own source runs with a stand-in for the language:
tensors are torch's, shared memory is a tensor of NaN, or of whole numbers by chance, and each
partition of `warp_specialize` is a thread. One thread runs at a time, and at each operation on
shared memory chance decides which is next, so that many orders are met. What is asynchronous
happens late: a copy when the copying engine, a thread too, gets to it; a product when it is waited
for. These are errors:

- a product whose operand is not there yet, changes while it may still be read, or was written
  without a fence for the tensor cores;
- the result of a product that was not waited for;
- more arrivals at a barrier than it counts;
- threads that all wait (a deadlock).

The warps of a partition are one thread: that they wait for each other, as the compiler has them do
before one of them arrives at a barrier for all, is not seen here, nor is anything about layouts.
"""

from __future__ import annotations

import builtins
import math
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ptx_model import follow
from torch import Tensor

import quire
from quire.kernels.dequantise import E2M1, unpack_nibbles
from quire.kernels.four_bits import from_quarters

IN_SCALES = 110  # as `unpack.py` has it


class Layout:
    """Of no meaning here; whichever it is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.value = self

    @classmethod
    def get_default_for(cls, *_: Any) -> Layout:
        return cls()


class Pointer:
    """To numbers of a tensor's storage."""

    def __init__(self, storage: Tensor, offset: Tensor) -> None:
        self.storage, self.offset = storage, offset
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        size = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.as_strided((size,), (1,), 0), torch.tensor(x.storage_offset()))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.storage, self.offset + more)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.storage, self.offset[key])

    def to(self, _: torch.dtype) -> Tensor:
        return self.offset


class Typed(Tensor):
    """A tensor whose type tells its layout."""

    type = SimpleNamespace(layout=Layout())


class Descriptor:
    """Of tiles of a matrix that the hardware copies; what lies beyond its ends is 0."""

    def __init__(self, matrix: Tensor, height: int, width: int) -> None:
        self.matrix, self.shape, self.layout = matrix, (height, width), Layout()
        bytes_of_tile = height * width * matrix.element_size()
        self.block_type = SimpleNamespace(nbytes=bytes_of_tile, shape=self.shape)

    def tile(self, row: int, column: int) -> Tensor:
        found = self.matrix.new_zeros(self.shape)
        part = self.matrix[row : row + self.shape[0], column : column + self.shape[1]]
        found[: part.shape[0], : part.shape[1]] = part
        return found


class Shared:
    """A piece of shared memory."""

    def __init__(self, machine: Machine, numbers: Tensor) -> None:
        self.machine, self.numbers = machine, numbers
        self.shape, self.dtype = list(numbers.shape), numbers.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.machine, self.numbers[int(i)])

    def slice(self, first: int, size: int, axis: int) -> Shared:
        return Shared(self.machine, self.numbers.narrow(axis, first, size))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.machine, self.numbers.permute(order))

    def store(self, value: Tensor) -> None:
        self.machine.switch()
        self.numbers.copy_(value)
        self.machine.unfenced[self.key] = threading.current_thread().name

    def load(self, _: Layout) -> Tensor:
        self.machine.switch()
        return self.numbers.clone()

    def forget(self) -> None:
        """What was there is gone, and what will be there is not there yet."""
        _forget(self.numbers)

    @property
    def key(self) -> int:
        return self.numbers.data_ptr()


def _forget(numbers: Tensor) -> None:
    if numbers.dtype.is_floating_point:
        numbers.fill_(torch.nan)
    else:
        numbers.random_()


class Product:
    """Of tensor cores: what it becomes, and what its operands in shared memory were."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.read = [(x, x.numbers.clone()) for x in (a, b) if isinstance(x, Shared)]
        for x, numbers in self.read:
            assert not numbers.isnan().any(), "a product's operand is not there yet"
            assert x.key not in x.machine.unfenced, "no fence before a product"
        left = a.numbers if isinstance(a, Shared) else a
        self.value = left.float() @ b.numbers.float()
        if use_acc:
            self.value = self.value + (acc.value if isinstance(acc, Product) else acc)
        self.is_done = False

    def finish(self) -> None:
        for x, numbers in self.read:
            assert torch.equal(x.numbers, numbers), "a product's operand changed under it"
        self.is_done = True


class Machine:
    """One program: its shared memory, barriers and threads."""

    def __init__(self, program: tuple[int, ...], programs: int, seed: int) -> None:
        self.program, self.programs = program, programs
        self.chance = random.Random(seed)
        self.unfenced: dict[int, str] = {}
        # Of each its count, those and the bytes that are still expected, and phases that are over.
        self._barriers: dict[int, list[int]] = {}
        self._products = threading.local()
        self._copies: list[Callable[[], None]] = []  # which are done in their order
        self._tiles: list[Callable[[], None]] = []  # which are done in any
        self._threads: dict[str, int] = {}  # of the hardware, that a thread here stands for
        self._turns: dict[str, threading.Semaphore] = {}  # of the threads that still run
        self._until: dict[str, Callable[[], bool]] = {}
        self._paces: dict[str, int] = {}
        self._error: BaseException | None = None

    # Threads.

    def specialize(
        self, parts: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], *_: Any
    ) -> None:
        jobs = {f"part {i}": partial(job, *args) for i, (job, args) in enumerate(parts)}
        self._threads = {f"part {i}": 32 * each for i, each in enumerate(warps, 1)}
        jobs["copies"] = self._copy_all
        self._turns = {name: threading.Semaphore(0) for name in jobs}
        threads = [
            threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
            for name, job in jobs.items()
        ]
        for thread in threads:
            thread.start()
        self._turns["part 0"].release()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, job: Callable[[], None]) -> None:
        name = threading.current_thread().name
        self._turns[name].acquire()
        try:
            if self._error is None:
                job()
        except BaseException as error:
            self._error = self._error or error
        del self._turns[name]
        if self._turns:
            self._turns[self._next()].release()

    def switch(self, until: Callable[[], bool] = lambda: True) -> None:
        """Let another thread run, or the same one again if what it waits for is so."""
        name = threading.current_thread().name
        if name not in self._turns:
            return  # nothing runs beside it
        self._until[name] = until
        chosen = self._next()
        if chosen != name:
            mine = self._turns[name]
            self._turns[chosen].release()
            mine.acquire()
            if self._error is not None:
                raise SystemExit

    def _next(self) -> str:
        """By chance, with some threads slow for some time."""
        if self._error is not None:
            return next(iter(self._turns))
        able = [name for name in self._turns if name not in self._until or self._until[name]()]
        if not able:
            self._error = TimeoutError("all threads wait: a deadlock")
            return next(iter(self._turns))
        if not self._paces or self.chance.random() < 0.02:
            self._paces = {name: self.chance.choice((1, 1, 100)) for name in self._turns}
        return self.chance.choices(able, [self._paces.get(name, 1) for name in able])[0]

    # Copies.

    def copy(self, to: Shared, pointer: Pointer, mask: Tensor | None = None) -> None:
        self.switch()
        to.forget()

        def arrive() -> None:
            to.numbers.copy_(_load_numbers(pointer, mask))
            self.unfenced[to.key] = "copies"

        self._copies.append(arrive)

    def arrive_after_copies(self, barrier: Shared, increment_count: bool) -> None:
        """Each thread's own."""
        assert not increment_count
        threads = self._threads[threading.current_thread().name]
        self._copies.append(lambda: self.arrive(barrier, threads))

    def copy_tile(self, tiles: Descriptor, place: list[Any], barrier: Shared, to: Shared) -> None:
        self.switch()
        to.forget()

        def arrive() -> None:
            to.numbers.copy_(tiles.tile(*(int(each) for each in place)))
            self._count(barrier, 0, -tiles.block_type.nbytes)

        self._tiles.append(arrive)

    def _copy_all(self) -> None:
        while self._copies or self._tiles or len(self._turns) > 1:
            if self._tiles and self.chance.random() < 0.7:
                self._tiles.pop(self.chance.randrange(len(self._tiles)))()
            elif self._copies:
                self._copies.pop(0)()
            self.switch(lambda: bool(self._copies or self._tiles) or len(self._turns) == 1)

    # Barriers.

    def init(self, barrier: Shared, count: int) -> None:
        self._barriers[barrier.key] = [count, count, 0, 0]

    def arrive(self, barrier: Shared, count: int = 1) -> None:
        self.switch()
        self._count(barrier, count, 0)

    def expect(self, barrier: Shared, size: int) -> None:
        """An arrival that tells of bytes to come."""
        self.switch()
        self._count(barrier, 1, size)

    def _count(self, barrier: Shared, arrivals: int, size: int) -> None:
        state = self._barriers[barrier.key]
        state[1] -= arrivals
        state[2] += size
        assert state[1] >= 0, "more arrivals at a barrier than it counts"
        if state[1] == state[2] == 0:
            state[1:] = [state[0], 0, state[3] + 1]

    def wait(self, barrier: Shared, parity: Any) -> None:
        state = self._barriers[barrier.key]
        self.switch(lambda: state[3] % 2 != int(parity))

    def fence(self) -> None:
        mine = (threading.current_thread().name, "copies")
        self.unfenced = {key: by for key, by in self.unfenced.items() if by not in mine}

    # Tensor cores.

    def multiply(
        self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        self.switch()
        product = Product(a, b, acc, use_acc)
        self._outstanding.append(product)
        return product

    def wait_for_products(self, count: int, deps: list[Any]) -> Any:
        self.switch()
        while len(self._outstanding) > count:
            self._outstanding.pop(0).finish()
        results = []
        for x in deps:
            assert not isinstance(x, Product) or x.is_done, "a result that was not waited for"
            results.append(x.value if isinstance(x, Product) else x)
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def _outstanding(self) -> list[Product]:
        if not hasattr(self._products, "list"):
            self._products.list = []
        return self._products.list

    # The language.

    def language(self) -> SimpleNamespace:
        def lifted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *args: function(*(torch.as_tensor(x) for x in args))

        def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
            mask = mask.expand(pointer.offset.shape)
            pointer.storage[pointer.offset[mask]] = value.to(pointer.storage.dtype)[mask]

        def allocate(
            dtype: torch.dtype, shape: list[int], _: Layout, value: Tensor | None = None
        ) -> Shared:
            if value is None:
                value = torch.empty(shape, dtype=dtype)
                _forget(value)
            return Shared(self, value.to(dtype).clone())

        return SimpleNamespace(
            constexpr=lambda x: x,
            int16=torch.int16,
            int32=torch.int32,
            int64=torch.int64,
            float16=torch.float16,
            float32=torch.float32,
            bfloat16=torch.bfloat16,
            NVMMASharedLayout=Layout,
            SwizzledSharedLayout=Layout,
            BlockedLayout=Layout,
            SliceLayout=Layout,
            NVMMADistributedLayout=Layout,
            DotOperandLayout=Layout,
            DistributedLinearLayout=Layout,
            program_id=lambda axis: torch.tensor(self.program[axis]),
            num_programs=lambda axis: self.programs,
            load=_load_numbers,
            store=store,
            arange=lambda first, end, layout: torch.arange(first, end),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Typed),
            allocate_shared_memory=allocate,
            convert_layout=lambda x, _, assert_trivial=False: x,
            reshape=lambda x, shape: x.reshape(shape).as_subclass(Typed),
            permute=lambda x, order: x.permute(order),
            join=lambda x, y: torch.stack([x, y], -1),
            split=lambda x: x.unbind(-1),
            static_range=range,
            cdiv=lambda a, b: (a + b - 1) // b,
            minimum=lifted(torch.minimum),
            maximum=lifted(torch.maximum),
            where=torch.where,
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            exp=torch.exp,
            exp2=torch.exp2,
            log2=torch.log2,
            barrier=lambda: None,
            thread_barrier=lambda: None,
            inline_asm_elementwise=_inline_asm,
            warp_specialize=self.specialize,
        )

    def hopper(self) -> SimpleNamespace:
        return SimpleNamespace(
            mbarrier=SimpleNamespace(
                MBarrierLayout=Layout,
                init=self.init,
                arrive=self.arrive,
                expect=self.expect,
                wait=self.wait,
            ),
            tma=SimpleNamespace(async_load=self.copy_tile),
            async_copy=SimpleNamespace(
                async_load=self.copy, mbarrier_arrive=self.arrive_after_copies
            ),
            fence_async_shared=self.fence,
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.wait_for_products,
        )


def _load_numbers(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    if mask is None:
        return pointer.storage[pointer.offset]
    mask = mask.expand(pointer.offset.shape)
    found = pointer.storage[pointer.offset.where(mask, 0)]
    return found.where(mask, torch.tensor(other, dtype=found.dtype))


def _inline_asm(asm: str, _: str, arguments: list[Any], dtype: Any, *__: Any, **___: Any) -> Any:
    if asm == "mov.b32 $0, $1;":
        return arguments[0]
    if "cvt.rn.bf16x2" in asm:
        return tuple(x.bfloat16().float() for x in arguments)
    if "bf16x2" in asm:  # by the lower halves of its scales, or by the upper ones
        found = _unpacked(*arguments)
        return found[:2] if "{lo, lo}" in asm else found[2:]
    if "mul.f32" in asm:
        return arguments[0] * arguments[1]
    if "e4m3x2" in asm or "lg2" in asm:
        return follow(asm, arguments, dtype)
    return 0  # no result of another one is looked at, but 0


def _unpacked(codes: Tensor, even: Tensor, odd: Tensor) -> list[Tensor]:
    """What `hopper_unpack.py` has instructions for (`test_unpack_instructions.py` is about those):
    the numbers of four quarters, with the scales of the first and the third in `even`."""
    numbers = torch.tensor([*E2M1, *(-size for size in E2M1)])
    found = unpack_nibbles(from_quarters(codes.contiguous(), 4 * codes.shape[1], False)).chunk(4, 1)
    halves = [even & 0xFFFF, odd & 0xFFFF, (even >> 16) & 0xFFFF, (odd >> 16) & 0xFFFF]
    return [
        # A scale has more than its exponent, and results are divided by that and `DIVISOR`.
        (numbers[each.long()] * torch.exp2((half >> 7).float() - 127 - IN_SCALES - 16)).bfloat16()
        for each, half in zip(found, halves, strict=True)
    ]


def run_program(
    module: str,
    kernel: str,
    program: tuple[int, ...],
    seed: int,
    programs: int = 1,
    **arguments: Any,
) -> None:
    """One program of a kernel, by the name of its module; tensors become pointers."""
    machine = Machine(program, programs, seed)
    given = {name: Pointer.of(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    _load(module, machine)[kernel](**given)


def multiplied(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """By one warp, at once."""
    return acc + a.float() @ b.float()


def _load(name: str, machine: Machine) -> dict[str, Any]:
    """A module of Gluon kernels for this machine, and whichever modules beside it it imports."""
    stand_ins = {
        "triton": SimpleNamespace(),
        "triton.experimental": SimpleNamespace(
            gluon=SimpleNamespace(jit=_unchanged, constexpr_function=_unchanged)
        ),
        "triton.experimental.gluon": SimpleNamespace(language=machine.language()),
        "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(mma_v2=multiplied),
        "triton.experimental.gluon.language.nvidia.hopper": machine.hopper(),
        "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=None),
        "triton.language.extra.cuda": SimpleNamespace(gdc_wait=None, gdc_launch_dependents=None),
        "quire.kernels.triton.attention.kv_splits": SimpleNamespace(
            FIELDS=SimpleNamespace(value=8), KVSplits=None
        ),
        "quire.kernels.triton.attention.softmax": SimpleNamespace(
            LOG2_E=math.log2(math.e), scoring_arguments=None
        ),
        "quire.kernels.triton.pdl": SimpleNamespace(pdl_launch=None),
    }

    def import_(name: str, *args: Any) -> Any:
        if name in stand_ins:
            return stand_ins[name]
        if name.startswith("quire.kernels.triton.") and _is_gluon(name):
            return SimpleNamespace(**_load(name, machine))
        return builtins.__import__(name, *args)

    path = _path_of(name)
    space: dict[str, Any] = {
        "__name__": name,
        "__builtins__": {**vars(builtins), "__import__": import_},
    }
    exec(compile(path.read_text(), str(path), "exec"), space)
    return {key: value for key, value in space.items() if not key.startswith("__")}


def _path_of(name: str) -> Path:
    return Path(quire.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")


def _is_gluon(name: str) -> bool:
    path = _path_of(name)
    return path.exists() and "triton.experimental.gluon" in path.read_text()


def _unchanged(function: Any = None, **_: Any) -> Any:
    """In place of a decorator, with arguments or without."""
    return function or _unchanged
