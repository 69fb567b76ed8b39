"""What lives on the device between steps, one row per scheduler slot, and how it is uploaded.

A step uploads one int32 vector (`StepInput`); a request that joins uploads one more (`pack_join`).
Everything else - the tokens so far, block tables, positions, sampling choices - stays where the
step reads and updates it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32
from numpy.typing import NDArray

from engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

# End-of-sequence ids a model may have beside a request's own stop ids.
MAX_EOS_IDS = 8
MAX_STOPS = MAX_STOP_TOKEN_IDS + MAX_EOS_IDS


class DeviceState(NamedTuple):
    """Resident per-slot state; the last row (index num_slots) belongs to padding.

    Attributes:
      tokens: [S+1, L], prompt and output so far; the step writes what it samples.
      block_table: [S+1, B].
      computed: [S+1], tokens whose keys and values are in the cache: the next position.
      params: [S+1, NUM_PARAMS], sampling choices; floats are stored by their bits.
    """

    tokens: Int32[Array, "S L"]
    block_table: Int32[Array, "S B"]
    computed: Int32[Array, " S"]
    params: Int32[Array, "S P"]


class Param(enum.IntEnum):
    """Columns of `DeviceState.params`; arrays follow the scalars."""

    TEMPERATURE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3
    SEED = 4
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    REPETITION_PENALTY = 7
    PROMPT_LEN = 8
    MIN_LEN = 9
    STOP_IDS = 10
    BIAS_IDS = STOP_IDS + MAX_STOPS
    BIAS_VALUES = BIAS_IDS + MAX_LOGIT_BIAS
    END = BIAS_VALUES + MAX_LOGIT_BIAS


class Need(enum.IntFlag):
    """Work that a step does only when some row asks for it (a run-time branch, not a compile)."""

    NONE = 0
    RANDOM = 1
    TRUNCATE = 2
    PENALTIES = 4
    BIAS = 8
    MIN_TOKENS = 16
    LOGPROBS = 32


class RowParams(NamedTuple):
    """The sampling choices of a step's R rows, unpacked on the device."""

    temperature: Float32[Array, " R"]
    top_k: Int32[Array, " R"]
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    seed: Int32[Array, " R"]
    presence_penalty: Float32[Array, " R"]
    frequency_penalty: Float32[Array, " R"]
    repetition_penalty: Float32[Array, " R"]
    prompt_len: Int32[Array, " R"]
    min_len: Int32[Array, " R"]
    stop_ids: Int32[Array, "R K"]
    bias_ids: Int32[Array, "R N"]
    bias_values: Float32[Array, "R N"]


_FLOATS = {"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"}
_FLOATS |= {"repetition_penalty", "bias_values"}


def unpack_params(rows: Int32[Array, "R P"]) -> RowParams:
    """Splits packed parameter rows into typed columns."""
    fields = {}
    for name in RowParams._fields:
        begin = Param[name.upper()]
        if name in ("stop_ids", "bias_ids", "bias_values"):
            columns = list(Param)
            end = columns[columns.index(begin) + 1]
            value = rows[:, begin:end]
        else:
            value = rows[:, begin]
        if name in _FLOATS:
            value = jax.lax.bitcast_convert_type(value, jnp.float32)
        fields[name] = value
    return RowParams(**fields)


def pack_params(
    params: SamplingParams, *, prompt_len: int, seed: int, eos_ids: Sequence[int]
) -> tuple[NDArray[np.int32], Need]:
    """One request's row of `DeviceState.params`, and the work its steps will need.

    Args:
      params: the request's choices.
      prompt_len: tokens of the prompt.
      seed: 32-bit seed of its draws.
      eos_ids: end-of-sequence ids that end it; masked, like the stop ids, below min_tokens.
    """
    row = np.zeros(Param.END, np.int32)
    floats = row.view(np.float32)
    floats[Param.TEMPERATURE] = params.temperature
    row[Param.TOP_K] = max(params.top_k, 0)
    floats[Param.TOP_P] = params.top_p
    floats[Param.MIN_P] = params.min_p
    row[Param.SEED] = np.uint32(seed & 0xFFFFFFFF).view(np.int32)
    floats[Param.PRESENCE_PENALTY] = params.presence_penalty
    floats[Param.FREQUENCY_PENALTY] = params.frequency_penalty
    floats[Param.REPETITION_PENALTY] = params.repetition_penalty
    row[Param.PROMPT_LEN] = prompt_len
    row[Param.MIN_LEN] = prompt_len + params.min_tokens
    stops = [*eos_ids, *(params.stop_token_ids or ())]
    row[Param.STOP_IDS : Param.BIAS_IDS] = -1
    row[Param.STOP_IDS : Param.STOP_IDS + len(stops)] = stops
    bias = dict(params.logit_bias or {})
    row[Param.BIAS_IDS : Param.BIAS_VALUES] = -1
    row[Param.BIAS_IDS : Param.BIAS_IDS + len(bias)] = list(bias.keys())
    floats[Param.BIAS_VALUES : Param.BIAS_VALUES + len(bias)] = list(bias.values())

    need = Need.NONE
    if params.temperature > 0:
        need |= Need.RANDOM
        if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
            need |= Need.TRUNCATE
    if params.needs_history:
        need |= Need.PENALTIES
    if bias:
        need |= Need.BIAS
    if params.min_tokens > 0:
        need |= Need.MIN_TOKENS
    if params.logprobs is not None:
        need |= Need.LOGPROBS
    return row, need


