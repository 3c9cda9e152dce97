"""Which globals and compiled functions a callable leads to, through what."""

import pytest
import reached_programs
import torch

from samebits.checks.compile.discover import leaves
from samebits.checks.compile.reached import is_compiled
from samebits.checks.compile.survey import prepare

pytestmark = pytest.mark.reference

SETTINGS = "reached_programs.settings"


def one_tensor():
    return (torch.randn(4, 8),), {}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (reached_programs.by_module, {f"{SETTINGS}.LIMIT"}),
        (reached_programs.by_class, {f"{SETTINGS}.Namespace.limit"}),
        (reached_programs.by_function_of_a_module, {"reached_programs.activations.SLOPE"}),
        (reached_programs.by_table, {"reached_programs.activations.SLOPE"}),
        (reached_programs.by_default, {"options['limit']"}),
        (reached_programs.by_autograd_function, {"reached_programs.Clamp.LIMIT"}),
        (reached_programs.Block(), {"target.activation.limit", "reached_programs.SCALE"}),
        (reached_programs.CompiledBlock(), {"target.activation.limit", "reached_programs.SCALE"}),
        (
            reached_programs.hooked(),
            {
                "target._forward_hooks[0]:limit",
                "target.0.activation.limit",
                "reached_programs.SCALE",
            },
        ),
    ],
    ids=lambda value: "" if isinstance(value, set) else None,
)
def test_numbers_are_found_behind_modules_classes_methods_and_hooks(function, expected):
    call = prepare(function, one_tensor)
    places = {place.path: place for place in leaves(call)}

    assert set(places) == expected
    for place in places.values():
        own = place.get()
        place.set(0.125)
        assert place.get() == 0.125
        place.set(own)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (reached_programs.Block(), False),
        (reached_programs.CompiledBlock(), True),
        (reached_programs.compiled_in_place(), True),
        (reached_programs.decorated, True),
        (reached_programs.by_function_of_a_module, False),
    ],
)
def test_compilers_are_seen_behind_methods_modules_and_decorators(function, expected):
    assert is_compiled(function) is expected
