"""The kernel contract: paged attention over a ragged batch, and the write of new keys and values.

One operation, several implementations, one shared test suite:

  reference  numpy float64, the specification (not traceable; tests only)
  xla        plain JAX; runs everywhere
  cpu        C++ through XLA's foreign function interface, where a compiler is at hand
  tpu        Pallas (Mosaic TPU)
  gpu        Pallas

`implementation=None` takes the best one for the platform. NotImplementedError from an
implementation means: valid, but not supported here, try the next one (logged once). ValueError
means: the caller is wrong.

The physical layout of a layer's KV pages belongs to the implementation: callers treat what
`init_kv_pages` returns as opaque. Tests convert with `kv_pages_from_logical` and
`kv_pages_to_logical`, whose logical form is [num_pages, page_size, 2, num_kv_heads, head_dim]
(index 0 of axis 2 is K, 1 is V).
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import jax
from jaxtyping import Array, Float32, Num, Shaped

from pallas_kernels import cpu_build, validation
from pallas_kernels.attention_types import AttentionConfig, KVCacheSpec, KVPages
from pallas_kernels.batch import RaggedBatch

logger = logging.getLogger(__name__)

# Best first, by the name of JAX's platform ("cuda" and "rocm" both report "gpu").
_ORDER = {"cpu": ("cpu", "xla"), "gpu": ("gpu", "xla"), "tpu": ("tpu", "xla")}
IMPLEMENTATIONS = ("reference", "xla", "cpu", "tpu", "gpu")


def implementation_module(name: str) -> ModuleType:
    """The module of an implementation, imported on first use. Raises ValueError if unknown."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} is not one of: {', '.join(IMPLEMENTATIONS)}")
    return importlib.import_module(f"pallas_kernels.{name}")


def resolve_implementation(
    spec: KVCacheSpec, config: AttentionConfig | None = None, platform: str | None = None
) -> str:
    """Name of the best implementation for pages of `spec` on a platform.

    One engine uses one implementation, because the layout of the pages is the implementation's
    own: resolve once and pass the name to every function.

    Args:
      spec: the pages.
      config: the attention that will run over them; None asks about the pages alone.
      platform: "cpu", "gpu" or "tpu"; None is JAX's default backend.

    Raises:
      ValueError: a description that makes no sense, or a platform without kernels.
    """
    platform = jax.default_backend() if platform is None else platform
    if platform not in _ORDER:
        raise ValueError(f"platform={platform!r} is not one of: {', '.join(_ORDER)}")
    validation.check_spec(spec)
    if config is not None:
        validation.check_config(config)
    return _resolve(spec, config, platform, cpu_build.get_mode())


@functools.cache
def _resolve(
    spec: KVCacheSpec, config: AttentionConfig | None, platform: str, cpu_kernels: str
) -> str:
    del cpu_kernels  # a change of mode is another question
    *preferred, last = _ORDER[platform]
    for name in preferred:
        module = implementation_module(name)
        try:
            module.kv_page_bytes(spec)
            if config is not None and hasattr(module, "check_supported"):
                module.check_supported(spec, config)
        except NotImplementedError as reason:
            logger.warning("Attention implementation %s is passed over: %s", name, reason)
            continue
        return name
    return last


def _select(
    spec: KVCacheSpec, implementation: str | None, config: AttentionConfig | None = None
) -> ModuleType:
    return implementation_module(implementation or resolve_implementation(spec, config))


def init_kv_pages(spec: KVCacheSpec, *, implementation: str | None = None) -> KVPages:
    """Zeroed pages of one layer, in the implementation's own layout."""
    validation.check_spec(spec)
    return _select(spec, implementation).init_kv_pages(spec)


def kv_pages_from_logical(
    logical: Shaped[Array, "N S 2 H D"], spec: KVCacheSpec, *, implementation: str | None = None
) -> KVPages:
    """Lays out logical pages [num_pages, page_size, 2, num_kv_heads, head_dim]; a copy."""
    validation.check_spec(spec)
    validation.check_logical(logical.shape, spec)
    return _select(spec, implementation).kv_pages_from_logical(logical, spec)