def init_state(num_slots: int, max_model_len: int, max_blocks: int) -> DeviceState:
    """All-zero state of `num_slots` slots and the padding row."""
    rows = num_slots + 1
    return DeviceState(
        tokens=jnp.zeros((rows, max_model_len), jnp.int32),
        block_table=jnp.zeros((rows, max_blocks), jnp.int32),
        computed=jnp.zeros((rows,), jnp.int32),
        params=jnp.zeros((rows, Param.END), jnp.int32),
    )


def pack_join(
    slot: int,
    computed: int,
    tokens: NDArray[np.int32],
    block_row: NDArray[np.int32],
    params: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The upload that fills one slot: [2 + L + B + P] int32."""
    return np.concatenate([np.array([slot, computed], np.int32), tokens, block_row, params])


def apply_join(state: DeviceState, packed: Int32[Array, " N"]) -> DeviceState:
    """Device side of `pack_join`."""
    length, blocks = state.tokens.shape[1], state.block_table.shape[1]
    slot, computed = packed[0], packed[1]
    tokens, block_row, params = jnp.split(packed[2:], [length, length + blocks])
    return DeviceState(
        tokens=state.tokens.at[slot].set(tokens),
        block_table=state.block_table.at[slot].set(block_row),
        computed=state.computed.at[slot].set(computed),
        params=state.params.at[slot].set(params),
    )


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Static shape of a compiled step: a bucket.

    Attributes:
      num_tokens: padded tokens T of a mixed step; equals num_rows in a decode step.
      num_rows: padded rows R.
      decode: every row runs exactly one token.
    """

    num_tokens: int
    num_rows: int
    decode: bool

    @property
    def max_updates(self) -> int:
        """Block-table entries that travel with the step; more go ahead in a call of their own."""
        return max(8, self.num_rows // 4)

    @property
    def input_size(self) -> int:
        """Length of the packed step input in int32."""
        rows = self.num_rows if self.decode else 2 * self.num_rows
        return NUM_HEADER + 3 * self.max_updates + rows


NUM_HEADER = 4
MAX_BULK_UPDATES = 256


class StepInput(NamedTuple):
    """A step's upload, unpacked. Block updates beyond the used ones name the padding row."""

    num_rows: Int32[Array, ""]
    need: Int32[Array, ""]
    num_decodes: Int32[Array, ""]
    num_steps: Int32[Array, ""]
    updates: Int32[Array, "3 U"]
    slots: Int32[Array, " R"]
    num_tokens: Int32[Array, " R"]
    samples: Array


def pack_step(
    shape: StepShape,
    *,
    padding_slot: int,
    need: int,
    slots: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
    samples: NDArray[np.bool_],
    num_decodes: int,
    updates: NDArray[np.int32],
    num_steps: int = 1,
) -> NDArray[np.int32]:
    """One step's upload: [header, updates (slot, index, block), slots, row lengths].

    A row's length carries in its lowest bit whether the row samples. A decode step sends no
    lengths: every row runs one token and samples.

    Args:
      updates: [3, u] with u at most shape.max_updates.
      num_steps: decode steps to run in a row.
    """
    packed = np.zeros(shape.input_size, np.int32)
    n, u = len(slots), updates.shape[1]
    packed[:NUM_HEADER] = n, need, num_decodes, num_steps
    most = shape.max_updates
    if u:
        table = packed[NUM_HEADER : NUM_HEADER + 3 * most].reshape(3, -1)
        table[:, :u] = updates
    packed[NUM_HEADER + u : NUM_HEADER + most] = padding_slot
    rows = packed[NUM_HEADER + 3 * most :]
    rows[: shape.num_rows] = padding_slot
    rows[:n] = slots
    if not shape.decode:
        rows[shape.num_rows : shape.num_rows + n] = 2 * num_tokens + samples
    return packed


def unpack_step(shape: StepShape, packed: Int32[Array, " N"]) -> StepInput:
    """Device side of `pack_step`."""
    header, updates, rows = jnp.split(packed, [NUM_HEADER, NUM_HEADER + 3 * shape.max_updates])
    slots = rows[: shape.num_rows]
    valid = jnp.arange(shape.num_rows) < header[0]
    if shape.decode:
        num_tokens, samples = valid.astype(jnp.int32), valid
    else:
        lengths = rows[shape.num_rows :]
        num_tokens, samples = lengths // 2, (lengths & 1).astype(bool)
    num_rows, need, num_decodes, num_steps = header
    return StepInput(
        num_rows,
        need,
        num_decodes,
        num_steps,
        updates.reshape(3, -1),
        slots,
        num_tokens,
        samples,
    )


def apply_updates(state: DeviceState, updates: Int32[Array, "3 U"]) -> DeviceState:
    """Writes block_table[slot, index] = block for each update."""
    slot, index, block = updates
    return state._replace(block_table=state.block_table.at[slot, index].set(block))
