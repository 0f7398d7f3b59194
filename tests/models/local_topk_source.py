"""The local top-N's code for a row that two blocks share, executed: its source, a generator a lane.

Decorators are dropped, and a call in which lanes may have to meet becomes a `yield from`; inline PTX runs from its text
(`ptx_text`), over memories that `local_topk_unit` models. Who runs next, and when a copy or a word sent to the other
block lands, is drawn from a seed.
"""

from __future__ import annotations

import ast
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import ptx_text
from local_topk_unit import BASE, FRESH, ROW_AT, Block, Int32, Int64, Lane, Uint32, Unit
from sm100_source import KERNELS, functions

from keysieve.kernels.local_topk_config import LocalMap, LocalTopkConfig

KEPT, GUESS, LISTED, STEPS = "local_topk_kept", "local_topk_guess", "local_topk_listed_keys", "local_topk_steps"
SPLIT, WHOLE, WINDOW = "local_topk_split", "local_topk_whole", "local_topk_window"
FILES = {
    **{name: f"{name}.py" for name in (KEPT, GUESS, LISTED, STEPS, SPLIT, WHOLE, WINDOW)},
    **{name: f"../device/{name}.py" for name in ("packed", "scan", "exchange_cluster", "keys", "ptx", "ptx_memory")},
}
NUMBERS = {"Int32": Int32, "Int64": Int64, "Uint32": Uint32}
Edits = tuple[tuple[str, str], ...]


