"""Build any experts class tiny, with sizes that are pairwise different.

Which fields of its configuration a class reads, and which of its dimensions each of them is, is
learned by running its ``__init__`` on the meta device with a spy in place of the configuration:
every integer that is read gets a number of its own, and the shapes of parameters show where it
went.
"""

import copy
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from samebits.checks.models.protocol import FOREIGN_ERRORS, Sizes, UnbuildableError
from samebits.integrations.transformers.zoo import ExpertsClass

DEFAULT_SIZES = Sizes(T=7, K=3, E=5, H=48, F=80)
ODD_SIZES = Sizes(T=9, K=2, E=7, H=63, F=41)

# Standard deviation of the first projection where no limit asks for more.
_SPREAD = 3.0
# With z of standard deviation 1.3 * limit, 22 % of a normal z lie beyond the limit on each side.
_BEYOND_LIMIT = 1.3
# Numbers given to the fields that are read: different, and different in their doubles.
_FIRST_MARK = 101
_MARK_STEP = 2
_SIZE_NAME = re.compile("size|dim|experts")


class _Spy:
    """A configuration that notes which integers are read and answers each with its own mark."""

    def __init__(self, config: PreTrainedConfig, *, unset: bool) -> None:
        self._config = config
        # True: a size whose default is None is answered with a mark too.
        self._unset = unset
        self.marks: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        size = isinstance(value, int) and not isinstance(value, bool)
        if size or (self._unset and value is None and _SIZE_NAME.search(name)):
            return self.marks.setdefault(name, _FIRST_MARK + _MARK_STEP * len(self.marks))
        return value


class Recipe(NamedTuple):
    """How to build one class with any sizes."""

    config: PreTrainedConfig
    # Field of the configuration (or extra argument of ``__init__``) -> the letter of its size.
    letters: dict[str, str]
    # Extra arguments of ``__init__`` that have no default, or that stand for a size.
    arguments: tuple[str, ...]


class Dimensions(NamedTuple):
    """Sizes of a built module, read from its parameters."""

    E: int
    H: int
    F: int


def dimensions(module: nn.Module) -> Dimensions:
    """Return E, H and F of an experts module by the shape of ``down_proj``."""
    down = module.down_proj
    if not isinstance(down, Tensor):
        raise UnbuildableError(f"{type(module).__name__}.down_proj is not a tensor")
    experts, rows, columns = down.shape
    hidden, inner = (columns, rows) if module.is_transposed else (rows, columns)
    return Dimensions(experts, hidden, inner)


def learn(found: ExpertsClass) -> Recipe:
    """Return how to build ``found``, learned on the meta device.

    Raises:
        UnbuildableError: No configuration of its module fits, or a size depends on no field.
    """
    reasons = []
    # A default of None is an option that is off, unless the class cannot be built without it.
    for unset, config_class in itertools.product((False, True), _config_classes(found)):
        try:
            return _learn_from(found, config_class(), unset=unset)
        except UnbuildableError as error:
            reasons.append(f"{config_class.__name__}: {error}")
        except FOREIGN_ERRORS as error:
            reasons.append(f"{config_class.__name__}: {type(error).__name__}: {error}")
    raise UnbuildableError("; ".join(reasons) or "its module has no configuration class")


def build(found: ExpertsClass, sizes: Sizes, *, spread: float = _SPREAD) -> nn.Module:
    """Return an fp32 instance with fixed random parameters; limits bind (module docstring).

    Args:
        found: The class.
        sizes: E, H and F.
        spread: Standard deviation of the first projection for tokens of standard deviation 1; a
            clamp limit raises it until at least 20 % of it lie beyond the limit on each side.

    Raises:
        UnbuildableError: See ``learn``.

    Determinism: a function of its arguments.
    """
    recipe = learn(found)
    config = copy.deepcopy(recipe.config)
    arguments = {}
    for name, letter in recipe.letters.items():
        if name in recipe.arguments:
            arguments[name] = getattr(sizes, letter)
        else:
            setattr(config, name, getattr(sizes, letter))
    config._experts_implementation = "eager"
    module = found.experts(config, **arguments)
    if dimensions(module) != (sizes.E, sizes.H, sizes.F):
        raise UnbuildableError(f"{found.name} does not take the sizes {sizes}")
    fill(module, spread=spread)
    return module


