"""What compiled code says about itself: registers, stack, shared memory, launch attributes, instructions.

Read from the cubin's ELF notes, from the host IR (dynamic shared memory and launch attributes stand only there) and
from the PTX text. Nothing here needs cutlass or a GPU.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE_COOPERATIVE = 2
ATTRIBUTE_CLUSTER = 4
ATTRIBUTE_PROGRAMMATIC = 6
RUN_TIME = "run time"
"""Stands for a launch value that the caller decides at every call."""

Value = int | str

# Attribute numbers of the records of .nv.info sections.
_REGISTERS, _FRAME, _STACK, _MAX_REGISTERS, _THREADS = 0x2F, 0x11, 0x12, 0x1B, 0x10
_PARAMETERS = 0x17


@dataclass(frozen=True)
class DeviceCode:
    """One kernel of a cubin.

    registers: a thread. frame_bytes, stack_bytes: local memory (spills, run-time indexed arrays): 0 is wanted.
    threads: the block size the code was compiled for, or None. static_shared: bytes, the system's 1 KiB included.
    parameters: (offset, bytes) in order. code_bytes: machine code.
    """

    name: str
    registers: int = 0
    frame_bytes: int = 0
    stack_bytes: int = 0
    threads: tuple[int, int, int] | None = None
    static_shared: int = 0
    code_bytes: int = 0
    parameters: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class LaunchFacts:
    """One launch of the host function: kernel name, dynamic shared memory in bytes, block, and launch attributes."""

    kernel: str
    dynamic_shared: Value
    block: tuple[Value, ...]
    attributes: tuple[tuple[int, Value], ...]

    @property
    def programmatic(self) -> Value:
        """Programmatic stream serialization: 0, 1, or decided at run time."""
        return dict(self.attributes).get(ATTRIBUTE_PROGRAMMATIC, 0)


@dataclass(frozen=True)
class Facts:
    """Everything read from one compiled entry. instructions: PTX opcodes (with all suffixes) and their counts."""

    kernels: tuple[DeviceCode, ...]
    launches: tuple[LaunchFacts, ...]
    instructions: dict[str, int] = field(default_factory=dict)

    def count(self, pattern: str) -> int:
        """Instructions whose PTX opcode matches the regular expression (from its beginning)."""
        return sum(n for opcode, n in self.instructions.items() if re.match(pattern, opcode))

    def problems(self, max_shared: int, max_registers: int = 0) -> list[str]:
        """What must not ship: local memory, too much shared memory, more registers than allowed."""
        found = []
        for code in self.kernels:
            if code.frame_bytes or code.stack_bytes:
                found.append(f"{code.name}: local memory (frame {code.frame_bytes} B, stack {code.stack_bytes} B)")
            if max_registers and code.registers > max_registers:
                found.append(f"{code.name}: {code.registers} registers a thread, at most {max_registers} allowed")
        for launch in self.launches:
            if isinstance(launch.dynamic_shared, int) and launch.dynamic_shared > max_shared:
                found.append(f"{launch.kernel}: {launch.dynamic_shared} B of dynamic shared memory, {max_shared} exist")
        return found


# ------------------------------------------------------------------------------------------------------------ cubin


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int
    info: int


def _sections(data: bytes) -> list[_Section]:
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise ValueError("not a 64-bit ELF image")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    strings = rows[names_at][4]
    return [_Section(_string(data, strings + r[0]), r[4], r[5], r[6], r[7]) for r in rows]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _records(data: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section: u8 form, u8 attribute, then a u16 value or a sized payload."""
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute = data[at], data[at + 1]
        (word,) = struct.unpack_from("<H", data, at + 2)
        if form == 4:
            yield attribute, data[at + 4 : at + 4 + word]
            at += 4 + word
        else:
            yield attribute, data[at + 2 : at + 4]
            at += 4


def read_cubin(data: bytes) -> tuple[DeviceCode, ...]:
    """The kernels of a cubin. Compiler-internal helper functions, which have no entry facts, are left out."""
    sections = _sections(data)
    symbols_at = next(s for s in sections if s.name == ".symtab")
    strings = sections[symbols_at.link].offset
    symbols = [
        _string(data, strings + struct.unpack_from("<I", data, at)[0])
        for at in range(symbols_at.offset, symbols_at.offset + symbols_at.size, 24)
    ]
    facts: dict[str, dict[str, Any]] = {}
    for section in sections:
        if section.name.startswith(".nv.info."):
            _entry_facts(facts.setdefault(section.name[9:], {}), _records(data, section))
    for section in sections:
        if section.name == ".nv.info":
            _module_facts(facts, symbols, _records(data, section))
        elif section.name.startswith(".text.") and section.name[6:] in facts:
            facts[section.name[6:]]["code_bytes"] = section.size
        elif section.name.startswith(".nv.shared.") and section.name[11:] in facts:
            facts[section.name[11:]]["static_shared"] = section.size
    found = []
    for name in sorted(facts):
        values = facts[name]
        if not values.pop("is_entry", False):
            continue
        parameters = values.pop("by_ordinal", {})
        found.append(DeviceCode(name=name, parameters=tuple(parameters[k] for k in sorted(parameters)), **values))
    return tuple(found)