class Cluster:
    """Two blocks and a row. seed: of who runs next, what lands when, and of what lies where nobody has written."""

    def __init__(self, config: LocalTopkConfig, row: bytes, seed: int, edits: Edits = ()) -> None:
        self.draw = random.Random(seed)
        self.blocks = [Block(config, rank, self.draw) for rank in range(config.cluster)]
        self.unit = Unit(self.blocks, row)
        self.config = config
        self.code = load_code(self.unit, edits)
        self.eager = self.draw.choice((0.0, 0.1, 0.5))  # how readily something lands while there are lanes to run
        self.ahead = self.draw.choice((None, 0, 1))  # the block that runs first

    def watch(self, module: str, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of a function, as they come."""
        original, calls = getattr(self.code[module], name), []

        def noted(*args: Any) -> Any:
            calls.append(args)
            return original(*args)

        setattr(self.code[module], name, noted)
        return calls

    def run(self, length: int, n: int) -> list[tuple[int, int]]:
        """Every block's (place of its first word, their number)."""
        warps = [warp for block in self.blocks for warp in block.warps]
        for lane in (lane for block in self.blocks for lane in block.lanes):
            lane.job = self._lane(lane, length, n)
        ready = list(warps)
        while ready or self.unit.landings:
            if self.unit.landings and (not ready or self.draw.random() < self.eager):
                block, land = self.unit.landings.pop(self.draw.randrange(len(self.unit.landings)))
                if land():
                    ready += [warp for warp in block.warps if warp not in ready]
                continue
            first = [warp for warp in ready if warp[0].block.rank == self.ahead] or ready
            warp = self.draw.choice(first)
            ready.remove(warp)
            ready += [other for other in self._advance(warp) if other not in ready]
        lanes = [lane for block in self.blocks for lane in block.lanes]
        stuck = {(lane.block.rank, lane.thread >> 5, str(lane.wants)) for lane in lanes if lane.result is None}
        assert not stuck, f"lanes wait for ever: {sorted(stuck)[:8]}"
        results = [{lane.result for lane in block.lanes} for block in self.blocks]
        assert all(len(one) == 1 for one in results), f"threads of a block disagree: {results}"
        return [next(iter(one)) for one in results]

    def words(self, rank: int, begin: int, count: int) -> list[int]:
        """A block's words, which are all that it has written."""
        block, first = self.blocks[rank], LocalMap.of(self.config).words
        written = [i for i in range(self.config.n_class) if block.writers[first + 4 * i] is not FRESH]
        assert written == list(range(begin, begin + count)), "words beside the block's own are written, or not all"
        return list(struct.unpack_from(f"<{count}I", block.bytes, first + 4 * begin))

    def _lane(self, lane: Lane, length: int, n: int) -> Iterator[Any]:
        code, config = self.code, self.config
        base, thread, rank = Uint32(BASE), Int32(lane.thread), Int32(lane.block.rank)
        code["local_topk_split"].open_cluster(base, thread, config)
        yield ("cluster", None)
        row = code["local_topk_steps"].Row(config, base, thread, Int64(ROW_AT), Int32(length))
        part = code["local_topk_split"].part_of(row, base, Int32(n), rank)
        begin, count = yield from code["local_topk_guess"].share(part, Int32(n), rank)
        lane.result = int(begin), int(count)

    def _advance(self, warp: list[Lane]) -> list[list[Lane]]:
        """Run a warp's lanes as far as they come; returns warps that can go on."""
        for lane in self.draw.sample(warp, len(warp)):
            while lane.job is not None and self._may_go_on(lane):
                self.unit.here = lane
                try:
                    lane.wants = lane.job.send(lane.answer)
                except StopIteration:
                    lane.job, lane.wants = None, ("done",)
                    self._check_end(lane.block)
                lane.answer = None
        kinds = {lane.wants[0] for lane in warp}
        if len(kinds) > 1 and kinds & set(MEETS):
            assert kinds <= {*MEETS, "phase"}, f"lanes of a warp part: {kinds}"
            assert len(kinds & set(MEETS)) == 1, f"lanes of a warp meet for different things: {kinds}"
        if len(kinds) == 1 and kinds <= set(MEETS):
            MEETS[warp[0].wants[0]](warp)
            return [warp]
        return self._meet(warp[0].block)

    def _may_go_on(self, lane: Lane) -> bool:
        if lane.wants is None:
            return True
        kind, *what = lane.wants
        if kind != "phase":
            return False
        done = lane.block.phases[what[0]] == [0, 0]
        assert what[1] == 0, "barriers have one phase"
        if done:
            lane.answer, lane.seen = True, lane.seen | {what[0]}
        return done

    def _meet(self, block: Block) -> list[list[Lane]]:
        """Let those go on whose block, or cluster, is complete."""
        for kind, blocks in (("block", [block]), ("cluster", self.blocks)):
            lanes = [lane for one in blocks for lane in one.lanes]
            if all(lane.wants is not None and lane.wants[0] == kind for lane in lanes):
                for one in blocks:
                    one.meets += 1
                _let_go(lanes)
                return [warp for one in blocks for warp in one.warps]
        return []

    def _check_end(self, block: Block) -> None:
        if all(lane.job is None for lane in block.lanes):
            assert block.on_their_way == 0, "a block is done, and something is on its way to it"


def _let_go(lanes: list[Lane], answers: Any = None) -> None:
    """They have met, at a barrier where there are no answers: what one knows to have landed, all do."""
    if answers is None:
        seen = frozenset().union(*(lane.seen for lane in lanes))
        for lane in lanes:
            lane.seen, lane.meets = seen, lane.meets + 1
            lane.touch()
    for number, lane in enumerate(lanes):
        lane.wants, lane.answer = None, None if answers is None else answers[number]


def _values(warp: list[Lane], place: int = 1) -> list[Any]:
    return [lane.wants[place] for lane in warp]


def _up(warp: list[Lane]) -> None:
    values, by = _values(warp), warp[0].wants[2]
    _let_go(warp, [(values[i - by], True) if i >= by else (values[i], False) for i in range(32)])


def _shuffle(warp: list[Lane]) -> None:
    values = _values(warp)
    assert all(0 <= source < 32 for source in _values(warp, 2))
    _let_go(warp, [values[source] for source in _values(warp, 2)])


MEETS: dict[str, Callable[[list[Lane]], None]] = {
    "ballot": lambda warp: _let_go(warp, [sum(bool(flag) << i for i, flag in enumerate(_values(warp)))] * 32),
    "add": lambda warp: _let_go(warp, [sum(map(int, _values(warp)))] * 32),
    "umax": lambda warp: _let_go(warp, [max(_values(warp))] * 32),
    "warp": lambda warp: _let_go(warp),
    "up": _up,
    "shuffle": _shuffle,
}


# ---------------------------------------------------------------------------------------------- the source

ARCH: dict[str, Callable[..., Any]] = {
    "sync_threads": lambda: ("block",),
    "sync_warp": lambda: ("warp",),
    "vote_ballot_sync": lambda flag: ("ballot", flag),
    "shuffle_sync": lambda value, source: ("shuffle", value, source),
    "warp_redux_sync": lambda value, what: (what, value),
}
"""Operations of `cute.arch` in which lanes meet, as what is met for."""


@cache
def _meeting_names() -> frozenset[str]:
    return frozenset(_meeting({name: functions(file) for name, file in FILES.items()}))


@cache
def _compiled(name: str, edits: Edits) -> tuple[Any, list[ast.ImportFrom], dict[str, Any]]:
    """Code and imports of a module, and its constants. edits: replacements in the source."""
    changed = _Generators(_meeting_names())
    tree = ast.fix_missing_locations(changed.visit(functions(FILES[name], None, edits)))
    imports = [node for node in ast.parse(_source(name)).body if isinstance(node, ast.ImportFrom)]
    return compile(tree, FILES[name], "exec"), imports, changed.constants


@cache
def _source(name: str) -> str:
    return (KERNELS / FILES[name]).read_text()


def load_code(unit: Unit, edits: Edits = ()) -> dict[str, ModuleType]:
    """The modules of `FILES` by name, over `unit`. edits: replacements in the source."""
    assert all(any(old in _source(name) for name in FILES) for old, _new in edits), "nothing to edit"
    modules = {name: ModuleType(name) for name in FILES}
    parts = {name: _compiled(name, tuple(one for one in edits if one[0] in _source(name))) for name in FILES}
    for name, (code, _imported, constants) in parts.items():
        vars(modules[name]).update(_bindings(unit), **constants)
        exec(code, vars(modules[name]))
    for name in reversed(FILES):  # what `ptx` hands on is defined first
        vars(modules[name]).update(_imports(parts[name][1], modules))
    return modules


def _bindings(unit: Unit) -> dict[str, Any]:
    class Constexpr:
        def __class_getitem__(cls, item: Any) -> Any:
            return item

    def span(*bounds: Any, **_options: Any) -> Iterator[Any]:
        return map(Int32, range(*map(int, bounds)))

    def meet(what: Callable[..., Any]) -> Any:
        def operation(*args: Any) -> Any:
            return (yield what(*args))

        return operation

    def each(generators: Any) -> Any:
        out = []
        for one in generators:
            out.append((yield from one))
        return out

    arch = SimpleNamespace(
        **{name: meet(what) for name, what in ARCH.items()},
        popc=lambda word: Uint32(int(word) & ptx_text.M).bit_count(),
        cluster_arrive_relaxed=lambda: None,
    )
    cutlass = SimpleNamespace(
        range=span,
        range_constexpr=range,
        const_expr=lambda value: value,
        select_=lambda condition, yes, no: yes if condition else no,
        Constexpr=Constexpr,
    )
    other = {"Any": Any, "asm": unit.asm, "_asm_meeting": unit.asm_meeting, "_each": each}
    return {"cutlass": cutlass, "cute": SimpleNamespace(arch=arch), **NUMBERS, **other}


def _imports(nodes: list[ast.ImportFrom], modules: dict[str, ModuleType]) -> dict[str, Any]:
    """What a module has from others of these, and from those that are plain Python."""
    found: dict[str, Any] = {}
    for node in nodes:
        home = (node.module or "").split(".")[-1]
        for name in node.names:
            called = name.asname or name.name
            if name.name in modules:
                found[called] = modules[name.name]
            elif home in modules:
                found[called] = getattr(modules[home], name.name)
            elif home.endswith("_config"):
                found[called] = getattr(import_module(node.module or ""), name.name)
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _meets_in_ptx(function: ast.FunctionDef) -> bool:
    told = ast.get_docstring(function, clean=False)
    values = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant) and node.value != told]
    return any(word in text for text in values if isinstance(text, str) for word in ptx_text.MEETING)


