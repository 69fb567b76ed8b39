"""Stands in for jaxtyping where only JAX is installed: the annotations, without their meaning."""

from __future__ import annotations

from typing import Any


class _Annotation:
    def __class_getitem__(cls, item: Any) -> Any:
        return Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "Array":
        import jax

        return jax.Array
    return _Annotation
