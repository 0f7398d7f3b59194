"""What a kernel's registration is made of. No cutlass here: the host asks these questions without the DSL."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

ARCHS: tuple[str, ...] = ("sm_90a", "sm_100a", "sm_103a")
"""Targets that kernels are compiled for: Hopper, and the two Blackwell data-centre chips."""

MAX_BLOCK_SHARED = 227 * 1024
"""Dynamic shared memory a block may ask for, bytes, on every target. The compiler itself does not check it."""

Options = tuple[tuple[str, bool | int | str], ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel that can be compiled: its name, its options, and every configuration that may be asked for.

    Attributes:
        name: short, a C identifier; begins the symbol and the file name.
        entry: `"module:function"`; the function takes (config, arch) and returns `(jit function, fake arguments)`.
            The module imports cutlass; it is only imported to compile.
        config: a frozen dataclass of bools, ints and strings: what the code is specialised by. Never a batch size, a
            table width or a length.
        archs: targets it compiles for.
        admitted: arch -> every configuration that the host may ask for.
        common: arch -> those worth compiling ahead for the usual models (None: all admitted ones).
        max_registers: bound checked after compiling (0: none).
    """

    name: str
    entry: str
    config: type[Any]
    archs: tuple[str, ...]
    admitted: Callable[[str], Iterable[Any]]
    max_registers: int = 0
    common: Callable[[str], Iterable[Any]] | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"kernel name {self.name!r}: a C identifier is needed")
        if not (dataclasses.is_dataclass(self.config) and self.config.__dataclass_params__.frozen):  # type: ignore[attr-defined]  # mypy does not model it
            raise ValueError(f"kernel {self.name}: config {self.config} must be a frozen dataclass")
        unknown = [arch for arch in self.archs if arch not in ARCHS]
        if unknown or not self.archs:
            raise ValueError(f"kernel {self.name}: archs {self.archs}, accepted {ARCHS}")

    @property
    def module(self) -> str:
        """Module of the device code."""
        return self.entry.partition(":")[0]

    def build(self, config: Any, arch: str) -> tuple[Any, tuple[Any, ...]]:
        """Import the device code (and cutlass) and return the jit function and its fake arguments."""
        module, _, function = self.entry.partition(":")
        entry, args = getattr(importlib.import_module(module), function)(config, arch)
        return entry, tuple(args)

    def options(self, config: Any) -> Options:
        """The options of `config`, in declaration order; refuses another kernel's configuration."""
        if type(config) is not self.config:
            raise TypeError(f"kernel {self.name}: config {config!r} is not a {self.config.__name__}")
        pairs = tuple((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
        for name, value in pairs:
            if not isinstance(value, bool | int | str):
                raise TypeError(f"kernel {self.name}: option {name}={value!r} is not a bool, int or str")
        return pairs

    def symbol(self, config: Any) -> str:
        """A C identifier that names this configuration: kernel name and options."""
        parts = [self.name]
        for name, value in self.options(config):
            text = str(int(value)) if isinstance(value, bool) else str(value)
            parts.append(f"{name}_{text}")
        symbol = "__".join(parts)
        return "".join(c if c.isalnum() or c == "_" else "_" for c in symbol)


def pairwise(configs: Iterable[Any]) -> list[Any]:
    """A small subset of `configs` in which every pair of option values that occurs together occurs at least once."""
    pool = list(configs)
    if not pool:
        return []
    names = [field.name for field in dataclasses.fields(pool[0])]

    def pairs(config: Any) -> set[tuple[str, Any, str, Any]]:
        values = [(name, getattr(config, name)) for name in names]
        if len(values) == 1:
            return {(*values[0], *values[0])}
        return {(*a, *b) for i, a in enumerate(values) for b in values[i + 1 :]}

    wanted = set().union(*(pairs(config) for config in pool))
    chosen: list[Any] = []
    while wanted:
        best = max(pool, key=lambda config: len(pairs(config) & wanted))  # max keeps the first of equals: deterministic
        chosen.append(best)
        wanted -= pairs(best)
    return chosen or pool[:1]
