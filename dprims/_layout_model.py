"""Check a layout against a model's dimensions, as a Hugging Face ``config.json`` states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .exceptions import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from .layout import ParallelLayout

_HEADS = ("num_attention_heads", "n_head")
_KEY_VALUE_HEADS = ("num_key_value_heads", *_HEADS)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, whether the model keeps it (None: the config does not say), and why in words."""

    rule: str
    passed: bool | None
    text: str


def check_model(layout: ParallelLayout, config: Mapping[str, Any]) -> tuple[Check, ...]:
    """Return what holds of a model of this config under the layout.

    Attention and key-value heads divide by tp, layers by pp, experts by ep, and weights are not tied
    across pipeline stages. A multimodal config is read for its ``text_config``.
    """
    inner = config.get("text_config")
    return tuple(_checks(layout, inner if isinstance(inner, dict) else config))


def _checks(layout: ParallelLayout, config: Mapping[str, Any]) -> Iterator[Check]:
    yield _divides(layout, config, "attention heads", _HEADS, "tp")
    yield _divides(layout, config, "key-value heads", _KEY_VALUE_HEADS, "tp")
    yield _divides(layout, config, "layers", _LAYERS, "pp")
    if layout.ep > 1:
        yield _divides(layout, config, "experts", _EXPERTS, "ep")
    tied = config.get("tie_word_embeddings")
    if isinstance(tied, bool):
        yield _kept("tied weights", lambda: _untied(layout, tied))
    else:
        yield Check("tied weights", None, "the config has no tie_word_embeddings")


def _divides(
    layout: ParallelLayout, config: Mapping[str, Any], rule: str, keys: tuple[str, ...], by: str
) -> Check:
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return Check(rule, None, f"the config has no {' or '.join(keys)}")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        return Check(rule, False, f"{key}={value!r} in the config is no positive integer")

    def quotient() -> str:
        each = layout.require_divisible(key, value, by)
        return f"{key}={value} over {by}={layout.size(by)}: {each} each"

    return _kept(rule, quotient)


def _untied(layout: ParallelLayout, tied: bool) -> str:
    layout.require_untied_weights(tied)
    return f"tie_word_embeddings={str(tied).lower()} with pp={layout.pp}"


def _kept(rule: str, explain: Callable[[], str]) -> Check:
    try:
        return Check(rule, True, explain())
    except LayoutError as error:
        return Check(rule, False, str(error))