def _entry_facts(values: dict[str, Any], records: Iterator[tuple[int, bytes]]) -> None:
    for attribute, payload in records:
        if attribute == _THREADS:
            values["threads"] = struct.unpack("<III", payload[:12])
            values["is_entry"] = True
        elif attribute == _PARAMETERS:
            ordinal, offset = struct.unpack("<HH", payload[4:8])
            (flags,) = struct.unpack("<I", payload[8:12])
            values.setdefault("by_ordinal", {})[ordinal] = (offset, flags >> 18)
            values["is_entry"] = True


def _module_facts(facts: dict[str, dict[str, Any]], symbols: list[str], records: Iterator[tuple[int, bytes]]) -> None:
    names = {_REGISTERS: "registers", _FRAME: "frame_bytes", _STACK: "stack_bytes"}
    for attribute, payload in records:
        if attribute in names and len(payload) == 8:
            symbol, value = struct.unpack("<II", payload)
            if symbols[symbol] in facts:
                facts[symbols[symbol]][names[attribute]] = value


# ---------------------------------------------------------------------------------------------------------- host IR

_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_ATTRIBUTE = r"!llvm\.struct<\(i32, array<4 x i8>, array<64 x i8>\)>"
_CONSTANT = re.compile(r"\s*(%\S+) = llvm\.mlir\.constant\((-?\w+)")
_GEP = re.compile(r"\s*(%\S+) = llvm\.getelementptr %\S+\[(.*?)\].*, (!llvm\.struct.*)$")
_STORE = re.compile(r"\s*llvm\.store (%\S+), (%\S+) :")
_KERNEL = re.compile(r"\s*%\S+ = llvm\.mlir\.addressof @kernels_(\S+) :")
_LAUNCH = re.compile(r"\s*(?:%\S+ = )?llvm\.call @_cudaLaunchKernelEx\(")


class _LaunchReader:
    """Follows the stores into launch configurations and attributes, up to each launch call."""

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.places: dict[str, tuple[str, str]] = {}
        self.kernel = ""
        self.config: dict[str, Value] = {}
        self.attributes: list[tuple[int, Value]] = []
        self.pending: int | None = None

    def line(self, text: str) -> LaunchFacts | None:
        if (m := _CONSTANT.match(text)) is not None:
            word = {"true": "1", "false": "0"}.get(m[2], m[2])
            if word.lstrip("-").isdigit():
                self.constants[m[1]] = int(word)
        elif (m := _GEP.match(text)) is not None:
            kind = "config" if re.match(_CONFIG, m[3]) else "attribute" if re.match(_ATTRIBUTE, m[3]) else ""
            self.places[m[1]] = (kind, m[2])
        elif (m := _STORE.match(text)) is not None:
            self._store(m[1], m[2])
        elif (m := _KERNEL.match(text)) is not None:
            self.kernel = m[1]
        elif _LAUNCH.match(text):
            return self._launch()
        return None

    def _store(self, value: str, place: str) -> None:
        kind, index = self.places.get(place, ("", ""))
        known: Value = self.constants.get(value, RUN_TIME)
        if kind == "config":
            self.config[index] = known
        elif kind == "attribute" and index == "0, 0":
            self.pending = known if isinstance(known, int) else None
        elif kind == "attribute" and index.startswith("0, 2") and self.pending is not None:
            self.attributes.append((self.pending, known))
            self.pending = None

    def _launch(self) -> LaunchFacts:
        block = tuple(self.config.get(f"0, 1, {i}", RUN_TIME) for i in range(3))
        facts = LaunchFacts(self.kernel, self.config.get("0, 2", 0), block, tuple(self.attributes))
        self.config, self.attributes, self.pending = {}, [], None
        return facts


def read_host_ir(text: str) -> tuple[LaunchFacts, ...]:
    """The launches in the host IR of a compiled function (its text), in order."""
    found: list[LaunchFacts] = []
    reader = _LaunchReader()
    for line in text.splitlines():
        if line.lstrip().startswith("llvm.func"):
            reader = _LaunchReader()
        launch = reader.line(line)
        if launch is not None:
            found.append(launch)
    return tuple(found)


# -------------------------------------------------------------------------------------------------------------- PTX

_OPCODE = re.compile(r"(?:@!?%?\w+\s+)?([a-z][a-z0-9_]*(?:\.[A-Za-z0-9_:]+)*)\b")


def read_ptx(text: str) -> dict[str, int]:
    """PTX opcodes (with all suffixes) and how often each stands in the text, sorted by name."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        body = line.split("//")[0].strip()
        for statement in body.replace("{", ";").replace("}", ";").split(";"):
            m = _OPCODE.match(statement.strip())
            if m is not None and not statement.strip().endswith(":"):
                counts[m[1]] += 1
    return dict(sorted(counts.items()))
