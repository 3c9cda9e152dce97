"""What the configurations of transformers' models say of their layers, one reader per spelling.

Each reads ``Fields``; a row of ``FAMILIES`` puts some together.
"""

from collections.abc import Callable

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.integrations.configs.fields import Fields, existing
from samebits.integrations.configs.kinds import activation_of
from samebits.integrations.configs.spec import SharedSpec

# (fields, layer, number of layers) -> the function of that layer's experts.
OfLayer = Callable[[Fields, int, int], Activation]
SharedOfLayer = Callable[[Fields, int, int], SharedSpec | None]
# (fields, number of layers) -> those that have experts.
Layers = Callable[[Fields, int], tuple[int, ...]]
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOPK = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


def experts_of(fields: Fields) -> int:
    """Return E."""
    return whole(fields, *_EXPERTS)


def topk_of(fields: Fields) -> int:
    """Return K."""
    return whole(fields, *_TOPK)


def whole(fields: Fields, *names: str) -> int:
    """Return one number, also where a list says it for each layer.

    Raises:
        UnsupportedError: It differs from layer to layer.
    """
    value = fields.get(*names)
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise UnsupportedError(must(" or ".join(names), "be the same in every layer", value))
        value = value[0]
    return int(value)


def plain(fields: Fields, layer: int, layers: int) -> Activation:
    """Return the function that ``hidden_act`` names."""
    return activation_of(fields.get("hidden_act", "hidden_activation"))


def silu(fields: Fields, layer: int, layers: int) -> Activation:
    """Return the function of a family whose code has no choice."""
    return Activation()


def named(field: str, *, gated: bool = True) -> OfLayer:
    """Return a reader of the function that another field names."""

    def of_layer(fields: Fields, layer: int, layers: int) -> Activation:
        value = fields.get(field)
        return activation_of(value["name"] if isinstance(value, dict) else value, gated=gated)

    return of_layer


def soft_capped(fields: Fields, layer: int, layers: int) -> Activation:
    """Return Inkling-2's function, bounded by two soft caps."""
    return Activation(
        kind="situ",
        gate_softcap=float(fields.get("mlp_gate_softcap")),
        up_softcap=float(fields.get("mlp_up_softcap")),
    )


def pre_clamped(fields: Fields, layer: int, layers: int) -> Activation:
    """Return it with ``swiglu_limit`` before the activation."""
    return activation_of(
        fields.get("hidden_act"), limit=fields.limit("swiglu_limit", layer, layers)
    )


def post_clamped(field: str) -> OfLayer:
    """Return a reader of a limit behind the activation, or of one for each layer."""

    def of_layer(fields: Fields, layer: int, layers: int) -> Activation:
        return activation_of(
            fields.get("hidden_act"), limit=fields.limit(field, layer, layers), position="post"
        )

    return of_layer


def plain_with_offset(fields: Fields, layer: int, layers: int) -> Activation:
    """Return gpt-oss' function: no field holds its offset of 1, nor at first its slope."""
    named = fields.get("hidden_act", default="silu")
    if named not in ("silu", "swigluoai"):
        raise UnsupportedError(must("hidden_act", "be silu or swigluoai in this family", named))
    return Activation(
        alpha=float(fields.get("swiglu_alpha", default=1.702)),
        limit=fields.limit("swiglu_limit", layer, layers),
        linear_offset=1.0,
    )


