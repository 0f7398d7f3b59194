"""The direction of imports, and what importing the package may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import keysieve

ROOT = Path(keysieve.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# A module may import modules of its own layer and of the layers to its left. The longest matching prefix decides.
LAYERS = {
    "keysieve.checks": 0,
    "keysieve.spec": 1,
    "keysieve.device": 2,
    "keysieve.kernels": 3,
    "keysieve.models": 2,
    "keysieve.plan": 2,
    "keysieve.quantize": 3,
    "keysieve.cache": 3,
    "keysieve.inputs": 4,
    "keysieve.reference": 4,
    "keysieve.compile": 4,
    "keysieve.launch": 5,
    "keysieve.residency": 2,
    "keysieve.driver": 5,
    "keysieve.prepared": 5,
    "keysieve.relaunch": 5,
    "keysieve.forms": 1,
    "keysieve.usual_forms": 5,
    "keysieve.repeats": 5,
    "keysieve.testing": 5,
    "keysieve.dcp": 6,
    "keysieve.gpu": 6,
    "keysieve.sm90": 6,
    "keysieve.sm90_step": 6,
    "keysieve.sm90_dcp": 6,
    "keysieve.sm90_merge": 6,
    "keysieve.sm90_dcp_paths": 6,
    "keysieve.sm100": 6,
    "keysieve.backends": 6,
    "keysieve.api": 7,
    "keysieve.ops": 7,
    "keysieve.indexer": 7,
    "keysieve.workspace": 7,
    "keysieve": 8,
    "keysieve.compat": 9,
    "keysieve.integrations": 9,
    "keysieve.check": 9,
    "keysieve.doctor": 9,
    "keysieve.bench": 9,
    "keysieve.demo": 10,
    "keysieve.cli": 11,
    "keysieve.__main__": 12,
}
WITHOUT_DSL = ("checks", "spec", "plan", "reference", "cache", "quantize", "models", "dcp", "api", "testing")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    best = max((p for p in LAYERS if module == p or module.startswith(p + ".")), key=len)
    assert best != "keysieve" or module == "keysieve", f"{module} has no layer: add it to LAYERS"
    return LAYERS[best]


def type_checking_lines(tree: ast.Module) -> set[int]:
    """Lines inside `if TYPE_CHECKING:` blocks, which never run."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imports_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    skipped = type_checking_lines(tree)
    found: list[str] = []
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            submodules = [
                f"{base}.{a.name}"
                for a in node.names
                if (ROOT.parent / base.replace(".", "/") / a.name).exists()
                or (ROOT.parent / base.replace(".", "/") / f"{a.name}.py").exists()
            ]
            found += submodules or [base]
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    module = name_of(path)
    for target in imports_of(path):
        if target.split(".")[0] != "keysieve" or target == "keysieve":
            # The package itself only re-exports: code inside the lower layers must not go through it.
            assert target != "keysieve" or layer_of(module) >= LAYERS["keysieve"], (
                f"{module} imports the package itself"
            )
            continue
        assert layer_of(target) <= layer_of(module), f"{module} (layer {layer_of(module)}) imports {target}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if name_of(p).split(".")[1:2] and name_of(p).split(".")[1] in WITHOUT_DSL], ids=name_of
)
def test_host_and_reference_never_import_the_dsl(path: Path) -> None:
    roots = {target.split(".")[0] for target in imports_of(path)}
    assert not roots & {"cutlass", "cuda", "tvm_ffi", "triton"}, roots


def test_kernels_import_only_the_dsl_and_leaves() -> None:
    allowed = ("keysieve.device", "keysieve.spec", "keysieve.kernels", "keysieve.compile")
    for path in (ROOT / "kernels").glob("*.py"):
        if path.stem.endswith("_host"):
            continue
        for target in imports_of(path):
            assert not target.startswith("keysieve") or target.startswith(allowed), f"{path.name} imports {target}"


def test_import_is_light() -> None:
    """No DSL, no drawing or model library, no CUDA context, and under a second beyond torch itself: of the processor's
    time, which is not longer where other processes want it too."""
    code = (
        "import time, sys, torch\n"
        "before = set(sys.modules)\n"
        "start = time.process_time(); import keysieve; spent = time.process_time() - start\n"
        "heavy = {'cutlass', 'cuda', 'tvm_ffi', 'transformers', 'matplotlib', 'rich'} & (set(sys.modules) - before)\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert spent < 1.0, spent\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
