"""Which numbers reach a callable, and whether setting one is seen by the next call."""

import functools
import math

import programs
import pytest
import torch
from programs import Adapter, Layers, Options, make_closure

from samebits.checks.compile.discover import is_compiled, leaves
from samebits.checks.compile.evaluate import Call, grown
from samebits.checks.compile.place import WANTED, candidates
from samebits.checks.compile.survey import prepare
from samebits.checks.compile.target import SEED

pytestmark = pytest.mark.reference


def numbers(function, factory):
    call = prepare(function, factory)
    return call, {place.path: place for place in leaves(call)}


@pytest.mark.parametrize(
    ("function", "factory", "expected"),
    [
        (programs.clamped_swiglu, programs.two_floats, {"limit"}),
        (programs.with_global, programs.one_tensor, {"programs.SCALE"}),
        (
            programs.with_global_objects,
            programs.one_tensor,
            {"programs.OPTIONS.limit", "programs.TABLE['scale'][0]"},
        ),
        (programs.WithClassNumber().run, programs.one_tensor, {"target.__self__.limit"}),
        (programs.with_default, programs.one_tensor, {"eps", "flag"}),
        (make_closure(0.5), programs.one_tensor, {"target:limit"}),
        (
            programs.with_options,
            programs.with_objects,
            {"options.limit", "options.rows", "table['scale'][0]"},
        ),
        (Layers(), programs.one_tensor, {"target.layers.0.limit", "target.layers.1.limit"}),
        (Adapter(), programs.one_tensor, {"target.enabled", "target.scale"}),
        (Layers().forward, programs.one_tensor, {"target.__self__.layers.0.limit"}),
        (
            functools.partial(programs.clamped_swiglu, limit=0.5),
            programs.one_tensor,
            {"limit"},
        ),
        (programs.tensor_argument, programs.tensor_limit, set()),
        (programs.text_argument, programs.text_limit, set()),
        (programs.forward_compiled, programs.two_floats, {"limit"}),
        (programs.Callable(), programs.one_tensor, {"target.limit", "target.factor"}),
        (
            programs.Callable().run,
            programs.one_tensor,
            {"target.__self__.limit", "target.__self__.factor"},
        ),
        (programs.Callable.of_class, programs.one_tensor, {"target.__self__.factor"}),
        (programs.with_attribute, programs.with_slots, {"options.limit"}),
        (functools.partial(programs.limit_first, 0.5), programs.one_tensor, {"target.args[0]"}),
        (programs.positional_only, programs.one_tensor, {"limit"}),
    ],
)
def test_numbers_are_found_wherever_they_live(function, factory, expected):
    _, found = numbers(function, factory)

    assert expected <= set(found)
    assert expected or not found


@pytest.mark.parametrize(
    ("function", "factory", "path", "value"),
    [
        (programs.clamped_swiglu, programs.two_floats, "limit", 0.125),
        (programs.with_global_objects, programs.one_tensor, "programs.OPTIONS.limit", 0.125),
        (programs.WithClassNumber().run, programs.one_tensor, "target.__self__.limit", 0.125),
        (programs.with_global, programs.one_tensor, "programs.SCALE", 2.0),
        (make_closure(0.5), programs.one_tensor, "target:limit", 0.125),
        (programs.with_options, programs.with_objects, "options.limit", 0.125),
        (programs.with_options, programs.with_objects, "table['scale'][0]", 3.0),
        (Layers(), programs.one_tensor, "target.layers.1.limit", 0.125),
        (Adapter(), programs.one_tensor, "target.enabled", False),
        (functools.partial(programs.clamped_swiglu, limit=0.5), programs.one_tensor, "limit", 0.1),
        (programs.Callable(), programs.one_tensor, "target.limit", 0.125),
        (programs.Callable.of_class, programs.one_tensor, "target.__self__.factor", 3.0),
        (programs.with_attribute, programs.with_slots, "options.limit", 0.125),
        (functools.partial(programs.limit_first, 0.5), programs.one_tensor, "target.args[0]", 0.1),
        (programs.positional_only, programs.one_tensor, "limit", 0.125),
    ],
)
def test_a_number_that_is_set_changes_the_result(function, factory, path, value):
    call, found = numbers(function, factory)
    before, own = call.run(), found[path].get()

    found[path].set(value)
    changed = call.run()
    found[path].set(own)

    assert not torch.equal(before, changed)
    assert torch.equal(before, call.run())


def test_what_a_partial_is_given_by_name_is_one_number():
    partial = functools.partial(programs.clamped_swiglu, limit=0.5)

    assert set(numbers(partial, programs.one_tensor)[1]) == {"limit"}


def test_a_compiled_module_has_no_numbers_of_torch():
    module = torch.compile(Adapter(), backend="eager")
    module(torch.randn(4, 8))

    found = set(numbers(module, programs.one_tensor)[1])
    assert found == {"target.__self__.enabled", "target.__self__.scale"}


def test_items_of_tuples_are_set_through_their_holder():
    def total(x, pair):
        return x * pair[0] + pair[1][0]

    call, found = numbers(total, lambda: ((torch.ones(2), (2.0, (3.0,))), {}))

    found["pair[1][0]"].set(5.0)

    assert call.run().tolist() == [7.0, 7.0]


def test_frozen_options_can_be_set():
    options = Options()
    _, found = numbers(programs.with_options, lambda: ((torch.ones(2, 4), options, {}), {}))

    found["options.limit"].set(0.25)

    assert options.limit == 0.25


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (programs.clamped_swiglu, False),
        (programs.forward_compiled, True),
        (programs.fused_swiglu, True),
        (programs.layers, False),
    ],
)
def test_compiled_functions_inside_the_target_are_seen(function, expected):
    assert is_compiled(function) is expected


def test_the_second_shape_doubles_what_has_the_rows():
    def target(x, weight, mask):
        return x @ weight * mask

    call = Call(target, [torch.ones(3, 4), torch.ones(4, 2), torch.ones(3, 1)], {"scale": 2.0})

    shapes = [tuple(t.shape) for t in grown(call).args]

    assert shapes == [(6, 4), (4, 2), (6, 1)]


def test_the_seed_is_set_before_the_factory():
    call, _ = numbers(programs.with_global, programs.one_tensor)

    torch.manual_seed(SEED)

    assert torch.equal(call.args[0], torch.randn(4, 8))


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, 7.0])
def test_every_float_has_other_finite_values(value):
    others = list(candidates(value))

    assert len(others) > WANTED
    assert all(math.isfinite(other) and other != value for other in others)
    assert all(math.copysign(1.0, other) == math.copysign(1.0, value) for other in others)