def every_layer(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return all layers."""
    return tuple(range(layers))


def stepped(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return every n-th layer, without those listed as dense."""
    step = int(fields.get("decoder_sparse_step", default=1))
    dense = set(fields.get("mlp_only_layers", default=()))
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def behind_dense(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers behind the first dense ones."""
    return tuple(range(int(fields.get("first_k_dense_replace", default=0)), layers))


def typed(default: Layers) -> Layers:
    """Return a reader of a list of layer types; without one, ``default`` reads."""

    def sparse(fields: Fields, layers: int) -> tuple[int, ...]:
        types = fields.get("mlp_layer_types", default=None)
        if types is None:
            return default(fields, layers)
        return existing(layers, (i for i, kind in enumerate(types) if kind != "dense"))

    return sparse


def listed(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers that Step lists; its models have three dense ones without a list."""
    listed = fields.get("moe_layers_enum", default=None)
    if listed is None:
        return tuple(range(3, layers))
    items = listed.split(",") if isinstance(listed, str) else listed
    return existing(layers, (int(item) for item in items))


def interleaved_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return Llama-4's layers, listed or every n-th."""
    step = int(fields.get("interleave_moe_layer_step", default=1))
    listed = fields.get("moe_layers", default=None)
    return existing(layers, range(step - 1, layers, step) if listed is None else listed)


def behind(field: str) -> Layers:
    """Return a reader of the layers behind as many dense ones as ``field`` says."""
    return lambda fields, layers: tuple(range(int(fields.get(field, default=0)), layers))


def ranged(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return ERNIE's layers: every n-th of a range, both ends included."""
    step = int(fields.get("moe_layer_interval", default=1))
    start = int(fields.get("moe_layer_start_index", default=0))
    end = fields.get("moe_layer_end_index", default=-1)
    end = layers - 1 if int(end) < 0 else int(end)
    return existing(layers, (i for i in range(start, end + 1) if (i + 1) % step == 0))


def periodic(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return Jamba's layers, every n-th from an offset."""
    if experts_of(fields) == 1:
        return ()
    period = int(fields.get("expert_layer_period"))
    return existing(layers, range(int(fields.get("expert_layer_offset")), layers, period))


def blocks(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers that Nemotron-H lists as such."""
    kinds = fields.get("layers_block_type", "layer_types")
    return tuple(i for i, kind in enumerate(kinds) if kind == "moe")


def where_experts(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return all layers, or none where E is 0."""
    return tuple(range(layers)) if experts_of(fields) else ()


def number_of_layers(fields: Fields) -> int:
    """Return how many layers the model has."""
    return int(fields.get("num_hidden_layers", "num_layers", "n_layers"))


def number_of_blocks(fields: Fields) -> int:
    """Return how many blocks Nemotron-H lists."""
    return len(fields.get("layers_block_type", "layer_types"))


def behind_one(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return every layer but the first."""
    return tuple(range(1, layers))


_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def counted_shared(
    activation: OfLayer, size_of_one: str = "moe_intermediate_size"
) -> SharedOfLayer:
    """Return a reader of shared experts that are a number of sizes, usually of a routed one."""

    def shared(fields: Fields, layer: int, layers: int) -> SharedSpec | None:
        count = int(fields.get(*_SHARED, default=0))
        if not count:
            return None
        size = count * int(fields.get(size_of_one))
        return SharedSpec(intermediate_size=size, activation=activation(fields, layer, layers))

    return shared


def sized_shared(activation: OfLayer, name: str, *, gate: bool = False) -> SharedOfLayer:
    """Return a reader of one shared expert with a size of its own."""

    def shared(fields: Fields, layer: int, layers: int) -> SharedSpec | None:
        size = int(fields.get(name, default=0))
        if not size:
            return None
        function = activation(fields, layer, layers)
        return SharedSpec(intermediate_size=size, activation=function, gate=gate)

    return shared


def hash_routing(fields: Fields, layer: int) -> str | None:
    """Say which of DeepSeek-V4's layers choose by token id."""
    types = fields.get("mlp_layer_types", default=None)
    first = int(fields.get("num_hash_layers", default=3)) if types is None else 0
    hashed = layer < first if types is None else types[layer] == "hash_moe"
    return "its choice is a table of token ids (hash routing)" if hashed else None


def always(what: str) -> Callable[[Fields, int], str | None]:
    """Return a reader that says what every layer of a family does besides."""
    return lambda fields, layer: what


def averaged_shared(fields: Fields, layer: int) -> str | None:
    """Say where Cohere's shared experts are averaged with the routed ones."""
    strategy = fields.get("shared_expert_combination_strategy", default="sum")
    if not fields.get(*_SHARED, default=0) or strategy == "sum":
        return None
    return f"its shared experts and the routed sum are combined by {strategy}"


def gemma_router(fields: Fields, layer: int) -> str | None:
    """Say what Gemma's router does besides."""
    return "its router normalises its input and scales the probabilities of each expert"
