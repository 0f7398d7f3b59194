"""What this machine can run, and why not the rest: the facts behind ``keysieve doctor``."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from keysieve.backends import ARCHITECTURES, supports
from keysieve.spec import BACKENDS, FORMATS, IndexerSpec

OK, MISSING, NOTE = "ok", "missing", "note"

UNTRIED = "compiled and inspected, not run"
"""What has been done with the Blackwell kernels so far. The text of README and docs/blackwell.md as well."""


@dataclass(frozen=True)
class Fact:
    """One line: what was looked at, ``"ok" | "missing" | "note"``, what was found, and why it matters if it does."""

    name: str
    status: str
    value: str
    why: str = ""


@dataclass(frozen=True)
class BackendState:
    """Whether a backend works here. ``reason`` is the text of ``supports()``; ``formats`` those it runs."""

    name: str
    works: bool
    reason: str | None
    device: str
    formats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Everything ``keysieve doctor`` prints."""

    facts: tuple[Fact, ...]
    backends: tuple[BackendState, ...]
    devices: tuple[dict[str, Any], ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data for JSON."""
        return asdict(self)

    def works(self, backend: str) -> bool:
        """Whether ``backend`` runs here; ``"auto"``: whether any does."""
        return any(state.works for state in self.backends if backend in ("auto", state.name))


def diagnose() -> Diagnosis:
    """Look at this machine. Makes a CUDA context if torch finds a device, and compiles nothing."""
    facts = [
        Fact("python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Fact("keysieve", OK, _version("keysieve") or "not installed as a package (running from a checkout)"),
        Fact("numpy", OK, _version("numpy") or "?"),
        *_torch_facts(),
        *_toolchain_facts(),
        *_cache_facts(),
        *_optional_facts(),
    ]
    devices = tuple(_devices())
    facts += _peer_facts(devices)
    facts.append(Fact("backend sm100", NOTE, UNTRIED, "run `keysieve check --device cuda` first: docs/blackwell.md"))
    return Diagnosis(tuple(facts), tuple(_backend_state(name, devices) for name in BACKENDS), devices)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_facts() -> list[Fact]:
    cuda = torch.version.cuda
    facts = [Fact("torch", OK, torch.__version__)]
    if cuda is None:
        why = "GPU backends need a CUDA build of torch"
        return [*facts, Fact("cuda build of torch", MISSING, "this torch is built for the CPU only", why)]
    facts.append(Fact("cuda build of torch", OK, cuda))
    driver = _driver()
    facts.append(Fact("nvidia driver", OK if driver else MISSING, driver or "none found", "" if driver else "no GPU"))
    if torch.distributed.is_available():
        nccl = torch.distributed.is_nccl_available()
        why = "" if nccl else "context parallelism on GPUs needs NCCL; on CPUs Gloo serves"
        facts.append(Fact("nccl", OK if nccl else MISSING, _nccl() if nccl else "not in this torch", why))
    return facts


def _nccl() -> str:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]  # torch's
    except (AttributeError, RuntimeError):
        return "present, version unknown"


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, from the file it publishes."""
    path = Path("/proc/driver/nvidia/version")
    try:
        words = path.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _toolchain_facts() -> list[Fact]:
    from keysieve.compile import versions

    tool = versions.installed()
    if isinstance(tool, str):
        return [Fact("CuTe DSL and tvm-ffi", MISSING, tool, "GPU backends load and compile kernels with them")]
    untested = versions.untested(tool)
    facts = [
        Fact("CuTe DSL", NOTE if untested else OK, tool.dsl, untested or ""),
        Fact("tvm-ffi", OK, tool.ffi),
    ]
    if not tool.compiler:
        why = "kernels can be loaded from a filled cache, not compiled"
        facts.append(Fact("kernel compiler", MISSING, "only the DSL's runtime is installed", why))
    return facts


def _cache_facts() -> list[Fact]:
    from keysieve.compile import store

    path = store.cache_dir()
    # os.path's answer where Path.exists raises: in another user's home, which this one may not even look into.
    existing = next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), path)
    if os.path.isdir(existing) and os.access(existing, os.W_OK):
        return [Fact("kernel cache", OK, str(path))]
    why = "read only: kernels it lacks are compiled again in every process"
    return [Fact("kernel cache", NOTE, str(path), why)]


def _optional_facts() -> list[Fact]:
    wanted = {"rich": "tables and progress bars", "matplotlib": "pictures", "transformers": "the demo's model"}
    facts = []
    for package, use in wanted.items():
        version = _version(package)
        facts.append(
            Fact(package, OK if version else NOTE, version or "not installed", "" if version else f"for {use}")
        )
    return facts


def _devices() -> list[dict[str, Any]]:
    """One record per CUDA device that torch sees."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{capability[0]}.{capability[1]}",
                "served_by": ARCHITECTURES.get(capability),
                "sms": properties.multi_processor_count,
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    return found


def _peer_facts(devices: tuple[dict[str, Any], ...]) -> list[Fact]:
    """Peer access between the devices, and symmetric memory: what the NVLink exchange needs."""
    if not devices:
        return [Fact("cuda devices", MISSING, "torch finds none", "only the cpu backend runs here")]
    facts = [
        Fact(
            f"cuda:{d['index']}", OK if d["served_by"] else NOTE, f"{d['name']}, {d['sms']} SMs, {d['memory_gib']} GiB"
        )
        for d in devices
    ]
    if len(devices) > 1:
        pairs = [(a["index"], b["index"]) for a in devices for b in devices if a is not b]
        closed = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        why = f"not between {closed[:4]}: context parallelism there takes the all-gather path" if closed else ""
        facts.append(Fact("peer access", NOTE if closed else OK, f"{len(pairs) - len(closed)} of {len(pairs)}", why))
    try:
        import torch.distributed._symmetric_memory  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        facts.append(Fact("symmetric memory", MISSING, str(error), "the NVLink exchange needs it"))
    else:
        facts.append(Fact("symmetric memory", OK, "in this torch"))
    return facts


def _backend_state(name: str, devices: tuple[dict[str, Any], ...]) -> BackendState:
    """Whether a backend runs on the device it would be used on, and which formats."""
    served = next((d["index"] for d in devices if d["served_by"] == name), devices[0]["index"] if devices else 0)
    device = "cpu" if name == "cpu" else f"cuda:{served}"
    reasons = {
        key_format: supports(IndexerSpec(heads=32, topk=2048, key_format=key_format), 1, name, device)
        for key_format in FORMATS
    }
    formats = tuple(key_format for key_format, reason in reasons.items() if reason is None)
    reason = None if formats else reasons["fp8_fp32"]
    return BackendState(name, bool(formats), reason, device, formats)
