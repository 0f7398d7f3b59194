"""The Blackwell scorer's device code, executed: its source, with the DSL's names bound to a model of the device.

Decorators are dropped, run-time loops become Python loops, and the functions then run as they stand, one thread a warp.
What a lane computes is computed for as many lanes as asked for, one after another; elections fall on lane 0.
"""

from __future__ import annotations

import ast
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sm100_numbers import Numerics, halves
from sm100_unit import DEADLINE, Barrier, Unit

import keysieve
from keysieve.kernels import score_cut, sm100_score_config, sm100_score_words
from keysieve.spec import GROUP, HEAD_DIM, PAGE, TILE, key16

KERNELS = Path(keysieve.__file__).parent / "kernels"
SHARED_FUNCTIONS = ("advance", "release", "row_places", "key_scale", "logit_word", "next_tile")


class Ptx:
    """keysieve.device.ptx over the unit's shared memory and a global memory of bytes by address."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def load_shared(self, at: int) -> int:
        assert at % 4 == 0
        return int(self.unit.smem[at : at + 4].view(np.uint32)[0])

    def load_shared_v4(self, at: int) -> tuple[int, ...]:
        assert at % 16 == 0
        return tuple(int(w) for w in self.unit.smem[at : at + 16].view(np.uint32))

    def store_shared(self, at: int, value: int) -> None:
        self.unit.smem[at : at + 4] = np.frombuffer(struct.pack("<I", value & 0xFFFFFFFF), np.uint8)

    def store_shared_v4(self, at: int, *words: int) -> None:
        assert at % 16 == 0
        for i, word in enumerate(words):
            self.store_shared(at + 4 * i, word)

    def load(self, at: int, dtype: Any) -> Any:
        assert at % 4 == 0
        raw = bytes(self.unit.memory[at + i] for i in range(4))
        if dtype == "float":
            return np.frombuffer(raw, np.float32)[0]
        return int.from_bytes(raw, "little", signed=dtype is signed)

    def load_u16(self, at: int) -> int:
        return self.unit.memory[at] | self.unit.memory[at + 1] << 8

    def store_u16(self, at: int, value: int) -> None:
        assert at not in self.unit.memory, "a logit is stored once"
        self.unit.memory.update({at: value & 0xFF, at + 1: value >> 8 & 0xFF})

    @staticmethod
    def max_u16x2(a: int, b: int) -> int:
        low, high = (max(x, y) for x, y in zip(halves(a), halves(b), strict=True))
        return low | high << 16

    def red_global(self, at: int, value: int, _what: str) -> None:
        self.unit.memory[at] = self.unit.memory.get(at, 0) | value

    def bulk_load(self, target: int, source: int, count: int, barriers: Any, _policy: Any) -> None:
        assert target % 16 == source % 16 == count % 16 == 0

        def copy() -> None:
            self.unit.smem[target : target + count] = self.unit.global_bytes(source, count)
            barriers.here.landed(count)

        self.unit.submit_copy(copy)

    smem_addr = staticmethod(lambda barriers: barriers)
    fence_async_shared = staticmethod(lambda: None)
    l2_policy = staticmethod(lambda _name: 0)


def signed(value: Any) -> int:
    """Int32: the number, or the signed number with the same 32 bits."""
    return (int(value) + (1 << 31) & (1 << 32) - 1) - (1 << 31)


def key16x2(word: int) -> int:
    """The contract's image of both halves."""
    low, high = (key16(half) for half in halves(word))
    return low | high << 16


class Warp:
    """32 lanes that are threads: they meet, and exchange a word."""

    def __init__(self, timeout: float) -> None:
        self._barrier = threading.Barrier(32, timeout=timeout)
        self._words: list[Any] = [None] * 32

    def meet(self) -> None:
        self._barrier.wait()

    def abort(self) -> None:
        """Something failed: nobody needs to come any more."""
        self._barrier.abort()

    def gather(self, lane: int, value: Any) -> list[Any]:
        """What every lane brought."""
        self._words[lane] = value
        self.meet()
        words = list(self._words)
        self.meet()
        return words


class Lanes(threading.local):
    """Who the calling thread is: warp, lane, and how it meets the other lanes of its warp (where they are threads)."""

    lane = 0
    warp = 0

    def __init__(self) -> None:
        self.meet: Any = lambda: None
        self.gather: Any = None

    def join(self, warp: int, lane: int, together: Warp | None = None) -> None:
        """Be this lane; together: its warp, where the lanes are threads."""
        self.warp, self.lane = warp, lane
        if together is not None:
            self.meet = together.meet
            self.gather = lambda value: together.gather(lane, value)