def kv_pages_to_logical(
    pages: KVPages, spec: KVCacheSpec, *, implementation: str | None = None
) -> Shaped[Array, "N S 2 H D"]:
    """The inverse of `kv_pages_from_logical`; a copy."""
    validation.check_spec(spec)
    return _select(spec, implementation).kv_pages_to_logical(pages, spec)


def kv_page_bytes(spec: KVCacheSpec, *, implementation: str | None = None) -> int:
    """Bytes of one page of one layer, with the layout's padding."""
    validation.check_spec(spec)
    return _select(spec, implementation).kv_page_bytes(spec)


def kv_write(
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: KVPages,
    batch: RaggedBatch,
    spec: KVCacheSpec,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    implementation: str | None = None,
) -> KVPages:
    """Writes keys and values to `batch.slots`; in place where `pages` is donated.

    Args:
      k, v: [T, Hkv, D], this step's keys and values; padding tokens go to the null page.
      pages: from `init_kv_pages` of the same implementation.
      batch, spec: the step and the pages.
      k_scale, v_scale: float32 [Hkv]; stored = x / scale, rounded to nearest even and saturated.
      implementation: by name; None takes the platform's best.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: the named implementation cannot do this.
    """
    validation.check_write(k, v, batch, spec, k_scale, v_scale)
    return _select(spec, implementation).kv_write(
        k, v, pages, batch, spec, k_scale=k_scale, v_scale=v_scale
    )


def ragged_paged_attention(
    q: Num[Array, "T Hq D"],
    pages: KVPages,
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    implementation: str | None = None,
) -> Num[Array, "T Hq D"]:
    """Causal attention of each query over its row's pages.

    Args:
      q: [T, Hq, D]; query head h reads key/value head h // (Hq // Hkv).
      pages, batch, spec: this step's keys and values are written already.
      config: scale, window, cap.
      k_scale, v_scale: float32 [Hkv]; a key is stored * scale.
      sinks: float32 [Hq], an extra logit per head in the softmax's denominator.
      implementation: by name; None takes the platform's best.

    Returns:
      [T, Hq, D] in q's dtype; unspecified but finite for padding tokens.

    Raises:
      ValueError: shapes or dtypes do not fit.
      NotImplementedError: the named implementation cannot do this.
    """
    validation.check_attention(q, batch, spec, config, k_scale, v_scale, sinks)
    return _select(spec, implementation, config).ragged_paged_attention(
        q, pages, batch, spec, config, k_scale=k_scale, v_scale=v_scale, sinks=sinks
    )


def attend(
    q: Num[Array, "T Hq D"],
    k: Num[Array, "T H D"],
    v: Num[Array, "T H D"],
    pages: KVPages,
    batch: RaggedBatch,
    spec: KVCacheSpec,
    config: AttentionConfig,
    *,
    k_scale: Float32[Array, " H"] | None = None,
    v_scale: Float32[Array, " H"] | None = None,
    sinks: Float32[Array, " Hq"] | None = None,
    implementation: str | None = None,
) -> tuple[Num[Array, "T Hq D"], KVPages]:
    """What models call: `kv_write`, then `ragged_paged_attention`, fused where that pays."""
    validation.check_write(k, v, batch, spec, k_scale, v_scale)
    validation.check_attention(q, batch, spec, config, k_scale, v_scale, sinks)
    return _select(spec, implementation, config).attend(
        q, k, v, pages, batch, spec, config, k_scale=k_scale, v_scale=v_scale, sinks=sinks
    )


__all__ = [
    "IMPLEMENTATIONS",
    "AttentionConfig",
    "KVCacheSpec",
    "KVPages",
    "attend",
    "implementation_module",
    "init_kv_pages",
    "kv_page_bytes",
    "kv_pages_from_logical",
    "kv_pages_to_logical",
    "kv_write",
    "ragged_paged_attention",
    "resolve_implementation",
]