def scalars(module: nn.Module) -> dict[str, float]:
    """Return the numbers that an experts module and its submodules hold, by dotted name."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and not name.startswith("_"):
                found[f"{path}.{name}" if path else name] = value
    return found


def limits(module: nn.Module) -> dict[str, float]:
    """Return those of ``scalars`` that are clamp limits, by their name."""
    return {name: value for name, value in scalars(module).items() if "limit" in name}


def set_scalar(module: nn.Module, name: str, value: float) -> None:
    """Set the attribute that ``scalars`` calls ``name``."""
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path), attribute, value)


def _learn_from(found: ExpertsClass, config: PreTrainedConfig, *, unset: bool) -> Recipe:
    init = inspect.unwrap(found.experts.__init__)
    extra = list(inspect.signature(init).parameters.values())[2:]
    spy = _Spy(config, unset=unset)
    # An extra argument gets a mark too: it may override a field of the configuration.
    named = [p.name for p in extra if p.default is inspect.Parameter.empty or "size" in p.name]
    for name in named:
        spy.marks[name] = _FIRST_MARK + _MARK_STEP * len(spy.marks)
    with torch.device("meta"):
        module = found.experts(spy, **{name: spy.marks[name] for name in named})
    by_mark = {mark: name for name, mark in spy.marks.items()}
    letters = {}
    for letter, size in dimensions(module)._asdict().items():
        if size not in by_mark:
            raise UnbuildableError(f"{letter} = {size} is no field that its __init__ reads")
        letters[by_mark[size]] = letter
    return Recipe(config, letters, tuple(named))


def _config_classes(found: ExpertsClass) -> Iterator[type[PreTrainedConfig]]:
    """Yield the configuration classes that may belong to ``found``, the likeliest first."""
    init = inspect.unwrap(found.experts.__init__)
    parameters = list(inspect.signature(init).parameters.values())
    annotation: Any = parameters[1].annotation if len(parameters) > 1 else None
    if isinstance(annotation, str):
        annotation = getattr(found.module, annotation, None)
    candidates: list[Any] = []
    if annotation is not None and _is_config(annotation):
        candidates.append(annotation)
        candidates += annotation.sub_configs.values()
    # Text configurations first: vision towers have other experts, or none.
    others = sorted(_config_classes_of(found.module), key=lambda c: "Text" not in c.__name__)
    for candidate in dict.fromkeys([*candidates, *others]):
        if _is_config(candidate):
            yield candidate


def _config_classes_of(module: Any) -> list[type[PreTrainedConfig]]:
    classes = []
    for value in vars(module).values():
        if _is_config(value):
            classes.append(value)
        if (
            inspect.isclass(value)
            and issubclass(value, PreTrainedModel)
            and value.__module__ == module.__name__
            and _is_config(getattr(value, "config_class", None))
        ):
            classes.append(value.config_class)
    package = sys.modules.get(module.__name__.replace(".modeling_", ".configuration_"))
    if package is not None:
        classes += [value for value in vars(package).values() if _is_config(value)]
    return classes


def _is_config(value: object) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, PreTrainedConfig)
        and value is not PreTrainedConfig
    )


def fill(module: nn.Module, *, spread: float = _SPREAD, seed: int = 1) -> None:
    """Fill parameters at random so that limits bind and y is about as large as h; see ``build``.

    Determinism: a function of its arguments.
    """
    spread = max([spread, *(_BEYOND_LIMIT * limit for limit in limits(module).values())])
    size = dimensions(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 3:
                values *= size.F**-0.5 if name.startswith("down") else spread * size.H**-0.5
            elif parameter.dim() == 1:
                values = 0.5 + values.abs()
            parameter.copy_(values)