class Tcgen05:
    """keysieve.device.tcgen05 over the unit's queue; one thread must issue everything."""

    def __init__(self, unit: Unit, here: Lanes) -> None:
        self.unit, self.here = unit, here
        self.issuer: int | None = None

    def _submit(self, operation: Any) -> None:
        me = threading.get_ident()
        self.issuer = me if self.issuer is None else self.issuer
        assert self.issuer == me, "products and commits must come from one thread"
        self.unit.submit(operation)

    def product_f8(self, *args: Any) -> None:
        self._submit(lambda: self.unit.product_f8(*args))

    def product_mxf4(self, *args: Any) -> None:
        self._submit(lambda: self.unit.product_mxf4(*args))

    def copy_scales(self, *args: Any) -> None:
        self._submit(lambda: self.unit.copy_scales(*args))

    def commit(self, barriers: Any) -> None:
        self._submit(barriers.here.arrive)

    def load(self, address: int, columns: int) -> list[Any]:
        return self.unit.load(self.here.warp, self.here.lane, address, columns)

    fence_before = staticmethod(lambda: None)
    fence_after = staticmethod(lambda: None)


def bindings(unit: Unit, here: Lanes) -> dict[str, Any]:
    """The names that the device code takes from the DSL and from keysieve.device."""

    class Constexpr:
        def __class_getitem__(cls, item: Any) -> Any:
            return item

    def wrap(bits: int) -> Any:
        return lambda value: int(value) & (1 << bits) - 1

    def span(*bounds: int, **_options: Any) -> range:
        return range(*bounds)

    def wait(barriers: Any, parity: int) -> None:
        barriers.here.wait(parity)
        here.meet()

    def up(value: Any, distance: int, mask_and_clamp: int) -> Any:
        assert mask_and_clamp == 0
        return here.gather(value)[here.lane - distance if here.lane >= distance else here.lane]

    def ballot(flag: Any) -> int:
        return sum(bool(word) << lane for lane, word in enumerate(here.gather(flag)))

    def redux(value: Any, what: str) -> int:
        assert what == "add"
        return sum(here.gather(value))

    def barrier_arrive(barrier_id: int, number_of_threads: int) -> None:
        assert number_of_threads == 32 * meeting(barrier_id).warps
        here.meet()
        if here.lane == 0:
            meeting(barrier_id).arrive()

    def barrier(barrier_id: int, number_of_threads: int) -> None:
        barrier_arrive(barrier_id, number_of_threads)
        meeting(barrier_id).wait()

    def meeting(number: int) -> Any:
        return unit.plan if number == 1 else unit.meetings[number]

    def copy(_atom: Any, source: np.ndarray, target: int, tma_bar_ptr: Any, **_hints: Any) -> None:
        def bring() -> None:
            unit.copy_box(target, source)
            tma_bar_ptr.here.landed(source.size)

        if here.lane == 0:  # a tensor copy elects a lane itself
            unit.submit_copy(bring)

    arch = SimpleNamespace(
        lane_idx=lambda: here.lane,
        make_warp_uniform=lambda value: value,
        elected=lambda: here.lane == 0,
        sync_warp=lambda: here.meet(),
        mbarrier_init=lambda _barriers, _arrivals: None,  # the block's are made with it
        mbarrier_init_fence=lambda: None,
        mbarrier_arrive=lambda barriers: barriers.here.arrive(),
        mbarrier_arrive_and_expect_tx=lambda barriers, count: barriers.here.arrive(count),
        shuffle_sync_bfly=lambda value, distance: here.gather(value)[here.lane ^ distance],
        shuffle_sync=lambda value, lane: here.gather(value)[lane],
        shuffle_sync_up=up,
        vote_ballot_sync=ballot,
        warp_redux_sync=redux,
        barrier=barrier,
        barrier_arrive=barrier_arrive,
        popc=int.bit_count,
        clz=lambda value: 32 - int(value).bit_length(),
    )
    names = {n: v for module in (score_cut, sm100_score_config) for n, v in vars(module).items() if n[:2] != "__"}
    return {
        **names,
        "GROUP": GROUP,
        "HEAD_DIM": HEAD_DIM,
        "PAGE": PAGE,
        "TILE": TILE,
        "Any": Any,
        "cutlass": SimpleNamespace(
            range=span,
            range_constexpr=range,
            const_expr=lambda value: value,
            select_=lambda condition, yes, no: yes if condition else no,
            Constexpr=Constexpr,
        ),
        "cute": SimpleNamespace(arch=arch, copy=copy),
        "Int32": signed,
        "Int64": int,
        "Uint32": wrap(32),
        "Float32": "float",
        "numerics": Numerics,
        "ptx": Ptx(unit),
        "sync": SimpleNamespace(wait_barrier=wait),
        "tcgen05": Tcgen05(unit, here),
        "words": sm100_score_words,
        "scale_offset": sm100_score_words.scale_offset,
        "keys": SimpleNamespace(key16x2=key16x2),
    }