def _meeting(trees: dict[str, ast.Module]) -> set[str]:
    """Names of functions in which lanes may meet."""
    defined = [node for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = {*ARCH, *(node.name for node in defined if _meets_in_ptx(node))}
    size = 0
    while size != len(found):
        size = len(found)
        for function in defined:
            if any(isinstance(node, ast.Call) and _called(node) in found for node in ast.walk(function)):
                found.add(function.name)
    return found


class _Generators(ast.NodeTransformer):
    """Functions in which lanes may meet become generators, and calls of them `yield from`."""

    def __init__(self, meeting: frozenset[str]) -> None:
        self.meeting = meeting
        self.in_ptx = False
        self.constants: dict[str, Any] = {}  # numbers that the source makes of literals, made once

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.in_ptx = _meets_in_ptx(node)
        self.generic_visit(node)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.elt, ast.YieldFrom):
            lazy = ast.GeneratorExp(node.elt.value, node.generators)
            return ast.YieldFrom(ast.Call(ast.Name("_each", ast.Load()), [lazy], []))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = _called(node)
        first = node.args[0] if node.args else None
        if name in NUMBERS and isinstance(first, ast.Constant) and isinstance(first.value, int):
            constant = f"_{name}_{first.value}"
            self.constants[constant] = NUMBERS[name](first.value)
            return ast.Name(constant, ast.Load())
        if name == "asm" and self.in_ptx:
            return ast.YieldFrom(ast.Call(ast.Name("_asm_meeting", ast.Load()), node.args, node.keywords))
        return ast.YieldFrom(node) if name in self.meeting else node
