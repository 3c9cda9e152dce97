"""Kernels that others write in other styles are found, with what decides their bits."""

from pathlib import Path

import pytest

from samebits.checks.determinism.coverage import coverage
from samebits.checks.determinism.source import Sources
from samebits.checks.determinism.variant import RegistryError, load

pytestmark = pytest.mark.reference

# How others write kernels.
OTHERS = {
    "lib/mathlib.py": """
import triton
import triton.language as tl
LOG2E: tl.constexpr = 1.4426950408889634
@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))
""",
    "lib/__init__.py": "from .norms import *\n",
    "lib/norms.py": """
import triton as tr
from triton import language as L
from triton import jit as kernel
from . import mathlib as m
from .mathlib import *

@tr.autotune(configs=[tr.Config({"BLOCK": b}) for b in (256, 512)], key=["N"])
@tr.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@tr.jit
def through_a_module(X, N, BLOCK: L.constexpr, EVEN: L.constexpr):
    L.store(X, m.sigmoid(L.load(X)))

@kernel
def through_a_star(X):
    L.store(X, sigmoid(L.load(X)))

def called(X):
    L.store(X, 1.0)

compiled = tr.jit(called, debug=True)

def launches(x):
    grid = lambda meta: (tr.cdiv(x.numel(), meta["BLOCK"]),)
    through_a_module[grid](x, x.numel())
    started = through_a_star[(1,)]
    started(x, num_warps=2)

def launches_another(x):
    compiled[(1,)](x, num_warps=4)
""",
    "factory.py": """
import functools
import triton
import triton.language as tl
def own_jit(function=None, **options):
    if function is None:
        return functools.partial(own_jit, **options)
    return triton.jit(function, **options)
""",
    "uses.py": """
from factory import own_jit as compiled
import lib
@compiled(debug=True)
def wrapped(X):
    pass
class Kernels:
    @staticmethod
    @compiled
    def inside(X):
        pass
def start(x):
    lib.through_a_star[(1,)](x, num_warps=8)
""",
    "old.py": 'print "Python 2"\n',
    "env/pyvenv.cfg": "",
    "env/kernels.py": "import triton\n@triton.jit\ndef of_another(x):\n    pass\n",
}
# Gluon: kernels whose warps have parts of their own, and classes of the device.
GLUON = {
    "parts.py": """
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon import jit as compiled
from triton.language.core import _aggregate as aggregate

@triton.jit
def of_triton(x):
    return x * 2.0

@aggregate
class Walk:
    tiles: gl.tensor
    @gluon.jit
    def count(self):
        return self.tiles

@gluon.jit
def load(x_ptr, walk, STAGES: gl.constexpr):
    gl.store(x_ptr, walk.count())

@compiled
def multiply(x_ptr, walk, STAGES: gl.constexpr):
    gl.store(x_ptr, of_triton(gl.load(x_ptr)))
""",
    "kernel.py": """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from parts import Walk, load, multiply

@gluon.jit
def specialized(x_ptr, tiles, STAGES: gl.constexpr):
    args = (x_ptr, Walk(tiles), STAGES)
    gl.warp_specialize([(multiply, args), (load, args)], [1], [24])

def launch(x, tiles):
    specialized[(132,)](x, tiles, STAGES=4, num_warps=4)
""",
}
SIGMOID = {"lib/mathlib.py:sigmoid", "lib/mathlib.py:LOG2E"}


@pytest.fixture
def others(tmp_path: Path) -> Sources:
    for name, text in OTHERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    (tmp_path / "broken.py").write_bytes(b"# caf\xe9\n")
    return Sources(tmp_path)


def test_kernels_are_found_however_they_are_compiled(others):
    assert set(others.kernels) == {
        "lib/mathlib.py:sigmoid",
        "lib/norms.py:through_a_module",
        "lib/norms.py:through_a_star",
        "lib/norms.py:called",
        "uses.py:wrapped",
        "uses.py:Kernels.inside",
    }


@pytest.mark.parametrize(
    ("kernel", "holds"),
    [
        (
            "lib/norms.py:through_a_module",
            SIGMOID | {"launch lib/norms.py:launches"},
        ),
        (
            "lib/norms.py:through_a_star",
            SIGMOID
            | {"launch lib/norms.py:launches", "launch uses.py:start"}
            | {"lib/norms.py:through_a_module"},
        ),
        ("lib/norms.py:called", {"launch lib/norms.py:launches_another"}),
    ],
)
def test_what_others_name_belongs_to_their_kernels(others, kernel, holds):
    assert others.closure(kernel).keys() - {kernel} == holds


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(256, 512)", "(256, 1024)"),
        ("started(x, num_warps=2)", "started(x, num_warps=1)"),
        ("compiled[(1,)](x, num_warps=4)", "compiled[(1,)](x, num_warps=8)"),
    ],
    ids=["autotuned", "launch kept in a name", "launch of what was compiled by a call"],
)
def test_how_others_launch_makes_evidence_old(others, old, new):
    def hashes(sources: Sources) -> list[str]:
        names = ("through_a_module", "through_a_star", "called")
        return [sources.fingerprint((f"lib/norms.py:{name}",), {}) for name in names]

    before = hashes(others)

    file = others.root / "lib" / "norms.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))

    assert hashes(Sources(others.root)) != before


def test_a_file_that_may_hold_a_kernel_must_be_readable(others):
    (others.root / "broken.py").write_bytes(
        b"import triton  # caf\xe9\n@triton.jit\ndef f(): pass\n"
    )

    with pytest.raises(RegistryError, match=r"broken\.py cannot be read"):
        _ = Sources(others.root).kernels


@pytest.fixture
def gluon_kernels(tmp_path: Path) -> Path:
    for name, text in GLUON.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "registry.py").write_text(
        "from samebits.checks.determinism import Variant\n"
        "def variants():\n"
        "    yield Variant(name='v', kernels=['kernel.py:specialized'], config={'STAGES': 4},\n"
        "                  prepare=None)\n"
    )
    return tmp_path


def test_gluon_kernels_are_kernels(gluon_kernels):
    found = coverage(load(gluon_kernels / "registry.py"))

    # The parts of its warps and the methods of its classes belong to the one that is launched.
    assert [(r.case, r.backend, r.note) for r in found.results] == [
        ("v", "kernel.py:specialized", "no evidence")
    ]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("parts.py", "return x * 2.0", "return x * 3.0"),
        ("parts.py", "return self.tiles", "return self.tiles + 1"),
        ("kernel.py", "[1], [24]", "[1], [40]"),
        ("kernel.py", "STAGES=4, num_warps=4", "STAGES=4, num_warps=8"),
    ],
    ids=["a function of a part", "a method", "registers of a part", "its launch"],
)
def test_what_decides_a_gluon_kernel(gluon_kernels, file, old, new):
    def fingerprint() -> str:
        return Sources(gluon_kernels).fingerprint(("kernel.py:specialized",), {})

    before = fingerprint()
    text = (gluon_kernels / file).read_text()
    assert old in text
    (gluon_kernels / file).write_text(text.replace(old, new))

    assert fingerprint() != before