def functions(file: str, only: tuple[str, ...] | None = None, edits: tuple[tuple[str, str], ...] = ()) -> ast.Module:
    """The file's functions, constants and plain classes, or those functions `only`, without imports and decorators.
    edits: replacements in the source."""
    source = (KERNELS / file).read_text()
    for old, new in edits:
        if old in source:
            source = source.replace(old, new)
    tree = ast.parse(source)
    body = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if only is None or node.name in only:
                body.append(node)
        elif isinstance(node, ast.ClassDef):
            if only is None and not node.decorator_list:
                body.append(node)
        elif only is None and isinstance(node, ast.Assign | ast.Assert):
            body.append(node)
    return ast.Module(body, [])


def device_code(unit: Unit, here: Lanes, edits: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """The scorer's device functions by name, bound to `unit`. Float32(x) must stay a call: it becomes a float."""
    names = bindings(unit, here)
    shared = [
        (path.name, SHARED_FUNCTIONS)
        for path in sorted((*KERNELS.glob("sm90_score_*.py"), *KERNELS.glob("score_*.py")))
    ]
    shared.append(("schedule.py", ("tiles_before",)))
    for file, only in (*shared, ("sm100_score_feed.py", None), ("sm100_score_math.py", None)):
        execute(functions(file, only, edits), file, names)
    names["schedule"] = SimpleNamespace(tiles_before=names["tiles_before"])
    assert set(SHARED_FUNCTIONS) <= set(names), "a function shared with Hopper has moved"
    return names


PRODUCERS = (
    ("../device/paged.py", None),
    ("../device/scan.py", ("warp_inclusive", "warp_sum")),
    ("sharding.py", None),
    ("flags.py", None),
    ("schedule.py", None),
    ("schedule_homes.py", None),
    ("sm90_score_load.py", None),
    ("sm90_score_early.py", None),
    ("sm90_score_send.py", None),
    ("sm90_score_feed.py", None),
)
METHODS = ("copy_page", "scale_words", "put_weights")


class ByNumber:
    """What a tensor copy is told: box number `n` of a tensor is `tensor[(None, n)]`."""

    def __init__(self, box: Callable[..., Any]) -> None:
        self.box = box

    def __getitem__(self, numbers: tuple[Any, ...]) -> Any:
        assert numbers[0] is None
        return self.box(*numbers[1:])


def producer_code(unit: Unit, here: Lanes, edits: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """The functions of the two producer warps, which Hopper's scorer runs as well, by name."""
    names = bindings(unit, here)
    for file, only in PRODUCERS:
        execute(functions(file, only, edits), file, names)
    names["scan"] = names["schedule"] = names["homes"] = SimpleNamespace(**names)  # what the modules call one another
    names["score_trace"] = SimpleNamespace(mark=print_nothing, mark_first=print_nothing, COPYING=0, PLANNED=0)
    return names


def print_nothing(*_args: Any) -> None:
    """Marks are for builds that are traced."""


def methods(unit: Unit, here: Lanes, feed: dict[str, Any], edits: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """What the Blackwell kernel does for the producers. feed: functions of `sm100_score_feed`."""
    names = bindings(unit, here)
    execute(functions("../device/paged.py", ("page_base",)), "paged.py", names)
    execute(methods_of("sm100_score.py", "ScoreKernel", METHODS, edits), "sm100_score.py", names)
    names["sm100_score_feed"] = SimpleNamespace(**feed)
    return {name: names[name] for name in METHODS}


def methods_of(file: str, kernel: str, wanted: tuple[str, ...], edits: tuple[tuple[str, str], ...] = ()) -> ast.Module:
    """The methods `wanted` of a kernel's class, as functions."""
    source = (KERNELS / file).read_text()
    for old, new in edits:
        source = source.replace(old, new)
    (found,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == kernel]
    return ast.Module([n for n in found.body if isinstance(n, ast.FunctionDef) and n.name in wanted], [])


def run_together(jobs: list[Callable[[], None]], warps: list[Warp]) -> list[BaseException]:
    """A thread a job. Where one fails, the others are not waited for: barriers and `warps` let go. Returns failures."""
    failures: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as failure:
            failures.append(failure)
            Barrier.give_up()
            for warp in warps:
                warp.abort()

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * DEADLINE)
    return failures


def execute(module: ast.Module, file: str, names: dict[str, Any]) -> None:
    """Define the module's functions in `names`."""
    tree = ast.fix_missing_locations(_Plain().visit(module))
    exec(compile(tree, file, "exec"), names)


class _Plain(ast.NodeTransformer):
    """`Float32(x)` is a number, `Float32` as an argument a type; both names are bound to one string, so calls go. The
    body of an election is one lane's."""

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        assert len(node.items) == 1
        assert ast.unparse(node.items[0].context_expr) == "cute.arch.elect_one()"
        return ast.If(ast.parse("cute.arch.elected()", mode="eval").body, node.body, [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "Float32":
            return ast.Call(ast.Name("float", ast.Load()), node.args, [])
        return node
